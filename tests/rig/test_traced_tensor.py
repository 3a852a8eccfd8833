"""Any chain of moves: pieces put the same element in the same place as torch does."""

from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from leadline.rig.checkpoint import TensorEntry
from leadline.rig.fragments import NotRegularError
from leadline.rig.placement import place
from leadline.rig.traced_tensor import TracedTensor, traced

Move = Callable[[Tensor], Tensor]


def entry(index: int, shape: tuple[int, ...]) -> TensorEntry:
    begin = 1000 * index
    end = begin + 8 * prod(shape)
    return TensorEntry(name=str(index), dtype="I64", shape=shape, shard="one", begin=begin, end=end)


def contents(source: TensorEntry) -> Tensor:
    """Each element of every source is its own byte offset in the file."""
    return torch.arange(source.begin, source.end, 8).view(source.shape)


def fill(made: Tensor, sources: list[TensorEntry]) -> Tensor:
    assert isinstance(made, TracedTensor)
    out = torch.full(tuple(made.shape), -1, dtype=torch.int64)
    for fragment in made.fragments:
        piece = place(sources[fragment.source], fragment)
        view = piece.view(out)
        assert bool((view == -1).all())
        view.copy_(contents(piece.source).view(view.shape))
    return out


def draw_move(draw: st.DrawFn, current: Tensor) -> Move:
    """One move that fits *current*."""
    dim = draw(st.integers(0, current.dim() - 1))
    size, shape = current.shape[dim], list(current.shape)
    kind = draw(st.sampled_from(["swap", "split", "merge", "cut", "chunk", "dense"]))
    if kind == "swap":
        other = draw(st.integers(0, current.dim() - 1))
        return lambda x: x.transpose(dim, other)
    if kind == "split":
        factor = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        shape[dim : dim + 1] = [factor, size // factor]
        return lambda x: x.reshape(shape)
    if kind == "merge":
        shape[max(dim - 1, 0) : dim + 1] = [prod(shape[max(dim - 1, 0) : dim + 1])]
        return lambda x: x.reshape(shape)
    if kind == "cut":
        begin = draw(st.integers(0, size - 1))
        length = draw(st.integers(1, size - begin))
        return lambda x: x.narrow(dim, begin, length)
    if kind == "chunk":
        part = draw(st.sampled_from([0, -1]))
        return lambda x: x.chunk(2, dim)[part]
    return lambda x: x.contiguous()


@st.composite
def moves(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Move]:
    """Up to five moves, one after another, that fit a tensor of *shape*."""
    found: list[Move] = []
    current = torch.empty(shape)
    for _ in range(draw(st.integers(0, 5))):
        found.append(draw_move(draw, current))
        current = found[-1](current)
    return found


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_traced_chain_of_moves_places_what_torch_moves(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3).map(tuple))
    count = data.draw(st.integers(1, 3))
    sources = [entry(index, shape) for index in range(count)]
    before = data.draw(moves(shape))
    real = [contents(source) for source in sources]
    stand_ins: list[Tensor] = [traced(i, shape, torch.int64) for i in range(count)]
    try:
        for move in before:
            real, stand_ins = [move(x) for x in real], [move(x) for x in stand_ins]
        joined = data.draw(st.sampled_from(["cat", "stack"]))
        dim = data.draw(st.integers(0, real[0].dim() - 1))
        join = torch.cat if joined == "cat" else torch.stack
        whole, stand_in = join(real, dim), join(stand_ins, dim)
        after = data.draw(moves(tuple(whole.shape)))
        for move in after:
            whole, stand_in = move(whole), move(stand_in)
        filled = fill(stand_in, sources)
    except NotRegularError:
        return
    assert torch.equal(filled, whole)


def interleave(x: Tensor) -> Tensor:
    return x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).contiguous()


@pytest.mark.parametrize(
    "move",
    [
        interleave,
        lambda x: x.transpose(1, 2).contiguous(),
        lambda x: interleave(x).transpose(1, 2).contiguous(),
        lambda x: x.transpose(0, 1).reshape(6, -1),
        lambda x: x.unsqueeze(0).squeeze(0).permute(2, 0, 1),
        lambda x: torch.stack(list(x.unbind(0)), 2),
        lambda x: torch.cat(x.split([1, 3], 0)[::-1], 0),
    ],
)
def test_moves_of_known_layouts_are_regular(move: Move) -> None:
    sources = [entry(0, (4, 6, 10))]
    made = move(traced(0, (4, 6, 10), torch.int64))
    try:
        filled = fill(made, sources)
    except NotRegularError:
        pytest.fail("expected a regular place")
    assert torch.equal(filled, move(contents(sources[0])))


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x * 2,
        lambda x: x + torch.ones(6),
        lambda x: x.to(torch.float32),
        lambda x: x[:, ::2],
        lambda x: torch.cat([x, torch.zeros(1, 6)]),
        lambda x: x.expand(3, 4, 6),
    ],
)
def test_computation_is_not_traced(compute: Move) -> None:
    with pytest.raises(NotRegularError):
        compute(traced(0, (4, 6), torch.bfloat16))


def test_piece_of_source_share_has_bytes_of_its_rows() -> None:
    source = entry(2, (4, 6, 10))
    (fragment,) = traced(0, source.shape, torch.int64).narrow(0, 1, 2).fragments  # type: ignore[attr-defined]
    share = place(source, fragment).source
    assert share.shape == (2, 6, 10)
    assert (share.begin, share.end) == (2000 + 60 * 8, 2000 + 180 * 8)


def test_share_of_columns_is_not_placed() -> None:
    (fragment,) = traced(0, (4, 6), torch.int64).narrow(1, 0, 3).fragments  # type: ignore[attr-defined]
    with pytest.raises(NotRegularError):
        place(entry(0, (4, 6)), fragment)


def test_view_of_expert_keeps_the_step_of_the_parameter(tmp_path: Path) -> None:
    made = torch.stack([traced(i, (6, 10), torch.int64) for i in range(3)])
    parameter = torch.empty(3, 6, 10)
    view = place(entry(1, (6, 10)), made.fragments[1]).view(parameter)  # type: ignore[attr-defined]
    assert view.shape == (6, 10)
    assert view.data_ptr() == parameter[1].data_ptr()
