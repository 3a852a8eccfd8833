"""Watching the modules of a model being called: who is running, with what, giving what.

Hooks stand on every module of the model, outermost: they see arguments before the
user's own pre-hooks and results after the user's own hooks, as a replay needs them.
Calls are told in completion order, so a module comes before whatever contains it.
"""

from collections import Counter, deque
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from leadline.probe.isolation import RandomState, random_state, same_random_state
from leadline.probe.tensortree import map_tensors, tensors_in

MODEL_NAME = "(model)"
"""Name of the whole model, which torch names with an empty string."""
FORWARD_NAME = "(forward)"
"""Name of the code around the model: the closure that calls it and takes the loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One running call; `nth` counts the calls of that module from 0."""

    name: str
    nth: int


OUTSIDE = Frame(name=FORWARD_NAME, nth=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One recorded call: enough to make it again."""

    frame: Frame
    module: nn.Module | None
    """None for the code around the model."""
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    output: Any
    random: RandomState
    """Generator states when the call began."""
    drew_random: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class CallDtypes:
    """Dtypes of the tensors a call took and returned, in tree order."""

    arguments: tuple[torch.dtype, ...]
    output: tuple[torch.dtype, ...]


def module_names(model: nn.Module) -> dict[nn.Module, str]:
    """Dotted name of each module; a module reachable by several names has its first."""
    return {module: name or MODEL_NAME for name, module in model.named_modules()}


class CallWatch(AbstractContextManager["CallWatch"]):
    """Knows the innermost running module while it is entered."""

    def __init__(self, model: nn.Module) -> None:
        self._names = module_names(model)
        self._stack: list[Frame] = []
        self._counts: Counter[str] = Counter()
        self._handles: list[RemovableHandle] = []

    @property
    def innermost(self) -> Frame:
        """The call that is running now, or `OUTSIDE`; after a failure, the one that failed."""
        return self._stack[-1] if self._stack else OUTSIDE

    def innermost_name(self) -> str:
        """Name of the module that is running now."""
        return self.innermost.name

    def innermost_frame(self) -> Frame:
        """The call that is running now."""
        return self.innermost

    def __enter__(self) -> Self:
        for module in self._names:
            self._handles += [
                module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True),
                module.register_forward_hook(self._leave, with_kwargs=True),
            ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = self._names[module]
        frame = Frame(name=name, nth=self._counts[name])
        self._counts[name] += 1
        self._stack.append(frame)
        self._entered(frame, (args, kwargs))

    def _leave(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        del args, kwargs
        frame = self._stack.pop()
        # Calls that failed inside a `try` of the model never left by themselves.
        while frame.name != self._names[module]:
            frame = self._stack.pop()
        self._left(frame, module, output)

    def _entered(self, frame: Frame, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        raise NotImplementedError

    def _left(self, frame: Frame, module: nn.Module, output: Any) -> None:
        raise NotImplementedError


class CallRecorder(CallWatch):
    """Keeps every call's arguments and result, copied, in completion order."""

    def __init__(self, model: nn.Module, device_type: str) -> None:
        super().__init__(model)
        self.calls: deque[Call] = deque()
        self._device_type = device_type
        self._open: dict[Frame, tuple[Any, RandomState]] = {}
        self._copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def _entered(self, frame: Frame, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        self._open[frame] = (self._keep(arguments), random_state(self._device_type))

    def _left(self, frame: Frame, module: nn.Module, output: Any) -> None:
        arguments, before = self._open.pop(frame)
        after = random_state(self._device_type)
        self.calls.append(
            Call(
                frame=frame,
                module=module,
                arguments=arguments,
                output=self._keep(output),
                random=before,
                drew_random=not same_random_state(before, after),
            )
        )

    def _keep(self, value: Any) -> Any:
        return map_tensors(value, self._copy)

    def _copy(self, tensor: Tensor) -> Tensor:
        # One module's result is the next one's argument: one copy serves both.
        kept: tuple[int, Tensor] | None = self._copies.get(tensor)
        if kept is None or kept[0] != tensor._version:
            with _disable_current_modes():  # the copy is ours, not the model's doing
                kept = (tensor._version, tensor.detach().clone())
            self._copies[tensor] = kept
        return kept[1]


class DtypeRecorder(CallWatch):
    """Keeps only the dtypes that each call of a lane takes and returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.dtypes: dict[Frame, CallDtypes] = {}
        self._open: dict[Frame, tuple[torch.dtype, ...]] = {}

    def _entered(self, frame: Frame, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        self._open[frame] = _dtypes(arguments)

    def _left(self, frame: Frame, module: nn.Module, output: Any) -> None:
        del module
        self.dtypes[frame] = CallDtypes(arguments=self._open.pop(frame), output=_dtypes(output))


def _dtypes(value: Any) -> tuple[torch.dtype, ...]:
    return tuple(tensor.dtype for tensor in tensors_in(value))
