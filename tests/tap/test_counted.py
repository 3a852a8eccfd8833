"""What exactly is counted: each routed row once, whatever the shape, the layout or the order."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeModel

from leadline.core.canonical import sha256_file
from leadline.core.errors import IntegrityError, UsageError
from leadline.rig.scheduler import Scheduler, predicted_steps
from leadline.tap import GramReader
from leadline.tap.gram_tap import GramTap

from .conftest import Checkpoints
from .families import EXPERT_WIDTH, NUM_EXPERTS, TOP_K, random_documents
from .processes import CommandServer
from .reference import ReferenceGrams, reference_grams
from .scenes import build_small_model
from .tapping import assert_equal, assert_same_grams, command, file_hashes, record
from .toy import (
    build_toy,
    copy_checkpoint,
    edit_tensor,
    expert_name,
    move_tensor,
    number_experts,
    router_name,
    shards,
)

DOCUMENTS = random_documents((30, 12, 7, 21))
SCHEDULES: dict[str, dict[str, Any]] = {
    "wave": {"micro_batch_tokens": 32},
    "step": {"schedule": "step", "max_num_batched_tokens": 16, "max_num_seqs": 2},
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_toy(tmp_path_factory.mktemp("toy"))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("lengths", [(5, 9, 2, 16), (20, 19, 19, 18)])
def test_t21_documents_side_by_side_count_as_one_by_one(
    toy: Path, tmp_path: Path, lengths: tuple[int, ...], schedule: str
) -> None:
    """Near lengths share a padded micro-batch, unlike ones a step."""
    documents = random_documents(lengths)
    together = {**SCHEDULES[schedule], "micro_batch_tokens": 80, "max_num_batched_tokens": 80}
    record(toy, documents, tmp_path / "together", targets="all", **together)
    record(toy, documents, tmp_path / "apart", targets="all", micro_batch_tokens=1)
    with GramReader(tmp_path / "together") as left, GramReader(tmp_path / "apart") as right:
        assert left.rows(0, "gate_up") == sum(lengths)
        assert left.rows(0).sum() == sum(lengths) * TOP_K
        assert_same_grams(left, right, 1e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("lost", ["a layer", "a chunk"])
def test_t24_rows_that_pass_the_tap_by_stop_it(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str, lost: str
) -> None:
    """As a fused path would that calls no hook: in layer 1, or for one chunk of it."""
    rows_of, calls = GramTap.rows_of, []

    def bypassed(self: GramTap, module: str) -> Any:
        calls.append(self._layer)
        missed = self._layer == 1 and (lost == "a layer" or calls.count(1) == 1)
        return None if missed else rows_of(self, module)

    monkeypatch.setattr(GramTap, "rows_of", bypassed)
    with pytest.raises(IntegrityError, match=r"layer 1, .* counted \d+ rows, wanted \d+"):
        record(toy, DOCUMENTS, tmp_path / "tap", **SCHEDULES[schedule])


def test_t25_each_experts_gram_is_that_of_its_own_rows(toy: Path, tmp_path: Path) -> None:
    record(toy, DOCUMENTS, tmp_path / "tap", gate_up_gram="expert")
    wanted = only_experts(reference_grams(toy, DOCUMENTS))
    with GramReader(tmp_path / "tap") as reader:
        assert_equal(reader, wanted, 1e-5)
        for target in ("gate_up", "down"):
            first, second = (reader.gram(0, target, expert=expert) for expert in (0, 1))
            assert np.linalg.norm(first - second) > 0.1 * np.linalg.norm(first)


def only_experts(wanted: ReferenceGrams) -> ReferenceGrams:
    wanted.linears.clear()
    return wanted


def test_t27_near_ties_of_the_router_fall_as_in_the_reference(tmp_path: Path) -> None:
    """Two router rows that differ by 1e-4: BF16 would make them one."""
    path = build_toy(tmp_path / "toy", dtype=torch.float32)

    def near(weight: Tensor) -> None:
        for first in range(0, NUM_EXPERTS, 2):
            weight[first + 1] = weight[first] * (1 + 1e-4)

    for layer in (0, 1):
        edit_tensor(path, router_name(layer), near)
    record(path, DOCUMENTS, tmp_path / "tap")
    with GramReader(tmp_path / "tap") as reader:
        assert_equal(reader, only_experts(reference_grams(path, DOCUMENTS)), 1e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_t30_tapped_again_is_bit_equal(toy: Path, tmp_path: Path, schedule: str) -> None:
    for name, threads in (("first", 1), ("again", 8)):
        flags = {**SCHEDULES[schedule], "targets": "all", "dtype": "bfloat16", "threads": threads}
        record(toy, DOCUMENTS, tmp_path / name, **flags)
    assert file_hashes(tmp_path / "first") == file_hashes(tmp_path / "again")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_t90_document_given_twice_counts_twice(toy: Path, tmp_path: Path, schedule: str) -> None:
    """No cache of prefixes: all of a document that was seen before passes the layers."""
    record(toy, [DOCUMENTS[0]], tmp_path / "once", **SCHEDULES[schedule])
    record(toy, [DOCUMENTS[0]] * 2, tmp_path / "twice", **SCHEDULES[schedule])
    with GramReader(tmp_path / "once") as once, GramReader(tmp_path / "twice") as twice:
        for layer in once.layers:
            assert (twice.rows(layer) == 2 * once.rows(layer)).all()
            doubled = 2 * once.packed(layer, "down")
            assert np.allclose(twice.packed(layer, "down"), doubled, rtol=1e-4, atol=1e-5)


def test_t89_tokens_computed_again_after_preemption_are_counted_once(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents that share a step's width, and a KV pool that does not hold them all."""
    monkeypatch.setattr("leadline.tap.step.Scheduler", partial(Scheduler, max_chunk=8))
    foreseen = partial(predicted_steps, max_chunk=8)
    monkeypatch.setattr("leadline.rig.step_plan.predicted_steps", foreseen)
    shape = {"schedule": "step", "max_num_seqs": 4, "max_num_batched_tokens": 32, "kv_tokens": 32}
    result = record(toy, DOCUMENTS, tmp_path / "tap", targets="all", **shape)
    assert result["preemptions"] > 0
    assert result["recomputed_tokens"] > 0
    with GramReader(tmp_path / "tap") as reader:
        assert_equal(reader, reference_grams(toy, DOCUMENTS), 1e-5)


def twice_over(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A model that applies its first layer twice and never its second."""

    def looped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        layers: Any = self.layers
        self.layers = nn.ModuleList([layers[0], layers[0]])
        try:
            return forward(self, *args, **kwargs)
        finally:
            self.layers = layers

    return looped


def test_t15_model_that_applies_a_layer_twice_is_refused(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Qwen2MoeModel, "forward", twice_over(Qwen2MoeModel.forward))
    with pytest.raises(UsageError, match=r"Qwen2MoeForCausalLM .*layer"):
        record(toy, DOCUMENTS, tmp_path / "tap")


def test_t15_layer_that_calls_its_experts_twice_stops_the_tap(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts

    forward = Qwen2MoeExperts.forward

    def doubled(self: nn.Module, *args: Any) -> Any:
        return forward(self, *args) + forward(self, *args)

    monkeypatch.setattr(Qwen2MoeExperts, "forward", doubled)
    with pytest.raises(IntegrityError, match=r"layer 0, down counted 280 rows, wanted 140"):
        record(toy, DOCUMENTS, tmp_path / "tap")


def test_t56_expert_whose_parts_lie_in_two_shards_equals_reference(
    toy: Path, tmp_path: Path
) -> None:
    path = copy_checkpoint(toy, tmp_path / "toy")
    for projection, shard in (("gate", 1), ("up", 1), ("down", 2)):
        move_tensor(path, expert_name(0, 4, projection), shard)
    record(path, DOCUMENTS, tmp_path / "tap")
    with GramReader(tmp_path / "tap") as reader:
        assert_equal(reader, only_experts(reference_grams(toy, DOCUMENTS)), 1e-5)


@pytest.mark.parametrize("budgets", [{}, {"vram_mib": 1, "host_pool_mib": 1}])
def test_t59_twelve_experts_are_in_the_order_of_numbers(
    tmp_path: Path, budgets: dict[str, int]
) -> None:
    """Expert e is constant, so its own Gram is one number everywhere, and the reference's."""
    path = build_toy(tmp_path / "toy", num_experts=12)
    number_experts(path, 0, 12)
    record(path, DOCUMENTS, tmp_path / "tap", **budgets)
    wanted = reference_grams(path, DOCUMENTS).experts["model.layers.0.mlp.experts"]
    with GramReader(tmp_path / "tap") as reader:
        assert (reader.rows(0) == wanted.rows).all()
        for expert in np.flatnonzero(wanted.rows):
            gram = reader.gram(0, "down", expert=int(expert))
            assert gram.shape == (EXPERT_WIDTH, EXPERT_WIDTH)
            assert np.allclose(gram, wanted.down[expert], rtol=1e-4)


@pytest.fixture
def untouchable(toy: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of TOY whose files and folder may not be written to."""
    path = copy_checkpoint(toy, tmp_path / "untouchable")
    for file in path.iterdir():
        file.chmod(0o444)
    path.chmod(0o555)
    yield path
    path.chmod(0o755)
    shutil.rmtree(path)


@pytest.mark.slow
def test_t62_source_is_read_and_never_written(
    server: CommandServer, untouchable: Path, tmp_path: Path
) -> None:
    def seen() -> dict[str, tuple[str, int]]:
        files = untouchable.iterdir()
        return {file.name: (sha256_file(file), file.stat().st_mtime_ns) for file in files}

    before = seen()
    assert len(shards(untouchable)) == 3
    for schedule, flags in SCHEDULES.items():
        assert server.run(command(untouchable, DOCUMENTS, tmp_path / schedule, **flags)).code == 0
    plan = ["rig", "plan", str(untouchable), "--tokens", "99", "--device", "cpu"]
    assert server.run(plan).code == 0
    assert seen() == before


def test_expert_that_only_a_later_wave_reaches_is_not_told_as_starved(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    path = build_small_model(checkpoints, num_experts=64)
    flags = {"dtype": "bfloat16", "vram_mib": 1, "host_pool_mib": 1}
    result = record(path, random_documents([16] * 8), tmp_path / "tap", **flags)
    assert result["waves"] > 1
    told = {note["detail"].split(",")[0]: note["count"] for note in result["notes"]}
    with GramReader(tmp_path / "tap") as reader:
        starved = {f"layer {n}": int((reader.rows(n) == 0).sum()) for n in reader.layers}
    assert max(starved.values()) > 0
    assert told == {layer: count for layer, count in starved.items() if count}
