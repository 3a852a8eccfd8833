"""Where the elements of a tensor come from, kept through moves of elements.

A *fragment* is a block of a tensor whose elements lie at regular steps in one source. Each
function takes the fragments of a tensor to those of its transpose, slice, reshape and so
on; nothing is computed with the elements, so nothing is read.

Within dimension d of the tensor, an element of a fragment has coordinate
`starts[d] + sum(i * axis.step for axes of d)`; in its source, flat index
`offset + sum(i * axis.source_step)`, i being the element's index along the axis.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import prod
from operator import mul


class NotRegularError(Exception):
    """The elements no longer lie at regular steps; caught by whoever traces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One index of a fragment."""

    size: int
    source_step: int
    dim: int
    """Dimension of the tensor that it moves along."""
    step: int
    """Coordinates it moves by there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fragment:
    """A block of a tensor, and where its elements lie in one source."""

    source: int
    offset: int
    starts: tuple[int, ...]
    axes: tuple[Axis, ...]

    @property
    def num_elements(self) -> int:
        """Elements in the block."""
        return prod(axis.size for axis in self.axes)


def whole(source: int, shape: Sequence[int]) -> tuple[Fragment, ...]:
    """The fragment of a tensor of *shape* that is its own source; none when it is empty."""
    if 0 in shape:
        return ()
    starts = (0,) * len(shape)
    return (Fragment(source=source, offset=0, starts=starts, axes=_dense_axes(tuple(shape))),)


@lru_cache(maxsize=1024)  # a hundred thousand experts have two or three shapes
def _dense_axes(shape: tuple[int, ...]) -> tuple[Axis, ...]:
    return tuple(
        Axis(size=size, source_step=stride, dim=dim, step=1)
        for dim, (size, stride) in enumerate(zip(shape, row_major(shape), strict=True))
        if size > 1
    )


def row_major(shape: Sequence[int]) -> list[int]:
    """Strides of a dense tensor of *shape*."""
    return list(accumulate([1, *reversed(shape[1:])], mul))[::-1] if shape else []


def permute(fragment: Fragment, order: Sequence[int]) -> Fragment:
    """Dimension d of the result is dimension order[d]."""
    new_dims = tuple(order.index(old) for old in range(len(order)))
    return Fragment(
        source=fragment.source,
        offset=fragment.offset,
        starts=tuple(fragment.starts[old] for old in order),
        axes=_moved(fragment.axes, new_dims),
    )


def shift(fragment: Fragment, dim: int, distance: int) -> Fragment:
    """Move along *dim*."""
    starts = list(fragment.starts)
    starts[dim] += distance
    return Fragment(
        source=fragment.source,
        offset=fragment.offset,
        starts=tuple(starts),
        axes=fragment.axes,
    )


def insert(fragment: Fragment, dim: int, start: int = 0) -> Fragment:
    """New dimension before *dim*, with the block at *start* of it."""
    count = len(fragment.starts)
    return Fragment(
        source=fragment.source,
        offset=fragment.offset,
        starts=(*fragment.starts[:dim], start, *fragment.starts[dim:]),
        axes=_moved(fragment.axes, tuple(old + (old >= dim) for old in range(count))),
    )


def remove(fragment: Fragment, dim: int) -> Fragment:
    """Drop dimension *dim*, which has size one."""
    count = len(fragment.starts)
    return Fragment(
        source=fragment.source,
        offset=fragment.offset,
        starts=(*fragment.starts[:dim], *fragment.starts[dim + 1 :]),
        axes=_moved(fragment.axes, tuple(old - (old > dim) for old in range(count))),
    )


@lru_cache(maxsize=1024)
def _moved(axes: tuple[Axis, ...], new_dims: tuple[int, ...]) -> tuple[Axis, ...]:
    """*axes* with dimension d renamed to new_dims[d]."""
    return tuple(replace(axis, dim=new_dims[axis.dim]) for axis in axes)


def cut(fragment: Fragment, dim: int, begin: int, end: int) -> Fragment | None:
    """What lies in coordinates *begin* to *end* of *dim*, counted from *begin*.

    Raises:
        NotRegularError: the cut goes through more than one axis.
    """
    axes = [axis for axis in fragment.axes if axis.dim == dim]
    low = fragment.starts[dim]
    high = low + sum((axis.size - 1) * axis.step for axis in axes)
    if high < begin or low >= end:
        return None
    if low < begin or high >= end:
        fragment = _cut_axis(fragment, axes, dim, begin, end)
    return shift(fragment, dim, -begin)


def _cut_axis(fragment: Fragment, axes: Sequence[Axis], dim: int, begin: int, end: int) -> Fragment:
    """Shorten the outermost axis of *dim*, whose blocks must lie in or out whole."""
    outer = max(axes, key=lambda axis: axis.step)
    span = sum((axis.size - 1) * axis.step for axis in axes if axis is not outer)
    low = fragment.starts[dim]
    inside = []
    for index in range(outer.size):
        first = low + index * outer.step
        if begin <= first and first + span < end:
            inside.append(index)
        elif first < end and first + span >= begin:
            raise NotRegularError
    if not inside:
        raise NotRegularError
    starts = list(fragment.starts)
    starts[dim] += inside[0] * outer.step
    kept = tuple(
        replace(axis, size=len(inside)) if axis is outer else axis for axis in fragment.axes
    )
    return replace(
        fragment,
        starts=tuple(starts),
        offset=fragment.offset + inside[0] * outer.source_step,
        axes=tuple(axis for axis in kept if axis.size > 1),
    )


def reshape(fragment: Fragment, old: Sequence[int], new: Sequence[int]) -> Fragment:
    """From a tensor of shape *old* to one of shape *new* with the same row-major order.

    Raises:
        NotRegularError: the block is none in the new shape.
    """
    old_strides, new_strides = row_major(old), row_major(new)
    start = sum(s * stride for s, stride in zip(fragment.starts, old_strides, strict=True))
    flat = [(axis, axis.step * old_strides[axis.dim]) for axis in fragment.axes]
    starts = []
    for stride, size in zip(new_strides, new, strict=True):
        starts.append(start // stride % size)
    axes: list[Axis] = []
    for axis, step in flat:
        axes += _split(axis, step, new, new_strides)
    for dim, size in enumerate(new):
        reach = sum((axis.size - 1) * axis.step for axis in axes if axis.dim == dim)
        if starts[dim] + reach >= size:
            raise NotRegularError
    return replace(fragment, starts=tuple(starts), axes=tuple(axes))


def _split(axis: Axis, step: int, shape: Sequence[int], strides: Sequence[int]) -> list[Axis]:
    """One axis with flat *step* as axes that each stay inside one dimension of *shape*."""
    parts: list[Axis] = []
    size, source_step = axis.size, axis.source_step
    for dim in reversed(range(len(shape))):
        extent = strides[dim] * shape[dim]
        if size == 1:
            break
        if step >= extent or shape[dim] == 1:
            continue
        if step % strides[dim]:
            raise NotRegularError
        here = min(size, -(-extent // step))
        if here < size and (extent % step or size % here):
            raise NotRegularError
        parts.append(Axis(size=here, source_step=source_step, dim=dim, step=step // strides[dim]))
        size, step, source_step = size // here, step * here, source_step * here
    if size > 1:
        raise NotRegularError
    return parts
