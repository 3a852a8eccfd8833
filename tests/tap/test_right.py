"""Grams of a tap against the independent reference, for ten families and two schedules."""

from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from leadline.rig.skeleton import Skeleton
from leadline.tap import GramReader

from .conftest import Checkpoints
from .families import TEN_FAMILIES, random_documents
from .reference import ReferenceGrams, reference_grams
from .steady import steady_documents
from .tapping import assert_equal, assert_same_grams, record

FP32_TOLERANCE = 1e-5
BF16_TOLERANCE = 2e-2

WIDTH = 32
"""Tokens of a micro-batch and of a step."""
KV_POOL = 96
"""Tokens that all documents in flight may hold in a step schedule."""
LENGTHS = (1, 31, 70, 32, 33, 2, 96, 64, 5)
"""One token, unequal, and at, under and over the width; the longest fills the KV pool."""

WAVE = MappingProxyType({"schedule": "wave", "micro_batch_tokens": WIDTH})
STEP = MappingProxyType(
    {
        "schedule": "step",
        "max_num_batched_tokens": WIDTH,
        "max_num_seqs": 3,
        "kv_tokens": KV_POOL,
    }
)
SCHEDULES = MappingProxyType({"wave": WAVE, "step": STEP})

# In bf16 every choice of a document must stand clear of ties, which four layers and long
# sparse attention make hard to find: two layers and short documents there.
_SHALLOW = MappingProxyType(
    {
        "qwen3_next": {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_only_layers": [],
        },
        "qwen4_exp": {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "indexed_attention"],
            "ple_layer_ids": [1],
        },
    }
)
_STEADY_LENGTHS = (1, 30, 7, 24, 30, 29, 30, 16, 30, 28)
_STEADY_SHORT = (1, 20, 7, 20, 19) * 4

References = Callable[[str], ReferenceGrams]
Steady = tuple[Path, list[list[int]], ReferenceGrams]


@pytest.fixture(scope="session")
def references(checkpoints: Checkpoints) -> References:
    """Fp32 reference of each family over `LENGTHS`, computed once."""
    known: dict[str, ReferenceGrams] = {}

    def get(family: str) -> ReferenceGrams:
        if family not in known:
            known[family] = reference_grams(checkpoints(family), random_documents(LENGTHS))
        return known[family]

    return get


@pytest.fixture(scope="session")
def steady(checkpoints: Checkpoints) -> Callable[[str], Steady]:
    """Checkpoint, documents clear of ties, and their fp32 reference, computed once."""
    known: dict[str, Steady] = {}

    def get(family: str) -> Steady:
        if family not in known:
            checkpoint = checkpoints(family, **_SHALLOW.get(family, {}))
            lengths = _STEADY_SHORT if family == "qwen4_exp" else _STEADY_LENGTHS
            documents = steady_documents(checkpoint, lengths)
            known[family] = (checkpoint, documents, reference_grams(checkpoint, documents))
        return known[family]

    return get


@pytest.fixture(autouse=True)
def small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count an n-gram table of any size as one that is placed apart."""
    floor_of_one = partialmethod(Skeleton.gather_tables, floor=1)
    monkeypatch.setattr(Skeleton, "gather_tables", floor_of_one)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", TEN_FAMILIES)
def test_fp32_grams_equal_reference(
    checkpoints: Checkpoints, references: References, tmp_path: Path, family: str, schedule: str
) -> None:
    documents = random_documents(LENGTHS)
    out = tmp_path / "tap"
    result = record(checkpoints(family), documents, out, targets="all", **SCHEDULES[schedule])
    assert result["tokens"] == sum(LENGTHS)
    with GramReader(out) as reader:
        assert_equal(reader, references(family), FP32_TOLERANCE)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", TEN_FAMILIES)
def test_bf16_grams_equal_fp32_reference(
    steady: Callable[[str], Steady], tmp_path: Path, family: str, schedule: str
) -> None:
    checkpoint, documents, wanted = steady(family)
    out = tmp_path / "tap"
    record(checkpoint, documents, out, targets="all", dtype="bfloat16", **SCHEDULES[schedule])
    with GramReader(out) as reader:
        assert_equal(reader, wanted, BF16_TOLERANCE)


@pytest.mark.parametrize("family", TEN_FAMILIES)
def test_wave_and_step_agree(checkpoints: Checkpoints, tmp_path: Path, family: str) -> None:
    documents = random_documents(LENGTHS, seed=3)
    for name, schedule in SCHEDULES.items():
        record(checkpoints(family), documents, tmp_path / name, targets="all", **schedule)
    with GramReader(tmp_path / "wave") as wave, GramReader(tmp_path / "step") as step:
        assert_same_grams(wave, step, FP32_TOLERANCE)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", [f for f in TEN_FAMILIES if f != "llama"])
def test_gate_up_of_each_expert_equals_reference(
    checkpoints: Checkpoints, references: References, tmp_path: Path, family: str, schedule: str
) -> None:
    documents = random_documents(LENGTHS)
    out = tmp_path / "tap"
    flags = {"targets": "experts", "gate_up_gram": "expert", **SCHEDULES[schedule]}
    record(checkpoints(family), documents, out, **flags)
    wanted = references(family)
    experts_only = ReferenceGrams(tokens=wanted.tokens, experts=wanted.experts)
    with GramReader(out) as reader:
        assert_equal(reader, experts_only, FP32_TOLERANCE)


BOUNDARY_LENGTHS = tuple(
    sorted({1, 2, *(edge + by for edge in (WIDTH, 2 * WIDTH, KV_POOL) for by in (-1, 0, 1))})
)


@pytest.mark.parametrize("length", [n for n in BOUNDARY_LENGTHS if n <= KV_POOL])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_document_at_every_boundary_equals_reference(
    checkpoints: Checkpoints, tmp_path: Path, schedule: str, length: int
) -> None:
    checkpoint, documents = checkpoints("qwen3_next"), random_documents((length,))
    record(checkpoint, documents, tmp_path / "tap", targets="all", **SCHEDULES[schedule])
    with GramReader(tmp_path / "tap") as reader:
        assert_equal(reader, reference_grams(checkpoint, documents), FP32_TOLERANCE)


SHAPES: dict[str, dict[str, Any]] = {
    "one document a micro-batch": {"micro_batch_tokens": 1},
    "all in one micro-batch": {"micro_batch_tokens": 4096},
    "several waves and groups of experts": {"vram_mib": 1, "host_pool_mib": 1},
    "step of one token": {**STEP, "max_num_batched_tokens": 1},
    "step of one document": {**STEP, "max_num_seqs": 1},
    "step wider than the corpus": {**STEP, "max_num_batched_tokens": 4096, "kv_tokens": 4096},
    "pool that preempts": {**STEP, "max_num_seqs": 9, "max_num_batched_tokens": 48},
}


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen4_exp"])
@pytest.mark.parametrize("shape", SHAPES)
def test_any_shape_equals_reference(
    checkpoints: Checkpoints, references: References, tmp_path: Path, family: str, shape: str
) -> None:
    out = tmp_path / "tap"
    record(checkpoints(family), random_documents(LENGTHS), out, targets="all", **SHAPES[shape])
    with GramReader(out) as reader:
        assert_equal(reader, references(family), FP32_TOLERANCE)


@pytest.mark.parametrize("placement", ["disk", "ram"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ngram_table_on_either_tier_equals_reference(
    checkpoints: Checkpoints,
    references: References,
    tmp_path: Path,
    schedule: str,
    placement: str,
) -> None:
    out = tmp_path / "tap"
    flags = {**SCHEDULES[schedule], "ngram_placement": placement}
    record(checkpoints("qwen4_exp"), random_documents(LENGTHS), out, targets="all", **flags)
    with GramReader(out) as reader:
        assert_equal(reader, references("qwen4_exp"), FP32_TOLERANCE)


def test_planted_error_of_tolerance_is_seen(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """The comparison itself: a reference with one token more, or 2e-5 more, is not equal."""
    checkpoint, documents = checkpoints("qwen3_moe"), random_documents((20, 9))
    record(checkpoint, documents, tmp_path / "tap", targets="all")
    wanted = reference_grams(checkpoint, documents, dtype=torch.float32)
    with GramReader(tmp_path / "tap") as reader:
        assert_equal(reader, wanted, FP32_TOLERANCE)
        sums = wanted.experts["model.layers.2.mlp.experts"]
        sums.down[3] *= 1 + 2e-5
        with pytest.raises(AssertionError, match=r"experts\.down_proj\[3\] 2\.00e-05"):
            assert_equal(reader, wanted, FP32_TOLERANCE)
        sums.rows[3] += 1
        with pytest.raises(AssertionError, match=r"1 of \d+ row counts differ"):
            assert_equal(reader, wanted, 1.0)
