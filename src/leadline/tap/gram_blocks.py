"""Where the numbers of a Gram lie while it is summed on a CUDA device.

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

BLOCK = 128  # features; derived: one 128 x 128 tile of fp32 fills the registers of 4 warps
_SUM_BYTES = 4
_CARRY_BYTES = 2
_LANE_PROGRAMS = 1024  # derived: about four rounds of two programs on each of 132 processors
_MAX_LANES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class GramBlocks:
    """Block triangle of a Gram of `num_features`."""

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
    def packed_elements(self) -> int:
        """Numbers of the packed upper triangle."""
        return self.num_features * (self.num_features + 1) // 2

    @property
    def lanes(self) -> int:
        """Accumulators that a single Gram is spread over."""
        return max(1, min(_MAX_LANES, _LANE_PROGRAMS // self.num_pairs))

    def slot_bytes(self, *, carry: bool) -> int:
        """Bytes of one accumulator, with or without the carried rounding errors."""
        return self.slot_elements * (_SUM_BYTES + (_CARRY_BYTES if carry else 0))

    def pair(self, block_row: int, block_column: int) -> int:
        """Index of a block in storage; block_row <= block_column."""
        return block_row * self.num_blocks - block_row * (block_row - 1) // 2 + (
            block_column - block_row
        )

    def diagonal(self) -> list[int]:
        """Index within a slot of every diagonal element, in the order of features."""
        area = self.block * self.block
        return [
            self.pair(k // self.block, k // self.block) * area + k % self.block * (self.block + 1)
            for k in range(self.num_features)
        ]

    def tiles(self, tile_rows: int, tile_columns: int) -> Iterator[tuple[int, int]]:
        """First feature row and column of every tile that covers the upper triangle.

        A tile lies within one block row and may span several block columns.
        """
        assert self.block % tile_rows == 0
        assert tile_columns % self.block == 0 or self.block % tile_columns == 0
        width = self.num_blocks * self.block
        for row in range(0, width, tile_rows):
            if row >= self.num_features:
                return
            for column in range(row // self.block * self.block, width, tile_columns):
                below_diagonal = column + tile_columns <= row
                if not below_diagonal and column < self.num_features:
                    yield row, column
