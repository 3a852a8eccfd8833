"""Pieces: which bytes of a checkpoint belong at which steps of a parameter."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from torch import Tensor

from leadline.rig.checkpoint import TensorEntry
from leadline.rig.fragments import Axis, Fragment, NotRegularError, row_major


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One index of a piece: *size* elements, *step* coordinates apart along *dim*."""

    size: int
    dim: int
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A run of bytes in the file and its place in a parameter."""

    source: TensorEntry
    """The published tensor, or the dense share of it that belongs to this parameter."""
    starts: tuple[int, ...]
    """Coordinates of its first element in the parameter."""
    steps: tuple[Step, ...]
    """In the order of the file, outermost first."""

    def view(self, parameter: Tensor) -> Tensor:
        """View of *parameter* that the source's elements fill in their order.

        In the source's shape, save that an axis which the parameter holds at more than one
        step (interleaved halves) is split in two.
        """
        strides = parameter.stride()
        offset = sum(start * strides[dim] for dim, start in enumerate(self.starts))
        return parameter.as_strided(
            [step.size for step in self.steps],
            [step.step * strides[step.dim] for step in self.steps],
            parameter.storage_offset() + offset,
        )


def place(source: TensorEntry, fragment: Fragment) -> Piece:
    """The piece that *fragment* of *source* is.

    Raises:
        NotRegularError: its elements do not lie side by side in the file.
    """
    count = _dense_count(fragment.axes)
    share = _share(source, fragment.offset, count)
    return Piece(source=share, starts=fragment.starts, steps=_steps(fragment.axes, share.shape))


@lru_cache(maxsize=1024)  # experts are alike: two or three cases a model
def _dense_count(axes: tuple[Axis, ...]) -> int:
    """Elements of *axes*, which must lie side by side in their source."""
    expected = 1
    for axis in sorted(axes, key=lambda axis: axis.source_step):
        if axis.source_step != expected:
            raise NotRegularError
        expected *= axis.size
    return expected


def whole_piece(source: TensorEntry) -> Piece:
    """The piece of a parameter that is published as it is."""
    steps = tuple(Step(size=size, dim=dim, step=1) for dim, size in enumerate(source.shape))
    return Piece(source=source, starts=(0,) * len(source.shape), steps=steps)


def _share(source: TensorEntry, offset: int, count: int) -> TensorEntry:
    """*count* elements of *source* from *offset* on, in as much of its shape as they fill."""
    if count == prod(source.shape):
        return source
    shape: tuple[int, ...] = (count,)
    for dim, row in enumerate(row_major(source.shape)):
        if count % row == 0 and offset % row == 0:
            shape = (count // row, *source.shape[dim + 1 :])
            break
    itemsize = source.num_bytes // prod(source.shape)
    begin = source.begin + offset * itemsize
    return replace(source, shape=shape, begin=begin, end=begin + count * itemsize)


@lru_cache(maxsize=1024)
def _steps(axes: tuple[Axis, ...], shape: tuple[int, ...]) -> tuple[Step, ...]:
    """*axes*, cut and joined so that they follow *shape* of the source where they can."""
    ordered = sorted(axes, key=lambda axis: -axis.source_step)
    whole = [Step(size=axis.size, dim=axis.dim, step=axis.step) for axis in ordered]
    left = list(whole)
    found: list[Step] = []
    for size in reversed(shape):
        group: list[Step] = []
        need = size
        while need > 1:
            inner = left.pop()
            if need % inner.size == 0:
                group.append(inner)
                need //= inner.size
            elif inner.size % need == 0:
                group.append(replace(inner, size=need))
                left.append(Step(size=inner.size // need, dim=inner.dim, step=inner.step * need))
                need = 1
            else:  # the axes do not follow the shape: leave them as they are
                return tuple(whole)
        found += _joined(group) or [Step(size=1, dim=0, step=1)]
    return tuple(reversed(found))


def _joined(group: Sequence[Step]) -> list[Step]:
    """Steps, innermost first, with those that run on made one."""
    joined: list[Step] = []
    for step in group:
        last = joined[-1] if joined else None
        if last is not None and last.dim == step.dim and step.step == last.step * last.size:
            joined[-1] = replace(last, size=last.size * step.size)
        else:
            joined.append(step)
    return joined
