"""The numerics twin's verdict: two lanes of numbers in, green or red with reasons out.

The fp32 lane is the yardstick, the bf16 lane is what will be trained. The verdict is
about bf16 arithmetic only if nothing else differs, so most rules check the yardstick
itself. Red when any of these holds, and every one that holds is told:

- the lanes have other lengths, or no step after the settling ones;
- they did not start from the same weights or did not see the same batches;
- the fp32 lane is not proven fp32 by a product against float64;
- a trainable parameter is held below fp32, where small updates round to nothing;
- a loss or a gradient norm is NaN or infinite;
- a loss spikes (`spike_steps`);
- after the settling steps, any loss is further than the tolerance from its twin. The
  worst step is judged: a mean hides one bad step, the last step hides all the others.

Steps are numbered from 1. No torch here; docs/numerics.md explains each constant.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from leadline.core.errors import ProbeError

TWIN_TOLERANCE = 0.05
"""Nats between the lanes; the gate procedure's own figure."""
SETTLE_STEPS = 20
"""Steps before the curves are judged: the first losses of a random model fall steeply."""
MATMUL_ERROR_LIMIT = 1e-5
"""fp32 gives about 3e-7 here, TF32 about 3e-4: the limit lies far from both."""
SPIKE_WINDOW_STEPS = 20
SPIKE_NOISE_STEPS = 100
"""Changes the noise is taken from: twenty give a figure that is itself too noisy."""
SPIKE_FLOOR = 0.5
"""Nats above the recent median that are always allowed."""
SPIKE_SIGMAS = 6.0
"""Allowed multiple of the recent noise, in robust standard deviations."""
_SIGMA_PER_MAD = 1.4826  # 1 / the 75 % quantile of a standard normal
_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """What one lane of the twin recorded, step by step."""

    losses: list[float]
    """Mean loss of each step, reduced in fp32 or wider."""
    grad_norms: list[float]
    """True gradient norm of each step, before clipping."""
    batch_hashes: list[str]
    """Hash of the token ids of each step's batch."""
    initial_weights_sha256: str
    low_precision_parameters: tuple[str, ...] = ()
    """Trainable parameters held in less than fp32."""
    matmul_error: float | None = None
    """Relative error of an fp32 product against float64, in this lane's setting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TwinVerdict:
    """Green or red, the figures behind it, and one sentence for each problem."""

    green: bool
    worst_step: int | None
    """Step after settling with the largest difference; None when none can be compared."""
    worst_delta: float | None
    """|bf16 - fp32| at that step, in nats."""
    final_delta: float | None
    """|bf16 - fp32| at the last step."""
    problems: tuple[str, ...]


def judge_twin(
    fp32: Lane,
    bf16: Lane,
    tolerance: float = TWIN_TOLERANCE,
    settle_steps: int = SETTLE_STEPS,
) -> TwinVerdict:
    """Judge the bf16 lane against its fp32 twin; see the module for the rules."""
    lanes = {"fp32": fp32, "bf16": bf16}
    problems = [
        *_setup_problems(fp32, bf16),
        *_length_problems(fp32, bf16, settle_steps),
        *(text for name, lane in lanes.items() for text in _finite_problems(name, lane)),
        *(text for name, lane in lanes.items() for text in _spike_problems(name, lane)),
    ]
    deltas = {
        step: abs(low - high)
        for step, (high, low) in enumerate(zip(fp32.losses, bf16.losses, strict=False), start=1)
        if math.isfinite(high) and math.isfinite(low)
    }
    settled = {step: delta for step, delta in deltas.items() if step > settle_steps}
    worst_step = max(settled, key=lambda step: settled[step]) if settled else None
    worst_delta = settled[worst_step] if worst_step is not None else None
    if worst_delta is not None and worst_delta > tolerance:
        problems.append(
            f"the bf16 loss is {worst_delta:.4f} from fp32 at step {worst_step}, more than "
            f"{tolerance:g}; find the module where the lanes part"
        )
    return TwinVerdict(
        green=not problems,
        worst_step=worst_step,
        worst_delta=worst_delta,
        final_delta=deltas.get(max(len(fp32.losses), len(bf16.losses))),
        problems=tuple(problems),
    )


def mean_loss(losses: Iterable[float]) -> float:
    """Mean of single losses, summed exactly; anything `float()` takes, a 0-d tensor too.

    A running sum in the dtype of a bf16 loss sticks at 256 and the mean then sinks by
    itself, which looks like learning.

    Raises:
        ProbeError: there is no loss to average.
    """
    values = [float(loss) for loss in losses]
    if not values:
        raise ProbeError("the mean of 0 losses was asked for; run at least one step")
    return math.fsum(values) / len(values)


def finite_or_none(value: float) -> float | None:
    """The value itself, or None for NaN and infinity, which JSON has no words for."""
    return value if math.isfinite(value) else None


def spike_steps(losses: Sequence[float]) -> tuple[int, ...]:
    """Steps, from 1, whose loss stands out above the 20 finite losses before it.

    Above their median by more than max(0.5, 6 robust standard deviations). The deviation
    is taken from the changes between steps (1.4826 x their median absolute deviation /
    sqrt 2) over up to 100 of them, so that a curve that falls steeply does not pass for a
    noisy one. Only rises count. The first 20 steps are never spikes, having no history;
    NaN and infinity are another rule's.
    """
    spikes: list[int] = []
    history: list[float] = []
    for step, loss in enumerate(losses, start=1):
        if not math.isfinite(loss):
            continue
        if len(history) >= SPIKE_WINDOW_STEPS:
            allowed = max(SPIKE_FLOOR, SPIKE_SIGMAS * _noise_sigma(history))
            if loss - median(history[-SPIKE_WINDOW_STEPS:]) > allowed:
                spikes.append(step)
        history = [*history[-SPIKE_NOISE_STEPS:], loss]
    return tuple(spikes)


def _noise_sigma(losses: Sequence[float]) -> float:
    changes = [after - before for before, after in pairwise(losses)]
    centre = median(changes)
    return _SIGMA_PER_MAD * median(abs(change - centre) for change in changes) / math.sqrt(2)


def _setup_problems(fp32: Lane, bf16: Lane) -> list[str]:
    problems = []
    if fp32.initial_weights_sha256 != bf16.initial_weights_sha256:
        problems.append(
            f"the lanes began from other weights ({fp32.initial_weights_sha256[:12]} and "
            f"{bf16.initial_weights_sha256[:12]}); seed both alike"
        )
    for step, (high, low) in enumerate(
        zip(fp32.batch_hashes, bf16.batch_hashes, strict=False), start=1
    ):
        if high != low:
            problems.append(
                f"the lanes saw other batches from step {step} on ({high[:12]} and {low[:12]}); "
                "give both the same loader seed"
            )
            break
    if fp32.matmul_error is None:
        problems.append(
            "the fp32 lane was not proven fp32: no product against float64 was measured"
        )
    elif not fp32.matmul_error < MATMUL_ERROR_LIMIT:
        problems.append(
            f"an fp32 product is {fp32.matmul_error:.1e} from float64, not below "
            f"{MATMUL_ERROR_LIMIT:g}: the fp32 lane is not fp32; turn TF32 off"
        )
    for name, lane in (("fp32", fp32), ("bf16", bf16)):
        narrow = lane.low_precision_parameters
        if narrow:
            problems.append(
                f"{len(narrow)} trainable parameter(s) of the {name} lane are held below fp32 "
                f"({_some(narrow)}), where small updates vanish; keep fp32 master weights"
            )
    return problems


def _length_problems(fp32: Lane, bf16: Lane, settle_steps: int) -> list[str]:
    problems = []
    for what, high, low in (
        ("losses", fp32.losses, bf16.losses),
        ("gradient norms", fp32.grad_norms, bf16.grad_norms),
        ("batch hashes", fp32.batch_hashes, bf16.batch_hashes),
    ):
        if not len(high) == len(low) == len(fp32.losses):
            problems.append(
                f"the lanes hold {len(high)} (fp32) and {len(low)} (bf16) {what} for "
                f"{len(fp32.losses)} fp32 steps; all must be equal, run both lanes to the end"
            )
    shortest = min(len(fp32.losses), len(bf16.losses))
    if shortest <= settle_steps:
        problems.append(
            f"the shorter lane has {shortest} steps and the first {settle_steps} are not judged; "
            "run more"
        )
    return problems


def _finite_problems(name: str, lane: Lane) -> list[str]:
    problems = []
    for what, values in (("loss", lane.losses), ("gradient norm", lane.grad_norms)):
        bad = [step for step, value in enumerate(values, start=1) if not math.isfinite(value)]
        if bad:
            problems.append(
                f"the {what} of the {name} lane is {values[bad[0] - 1]} at step {bad[0]} "
                f"({len(bad)} of {len(values)} steps are not finite)"
            )
    return problems


def _spike_problems(name: str, lane: Lane) -> list[str]:
    spikes = spike_steps(lane.losses)
    if not spikes:
        return []
    return [
        f"the loss of the {name} lane spikes to {lane.losses[spikes[0] - 1]:.3f} at step "
        f"{spikes[0]} ({len(spikes)} spike(s) in {len(lane.losses)} steps)"
    ]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
