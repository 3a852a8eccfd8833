"""NaN, Inf, huge numbers and experts without tokens: stopped and named, or counted and told."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leadline.tap import GramReader
from leadline.tap.manifest import read_manifest

from .families import HIDDEN, NUM_EXPERTS, TOP_K, VOCAB, random_documents
from .processes import CommandServer, Ended
from .reference import reference_grams
from .tapping import assert_equal, command
from .toy import build_toy, copy_checkpoint, expert_name, poison, router_name, scale, starve

pytestmark = pytest.mark.slow

DOCUMENTS = random_documents((30, 12, 7, 21))
TOKENS = sum(map(len, DOCUMENTS))
EMBEDDING = "model.embed_tokens.weight"
SCHEDULES: dict[str, dict[str, Any]] = {
    "wave": {"micro_batch_tokens": 32},
    "step": {"schedule": "step", "max_num_batched_tokens": 16, "max_num_seqs": 2},
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_toy(tmp_path_factory.mktemp("toy"))


Tap = Callable[..., Ended]


@pytest.fixture
def tap(server: CommandServer, toy: Path, tmp_path: Path) -> Tap:
    """Tap TOY, spoiled, into `tmp_path/tap`."""

    def run(spoil: Callable[[Path], Any], **flags: Any) -> Ended:
        spoiled = copy_checkpoint(toy, tmp_path / "spoiled")
        spoil(spoiled)
        return server.run(command(spoiled, DOCUMENTS, tmp_path / "tap", **flags))

    return run


def notes_of(ended: Ended) -> dict[str, dict[str, Any]]:
    return {note["kind"]: note for note in ended.result["notes"]}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_t09_bad_weight_that_is_used_stops_the_tap_and_is_named(
    tap: Tap, tmp_path: Path, schedule: str, value: float
) -> None:
    name = expert_name(0, 5, "down")
    said = tap(lambda path: poison(path, name, value), **SCHEDULES[schedule]).refused(1)
    assert said.startswith("layer 0: model.layers.0.mlp.experts.down_proj of expert 5 holds"), said
    assert read_manifest(tmp_path / "tap").sealed == frozenset()


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.mlp.shared_expert.up_proj.weight",
        "model.layers.1.input_layernorm.weight",
        router_name(1),
    ],
)
def test_t09_bad_weight_in_a_later_layer_leaves_the_layers_before_sealed(
    tap: Tap, tmp_path: Path, name: str
) -> None:
    said = tap(lambda path: poison(path, name)).refused(1)
    assert said.startswith(f"layer 1: {name} holds NaN or Inf"), said
    assert read_manifest(tmp_path / "tap").sealed == {0}


def test_t09_bad_embedding_stops_the_tap(tap: Tap, tmp_path: Path) -> None:
    used = DOCUMENTS[0][0] * HIDDEN
    said = tap(lambda path: poison(path, EMBEDDING, at=used)).refused(1)
    assert said.startswith(f"layer 0: {EMBEDDING} holds NaN or Inf"), said
    assert read_manifest(tmp_path / "tap").sealed == frozenset()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_t12_bad_weight_outside_the_layers_that_no_token_shows_is_told_once(
    tap: Tap, schedule: str
) -> None:
    unused = (set(range(VOCAB)) - {token for ids in DOCUMENTS for token in ids}).pop() * HIDDEN

    def spoil(path: Path) -> None:
        poison(path, EMBEDDING, at=unused)
        poison(path, "model.norm.weight")
        unreached(path)

    notes = tap(spoil, **SCHEDULES[schedule]).result["notes"]
    told = [note["detail"] for note in notes if note["kind"] == "weight_not_finite"]
    outside = sorted(detail.split()[0] for detail in told if not detail.startswith("layer"))
    assert outside == [EMBEDDING, "model.norm.weight"]
    assert len(told) == 4


def unreached(path: Path) -> None:
    """NaN in experts 6 and 7 of layer 0, which no token reaches."""
    starve(path, 0, experts=(6, 7))
    poison(path, expert_name(0, 6, "gate"))
    poison(path, expert_name(0, 7, "down"))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_t12_bad_weight_that_no_token_reached_is_told_and_harmless(
    tap: Tap, tmp_path: Path, schedule: str
) -> None:
    notes = tap(unreached, **SCHEDULES[schedule]).result["notes"]
    told = [note["detail"] for note in notes if note["kind"] == "weight_not_finite"]
    wanted = (("down_proj", 7), ("gate_up_proj", 6))
    assert len(told) == len(wanted)
    for detail, (name, expert) in zip(sorted(told), wanted, strict=True):
        assert f"layer 0: model.layers.0.mlp.experts.{name} of expert {expert} holds" in detail
    with GramReader(tmp_path / "tap") as reader:
        for layer in (0, 1):
            assert np.isfinite(reader.packed(layer, "down")).all()


def test_t12_bad_weight_that_no_token_reached_is_red_when_strict(tap: Tap) -> None:
    ended = tap(unreached, strict=True)
    assert ended.code == 3
    assert "weight_not_finite" in ended.stdout


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_t01_expert_without_tokens_has_count_0_and_is_told(
    tap: Tap, tmp_path: Path, schedule: str
) -> None:
    found = notes_of(tap(lambda path: starve(path, 1), **SCHEDULES[schedule]))
    note = found["expert_without_rows"]
    assert note["count"] == 2
    assert re.search(r"layer 1, down: no token reached expert 6, 7$", note["detail"])
    with GramReader(tmp_path / "tap") as reader:
        assert reader.rows(1)[6:].tolist() == [0, 0]
        assert reader.rows(1).sum() == TOKENS * TOP_K
        assert (reader.gram(1, "down", expert=6) == 0).all()


def test_t01_expert_without_tokens_is_red_when_strict(tap: Tap) -> None:
    assert tap(lambda path: starve(path, 1), strict=True).code == 3


def test_ordinary_tap_is_green_when_strict(tap: Tap) -> None:
    assert tap(lambda path: None, strict=True).result["notes"] == []


def test_t05_expert_whose_inputs_are_zero_has_tokens_and_a_gram_of_zero(
    tap: Tap, tmp_path: Path
) -> None:
    ended = tap(lambda path: scale(path, expert_name(0, 2, "up"), 0.0))
    assert ended.result["notes"] == []
    with GramReader(tmp_path / "tap") as reader:
        assert reader.rows(0)[2] > 0
        assert (reader.gram(0, "down", expert=2) == 0).all()
        assert (reader.gram(0, "down", expert=3) != 0).any()


def test_t06_least_middle_and_most_rows_of_a_layers_experts_are_shown(
    tap: Tap, tmp_path: Path
) -> None:
    assert tap(lambda path: starve(path, 1)).code == 0
    document = json.loads((tmp_path / "tap" / "grams.json").read_text(encoding="utf-8"))
    with GramReader(tmp_path / "tap") as reader:
        for layer, entry in enumerate(document["layers"]):
            rows, shown = np.sort(reader.rows(layer)), entry["rows"]["down"]
            wanted = {"total": TOKENS * TOP_K, "min": int(rows[0]), "max": int(rows[-1])}
            wanted |= {"median": int(rows[(NUM_EXPERTS - 1) // 2])}
            assert shown == {**wanted, "without_rows": 2 * layer}


def louder(path: Path) -> None:
    """Experts of layer 0 whose gated activations reach 1e5: past the range of fp16."""
    for expert in range(NUM_EXPERTS):
        scale(path, expert_name(0, expert, "up"), 2.0**17)
        scale(path, expert_name(0, expert, "down"), 2.0**-17)


def test_t10_activations_past_the_range_of_half_precision_equal_reference(
    tap: Tap, tmp_path: Path
) -> None:
    assert tap(louder, targets="all").result["notes"] == []
    wanted = reference_grams(tmp_path / "spoiled", DOCUMENTS)
    largest = max(sums.down.max() for sums in wanted.experts.values())
    assert largest > 1e5**2
    with GramReader(tmp_path / "tap") as reader:
        assert_equal(reader, wanted, 1e-5)


def test_t10_activations_past_the_range_of_half_precision_are_finite_in_bf16(
    tap: Tap, tmp_path: Path
) -> None:
    assert tap(louder, dtype="bfloat16").result["notes"] == []
    with GramReader(tmp_path / "tap") as reader:
        assert np.isfinite(reader.packed(0, "down")).all()
        assert reader.packed(0, "down").max() > 1e5**2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_inf_activations_of_finite_weights_stop_the_tap_and_name_layer_and_expert(
    tap: Tap, tmp_path: Path, schedule: str
) -> None:
    def spoil(path: Path) -> None:
        for projection in ("gate", "up"):
            scale(path, expert_name(1, 3, projection), 2.0**100)

    said = tap(spoil, **SCHEDULES[schedule]).refused(1)
    assert re.search(r"layer 1\b.*expert 3\b", said), said
    assert read_manifest(tmp_path / "tap").sealed <= {0}


def test_squares_that_overflow_a_gram_stop_the_tap_and_name_layer_and_expert(
    tap: Tap, tmp_path: Path
) -> None:
    """Activations are finite, the sum of their squares is not."""

    def spoil(path: Path) -> None:
        scale(path, expert_name(1, 3, "up"), 2.0**80)
        scale(path, expert_name(1, 3, "down"), 2.0**-80)

    said = tap(spoil).refused(1)
    assert re.search(r"layer 1, down, expert 3 has inf", said), said
    assert read_manifest(tmp_path / "tap").sealed == {0}


def test_t39_empty_documents_are_left_out_and_told(
    server: CommandServer, toy: Path, tmp_path: Path
) -> None:
    corpus = tmp_path / "c.jsonl"
    texts = ["", " ", "t5", " ".join(f"t{n}" for n in range(20))]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    ended = server.run(command(toy, corpus, tmp_path / "tap"))
    assert notes_of(ended)["document_empty"]["count"] == 2
    assert (ended.result["documents"], ended.result["tokens"]) == (2, 21)
    strict = server.run(command(toy, corpus, tmp_path / "tap", strict=True))
    assert strict.code == 3
