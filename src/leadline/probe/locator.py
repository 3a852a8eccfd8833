"""The divergence locator: names the module where a bf16 lane parts from its fp32 twin.

Method, on one small fixed batch:

1. The fp32 lane runs once. Every module call is recorded in completion order (callwatch),
   and every operation that brings fp16 or bf16 into being is charged to the innermost
   running module (optrace): *hard-coded low precision*. That fault sits in both lanes,
   so no comparison of them can show it.
2. The bf16 lane runs once. The dtype of every argument is noted, and every reduction
   taken in bf16 over more than 256 elements: *reduction in bfloat16*.
3. Each call is replayed alone in bf16 on its fp32 arguments (replay), so its error is
   its own and not inherited. Out of the band, or not finite: accused (errorband).
4. A container is replayed with its accused parts held in fp32: it is accused only of
   what is wrong beside them. So the first accused is the most specific one.

The code around the model, which takes the loss, is judged last, as "(forward)".

What it does not see: faults that only the backward has; modules called outside
`forward`; a fault in fewer than a tenth of the rows of a result that stays finite.
Modules that could not be judged are named in the report, never passed over.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from leadline.core.errors import ProbeError
from leadline.probe.callwatch import FORWARD_NAME, Call, module_names
from leadline.probe.errorband import Judgement, Rule, Unjudged, judge_call
from leadline.probe.isolation import Buffers, isolated
from leadline.probe.lanes import Bf16Lane, Failure, Fp32Lane, LaneRunner
from leadline.probe.optrace import Reduction
from leadline.probe.replay import Replayer, floating

Forward = Callable[[nn.Module], Tensor]
Progress = Callable[[int, int], None]
Notes = Mapping[str, Counter[str]]

_SHOWN = 3
_MESSAGE_CHARACTERS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Accusation:
    """One module, what it is accused of and the evidence."""

    module: str
    """Dotted name; "(model)" is the model itself, "(forward)" the code that called it."""
    module_class: str
    rule: str
    """A value of `errorband.Rule`."""
    error: float | None
    """Relative bf16 error, 90 % quantile over rows; None when it was not measured."""
    band: float | None
    """Largest error that unavoidable rounding explains."""
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LocatorReport:
    """Whom the locator accuses, in completion order, and what it could not look at."""

    accused: tuple[Accusation, ...]
    modules_checked: int
    skipped: tuple[tuple[str, str], ...]
    """Name and reason of each module that was not judged."""


def locate_divergence(
    model: nn.Module,
    forward: Forward,
    *,
    device_type: str,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> LocatorReport:
    """Name the modules of *model* whose bf16 numbers are not what rounding explains.

    Args:
        model: holds fp32 weights; it is given back unchanged.
        forward: runs the model once on a small fixed batch, without entering autocast
            itself, and returns the loss. It is called a few times.
        device_type: "cpu" or "cuda".
        seed: of torch's generators at the start of each lane.
        on_progress: told calls judged and calls in all.

    Raises:
        ProbeError: the fp32 forward fails, or memory runs out.
    """

    def run_all() -> Any:
        return forward(model)

    try:
        with isolated(model, device_type) as buffers:
            runner = LaneRunner(model, run_all, buffers, device_type, seed)
            inquiry = _Inquiry(model, run_all, buffers, device_type)
            return inquiry.judge(runner, seed, on_progress or (lambda _done, _total: None))
    except torch.OutOfMemoryError as error:
        raise ProbeError(
            "the divergence locator ran out of device memory while it kept each module's "
            "arguments and results; give it a batch of fewer tokens"
        ) from error


_NAN_IN_FP32 = Judgement(
    rule=Rule.NAN_IN_FP32,
    error=None,
    band=None,
    detail="NaN comes out of it in fp32 though none went in",
)


class _Inquiry:
    """One run of the method; holds what is known about each module so far."""

    def __init__(
        self, model: nn.Module, run_all: Callable[[], Any], buffers: Buffers, device_type: str
    ) -> None:
        self._run_all = run_all
        self._buffers = buffers
        self._device_type = device_type
        self._names = module_names(model)
        self._modules = {name: module for module, name in self._names.items()}
        self._accused: dict[str, Accusation] = {}
        self._checked: set[str] = set()
        self._skipped: dict[str, str] = {}

    def judge(self, runner: LaneRunner, seed: int, on_progress: Progress) -> LocatorReport:
        fp32 = runner.fp32()
        if fp32.failure is not None:
            self._accuse_failed_fp32(fp32.origins, fp32.failure)
            return self._report()
        bf16 = runner.bf16()
        if bf16.failure is not None:
            self._accuse_failed_bf16(fp32.origins, bf16.failure)
            return self._report()
        self._judge_calls(fp32, bf16, seed, on_progress)
        for name in sorted(bf16.reductions.keys() - self._accused.keys() - self._checked):
            self._accuse(name, None, bf16.reductions[name], None)
        for name, module in self._modules.items():
            if not (name in self._checked or name in self._accused or _is_container(module)):
                self._skipped.setdefault(name, "this forward does not call it")
        return self._report()

    def _judge_calls(
        self, fp32: Fp32Lane, bf16: Bf16Lane, seed: int, on_progress: Progress
    ) -> None:
        replayer = Replayer(
            self._run_all, bf16.dtypes, self._names, self._buffers, self._device_type
        )
        generator = torch.Generator(device=self._device_type).manual_seed(seed)
        ends_finite = _is_finite(fp32.calls[-1].output)
        total = len(fp32.calls)
        while fp32.calls:
            call = fp32.calls.popleft()  # its copies are freed when it is judged
            name = call.frame.name
            if name not in self._accused:
                additions = bf16.additions.get(name, 0)
                judgement = self._judge_call(call, replayer, additions, generator)
                if not (ends_finite or self._held_in(call)) and _turns_nan(call):
                    judgement = _NAN_IN_FP32
                self._accuse(name, fp32.origins.get(name), bf16.reductions.get(name), judgement)
            on_progress(total - len(fp32.calls), total)

    def _judge_call(
        self, call: Call, replayer: Replayer, additions: int, generator: torch.Generator
    ) -> Judgement | None:
        name = call.frame.name
        outcome: Judgement | Unjudged
        try:
            outcome = judge_call(call, replayer, self._held_in(call), additions, generator)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            outcome = Unjudged(reason=f"its replay failed: {_one_line(error)}")
        if isinstance(outcome, Unjudged):
            self._skipped[name] = outcome.reason
            return None
        self._checked.add(name)
        return replace(outcome, detail=outcome.detail + self._circumstances(call))

    def _circumstances(self, call: Call) -> str:
        text = f" in call {call.frame.nth + 1} of it" if call.frame.nth else ""
        parts = self._modules if call.module is None else list(call.module.children())
        if parts and not self._held_in(call):
            # Errors that fit every part's band can add up, or sit in the few rows a quantile drops.
            text += "; no part of it by itself is accused"
        return text

    def _held_in(self, call: Call) -> frozenset[nn.Module]:
        """The accused modules inside a call, which it is not to be blamed for."""
        inside = self._modules.values() if call.module is None else call.module.modules()
        return frozenset(m for m in inside if self._names.get(m) in self._accused) - {call.module}

    def _accuse(
        self,
        name: str,
        origins: Counter[str] | None,
        reductions: Counter[Reduction] | None,
        judgement: Judgement | None,
    ) -> None:
        """Accuse *name* if its numbers or what was seen in it give a reason."""
        rule, details = None, []
        if origins:
            rule = Rule.HARD_CODED
            details.append(_listed(origins) + " in the fp32 lane")
        if judgement is not None and judgement.rule is not None:
            rule = rule or judgement.rule
            details.append(judgement.detail)
        if reductions:
            if not all(reduction.is_exponential for reduction in reductions):
                rule = rule or Rule.REDUCTION
            details.append(_listed(reductions))
        if rule is None:
            return
        # Both lanes carry hard-coded precision alike: their difference says nothing about it.
        numbers = judgement if judgement and (judgement.rule or rule is Rule.REDUCTION) else None
        module = self._modules.get(name)
        self._accused[name] = Accusation(
            module=name,
            module_class=type(module).__name__ if module is not None else "function",
            rule=rule.value,
            error=numbers.error if numbers else None,
            band=numbers.band if numbers else None,
            detail="; ".join(details),
        )

    def _accuse_failed_fp32(self, origins: Notes, failure: Failure) -> None:
        reason = f"the fp32 forward stopped in {failure.module}: {_one_line(failure.error)}"
        if not origins:
            raise ProbeError(
                f"{reason}; make the model run in fp32 before bf16 is judged"
            ) from failure.error
        self._accuse_unjudged(origins, reason)

    def _accuse_failed_bf16(self, origins: Notes, failure: Failure) -> None:
        reason = f"the bf16 forward stopped in {failure.module}: {_one_line(failure.error)}"
        self._accuse_unjudged(origins, reason)
        if failure.module not in self._accused:
            failed = Judgement(rule=Rule.FAILS, error=None, band=None, detail=reason)
            self._accuse(failure.module, None, None, failed)

    def _accuse_unjudged(self, origins: Notes, reason: str) -> None:
        for name, notes in origins.items():
            self._accuse(name, notes, None, None)
        for name in self._modules:
            self._skipped[name] = reason

    def _report(self) -> LocatorReport:
        skipped = {n: why for n, why in self._skipped.items() if n not in self._accused}
        return LocatorReport(
            accused=tuple(self._accused.values()),
            modules_checked=len(self._checked - {FORWARD_NAME}),
            skipped=tuple((n, why) for n, why in skipped.items() if n not in self._checked),
        )


def _turns_nan(call: Call) -> bool:
    """Whether NaN comes out of a call that none went into."""
    taken = floating(call.arguments)
    return _has_nan(floating(call.output)) and not _has_nan(taken)


def _has_nan(tensors: list[Tensor]) -> bool:
    return any(bool(torch.isnan(tensor).any()) for tensor in tensors)


def _is_finite(value: Any) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in floating(value))


def _is_container(module: nn.Module) -> bool:
    """Whether a module has no forward of its own, like a ModuleList."""
    return type(module).forward is nn.Module.forward


def _listed(notes: Counter[Any]) -> str:
    more = f" and {len(notes) - _SHOWN} other kinds" if len(notes) > _SHOWN else ""
    return ", ".join(f"{note} ({times}x)" for note, times in notes.most_common(_SHOWN)) + more


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_MESSAGE_CHARACTERS]}"
