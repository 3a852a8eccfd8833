"""A random Qwen3-MoE checkpoint as such models are published, in BF16.

    python bench/moe_checkpoint.py OUT [--layers 16 --experts 128 --hidden 2048 ...]

One tensor per expert and projection, in shards of about 2 GB with an index. The defaults
are the model that every tap figure is taken on: 20.2 GB. Values are drawn on the GPU when
there is one and written by several threads; memory holds a few blocks of 64 MB.

Projections keep the size of what passes through them, each layer adds a small share to
the residual stream and the router's logits spread by about one, so that every expert gets
rows and none gets most of them.
"""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SHARD_BYTES = 2 * 10**9
BLOCK_BYTES = 64 * 2**20
ITEM_BYTES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeShape:
    """Sizes of the model."""

    layers: int = 16
    experts: int = 128
    hidden: int = 2048
    intermediate: int = 768
    top_k: int = 8
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    vocab: int = 32_768


SMALL = MoeShape(
    layers=4,
    experts=16,
    hidden=128,
    intermediate=64,
    top_k=4,
    heads=4,
    kv_heads=2,
    head_dim=32,
    vocab=512,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One tensor as it will be written."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Size in BF16."""
        return torch.Size(self.shape).numel() * ITEM_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Neighbouring tensors of one shard, drawn and written at once."""

    number: int
    path: Path
    offset: int
    """In the file, of the first tensor."""
    tensors: tuple[TensorSpec, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=8)
    for name in MoeShape.__dataclass_fields__:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    arguments = parser.parse_args()
    base = SMALL if arguments.small else MoeShape()
    given = {name: getattr(arguments, name) for name in MoeShape.__dataclass_fields__}
    shape = MoeShape(
        **{name: getattr(base, name) if value is None else value for name, value in given.items()}
    )
    start = time.perf_counter()
    written = write_checkpoint(arguments.out, shape, seed=arguments.seed, threads=arguments.threads)
    seconds = time.perf_counter() - start
    print(json.dumps({"checkpoint_bytes": written, "seconds": round(seconds, 1)}))
    rate = written / 1e9 / seconds
    print(f"{written:,} bytes in {seconds:.1f} s ({rate:.2f} GB/s)", file=sys.stderr)


def write_checkpoint(
    folder: Path,
    shape: MoeShape,
    *,
    seed: int = 0,
    threads: int = 8,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write the checkpoint to *folder*, synced to the disk; bytes of all tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, shape)
    blocks = plan_shards(folder, list(tensor_specs(shape)), shard_bytes)
    left = {path: sum(block.path == path for block in blocks) for path in {b.path for b in blocks}}
    lock = threading.Lock()

    def write(block: Block) -> None:
        write_block(block, seed)
        with lock:
            left[block.path] -= 1
            last = left[block.path] == 0
        if last:
            settle(block.path)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, blocks))
    return sum(spec.num_bytes for block in blocks for spec in block.tensors)


def write_config(folder: Path, shape: MoeShape) -> None:
    """Write config.json through transformers, so that any release reads its own keys."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        moe_intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
        max_position_embeddings=32_768,
        architectures=["Qwen3MoeForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(folder)


def tensor_specs(shape: MoeShape) -> Iterator[TensorSpec]:
    """Every tensor in the order of a published checkpoint."""
    hidden, deep = shape.hidden, (2 * shape.layers) ** -0.5
    yield TensorSpec(name="model.embed_tokens.weight", shape=(shape.vocab, hidden), std=1.0)
    for layer in range(shape.layers):
        yield from layer_specs(f"model.layers.{layer}", shape, deep)
    yield norm("model.norm.weight", hidden)
    yield TensorSpec(name="lm_head.weight", shape=(shape.vocab, hidden), std=hidden**-0.5)


def layer_specs(prefix: str, shape: MoeShape, deep: float) -> Iterator[TensorSpec]:
    hidden, width = shape.hidden, shape.intermediate
    attention, wide, narrow = f"{prefix}.self_attn", shape.heads, shape.kv_heads
    yield norm(f"{prefix}.input_layernorm.weight", hidden)
    yield linear(f"{attention}.q_proj.weight", wide * shape.head_dim, hidden)
    yield linear(f"{attention}.k_proj.weight", narrow * shape.head_dim, hidden)
    yield linear(f"{attention}.v_proj.weight", narrow * shape.head_dim, hidden)
    yield linear(f"{attention}.o_proj.weight", hidden, wide * shape.head_dim, deep)
    yield norm(f"{attention}.q_norm.weight", shape.head_dim)
    yield norm(f"{attention}.k_norm.weight", shape.head_dim)
    yield norm(f"{prefix}.post_attention_layernorm.weight", hidden)
    yield linear(f"{prefix}.mlp.gate.weight", shape.experts, hidden)
    for expert in range(shape.experts):
        experts = f"{prefix}.mlp.experts.{expert}"
        yield linear(f"{experts}.gate_proj.weight", width, hidden)
        yield linear(f"{experts}.up_proj.weight", width, hidden)
        yield linear(f"{experts}.down_proj.weight", hidden, width, deep)


def linear(name: str, out_features: int, in_features: int, gain: float = 1.0) -> TensorSpec:
    return TensorSpec(name=name, shape=(out_features, in_features), std=gain * in_features**-0.5)


def norm(name: str, features: int) -> TensorSpec:
    return TensorSpec(name=name, shape=(features,), std=0.1, mean=1.0)


def plan_shards(folder: Path, specs: Sequence[TensorSpec], shard_bytes: int) -> list[Block]:
    """Write headers and index, make the files their full size, and cut the data into blocks."""
    shards: list[list[TensorSpec]] = [[]]
    for spec in specs:
        size = sum(s.num_bytes for s in shards[-1]) if shards[-1] else 0
        if shards[-1] and size + spec.num_bytes > shard_bytes:
            shards.append([])
        shards[-1].append(spec)
    weight_map, blocks = {}, []
    for index, tensors in enumerate(shards):
        name = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= {spec.name: name for spec in tensors}
        for begin, group in write_header(folder / name, tensors):
            number = len(blocks)
            blocks.append(
                Block(number=number, path=folder / name, offset=begin, tensors=tuple(group))
            )
    total = sum(spec.num_bytes for spec in specs)
    index_table = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_table, indent=2))
    return blocks


def write_header(
    path: Path, tensors: Sequence[TensorSpec]
) -> Iterator[tuple[int, list[TensorSpec]]]:
    """Write a shard's header; yields the offset in the file and the tensors of each block."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in tensors:
        end = offset + spec.num_bytes
        table[spec.name] = {
            "dtype": "BF16",
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + offset)
    begin = position = 8 + len(header)
    group: list[TensorSpec] = []
    for spec in tensors:
        if group and position + spec.num_bytes - begin > BLOCK_BYTES:
            yield begin, group
            begin, group = position, []
        group.append(spec)
        position += spec.num_bytes
    yield begin, group


def write_block(block: Block, seed: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(seed * 1_000_003 + block.number)
    drawn = torch.cat([draw(spec, generator, device).view(-1) for spec in block.tensors])
    data = memoryview(drawn.cpu().view(torch.uint8).numpy())
    descriptor = os.open(block.path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        written = 0
        while written < len(data):
            written += os.pwrite(descriptor, data[written:], block.offset + written)
    finally:
        os.close(descriptor)


def draw(spec: TensorSpec, generator: torch.Generator, device: torch.device) -> Tensor:
    values = torch.empty(spec.shape, dtype=torch.bfloat16, device=device)
    return values.normal_(spec.mean, spec.std, generator=generator)


def settle(path: Path) -> None:
    """Sync a finished shard and let its pages go: what comes next shall read the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main()
