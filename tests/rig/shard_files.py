"""Safetensors files and checkpoint folders written byte by byte, right or wrong."""

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]


def header_of(shapes: Shapes, dtype: str = "F16", itemsize: int = 2) -> dict[str, Any]:
    """Header of dense tensors of *shapes*, one after another."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + prod(shape) * itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    return header


def write_raw(path: Path, header: Any, data: bytes | int) -> Path:
    """A file with any header; *data* or so many bytes behind it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = bytes(n % 251 for n in range(data)) if isinstance(data, int) else data
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


def write_shard(path: Path, shapes: Shapes) -> Path:
    """A right file."""
    return write_raw(path, header_of(shapes), sum(prod(shape) * 2 for shape in shapes.values()))


def write_checkpoint(path: Path, *shards: Shapes, config: Mapping[str, Any] | None = None) -> Path:
    """A right folder: one file, or shards with an index."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(dict(config or {"model_type": "llama"})))
    if len(shards) == 1:
        write_shard(path / "model.safetensors", shards[0])
        return path
    weight_map: dict[str, str] = {}
    for number, shapes in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_shard(path / name, shapes)
        weight_map.update(dict.fromkeys(shapes, name))
    write_index(path, weight_map)
    return path


def write_index(path: Path, weight_map: Any) -> None:
    """The index, as given."""
    document = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(document))


def read_index(path: Path) -> dict[str, str]:
    """The index's map of tensors to shards."""
    document = json.loads((path / "model.safetensors.index.json").read_text())
    found: dict[str, str] = document["weight_map"]
    return found
