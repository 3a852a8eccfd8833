"""What a tap is measured against, on the same checkpoint: one yardstick a process.

    python bench/tap_yardsticks.py raw|resident|accelerate CHECKPOINT [--corpus X.npy]

- raw: every byte of the checkpoint read once, past the page cache, by several threads.
- resident: all weights on the device, `transformers`' own forward of the base model with
  grouped products; the fastest of several batches is the ceiling.
- accelerate: decoder layers offloaded to disk by `accelerate`, the same forward. Its files
  leave the page cache before every measured step, because a machine smaller than the model
  would not hold them; one step at each width is taken with them there, and told apart.

Prints one JSON object a line, each as soon as it is known.
"""

import argparse
import importlib.util
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leadline.rig.disk_stream import DiskStream, Extent, coalesce
from leadline.rig.host_pool import HostPool

RING_BYTES = 512 * 2**20
SLAB_BYTES = 16 * 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("yardstick", choices=("raw", "resident", "accelerate"))
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--corpus", type=Path, help="int32 [documents, tokens] as .npy")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=131_072, help="resident: measured a batch")
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 8, 16], help="documents")
    parser.add_argument("--steps", type=int, default=2, help="accelerate: measured at each width")
    parser.add_argument("--offload", type=Path, help="accelerate: folder for its own files")
    arguments = parser.parse_args()
    for result in MEASURES[arguments.yardstick](arguments):
        print(json.dumps(result), flush=True)


def raw(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    shards = sorted(arguments.checkpoint.glob("*.safetensors"))
    whole = [Extent(path=path, begin=0, end=path.stat().st_size) for path in shards]
    requests = coalesce(whole, max_gap=0, max_bytes=SLAB_BYTES)
    with HostPool(RING_BYTES, pinned=False) as pool:
        ring = pool.take(RING_BYTES)
        ring.zero_()  # the ring's own page faults are not the disk's
        start = time.perf_counter()
        with DiskStream(
            requests, ring=ring, slab_bytes=SLAB_BYTES, threads=arguments.threads
        ) as stream:
            for slab in stream:
                slab.release()
            stats = stream.stats
        seconds = time.perf_counter() - start
    yield {
        "seconds": seconds,
        "bytes": stats.bytes_read,
        "bytes_per_s": stats.bytes_read / seconds,
        "direct": stats.direct,
        "threads": arguments.threads,
    }


def resident(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from transformers import AutoModel

    device = the_device()
    documents = np.load(arguments.corpus, mmap_mode="r")
    start = time.perf_counter()
    model = AutoModel.from_pretrained(
        arguments.checkpoint,
        dtype=torch.bfloat16,
        experts_implementation="grouped_mm",
        attn_implementation="sdpa",
        device_map={"": 0} if device.type == "cuda" else None,
    )
    settle(device)
    loaded = time.perf_counter() - start
    for batch in arguments.batches:
        steps = max(arguments.tokens // (batch * documents.shape[1]), 1)
        groups = groups_of(documents, batch, steps + 1, device)
        model(input_ids=next(groups), use_cache=False)
        settle(device)
        start = time.perf_counter()
        tokens = 0
        for ids in groups:
            model(input_ids=ids, use_cache=False)
            tokens += ids.numel()
        settle(device)
        seconds = time.perf_counter() - start
        yield {
            "documents_a_step": batch,
            "tokens": tokens,
            "seconds": seconds,
            "tok_s": tokens / seconds,
            "load_seconds": loaded,
        }


def accelerate(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if importlib.util.find_spec("accelerate") is None:
        yield {"missing": "accelerate is not installed here"}
        return
    device = the_device()
    documents = np.load(arguments.corpus, mmap_mode="r")
    start = time.perf_counter()
    model = offloaded(arguments.checkpoint, arguments.offload, device)
    loaded = time.perf_counter() - start
    folders = (arguments.offload, arguments.checkpoint)
    for batch in arguments.batches:
        # The first pass of all also warms up the device and its libraries: not kept.
        warm_up = [] if batch != arguments.batches[0] else ["warm-up"]
        kinds = [*warm_up, *["disk"] * arguments.steps, "page cache"]
        for kind, ids in zip(kinds, groups_of(documents, batch, len(kinds), device), strict=True):
            if kind == "disk":
                forget(folders)
            start = time.perf_counter()
            model(input_ids=ids, use_cache=False, logits_to_keep=1)
            settle(device)
            seconds = time.perf_counter() - start
            yield {
                "documents_a_step": batch,
                "from": kind,
                "tokens": ids.numel(),
                "seconds": seconds,
                "tok_s": ids.numel() / seconds,
                "load_seconds": loaded,
            }


def offloaded(checkpoint: Path, folder: Path, device: torch.device) -> Any:
    """The causal LM with its decoder layers on disk, everything else on *device*."""
    from transformers import AutoConfig, AutoModelForCausalLM

    home = 0 if device.type == "cuda" else "cpu"
    layers = AutoConfig.from_pretrained(checkpoint).num_hidden_layers
    outside = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    return AutoModelForCausalLM.from_pretrained(
        checkpoint,
        dtype=torch.bfloat16,
        experts_implementation="grouped_mm",
        attn_implementation="sdpa",
        device_map={
            **dict.fromkeys(outside, home),
            **{f"model.layers.{layer}": "disk" for layer in range(layers)},
        },
        offload_folder=folder,
    )


def the_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def groups_of(
    documents: Any, batch: int, num_groups: int, device: torch.device
) -> Iterator[Tensor]:
    """*num_groups* batches of documents, from the first one again when they run out."""
    for group in range(num_groups):
        rows = np.arange(group * batch, (group + 1) * batch) % documents.shape[0]
        yield torch.from_numpy(documents[rows].astype(np.int64)).to(device)


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget(folders: Sequence[Path]) -> None:
    """Let the pages of every file go, written ones included."""
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


MEASURES = {"raw": raw, "resident": resident, "accelerate": accelerate}


if __name__ == "__main__":
    with torch.inference_mode():
        main()
