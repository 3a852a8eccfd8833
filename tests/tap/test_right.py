"""Grams of a tap against the independent reference, for ten families and two schedules."""

from collections.abc import Callable, Iterator
from functools import partialmethod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from leadline.core.errors import UsageError
from leadline.rig.plan import Budgets
from leadline.rig.skeleton import Skeleton
from leadline.tap import GramReader

from .conftest import Checkpoints
from .families import NUM_EXPERTS, TEN_FAMILIES, random_documents
from .reference import ReferenceGrams, load_whole, reference_grams
from .steady import NOISE, SHALLOW, doubtful_tokens, steady_documents
from .tapping import assert_equal, assert_same_grams, record

FP32_TOLERANCE = 1e-5
BF16_TOLERANCE = 2e-2

WIDTH = 32
"""Tokens of a micro-batch and of a step."""
KV_POOL = 96
"""Tokens that all documents in flight may hold in a step schedule."""
LENGTHS = (1, 31, 70, 32, 33, 2, 96, 64, 5)
"""One token, unequal, and at, under and over the width; the longest fills the KV pool."""
DOCUMENTS = random_documents(LENGTHS)

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
ROUTED_FAMILIES = tuple(family for family in TEN_FAMILIES if family != "llama")

References = Callable[[str], ReferenceGrams]
Taps = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def references(checkpoints: Checkpoints) -> References:
    """Fp32 reference of each family over `DOCUMENTS`, computed once."""
    known: dict[str, ReferenceGrams] = {}

    def get(family: str) -> ReferenceGrams:
        if family not in known:
            known[family] = reference_grams(checkpoints(family), DOCUMENTS)
        return known[family]

    return get


@pytest.fixture(scope="module", autouse=True)
def small_tables() -> Iterator[None]:
    """Count an n-gram table of any size as one that is placed apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Skeleton, "gather_tables", partialmethod(Skeleton.gather_tables, floor=1))
        yield


@pytest.fixture(scope="module")
def taps(
    small_tables: None, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Taps:
    """Fp32 tap of everything in a family by a schedule, made once."""
    known: dict[tuple[str, str], Path] = {}

    def get(family: str, schedule: str) -> Path:
        if (family, schedule) not in known:
            out = tmp_path_factory.mktemp(f"{family}-{schedule}") / "tap"
            flags = {"targets": "all", **SCHEDULES[schedule]}
            result = record(checkpoints(family), DOCUMENTS, out, **flags)
            assert result["tokens"] == sum(LENGTHS)
            known[family, schedule] = out
        return known[family, schedule]

    return get


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", TEN_FAMILIES)
def test_fp32_grams_equal_reference(
    taps: Taps, references: References, family: str, schedule: str
) -> None:
    with GramReader(taps(family, schedule)) as reader:
        assert_equal(reader, references(family), FP32_TOLERANCE)


@pytest.mark.parametrize("family", TEN_FAMILIES)
def test_wave_and_step_agree(taps: Taps, family: str) -> None:
    with GramReader(taps(family, "wave")) as wave, GramReader(taps(family, "step")) as step:
        assert_same_grams(wave, step, FP32_TOLERANCE)


@pytest.mark.parametrize("family", ROUTED_FAMILIES)
def test_steady_documents_have_no_token_on_the_fence(checkpoints: Checkpoints, family: str) -> None:
    checkpoint = checkpoints(family, **SHALLOW.get(family, {}))
    exact, narrow = (load_whole(checkpoint, dtype) for dtype in (torch.float32, torch.bfloat16))
    documents = [torch.tensor(ids) for ids in steady_documents(family)]
    doubtful = doubtful_tokens(exact, narrow, documents, range(2), noise=NOISE / 2)
    on_the_fence = sum(int(tokens.sum()) for tokens in doubtful)
    assert on_the_fence == 0, "find other documents: python -m tests.tap.steady"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", TEN_FAMILIES)
def test_bf16_grams_equal_fp32_reference(
    checkpoints: Checkpoints, tmp_path: Path, family: str, schedule: str
) -> None:
    checkpoint = checkpoints(family, **SHALLOW.get(family, {}))
    documents = steady_documents(family)
    out = tmp_path / "tap"
    record(checkpoint, documents, out, targets="all", dtype="bfloat16", **SCHEDULES[schedule])
    with GramReader(out) as reader:
        assert_equal(reader, reference_grams(checkpoint, documents), BF16_TOLERANCE)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", ROUTED_FAMILIES)
def test_gate_up_of_each_expert_equals_reference(
    checkpoints: Checkpoints, references: References, tmp_path: Path, family: str, schedule: str
) -> None:
    out = tmp_path / "tap"
    flags = {"targets": "experts", "gate_up_gram": "expert", **SCHEDULES[schedule]}
    record(checkpoints(family), DOCUMENTS, out, **flags)
    wanted = references(family)
    experts_only = ReferenceGrams(tokens=wanted.tokens, experts=wanted.experts)
    with GramReader(out) as reader:
        assert_equal(reader, experts_only, FP32_TOLERANCE)


BOUNDARY_LENGTHS = sorted(
    {1, 2, *(edge + by for edge in (WIDTH, 2 * WIDTH, KV_POOL) for by in (-1, 0, 1))} - {97}
)


@pytest.mark.parametrize("length", BOUNDARY_LENGTHS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_document_at_every_boundary_equals_reference(
    checkpoints: Checkpoints, tmp_path: Path, schedule: str, length: int
) -> None:
    checkpoint, documents = checkpoints("qwen3_next"), random_documents((length,))
    record(checkpoint, documents, tmp_path / "tap", targets="all", **SCHEDULES[schedule])
    with GramReader(tmp_path / "tap") as reader:
        assert_equal(reader, reference_grams(checkpoint, documents), FP32_TOLERANCE)


def test_document_one_token_over_the_kv_pool_is_refused(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    documents = random_documents((5, KV_POOL + 1))
    with pytest.raises(UsageError, match=rf"document 2\b.*\b{KV_POOL + 1}\b"):
        record(checkpoints("mixtral"), documents, tmp_path / "tap", **STEP)


@pytest.mark.parametrize("lengths", [(1,), (20, 9), (40,), (65, 1)])
def test_corpus_of_few_tokens_with_shape_left_to_plan_equals_reference(
    checkpoints: Checkpoints, tmp_path: Path, lengths: tuple[int, ...]
) -> None:
    checkpoint, documents = checkpoints("olmoe"), random_documents(lengths)
    record(checkpoint, documents, tmp_path / "tap", targets="all")
    with GramReader(tmp_path / "tap") as reader:
        assert_equal(reader, reference_grams(checkpoint, documents), FP32_TOLERANCE)


SHAPES: dict[str, dict[str, Any]] = {
    "one document a micro-batch": {"micro_batch_tokens": 1},
    "all in one micro-batch": {"micro_batch_tokens": 4096},
    "step of seven tokens": {**STEP, "max_num_batched_tokens": 7},
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
    record(checkpoints(family), DOCUMENTS, out, targets="all", **SHAPES[shape])
    with GramReader(out) as reader:
        assert_equal(reader, references(family), FP32_TOLERANCE)


def test_step_of_one_token_equals_reference(checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoint, documents = checkpoints("deepseek_v3"), random_documents((9, 1, 14))
    flags = {**STEP, "max_num_batched_tokens": 1, "targets": "all"}
    record(checkpoint, documents, tmp_path / "tap", **flags)
    with GramReader(tmp_path / "tap") as reader:
        assert_equal(reader, reference_grams(checkpoint, documents), FP32_TOLERANCE)


@pytest.mark.parametrize("more_kib", [0, 35, 70])
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "qwen4_exp"])
def test_waves_and_groups_of_experts_equal_reference(
    checkpoints: Checkpoints,
    references: References,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    more_kib: int,
) -> None:
    """As little memory as is not refused, and a little more, so that groups come out uneven."""

    def tap(kib: int) -> dict[str, Any]:
        budgets = Budgets(device_bytes=kib << 10, pool_bytes=1 << 20)
        monkeypatch.setattr("leadline.tap.subject.Budgets", lambda **_: budgets)
        flags = {"targets": "all", "micro_batch_tokens": WIDTH}
        return record(checkpoints(family), DOCUMENTS, tmp_path / f"tap{kib}", **flags)

    kib = _smallest_not_refused(tap) + more_kib
    result = tap(kib)
    if not more_kib:
        assert result["waves"] > 1
        assert 0 < result["experts_per_group"] < NUM_EXPERTS
    with GramReader(tmp_path / f"tap{kib}") as reader:
        assert_equal(reader, references(family), FP32_TOLERANCE)


def _smallest_not_refused(tap: Callable[[int], Any]) -> int:
    """The least budget in KiB that *tap* takes; what else it may say of it is not judged."""
    refused, taken = 64, 8192
    while taken - refused > 1:
        middle = (refused + taken) // 2
        try:
            tap(middle)
        except UsageError:
            refused = middle
        except Exception:  # judged by the caller, at the budget that it takes
            taken = middle
        else:
            taken = middle
    return taken


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
    record(checkpoints("qwen4_exp"), DOCUMENTS, out, targets="all", **flags)
    with GramReader(out) as reader:
        assert_equal(reader, references("qwen4_exp"), FP32_TOLERANCE)


def test_planted_error_of_tolerance_is_seen(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """The comparison itself: a reference with one token more, or 2e-5 more, is not equal."""
    checkpoint, documents = checkpoints("qwen3_moe"), random_documents((20, 9))
    record(checkpoint, documents, tmp_path / "tap", targets="all", **WAVE)
    wanted = reference_grams(checkpoint, documents)
    with GramReader(tmp_path / "tap") as reader:
        assert_equal(reader, wanted, FP32_TOLERANCE)
        sums = wanted.experts["model.layers.2.mlp.experts"]
        sums.down[3] *= 1 + 2e-5
        with pytest.raises(AssertionError, match=r"experts\.down_proj\[3\] 2\.0\de-05"):
            assert_equal(reader, wanted, FP32_TOLERANCE)
        sums.rows[3] += 1
        with pytest.raises(AssertionError, match=r"1 of \d+ row counts differ"):
            assert_equal(reader, wanted, 1.0)
