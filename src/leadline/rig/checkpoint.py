"""A Hugging Face checkpoint on disk: which tensor lies where. No weight is read.

One `model.safetensors`, or shards with `model.safetensors.index.json`. Index and shards
must tell the same story: every tensor that the index names is in the shard it says, and no
shard holds one that the index leaves out.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from leadline.core.atomic import explained_os_errors
from leadline.core.errors import IntegrityError, UsageError
from leadline.rig.shard_header import ShardHeader, TensorEntry, read_shard_header

__all__ = ["Checkpoint", "TensorEntry"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_SAMPLED_PAGES = 16
_PAGE_BYTES = 4096
_QUANTISATION_FIELDS = ("quantization_config", "compression_config")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The tensors of a checkpoint and the files that hold them."""

    path: Path
    tensors: Mapping[str, TensorEntry]
    shards: Mapping[str, Path]
    """Files by name."""
    digest: str
    """sha256 over the configuration and, by shard, name, size, header and sampled pages."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, headers not counted."""
        return sum(entry.num_bytes for entry in self.tensors.values())

    @classmethod
    def open(cls, path: Path) -> "Checkpoint":
        """Read configuration, index and headers of the folder *path*.

        Raises:
            UsageError: no checkpoint, or a quantised one.
            IntegrityError: a shard is missing or damaged, or disagrees with the index.
        """
        config = _read_config(path)
        _refuse_quantised(path, config)
        weight_map = _read_weight_map(path)
        names = sorted(set(weight_map.values())) if weight_map else [SINGLE_FILE]
        shards = {name: path / name for name in names}
        _refuse_missing_shards(path, shards, weight_map)
        headers = {name: read_shard_header(shard) for name, shard in shards.items()}
        tensors = _collect(headers)
        if weight_map:
            _refuse_disagreement(path, weight_map, tensors)
        if not tensors:
            raise IntegrityError(f"{path} holds no tensor; fetch the checkpoint again")
        return cls(
            path=path,
            tensors=MappingProxyType(tensors),
            shards=MappingProxyType(shards),
            digest=_digest(path / "config.json", shards, headers),
        )


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise UsageError(f"{path} is no folder; give the folder of a Hugging Face checkpoint")
    if not (path / "config.json").is_file():
        raise UsageError(
            f"{path} holds no config.json; give the folder of a Hugging Face checkpoint"
        )
    return _read_object(path / "config.json")


def _read_object(path: Path) -> dict[str, Any]:
    with explained_os_errors(path, "read"):
        text = path.read_bytes()
    try:
        document = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path} is no JSON ({error}); fetch it again") from error
    if not isinstance(document, dict):
        raise IntegrityError(
            f"{path} is a JSON {type(document).__name__}, wanted an object; fetch it again"
        )
    return document


def _refuse_quantised(path: Path, config: Mapping[str, Any]) -> None:
    nested = [value for value in config.values() if isinstance(value, dict)]
    for part in (config, *nested):
        for field in _QUANTISATION_FIELDS:
            found = part.get(field)
            if not found:
                continue
            method = found.get("quant_method", "?") if isinstance(found, dict) else found
            raise UsageError(
                f"{path} is quantised: config.json has {field} with method {method}, wanted "
                "weights in BF16, F16 or F32; dequantise it first or take the published "
                "full-width checkpoint"
            )


def _read_weight_map(path: Path) -> dict[str, str]:
    """Shard of each tensor as the index says; empty when the checkpoint is one file."""
    index, single = path / INDEX_FILE, path / SINGLE_FILE
    if index.exists() and single.exists():
        raise UsageError(
            f"{path} holds both {SINGLE_FILE} and {INDEX_FILE}, wanted one of them; remove the "
            "one that is left over"
        )
    if single.exists():
        return {}
    if not index.exists():
        others = sorted(file.name for file in path.glob("*.safetensors"))
        found = f"found {', '.join(others[:3])}" if others else "found no safetensors file"
        raise UsageError(
            f"{path} holds neither {SINGLE_FILE} nor {INDEX_FILE} ({found}); save the model with "
            "save_pretrained or fetch the missing file"
        )
    weight_map = _read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise IntegrityError(f"{index} has no weight_map of tensors to shards; fetch it again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or shard in {"", ".", ".."} or "/" in shard or "\\" in shard:
            raise IntegrityError(
                f"{index} maps {name} to {shard!r}, wanted a file name inside the folder; fetch "
                "it again"
            )
    return weight_map


def _refuse_missing_shards(
    path: Path, shards: Mapping[str, Path], weight_map: Mapping[str, str]
) -> None:
    missing = [name for name, shard in shards.items() if not shard.is_file()]
    if not missing:
        return
    held = [name for name, shard in weight_map.items() if shard == missing[0]]
    more = f" and {len(held) - 3} more tensors" if len(held) > 3 else ""
    raise IntegrityError(
        f"{len(missing)} of the {len(shards)} shards that {INDEX_FILE} names are not in {path}: "
        f"first {missing[0]}, which holds {', '.join(held[:3])}{more}; fetch the missing files"
    )


def _collect(headers: Mapping[str, ShardHeader]) -> dict[str, TensorEntry]:
    tensors: dict[str, TensorEntry] = {}
    for header in headers.values():
        for entry in header.entries:
            known = tensors.setdefault(entry.name, entry)
            if known is not entry:
                raise IntegrityError(
                    f"tensor {entry.name} is in {known.shard} and in {entry.shard}, wanted in "
                    "one shard; remove the file that is left over or fetch the checkpoint again"
                )
    return tensors


def _refuse_disagreement(
    path: Path, weight_map: Mapping[str, str], tensors: Mapping[str, TensorEntry]
) -> None:
    wrong = [
        name
        for name, shard in weight_map.items()
        if name not in tensors or tensors[name].shard != shard
    ]
    unlisted = [name for name in tensors if name not in weight_map]
    if not wrong and not unlisted:
        return
    said = []
    if wrong:
        first = wrong[0]
        where = (
            f"it is in {tensors[first].shard}" if first in tensors else "no shard it names has it"
        )
        said.append(
            f"{len(wrong)} tensors are not in the shard it names, first {first} in "
            f"{weight_map[first]} ({where})"
        )
    if unlisted:
        first = unlisted[0]
        said.append(
            f"{len(unlisted)} tensors in the shards are not in it, first {first} in "
            f"{tensors[first].shard}"
        )
    raise IntegrityError(
        f"{INDEX_FILE} in {path} disagrees with the shards: {' and '.join(said)}; fetch index "
        "and shards of the same revision"
    )


def _digest(config: Path, shards: Mapping[str, Path], headers: Mapping[str, ShardHeader]) -> str:
    """Identity of the checkpoint: any other header, size, configuration or training changes it."""
    total = hashlib.sha256()
    with explained_os_errors(config, "read"):
        parts: list[bytes] = [config.read_bytes()]
    for name, path in shards.items():
        header = headers[name]
        parts += [name.encode(), str(header.file_bytes).encode(), header.raw]
        parts += _sampled_pages(path, len(header.raw), header.file_bytes)
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()


def _sampled_pages(path: Path, begin: int, end: int) -> Sequence[bytes]:
    """Pages spread evenly over the tensors' bytes, first and last included."""
    last = max(begin, end - _PAGE_BYTES)
    steps = _SAMPLED_PAGES - 1
    offsets = sorted({begin + (last - begin) * step // steps for step in range(steps + 1)})
    with explained_os_errors(path, "read"):
        handle = os.open(path, os.O_RDONLY)
        try:
            return [os.pread(handle, min(_PAGE_BYTES, end - at), at) for at in offsets]
        finally:
            os.close(handle)
