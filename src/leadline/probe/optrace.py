"""What is seen, and changed, at the level of single tensor operations.

Dispatch modes; each stands below autocast and so meets operations with the
dtypes they really run in.

- `OriginTrace` runs in the fp32 lane and notes where fp16 or bf16 *comes into being*.
  Nothing in an fp32 lane asks for it, so whoever makes it has it hard-coded, and both
  lanes carry the fault, which is why comparing them cannot find it. Operations that
  only pass such a tensor on are not noted.
- `LaneTrace` runs in the bf16 lane and notes reductions taken in bf16 over a long axis
  and values added to again and again in bf16.
- `OverflowTrace` runs in a replay that lost numbers and finds the operation that did it.
- `MatmulRounding` makes the best case of a bf16 lane: fp32 arithmetic in which only
  matrix products round, their inputs and their results, as autocast cannot avoid.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from leadline.probe.tensortree import map_tensors, tensors_in

LONG_AXIS = 256
"""Elements from which a bf16 running sum of equal terms no longer grows (2**8)."""
PARTIAL_SUMS = 8
"""Additions from which reductions of parts count as one long reduction."""
LOW_PRECISION = (torch.float16, torch.bfloat16)

# Reductions that lose digits when the result, or what is summed, is bf16. Maxima lose none.
_REDUCTIONS = frozenset(
    {"sum", "mean", "var", "var_mean", "std", "std_mean", "norm", "linalg_vector_norm"}
    | {"cumsum", "logsumexp", "logcumsumexp", "_softmax", "_log_softmax", "_safe_softmax"}
)
_EXPONENTIALS = frozenset({"exp", "exp2", "expm1"})
_ADDITIONS = frozenset({"add", "add_", "sub", "sub_", "addcmul", "addcmul_", "lerp", "lerp_"})
_PRODUCTS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "matmul"}
    | {"linear", "convolution", "mkldnn_rnn_layer", "_cudnn_rnn"}
)

FrameOf = Callable[[], object]
NameOf = Callable[[], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """One kind of low-precision reduction or exponential met in a module."""

    operation: str
    axis_length: int
    dtype: torch.dtype

    @property
    def is_exponential(self) -> bool:
        """Whether it is an elementwise exponential, which is evidence but no reduction."""
        return self.operation in _EXPONENTIALS

    def __str__(self) -> str:
        return f"{self.operation.strip('_')} in {dtype_name(self.dtype)} over {self.axis_length}"


class _Trace(TorchDispatchMode):
    supports_higher_order_operators = True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        self._note(func, args, kwargs, output)
        return output

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        raise NotImplementedError


class OriginTrace(_Trace):
    """Notes, by module name, the operations that bring fp16 or bf16 into an fp32 lane."""

    def __init__(self, name_of: NameOf) -> None:
        super().__init__()
        self.origins: dict[str, Counter[str]] = {}
        self._name_of = name_of
        self._descended: set[int] = set()

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        low_outputs = [t for t in tensors_in(output) if t.dtype in LOW_PRECISION]
        if not low_outputs:
            return
        low_inputs = [t for t in tensors_in((args, kwargs)) if t.dtype in LOW_PRECISION]
        # Known by address: what is alive cannot share one with what was made here and freed.
        inherits = any(t.untyped_storage().data_ptr() in self._descended for t in low_inputs)
        self._descended.update(t.untyped_storage().data_ptr() for t in low_outputs)
        if not inherits:
            note = f"{_operation(func)} gives {dtype_name(low_outputs[0].dtype)}"
            self.origins.setdefault(self._name_of(), Counter())[note] += 1


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sum:
    """What is known of a low-precision value: how it was summed, and in which call."""

    additions: int
    """Longest run of additions into it."""
    reduced_terms: int
    """Elements that low-precision reductions brought into it."""
    frame: object


class LaneTrace(_Trace):
    """Notes, by module name, low-precision reductions and running sums of a bf16 lane."""

    def __init__(self, name_of: NameOf, frame_of: FrameOf) -> None:
        super().__init__()
        self.reductions: dict[str, Counter[Reduction]] = {}
        self.additions: dict[str, int] = {}
        """Longest run of additions into one low-precision value in one call of the module."""
        self._name_of = name_of
        self._frame_of = frame_of
        self._sums: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._running: dict[str, Reduction] = {}

    def found_reductions(self) -> dict[str, Counter[Reduction]]:
        """Single reductions and, with them, those taken part by part in a running sum."""
        found = {name: Counter(notes) for name, notes in self.reductions.items()}
        for name, running in self._running.items():
            found.setdefault(name, Counter())[running] += 1
        return found

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        result = output[0] if isinstance(output, (tuple, list)) and output else output
        if not isinstance(result, Tensor) or result.dtype not in LOW_PRECISION:
            return
        inputs = [t for t in tensors_in(args) if t.dtype in LOW_PRECISION]
        if not inputs:
            return
        operation = _operation(func)
        length = 0
        if operation in _REDUCTIONS or operation in _EXPONENTIALS:
            length = _axis_length(func, inputs[0], args, kwargs)
            if length > LONG_AXIS:
                found = Reduction(operation=operation, axis_length=length, dtype=inputs[0].dtype)
                self.reductions.setdefault(self._name_of(), Counter())[found] += 1
        self._follow_sum(operation, length if operation in _REDUCTIONS else 0, inputs, result)

    def _follow_sum(
        self, operation: str, reduced: int, inputs: list[Tensor], result: Tensor
    ) -> None:
        frame, name = self._frame_of(), self._name_of()
        known = [self._sum_of(t) for t in inputs if t.numel() == result.numel()]
        sums = [one for one in known if one is not None and one.frame is frame]
        adds = operation in _ADDITIONS
        additions = max((one.additions for one in sums), default=0) + adds
        terms = [one.reduced_terms for one in sums]
        reduced += sum(terms) if adds else max(terms, default=0)
        if not (additions or reduced):
            return
        self._sums[result] = _Sum(additions=additions, reduced_terms=reduced, frame=frame)
        self.additions[name] = max(self.additions.get(name, 0), additions)
        before = self._running.get(name)
        if additions >= PARTIAL_SUMS and reduced > max(
            LONG_AXIS, before.axis_length if before else 0
        ):
            self._running[name] = Reduction(
                operation="running sum", axis_length=reduced, dtype=result.dtype
            )

    def _sum_of(self, tensor: Tensor) -> _Sum | None:
        known: _Sum | None = self._sums.get(tensor)
        return known


class OverflowTrace(_Trace):
    """Remembers the first operation that gives NaN or +infinity from finite numbers.

    Minus infinity is not counted: masks are made of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first: str | None = None

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.first is not None:
            return
        results = [t for t in tensors_in(output) if t.is_floating_point()]
        if not any(_is_lost(t) for t in results):
            return
        taken = [t for t in tensors_in((args, kwargs)) if t.is_floating_point()]
        # An argument that is also the result was written to: what it held before is gone.
        kept = [t for t in taken if not any(t is result for result in results)]
        if not any(_is_lost(t) for t in kept):
            self.first = f"{_operation(func)} in {dtype_name(results[0].dtype)}"


class MatmulRounding(TorchDispatchMode):
    """Rounds inputs and results of matrix products to bf16's digits, kept in fp32.

    To nearest without a generator, else up or down by chance in proportion, which shows
    what another, equally good rounding would have done.
    """

    supports_higher_order_operators = True

    def __init__(self, generator: torch.Generator | None) -> None:
        super().__init__()
        self._generator = generator

    def round(self, tensor: Tensor) -> Tensor:
        """Round one fp32 tensor; any other dtype is returned as it is."""
        return round_to_bfloat16(tensor, self._generator)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if not _is_product(func):
            return func(*args, **kwargs)
        args, kwargs = map_tensors((args, kwargs), self.round)
        return map_tensors(func(*args, **kwargs), self.round)


def round_to_bfloat16(tensor: Tensor, generator: torch.Generator | None) -> Tensor:
    """Keep of each fp32 number the eight significant bits that bf16 has."""
    if tensor.dtype != torch.float32:
        return tensor
    if generator is None:
        return tensor.bfloat16().float()
    bits = tensor.contiguous().view(torch.int32)
    dither = torch.randint(
        0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator
    )
    rounded = ((bits + dither) & -(1 << 16)).view(torch.float32)
    # The carry may run into the exponent, which is right, but not past the largest number.
    return torch.where(torch.isfinite(tensor) & torch.isfinite(rounded), rounded, tensor)


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def _is_lost(tensor: Tensor) -> bool:
    return bool((torch.isnan(tensor) | (tensor == torch.inf)).any())


def _operation(func: Any) -> str:
    name = func._schema.name if hasattr(func, "_schema") else str(func)
    return str(name).rpartition("::")[2]


def _is_product(func: Any) -> bool:
    if hasattr(func, "_schema") and func._schema.is_mutable:
        return False  # its effect on an argument would be lost with the rounded copy
    name = _operation(func)
    return name in _PRODUCTS or "attention" in name or name.endswith("grouped_mm")


def _axis_length(func: Any, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if _operation(func) in _EXPONENTIALS:
        return tensor.shape[-1] if tensor.ndim else 1
    axes = given.get("dim")
    if axes is None or axes == []:
        return tensor.numel()
    if isinstance(axes, int):
        axes = [axes]
    return math.prod(tensor.shape[axis] for axis in axes) if tensor.ndim else 1
