"""One watched run of a model in each lane, and what each run showed.

A run that raises is a finding, not an accident: a hard-coded `.half()` often ends in a
dtype mismatch one module later. It is returned with the module that was running.
"""

from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from leadline.probe.callwatch import (
    OUTSIDE,
    Call,
    CallDtypes,
    CallRecorder,
    CallWatch,
    DtypeRecorder,
    Frame,
)
from leadline.probe.isolation import Buffers, random_state, same_random_state
from leadline.probe.optrace import LaneTrace, OriginTrace, Reduction
from leadline.probe.replay import autocast
from leadline.probe.tensortree import map_tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A lane that could not finish."""

    module: str
    """The module that was running."""
    error: Exception


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp32Lane:
    """What the fp32 run showed."""

    calls: deque[Call]
    """Completed calls; the code around the model comes last, unless the run failed."""
    origins: dict[str, Counter[str]]
    """By module, the operations that brought low precision into being."""
    failure: Failure | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Bf16Lane:
    """What the bf16 run showed."""

    dtypes: dict[Frame, CallDtypes]
    reductions: dict[str, Counter[Reduction]]
    additions: dict[str, int]
    """By module, the longest run of additions into one low-precision value."""
    failure: Failure | None


class LaneRunner:
    """Runs `run_all`, which is the model and the code around it, from equal beginnings."""

    def __init__(
        self,
        model: torch.nn.Module,
        run_all: Callable[[], Any],
        buffers: Buffers,
        device_type: str,
        seed: int,
    ) -> None:
        self._model = model
        self._run_all = run_all
        self._buffers = buffers
        self._device_type = device_type
        self._seed = seed

    def fp32(self) -> Fp32Lane:
        """Run in fp32, keeping every call."""
        recorder = CallRecorder(self._model, self._device_type)
        trace = OriginTrace(recorder.innermost_name)
        torch.manual_seed(self._seed)
        before = random_state(self._device_type)
        output, failure = self._watched(recorder, trace, enabled=False)
        if failure is None:
            recorder.calls.append(
                Call(
                    frame=OUTSIDE,
                    module=None,
                    arguments=((), {}),
                    output=map_tensors(output, lambda tensor: tensor.detach().clone()),
                    random=before,
                    drew_random=not same_random_state(before, random_state(self._device_type)),
                )
            )
        return Fp32Lane(calls=recorder.calls, origins=trace.origins, failure=failure)

    def bf16(self) -> Bf16Lane:
        """Run under bf16 autocast, keeping dtypes and suspicious operations."""
        recorder = DtypeRecorder(self._model)
        trace = LaneTrace(recorder.innermost_name, recorder.innermost_frame)
        torch.manual_seed(self._seed)
        _, failure = self._watched(recorder, trace, enabled=True)
        return Bf16Lane(
            dtypes=recorder.dtypes,
            reductions=trace.found_reductions(),
            additions=trace.additions,
            failure=failure,
        )

    def _watched(
        self, watch: CallWatch, trace: AbstractContextManager[Any], *, enabled: bool
    ) -> tuple[Any, Failure | None]:
        self._buffers.restore()
        try:
            with autocast(self._device_type, enabled=enabled), watch, trace:
                return self._run_all(), None
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return None, Failure(module=watch.innermost.name, error=error)
