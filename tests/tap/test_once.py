"""Bytes read: each weight byte once for a wave, and for steps what the plan said.

The tap's own count is held against the kernel's. Where the file system of the temporary
folder does not count reads (memory), only the tap's own count is judged.
"""

from pathlib import Path
from typing import Any

import pytest

from leadline.rig.checkpoint import Checkpoint

from ..rig.page_cache import drop_pages, resident_pages
from .conftest import Checkpoints
from .families import random_documents
from .processes import CommandServer, Ended
from .scenes import SCENES, build_small_model
from .tapping import command

pytestmark = pytest.mark.slow

OPENING_BYTES = 512 * 1024
"""Of a shard: its header, what the kernel reads ahead behind it, and sixteen sampled pages."""
ROOMY = {"dtype": "bfloat16", "vram_mib": 64, "host_pool_mib": 16}


@pytest.fixture(scope="module")
def model(checkpoints: Checkpoints) -> Path:
    """38 MB in six layers, so that headers, tokenizer and page ends are below a hundredth."""
    shape = {"num_hidden_layers": 6, "num_experts": 32, "moe_intermediate_size": 128}
    return build_small_model(checkpoints, hidden_size=256, **shape)


@pytest.fixture
def cold(model: Path) -> Path:
    """The model out of the page cache, so that the kernel counts what is read."""
    for shard in model.glob("*.safetensors"):
        drop_pages(shard)
        assert not resident_pages(shard)
    return model


def by_kernel(ended: Ended) -> int:
    """Bytes that the kernel fetched from storage for a command, once it counts them."""
    read = ended.counters.get("read_bytes", 0)
    if not read:
        pytest.skip("this system does not count what a process reads from storage")
    return read


def in_layers(path: Path) -> int:
    """Bytes of everything but the head, which no layer reads."""
    tensors = Checkpoint.open(path).tensors
    return sum(entry.num_bytes for name, entry in tensors.items() if name != "lm_head.weight")


@pytest.mark.parametrize("documents", [1, 40])
@pytest.mark.parametrize("targets", ["experts", "all", "none"])
def test_t47_wave_reads_every_weight_byte_once_at_any_size(
    server: CommandServer, cold: Path, tmp_path: Path, documents: int, targets: str
) -> None:
    corpus = random_documents([64] * documents)
    ended = server.run(command(cold, corpus, tmp_path / "tap", targets=targets, **ROOMY))
    result, whole = ended.result, ended.result["checkpoint_bytes"]
    assert whole == Checkpoint.open(cold).total_bytes
    assert result["waves"] == 1
    assert result["bytes_read"] == result["planned_bytes"] == in_layers(cold)
    assert result["bytes_from_disk"] <= whole * 1.02
    kernel = by_kernel(ended) - result["bytes_from_disk"]
    assert 0 <= kernel <= 3 * OPENING_BYTES + whole * 0.01


def test_t60_tied_embedding_is_read_once(
    server: CommandServer, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    tied = checkpoints("qwen3_moe", tied=True)
    result = server.run(command(tied, random_documents((20,)), tmp_path / "tap")).result
    assert result["bytes_read"] == result["checkpoint_bytes"]


@pytest.mark.parametrize("scene", ["waves", "waves of groups of experts"])
def test_each_further_wave_is_one_more_pass(
    server: CommandServer, checkpoints: Checkpoints, tmp_path: Path, scene: str
) -> None:
    path = build_small_model(checkpoints)
    result = server.run(SCENES[scene].arguments(path, tmp_path / "tap")).result
    assert result["bytes_read"] == result["planned_bytes"]
    assert result["bytes_read"] == SCENES[scene].waves * in_layers(path)


STEPS: dict[str, tuple[dict[str, Any], int]] = {
    "nothing is kept": ({"vram_mib": 12, "host_pool_mib": 10, "kv_tokens": 128}, 0),
    "some layers are kept": ({"vram_mib": 20, "host_pool_mib": 20, "kv_tokens": 128}, 1),
}


@pytest.mark.parametrize("case", STEPS)
def test_steps_read_the_multiple_that_the_plan_predicts(
    server: CommandServer, cold: Path, tmp_path: Path, case: str
) -> None:
    budgets, kept = STEPS[case]
    shape = {"schedule": "step", "max_num_batched_tokens": 64, "max_num_seqs": 2, **budgets}
    corpus = random_documents([64] * 3)
    arguments = command(cold, corpus, tmp_path / "tap", dtype="bfloat16", **shape)
    planned = server.run(["rig", "plan", *without_out(arguments), "--no-probe"]).result
    ended = server.run(arguments)
    result, whole = ended.result, in_layers(cold)
    assert result["steps"] == planned["steps"] == 3
    assert result["bytes_read"] == result["planned_bytes"] == planned["bytes_to_read"]
    assert (result["layers_on_device"] + result["layers_in_pool"] > 0) == bool(kept)
    multiple = result["bytes_read"] / whole
    assert (multiple < 2.9) if kept else (2.9 < multiple <= 3.0)
    kernel = by_kernel(ended) - result["bytes_from_disk"]
    assert abs(kernel) <= 3 * OPENING_BYTES + result["bytes_read"] * 0.01


def without_out(arguments: list[str]) -> list[str]:
    """The flags of `tap record` that `rig plan` takes too."""
    place = arguments.index("--out")
    return [*arguments[2:place], *arguments[place + 2 :]]
