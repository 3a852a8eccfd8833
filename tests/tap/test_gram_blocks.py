"""The block triangle: every number has one place, and plans know the bytes."""

import pytest

from leadline.tap.gram import GramSum, GroupedGramSum
from leadline.tap.gram_blocks import GramBlocks, gram_bytes, grouped_gram_bytes, needs_carry

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("width", [1, 16, 31, 32, 33, 100])
@pytest.mark.parametrize("tile", [8, 16, 32])
def test_tiles_cover_the_upper_triangle_once(width: int, tile: int) -> None:
    covered: dict[tuple[int, int], int] = {}
    for row, column in GramBlocks(num_features=width, block=32).tiles(tile):
        assert row // 32 <= column // 32
        for i in range(row, row + tile):
            for j in range(column, column + tile):
                covered[i, j] = covered.get((i, j), 0) + 1
    upper = {(i, j) for i in range(width) for j in range(i, width)}
    assert upper <= covered.keys()
    assert set(covered.values()) == {1}


@pytest.mark.parametrize("width", [1, 128, 129, 1000])
def test_pairs_number_the_blocks_without_gap(width: int) -> None:
    blocks = GramBlocks(num_features=width)
    edge = range(blocks.num_blocks)
    pairs = [blocks.pair(i, j) for i in edge for j in edge if j >= i]
    assert pairs == list(range(blocks.num_pairs))
    assert len(set(blocks.diagonal())) == width
    assert max(blocks.diagonal()) < blocks.slot_elements


@pytest.mark.parametrize("width", [16, 768, 2048, 16_384])
def test_lanes_of_any_width_stay_within_a_few_megabytes_of_the_triangle(width: int) -> None:
    blocks = GramBlocks(num_features=width)
    assert blocks.lanes >= 1
    assert gram_bytes(width, on_cuda=True, carry=False) <= max(
        1024 * 128 * 128 * 4, blocks.slot_bytes(carry=False)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("carry", [True, False])
def test_planned_bytes_are_those_held(device: str, carry: bool) -> None:
    on_cuda = device == "cuda"
    single = GramSum(200, device=device, carry=carry)
    grouped = GroupedGramSum(3, 200, device=device, carry=carry)
    assert single.num_bytes == gram_bytes(200, on_cuda=on_cuda, carry=carry)
    assert grouped.num_bytes == grouped_gram_bytes(3, 200, on_cuda=on_cuda, carry=carry)


def test_few_additions_need_no_carry() -> None:
    assert not needs_carry(64)
    assert needs_carry(27_028)
