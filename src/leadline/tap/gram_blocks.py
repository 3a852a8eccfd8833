"""Where the numbers of a Gram lie while it is summed on a CUDA device, and their bytes.

Only the upper triangle is kept, in square blocks of `BLOCK` features: storage is
[slots, pairs, BLOCK, BLOCK], where a pair (i, j), i <= j, is a block row and a block
column in row-major order. Blocks on the diagonal are whole; the last block row and
column run past the width and hold zeros there. A *slot* is one accumulator: a group has
one, a single Gram has several *lanes*, each summing its own stretch of the rows, since
few blocks alone would leave most of the device idle.

Pure arithmetic, no torch: plans are made from it before anything is allocated.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

BLOCK = 128  # features; derived: a 128 x 128 tile of fp32 fits the registers of 4 warps
PLAIN_ADDS = 256  # derived: each loses at most 2e-8 of an all-positive sum; 256 lose 6e-6
_SUM_BYTES = 4
_CARRY_BYTES = 2
_COUNT_BYTES = 8
_FLOAT64_BYTES = 8
_LANE_PROGRAMS = 1024  # derived: about four rounds of two programs on each of 132 processors
_MAX_LANES = 64


def needs_carry(num_adds: int) -> bool:
    """Whether *num_adds* additions to one Gram lose digits that a carry would keep."""
    return num_adds > PLAIN_ADDS


def gram_bytes(num_features: int, *, on_cuda: bool, carry: bool = True) -> int:
    """Bytes that a `GramSum` holds on its device."""
    if not on_cuda:
        return num_features * num_features * _FLOAT64_BYTES
    blocks = GramBlocks(num_features=num_features)
    return blocks.lanes * blocks.slot_bytes(carry=carry)


def grouped_gram_bytes(
    num_groups: int, num_features: int, *, on_cuda: bool, carry: bool = True
) -> int:
    """Bytes that a `GroupedGramSum` holds on its device, its counts included."""
    counts = num_groups * _COUNT_BYTES
    if not on_cuda:
        return num_groups * num_features * num_features * _FLOAT64_BYTES + counts
    blocks = GramBlocks(num_features=num_features)
    return num_groups * blocks.slot_bytes(carry=carry) + counts


@dataclass(frozen=True, kw_only=True, slots=True)
class GramBlocks:
    """Block triangle of a Gram."""

    num_features: int
    """Width K of the rows."""
    block: int = BLOCK
    """Edge of a block in features; other than BLOCK only to try the kernels small."""

    @property
    def num_blocks(self) -> int:
        """Blocks along one edge."""
        return ceil(self.num_features / self.block)

    @property
    def num_pairs(self) -> int:
        """Blocks in the upper triangle, diagonal included."""
        return self.num_blocks * (self.num_blocks + 1) // 2

    @property
    def slot_elements(self) -> int:
        """Numbers of one accumulator."""
        return self.num_pairs * self.block * self.block

    @property
    def lanes(self) -> int:
        """Slots that a single Gram is spread over."""
        return max(1, min(_MAX_LANES, _LANE_PROGRAMS // self.num_pairs))

    def slot_bytes(self, *, carry: bool) -> int:
        """Bytes of one accumulator, with or without the carried rounding errors."""
        return self.slot_elements * (_SUM_BYTES + (_CARRY_BYTES if carry else 0))

    def pair(self, block_row: int, block_column: int) -> int:
        """Index of a block in a slot; block_row <= block_column."""
        before = block_row * self.num_blocks - block_row * (block_row - 1) // 2
        return before + block_column - block_row

    def diagonal(self) -> list[int]:
        """Index in a slot of every diagonal element, in the order of features."""
        area = self.block * self.block
        return [
            self.pair(k // self.block, k // self.block) * area + k % self.block * (self.block + 1)
            for k in range(self.num_features)
        ]

    def tiles(self, tile: int) -> Iterator[tuple[int, int]]:
        """First feature row and column of every square tile that the upper triangle needs.

        *tile* divides the block, so that a tile lies within one block.
        """
        assert self.block % tile == 0
        for row in range(0, self.num_features, tile):
            for column in range(row, self.num_features, tile):
                yield row, column
