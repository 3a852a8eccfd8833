"""A tap keeps to its memory: checkpoints and corpora larger than it, slow disks, many layers."""

import importlib.util
import mmap
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from leadline.tap import GramReader

from ..rig.page_cache import drop_pages, resident_pages
from .conftest import Checkpoints
from .families import random_documents
from .processes import CommandServer
from .reference import reference_grams
from .scenes import build_small_model
from .tapping import assert_equal, command
from .toy import build_toy

pytestmark = pytest.mark.slow

MIB = 2**20
LIMIT_BYTES = 335 * MIB
"""Address space that a tap may take beyond what Python and its libraries have mapped."""
OUTSIDE_BYTES = 2 * 2**30
"""Host memory outside the pool that the design allows: Python, torch and transformers."""


@pytest.fixture(scope="module")
def large_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """1.0 GB in 40 layers of 26 MB, each tensor of one shape the same."""
    script = Path(__file__).parents[2] / "bench" / "moe_checkpoint.py"
    spec = importlib.util.spec_from_file_location("moe_checkpoint", script)
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = bench
    spec.loader.exec_module(bench)
    drawn: dict[Any, Tensor] = {}

    def draw(spec: Any, generator: torch.Generator, device: torch.device) -> Tensor:
        key = (spec.shape, spec.std, spec.mean)
        if key not in drawn:
            drawn[key] = torch.normal(spec.mean, spec.std, spec.shape).bfloat16()
        return drawn[key]

    bench.draw = draw
    path = tmp_path_factory.mktemp("large")
    shape = bench.MoeShape(
        layers=40,
        experts=16,
        hidden=512,
        intermediate=512,
        top_k=2,
        heads=8,
        kv_heads=2,
        head_dim=64,
        vocab=512,
    )
    bench.write_checkpoint(path, shape, threads=1, shard_bytes=400 * 10**6)
    yield path
    shutil.rmtree(path)


def test_checkpoint_of_three_times_the_memory_taps_to_the_end(
    server: CommandServer, large_checkpoint: Path, tmp_path: Path
) -> None:
    shards = list(large_checkpoint.glob("*.safetensors"))
    weighs = sum(file.stat().st_size for file in shards)
    assert weighs > 3 * LIMIT_BYTES
    for shard in shards:
        drop_pages(shard)
    corpus = tmp_path / "c.npy"
    np.save(corpus, np.random.default_rng(0).integers(0, 512, (4, 64), dtype=np.int32))
    flags = {"vram_mib": 112, "host_pool_mib": 16, "threads": 4}
    arguments = command(large_checkpoint, corpus, tmp_path / "tap", **flags)
    ended = server.run(arguments, fault=("limit_memory", {"more_bytes": LIMIT_BYTES}))
    result = ended.result
    assert (result["layers"], result["tokens"]) == (40, 256)
    assert result["peak_host_bytes"] <= result["host_pool_bytes"] + OUTSIDE_BYTES
    # T54: what was read is not left in the page cache either.
    left = sum(resident_pages(shard) for shard in shards) * mmap.PAGESIZE
    assert left < LIMIT_BYTES // 20
    assert ended.counters.get("read_bytes", 0) <= weighs * 1.02


def test_t08_layer_of_more_experts_than_fit_is_taken_in_groups(
    server: CommandServer, tmp_path: Path
) -> None:
    """48 experts whose weights and Grams weigh 12 MiB, and a budget for about ten of them."""
    path = build_toy(tmp_path / "toy", num_experts=48, moe_intermediate_size=160)
    documents = random_documents((30, 17))
    arguments = command(path, documents, tmp_path / "tap", vram_mib=3, host_pool_mib=4)
    assert 5 <= server.run(arguments).result["experts_per_group"] <= 12
    wanted = reference_grams(path, documents)
    wanted.linears.clear()
    with GramReader(tmp_path / "tap") as reader:
        assert_equal(reader, wanted, 1e-5)


def test_t78_peak_memory_does_not_rise_from_layer_to_layer_while_sealing_is_slow(
    server: CommandServer, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """A layer's Grams weigh 8.4 MB: nine in a queue would be a fifth of the process."""
    checkpoint = build_small_model(checkpoints, num_hidden_layers=12, moe_intermediate_size=512)
    flags = {"vram_mib": 64, "host_pool_mib": 16}
    arguments = command(checkpoint, random_documents([64]), tmp_path / "tap", **flags)
    slow = server.run(arguments, fault=("seal_slowly", {"seconds": 0.15}))
    assert slow.result["layers"] == 12
    peaks = slow.told["peaks"][1:]  # the first look is before the first layer
    assert len(peaks) >= 12
    assert peaks[11] <= peaks[2] * 1.02, peaks


def test_t79_corpus_eight_times_as_large_takes_more_waves_and_no_more_memory(
    server: CommandServer, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    checkpoint = build_small_model(checkpoints)
    budgets = {"dtype": "bfloat16", "vram_mib": 1, "host_pool_mib": 1}
    results = {}
    for times in (1, 8):
        documents = random_documents([64] * 2 * times)
        arguments = command(checkpoint, documents, tmp_path / f"tap{times}", **budgets)
        results[times] = server.run(arguments).result
        words = ["rig", "plan", str(checkpoint), *arguments[3:5], "--device", "cpu", "--no-probe"]
        planned = server.run([*words, "--vram-mib", "1", "--host-pool-mib", "1", "--json"]).result
        assert planned["waves"] == results[times]["waves"]
        assert planned["bytes_to_read"] == results[times]["bytes_read"]
    assert (results[1]["waves"], results[8]["waves"]) == (1, 8)
    for result in results.values():
        assert result["vram_budget_bytes"] <= MIB
        assert result["host_pool_bytes"] <= MIB
    assert results[8]["peak_host_bytes"] <= results[1]["peak_host_bytes"] * 1.05


def test_t37_long_document_in_steps_takes_no_more_memory_than_a_short_one(
    server: CommandServer, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    checkpoint = build_small_model(checkpoints, max_position_embeddings=8192)
    step = {"schedule": "step", "max_num_batched_tokens": 128, "vram_mib": 32, "host_pool_mib": 8}
    peaks = []
    for length in (256, 6000):
        documents = random_documents((length,))
        result = server.run(command(checkpoint, documents, tmp_path / f"{length}", **step)).result
        assert result["tokens"] == length
        assert result["steps"] == -(-length // 128)
        peaks.append(result["peak_host_bytes"])
    # Keys and values of 6,000 tokens are 12 MB, and a mask of 6,000 x 6,000 would be 144.
    assert peaks[1] - peaks[0] < 32 * MIB
