"""Tensors without memory that remember which published element each of theirs is.

`transformers`' own converters are run on them once, when a checkpoint is mapped; what
comes out says where every byte of the file belongs in a parameter. An operation that does
more than move elements is refused here (`NotRegularError`), and the caller falls back to
running the converter on real tensors.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from leadline.rig import fragments as moves
from leadline.rig.fragments import Fragment, NotRegularError

Fragments = tuple[Fragment, ...]

aten = torch.ops.aten


class TracedTensor(Tensor):
    """A tensor that consists of fragments of sources."""

    fragments: Fragments
    _meta: Tensor

    @staticmethod
    def __new__(cls, meta: Tensor, fragments: Fragments) -> "TracedTensor":
        """Shape, strides and dtype are those of *meta*."""
        made: TracedTensor = Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=torch.device("cpu")
        )
        made.fragments = fragments
        made._meta = meta
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Shape and number of fragments; there are no contents."""
        del tensor_contents
        return f"TracedTensor({tuple(self.shape)}, {len(self.fragments)} fragments)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[Any, Any] | None = None,
    ) -> Any:
        """Follow the elements through *func*."""
        del types
        follow = _FOLLOW.get(func.overloadpacket)
        options = dict(kwargs or {})
        if follow is None:
            raise NotRegularError(str(func))
        if func.overloadpacket is aten._to_copy:
            _refuse_cast(args[0], options)
            options = {}
            func = aten.clone.default
        plain = torch.utils._pytree.tree_map(_to_meta, (args, options))
        made = func(*plain[0], **plain[1])
        pieces = follow(made, *args, **options)
        if isinstance(made, Tensor):
            return cls(made, pieces)
        return type(made)(cls(m, p) for m, p in zip(made, pieces, strict=True))


def traced(source: int, shape: Sequence[int], dtype: torch.dtype) -> TracedTensor:
    """Stand-in of published tensor number *source*."""
    meta = torch.empty(tuple(shape), dtype=dtype, device="meta")
    return TracedTensor(meta, moves.whole(source, shape))


def _to_meta(value: Any) -> Any:
    if isinstance(value, TracedTensor):
        return value._meta
    if isinstance(value, Tensor):
        raise NotRegularError("a tensor that is not from the checkpoint")
    return value


def _refuse_cast(tensor: Tensor, options: Mapping[str, Any]) -> None:
    dtype, device = options.get("dtype"), options.get("device")
    if dtype not in (None, tensor.dtype) or device not in (None, torch.device("cpu")):
        raise NotRegularError("a cast")


def _same(made: Tensor, tensor: TracedTensor, *args: Any, **options: Any) -> Fragments:
    del made, args, options
    return tensor.fragments


def _reshape(made: Tensor, tensor: TracedTensor, *args: Any) -> Fragments:
    del args
    return tuple(moves.reshape(f, tensor.shape, made.shape) for f in tensor.fragments)


def _transpose(made: Tensor, tensor: TracedTensor, dim0: int, dim1: int) -> Fragments:
    order = list(range(made.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return tuple(moves.permute(f, order) for f in tensor.fragments)


def _t(made: Tensor, tensor: TracedTensor) -> Fragments:
    return _transpose(made, tensor, 0, 1) if made.dim() == 2 else tensor.fragments


def _permute(made: Tensor, tensor: TracedTensor, order: Sequence[int]) -> Fragments:
    wanted = [dim % made.dim() for dim in order]
    return tuple(moves.permute(f, wanted) for f in tensor.fragments)


def _cut(tensor: TracedTensor, dim: int, begin: int, end: int) -> Fragments:
    found = (moves.cut(f, dim, begin, end) for f in tensor.fragments)
    return tuple(f for f in found if f is not None)


def _slice(
    made: Tensor,
    tensor: TracedTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Fragments:
    dim %= tensor.dim()
    begin, stop, stride = slice(start, end, step).indices(tensor.shape[dim])
    if stride != 1:
        raise NotRegularError("a slice with a step")
    del made
    return _cut(tensor, dim, begin, stop)


def _select(made: Tensor, tensor: TracedTensor, dim: int, index: int) -> Fragments:
    del made
    dim %= tensor.dim()
    index %= tensor.shape[dim]
    return tuple(moves.remove(f, dim) for f in _cut(tensor, dim, index, index + 1))


def _split(made: Sequence[Tensor], tensor: TracedTensor, sizes: Any, dim: int = 0) -> Any:
    del sizes
    dim %= tensor.dim()
    parts, begin = [], 0
    for part in made:
        parts.append(_cut(tensor, dim, begin, begin + part.shape[dim]))
        begin += part.shape[dim]
    return parts


def _unbind(made: Sequence[Tensor], tensor: TracedTensor, dim: int = 0) -> Any:
    return [_select(part, tensor, dim, index) for index, part in enumerate(made)]


def _cat(made: Tensor, tensors: Sequence[TracedTensor], dim: int = 0) -> Fragments:
    dim %= made.dim()
    found: list[Fragment] = []
    begin = 0
    for tensor in tensors:
        found += [moves.shift(f, dim, begin) for f in tensor.fragments]
        begin += tensor.shape[dim]
    return tuple(found)


def _stack(made: Tensor, tensors: Sequence[TracedTensor], dim: int = 0) -> Fragments:
    dim %= made.dim()
    found: list[Fragment] = []
    for index, tensor in enumerate(tensors):
        found += [moves.insert(f, dim, index) for f in tensor.fragments]
    return tuple(found)


def _unsqueeze(made: Tensor, tensor: TracedTensor, dim: int) -> Fragments:
    dim %= made.dim()
    return tuple(moves.insert(f, dim) for f in tensor.fragments)


_FOLLOW: dict[Any, Callable[..., Any]] = {
    aten.alias: _same,
    aten.cat: _cat,
    aten.clone: _same,
    aten.detach: _same,
    aten._to_copy: _same,
    aten.permute: _permute,
    aten.select: _select,
    aten.slice: _slice,
    aten.split: _split,
    aten.split_with_sizes: _split,
    aten.squeeze: _reshape,
    aten.stack: _stack,
    aten.t: _t,
    aten.transpose: _transpose,
    aten.unbind: _unbind,
    aten.unsqueeze: _unsqueeze,
    aten.view: _reshape,
    aten._reshape_alias: _reshape,
    aten._unsafe_view: _reshape,
}
"""What only moves elements; everything else is computed, not placed."""
