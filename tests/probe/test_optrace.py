from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from leadline.probe.optrace import (
    LaneTrace,
    MatmulRounding,
    OriginTrace,
    OverflowTrace,
    round_to_bfloat16,
)

NARROW = torch.ones(2, 300, dtype=torch.bfloat16)


def reductions(work: Callable[[], object]) -> list[str]:
    frame = object()
    trace = LaneTrace(lambda: "part", lambda: frame)
    with trace:
        work()
    return sorted(str(note) for note in trace.found_reductions().get("part", ()))


@pytest.mark.parametrize(
    ("work", "found"),
    [
        (lambda: NARROW.softmax(-1), "softmax in bfloat16 over 300"),
        (lambda: NARROW.log_softmax(-1), "log_softmax in bfloat16 over 300"),
        (lambda: NARROW.mean(-1), "mean in bfloat16 over 300"),
        (lambda: NARROW.sum(), "sum in bfloat16 over 600"),
        (lambda: NARROW.sum((0, 1)), "sum in bfloat16 over 600"),
        (lambda: NARROW.half().sum(-1), "sum in float16 over 300"),
        (lambda: NARROW.var(dim=-1), "var in bfloat16 over 300"),
        (lambda: NARROW.std(-1), "std in bfloat16 over 300"),
        (lambda: torch.var_mean(NARROW, -1), "var_mean in bfloat16 over 300"),
        (lambda: NARROW.cumsum(1), "cumsum in bfloat16 over 300"),
        (lambda: NARROW.logsumexp(-1), "logsumexp in bfloat16 over 300"),
        (lambda: NARROW.norm(dim=-1), "linalg_vector_norm in bfloat16 over 300"),
    ],
)
def test_lane_trace_long_narrow_reduction_is_noted(work: Callable[[], object], found: str) -> None:
    assert reductions(work) == [found]


@pytest.mark.parametrize(
    "work",
    [
        lambda: NARROW.float().softmax(-1),
        lambda: NARROW.softmax(-1, dtype=torch.float32),
        lambda: NARROW.sum(-1, dtype=torch.float32),
        lambda: NARROW.sum(0),
        lambda: NARROW[:, :256].sum(-1),
        lambda: NARROW.amax(-1),
        lambda: NARROW @ NARROW.T,
        lambda: F.layer_norm(NARROW, (300,)),
        lambda: F.rms_norm(NARROW, (300,)),
        lambda: F.scaled_dot_product_attention(NARROW[None], NARROW[None], NARROW[None]),
    ],
)
def test_lane_trace_harmless_operation_is_not_noted(work: Callable[[], object]) -> None:
    assert reductions(work) == []


def test_lane_trace_reduction_in_parts_counts_all_terms() -> None:
    def work() -> None:
        total = torch.zeros(2, dtype=torch.bfloat16)
        for part in NARROW.split(30, dim=-1):
            total = total * 1.0 + part.sum(-1)

    assert reductions(work) == ["running sum in bfloat16 over 300"]


def test_lane_trace_additions_are_counted_within_one_call_only() -> None:
    frames = iter(range(10_000))
    trace = LaneTrace(lambda: "part", lambda: next(frames))
    total = torch.zeros(2, dtype=torch.bfloat16)
    with trace:
        for _ in range(40):
            total = total + 1
    assert trace.additions == {"part": 1}


def origins(work: Callable[[], object]) -> list[str]:
    trace = OriginTrace(lambda: "part")
    with trace:
        work()
    return list(trace.origins.get("part", ()))


@pytest.mark.parametrize(
    "work",
    [
        lambda: torch.ones(2).half(),
        lambda: torch.zeros(2, dtype=torch.bfloat16),
        lambda: NARROW * 2,
        lambda: torch.ones(2).to(torch.float16).add(1).mul(2).float(),
    ],
)
def test_origin_trace_notes_where_low_precision_begins_once(work: Callable[[], object]) -> None:
    assert len(origins(work)) == 1


@pytest.mark.parametrize("work", [lambda: torch.ones(2) * 2, lambda: NARROW.float() + 1])
def test_origin_trace_fp32_results_are_no_origin(work: Callable[[], object]) -> None:
    assert origins(work) == []


@pytest.mark.parametrize(
    ("work", "first"),
    [
        (lambda x: torch.exp(x * 100) + 1, "exp in float32"),
        (lambda x: (x * 1e5).half().float() * 2, "_to_copy in float16"),
        (lambda x: torch.log(-x) + 1, "log in float32"),
        (lambda x: x.masked_fill(x > 0, -torch.inf).softmax(-1), "softmax in float32"),
        (lambda x: x.masked_fill(x < 0, -torch.inf).softmax(-1), None),
        (lambda x: x.clone().mul_(1e38).mul_(1e38), "mul_ in float32"),
    ],
)
def test_overflow_trace_names_the_first_loss(work: Callable[[Tensor], Tensor], first: str) -> None:
    with OverflowTrace() as trace:
        work(torch.ones(4))
    assert (trace.first or "").lstrip("_") == (first or "").lstrip("_")


@settings(max_examples=60, deadline=None)
@given(value=st.floats(width=32, allow_nan=False, allow_infinity=False), seed=st.integers(0, 2**31))
def test_round_to_bfloat16_by_chance_is_one_of_the_two_neighbours(value: float, seed: int) -> None:
    exact = torch.tensor([value], dtype=torch.float32)
    rounded = round_to_bfloat16(exact, torch.Generator().manual_seed(seed))
    fits_bf16 = torch.equal(rounded.bfloat16().float(), rounded)
    assert fits_bf16 or torch.equal(rounded, exact)  # kept where rounding up would overflow
    assert abs(rounded - exact) <= max(abs(exact) * 2**-7, torch.tensor(2.0**-133))


def test_round_to_bfloat16_by_chance_is_right_on_average() -> None:
    exact = torch.full((20_000,), 1 + 2**-9)  # a quarter of the way between neighbours
    rounded = round_to_bfloat16(exact, torch.Generator().manual_seed(0))
    assert rounded.mean().item() == pytest.approx(1 + 2**-9, abs=2**-13)


def test_matmul_rounding_rounds_products_and_nothing_else() -> None:
    x = torch.randn(8, 8)
    with MatmulRounding(None):
        product, total = x @ x, x + x
    wanted = (x.bfloat16().float() @ x.bfloat16().float()).bfloat16().float()
    assert torch.equal(product, wanted)
    assert torch.equal(total, 2 * x)
