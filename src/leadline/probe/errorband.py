"""The band: how far a call's bf16 result may be from fp32, and the judgement by it.

No fixed tolerance fits both a projection and a router on near-ties, so the band is made
for each call from what no care could prevent: the error of its best case, several
times over with other roundings (replay.in_best_case):

    band = SENSITIVITY x best-case error + FLOOR

The call's own error is the 90 % quantile over rows and the best case's is the 98 %
quantile, so that a router that sends nine tokens in a hundred elsewhere by one rounding
and eleven by another is not accused of the difference. docs/numerics.md says how the
constants were measured.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor, nn

from leadline.probe.callwatch import Call
from leadline.probe.optrace import OverflowTrace
from leadline.probe.replay import Replayer, floating
from leadline.probe.rowerror import lost_elements, row_error

BFLOAT16_STEP = 2.0**-8
"""Relative distance of neighbouring bf16 numbers; one rounding is at most half of it."""
SENSITIVITY = 2.0
FLOOR = 2 * BFLOAT16_STEP
LONG_SUM_ADDITIONS = 32
"""Additions into one bf16 value in one call that count as accumulating in bf16."""
LONG_SUM_SENSITIVITY = 1.5
LONG_SUM_FLOOR = BFLOAT16_STEP / 2
"""An accumulation seen as such is evidence already: it gets half the band."""
NO_BAND = 1.0
"""A band as wide as the result itself can judge nothing; such a module is told, not passed."""
ERROR_QUANTILE = 0.90
BEST_CASE_QUANTILE = 0.98
REPEATABLE = 2.0**-13
"""Error of a second fp32 run up to which a call repeats itself: other kernels, same sums."""
_ROUNDINGS = 3
_ROUNDINGS_OF_FEW_ROWS = 8
_FEW_ROWS = 8


class Rule(StrEnum):
    """What a module can be accused of."""

    HARD_CODED = "hard-coded low precision"
    NOT_FINITE = "not finite in bfloat16"
    OUT_OF_BAND = "outside the error band"
    ACCUMULATION = "accumulation in bfloat16"
    REDUCTION = "reduction in bfloat16"
    FAILS = "fails in the bf16 lane"
    NAN_IN_FP32 = "NaN in float32"


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """The numbers of one call, and the rule they break, if any."""

    rule: Rule | None
    error: float | None
    band: float | None
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unjudged:
    """Why a call's numbers say nothing."""

    reason: str


def judge_call(
    call: Call,
    replayer: Replayer,
    held: frozenset[nn.Module],
    num_additions: int,
    generator: torch.Generator,
) -> Judgement | Unjudged:
    """Replay *call* and hold its bf16 error against its band.

    Args:
        call: the recorded call.
        replayer: makes it again.
        held: accused modules inside it, kept in fp32.
        num_additions: longest accumulation in bf16 seen in this module.
        generator: of the chance roundings, on the tensors' device.
    """
    reference = floating(call.output)
    if not reference:
        return Unjudged(reason="it returns no floating-point tensor")
    if not any(bool(torch.isfinite(tensor).any()) for tensor in reference):
        return Unjudged(reason="its fp32 result has no finite element")
    result = replayer.in_bfloat16(call, held)
    if _shapes(result) != _shapes(reference):
        return Unjudged(reason="its bf16 result has another shape than its fp32 result")
    errors = [row_error(r, t, ERROR_QUANTILE) for r, t in zip(reference, result, strict=True)]
    lost = sum(lost_elements(r, t) for r, t in zip(reference, result, strict=True))
    accumulates = num_additions >= LONG_SUM_ADDITIONS
    factor, floor = (LONG_SUM_SENSITIVITY, LONG_SUM_FLOOR) if accumulates else (SENSITIVITY, FLOOR)
    if not lost and max(errors) <= floor:
        return Judgement(rule=None, error=max(errors), band=floor)
    if not _repeats(call, replayer, reference):
        return Unjudged(reason="a second fp32 run of it gives another result")
    if lost:
        return _lost(call, replayer, held, lost, sum(tensor.numel() for tensor in reference))
    if call.drew_random:
        return Unjudged(reason="it draws random numbers, which differ between dtypes")
    best = best_case_errors(call, replayer, reference, generator)
    bands = [factor * error + floor for error in best]
    error, band = max(zip(errors, bands, strict=True), key=lambda pair: pair[0] / pair[1])
    if band >= NO_BAND:
        why = f"the rounding that no care avoids moves its result by {max(best):.0%} already"
        return Unjudged(reason=why)
    if error <= band:
        return Judgement(rule=None, error=error, band=band)
    detail = f"relative error {error:.2%}, unavoidable rounding explains {band:.2%}"
    if not accumulates:
        return Judgement(rule=Rule.OUT_OF_BAND, error=error, band=band, detail=detail)
    detail += f"; {num_additions} additions into one bf16 value"
    return Judgement(rule=Rule.ACCUMULATION, error=error, band=band, detail=detail)


def _lost(
    call: Call, replayer: Replayer, held: frozenset[nn.Module], lost: int, total: int
) -> Judgement:
    with OverflowTrace() as trace:
        replayer.in_bfloat16(call, held)
    detail = f"{lost} of {total} elements are NaN or infinite in bf16 and finite in fp32"
    if trace.first is not None:
        detail += f", first from {trace.first}"
    return Judgement(rule=Rule.NOT_FINITE, error=None, band=None, detail=detail)


def best_case_errors(
    call: Call, replayer: Replayer, reference: list[Tensor], generator: torch.Generator
) -> list[float]:
    """Largest best-case error of each result over several roundings, to nearest first."""
    num_rows = min(t.numel() // max(t.shape[-1], 1) if t.ndim else 1 for t in reference)
    chances = _ROUNDINGS_OF_FEW_ROWS if num_rows < _FEW_ROWS else _ROUNDINGS
    worst = [0.0] * len(reference)
    for source in [None, *[generator] * chances]:
        result = replayer.in_best_case(call, source)
        if _shapes(result) != _shapes(reference):
            continue  # routed so differently that rows cannot be paired: no error to learn from
        worst = [
            max(known, row_error(r, t, BEST_CASE_QUANTILE))
            for known, r, t in zip(worst, reference, result, strict=True)
        ]
    return worst


def _repeats(call: Call, replayer: Replayer, reference: list[Tensor]) -> bool:
    again = replayer.exactly(call)
    return _shapes(again) == _shapes(reference) and all(
        row_error(r, t, BEST_CASE_QUANTILE) <= REPEATABLE
        for r, t in zip(reference, again, strict=True)
    )


def _shapes(tensors: list[Tensor]) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors]
