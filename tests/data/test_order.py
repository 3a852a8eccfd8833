"""The order of windows: one-to-one, seeded, and a function of nothing else."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.core.errors import UsageError
from leadline.data.order import WindowOrder


def _order(num_windows: int, seed: int = 0, epoch: int = 1) -> list[int]:
    positions = np.arange(num_windows, dtype=np.uint64)
    return [int(n) for n in WindowOrder(num_windows, seed=seed, epoch=epoch).at(positions)]


def _slow_order(num_windows: int, seed: int, epoch: int) -> list[int]:
    """The documented network, one number at a time."""
    word = 2**64
    digest = hashlib.shake_256(f"leadline-order|{seed}|{epoch}".encode()).digest(48)
    keys = [int.from_bytes(digest[at : at + 8], "little") for at in range(0, 48, 8)]
    half_bits = next(bits for bits in range(1, 65) if 4**bits >= num_windows)

    def mix(value: int) -> int:
        value = (value + 0x9E3779B97F4A7C15) % word
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % word
        value = (value ^ value >> 27) * 0x94D049BB133111EB % word
        return value ^ value >> 31

    def permute(value: int) -> int:
        left, right = divmod(value, 2**half_bits)
        for key in keys:
            left, right = right, left ^ mix((right + key) % word) % 2**half_bits
        return left * 2**half_bits + right

    order = []
    for position in range(num_windows):
        number = permute(position)
        while number >= num_windows:
            number = permute(number)
        order.append(number)
    return order


@settings(max_examples=80, deadline=None)
@given(num_windows=st.integers(1, 5000), seed=st.integers(0, 2**53), epoch=st.integers(1, 99))
def test_order_is_one_to_one(num_windows: int, seed: int, epoch: int) -> None:
    assert sorted(_order(num_windows, seed, epoch)) == list(range(num_windows))


@pytest.mark.parametrize("num_windows", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 65_536, 65_537])
def test_order_is_one_to_one_around_powers_of_two(num_windows: int) -> None:
    assert sorted(_order(num_windows)) == list(range(num_windows))


def test_order_differs_between_seeds_and_epochs() -> None:
    orders = {tuple(_order(200, seed, epoch)) for seed in range(20) for epoch in range(1, 11)}
    assert len(orders) == 200


@settings(max_examples=40, deadline=None)
@given(num_windows=st.integers(1, 2000), data=st.data())
def test_order_of_a_position_does_not_depend_on_what_else_is_asked(
    num_windows: int, data: st.DataObject
) -> None:
    whole = _order(num_windows, seed=5)
    asked = data.draw(st.lists(st.integers(0, num_windows - 1), min_size=1, max_size=20))
    positions = np.array(asked, dtype=np.uint64)
    some = WindowOrder(num_windows, seed=5, epoch=1).at(positions)
    assert some.tolist() == [whole[position] for position in asked]
    assert positions.tolist() == asked


def test_order_of_a_huge_epoch_answers_without_storing_it() -> None:
    num_windows = 2**40 + 7
    positions = np.array([0, 1, 2**39, 2**40 + 6], dtype=np.uint64)
    found = WindowOrder(num_windows, seed=1, epoch=1).at(positions)
    assert len({int(number) for number in found}) == 4
    assert all(0 <= int(number) < num_windows for number in found)


def test_order_spreads_neighbours_evenly() -> None:
    """A block of positions draws from every tenth of the epoch: no run of the file comes whole."""
    order = np.array(_order(10_000, seed=2))
    tenths = np.bincount(order[:1000] // 1000, minlength=10)
    assert tenths.min() > 60
    assert tenths.max() < 140


@settings(max_examples=40, deadline=None)
@given(num_windows=st.integers(1, 300), seed=st.integers(0, 2**53), epoch=st.integers(1, 99))
def test_order_equals_a_transcription_in_plain_integers(
    num_windows: int, seed: int, epoch: int
) -> None:
    assert _order(num_windows, seed, epoch) == _slow_order(num_windows, seed, epoch)


def test_order_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 1 window"):
        WindowOrder(0, seed=0, epoch=1)
