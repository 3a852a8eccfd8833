"""TOY of the list of faults, and ways to damage a saved checkpoint.

TOY: a `qwen2_moe` of two MoE layers, hidden 64, eight experts of width 32, two a token,
one gated shared expert, vocabulary 256, untied head, BF16, three shards with an index.
A TOY-d is a TOY built with one field changed, or edited with one of the functions here.
Edits go to the saved files, never through a model: what is not touched keeps its bytes.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from .families import NUM_EXPERTS, build_checkpoint

TOY_FAMILY = "qwen2_moe"
INDEX = "model.safetensors.index.json"


def build_toy(path: Path, **settings: Any) -> Path:
    """Save a fresh TOY at *path*; *settings* are those of `build_checkpoint`."""
    path.mkdir(parents=True, exist_ok=True)
    return build_checkpoint(TOY_FAMILY, path, **settings)


def copy_checkpoint(source: Path, path: Path) -> Path:
    """Copy a checkpoint, to be damaged."""
    return Path(shutil.copytree(source, path, dirs_exist_ok=True))


def expert_name(layer: int, expert: int, projection: str) -> str:
    """Published name of one weight of TOY's experts: gate, up or down."""
    return f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"


def router_name(layer: int) -> str:
    """Published name of TOY's router."""
    return f"model.layers.{layer}.mlp.gate.weight"


def tensor_names(path: Path) -> list[str]:
    """Names of all tensors in the shards, in order."""
    names: list[str] = []
    for shard in shards(path):
        with safe_open(shard, "pt") as file:
            names += file.keys()
    return sorted(names)


def shards(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint; shard number n is the n-th, from 1."""
    return sorted(path.glob("*.safetensors"))


def shard_of(path: Path, name: str) -> Path:
    """The shard that holds tensor *name*."""
    for shard in shards(path):
        with safe_open(shard, "pt") as file:
            if name in file.keys():  # noqa: SIM118 - not a mapping
                return shard
    raise KeyError(name)


def read_tensor(path: Path, name: str) -> Tensor:
    """One tensor as saved."""
    with safe_open(shard_of(path, name), "pt") as file:
        return file.get_tensor(name)


def edit_tensor(path: Path, name: str, change: Callable[[Tensor], Tensor | None]) -> None:
    """Put what *change* returns in place of tensor *name*; None: it was changed in place."""
    shard = shard_of(path, name)
    tensors = load_file(shard)
    changed = change(tensors[name])
    if changed is not None:
        tensors[name] = changed.contiguous()
    _save(tensors, shard)


def add_tensor(path: Path, name: str, value: Tensor, *, shard: int = 1, index: bool = True) -> None:
    """Put a further tensor into a shard, and by default into the index."""
    file = shards(path)[shard - 1]
    _save({**load_file(file), name: value}, file)
    if index:
        edit_index(path, lambda weight_map: weight_map.update({name: file.name}))


def rename_tensor(path: Path, old: str, new: str) -> None:
    """Give a tensor another name, in its shard and in the index."""
    shard = shard_of(path, old)
    tensors = load_file(shard)
    tensors[new] = tensors.pop(old)
    _save(tensors, shard)

    def change(weight_map: dict[str, str]) -> None:
        weight_map[new] = weight_map.pop(old)

    edit_index(path, change)


def move_tensor(path: Path, name: str, shard: int) -> None:
    """Move a tensor to shard number *shard*, in the files and in the index."""
    source, target = shard_of(path, name), shards(path)[shard - 1]
    if source == target:
        return
    tensors = load_file(source)
    _save({**load_file(target), name: tensors.pop(name)}, target)
    _save(tensors, source)
    edit_index(path, lambda weight_map: weight_map.update({name: target.name}))


def edit_index(path: Path, change: Callable[[dict[str, str]], Any]) -> None:
    """Change the index's map from tensor to shard in place, and nothing else."""
    file = path / INDEX
    if not file.exists():
        return
    document = json.loads(file.read_text(encoding="utf-8"))
    change(document["weight_map"])
    file.write_text(json.dumps(document, indent=2), encoding="utf-8")


def edit_config(path: Path, **fields: Any) -> None:
    """Set fields of config.json."""
    file = path / "config.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**document, **fields}), encoding="utf-8")


def delete_shard(path: Path, shard: int) -> Path:
    """Remove shard number *shard*; the index goes on naming it."""
    file = shards(path)[shard - 1]
    file.unlink()
    return file


def truncate_shard(path: Path, shard: int, num_bytes: int = 1024) -> Path:
    """Cut *num_bytes* off the end of shard number *shard*."""
    file = shards(path)[shard - 1]
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - num_bytes)
    return file


def starve(path: Path, layer: int, experts: Sequence[int] = (6, 7)) -> None:
    """Make TOY's router send no token to two of the eight experts.

    A row of -1e4 would not do: without a bias it wins wherever the input sums to less
    than nothing. Here the other six rows come as three pairs of opposite signs, so three
    scores are above zero whatever the input, and the starved rows score exactly zero.
    """
    others = [expert for expert in range(NUM_EXPERTS) if expert not in experts]

    def change(weight: Tensor) -> None:
        weight[list(experts)] = 0
        for left, right in zip(others[::2], others[1::2], strict=True):
            weight[right] = -weight[left]

    edit_tensor(path, router_name(layer), change)


def poison(path: Path, name: str, value: float = float("nan"), *, at: int | None = None) -> None:
    """Put one NaN, or *value*, into a tensor: into its middle, or at a flat index."""

    def change(weight: Tensor) -> None:
        weight.view(-1)[weight.numel() // 2 if at is None else at] = value

    edit_tensor(path, name, change)


def scale(path: Path, name: str, factor: float) -> None:
    """Multiply a tensor; 0 makes it all zeros."""
    edit_tensor(path, name, lambda weight: (weight.float() * factor).to(weight.dtype))


def number_experts(path: Path, layer: int, num_experts: int) -> None:
    """Give expert e constant weights: gate and up send ones to e + 1 (T59)."""
    for expert in range(num_experts):
        for projection in ("gate", "up", "down"):
            name = expert_name(layer, expert, projection)
            edit_tensor(path, name, lambda weight, e=expert: torch.full_like(weight, e + 1))


def _save(tensors: dict[str, Tensor], shard: Path) -> None:
    save_file(tensors, shard, metadata={"format": "pt"})
