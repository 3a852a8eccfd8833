"""Sums of X^T X per group of rows on a CUDA device, in fp32 on the tensor cores.

Imported only where there is a CUDA device: it needs Triton.

- One program owns one tile of one accumulator, so no two programs add to one number and
  the order of additions, hence every bit, is the same in every run.
- An accumulator of an empty group is neither read nor written; rows outside a group's
  range, those behind the last offset included, are masked out of the load itself, so that
  whatever lies there (NaN too) takes no part.
- Tensor cores cut the digits they drop instead of rounding, which drags a long sum down.
  So at most `CHUNK_ROWS` rows are summed there, and chunks are added with rounding.
- With a carry, what rounding dropped is kept beside the sum (bf16, by the exact error of
  an addition) and goes into the next addition: 32 bits of sum for half again the bytes.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.tap.gram_blocks import GramBlocks

CHUNK_ROWS = 2048  # derived: 128 truncating additions lose under 3e-6 of an all-positive sum
MIN_LANE_ROWS = 512  # derived: fewer rows a tile are dominated by reading and writing the tile


@dataclass(frozen=True, kw_only=True, slots=True)
class TileConfig:
    """Shape of one program."""

    tile: int
    """Rows and columns of the Gram in a tile; divides the block."""
    step_rows: int
    """Rows of X multiplied at a time."""
    num_warps: int
    num_stages: int
    """Steps in flight, each with 2 x tile x step_rows numbers of X in shared memory."""
    max_registers: int | None = None
    """Limit per thread, so that two programs fit a processor; None: the compiler's choice."""


# Compiled for sm_90: 96 KiB of shared memory and no spill, so that two programs fit a
# processor; for sm_80, sm_89 and sm_120: 48 KiB of the 99 KiB or more that they offer.
HALF_CONFIG = TileConfig(tile=128, step_rows=64, num_warps=8, num_stages=3, max_registers=128)
# Without tensor cores: the multiplicands pass through registers, so tiles are small.
SINGLE_CONFIG = TileConfig(tile=64, step_rows=16, num_warps=4, num_stages=3)


def config_for(dtype: torch.dtype) -> TileConfig:
    """The program shape for rows of *dtype*."""
    return SINGLE_CONFIG if dtype == torch.float32 else HALF_CONFIG


class BlockGrams:
    """Accumulators of *num_groups* Grams, each spread over *lanes* slots.

    Not for use by itself: `leadline.tap.gram` gives it its rules.
    """

    def __init__(
        self, num_groups: int, blocks: GramBlocks, *, lanes: int, carry: bool, device: torch.device
    ) -> None:
        self.num_groups = num_groups
        self.lanes = lanes
        self._blocks = blocks
        shape = (num_groups * lanes, blocks.slot_elements)
        self._sums = torch.zeros(shape, dtype=torch.float32, device=device)
        self._carries = torch.zeros(shape, dtype=torch.bfloat16, device=device) if carry else None

    @property
    def num_bytes(self) -> int:
        """Bytes held on the device."""
        return self._sums.nbytes + (0 if self._carries is None else self._carries.nbytes)

    def clear(self) -> None:
        """Start anew from zero."""
        self._sums.zero_()
        if self._carries is not None:
            self._carries.zero_()

    def add_groups(
        self, rows: Tensor, offsets: Tensor, first_group: int, config: TileConfig | None = None
    ) -> None:
        """Add rows [n, K] sorted by group; offsets int32 [g + 1] on the device, one lane."""
        assert self.lanes == 1
        self._launch(rows, offsets, first_group, offsets.numel() - 1, 0, config)

    def add_rows(self, rows: Tensor, config: TileConfig | None = None) -> None:
        """Add all rows [n, K] to the one group, spread evenly over its lanes."""
        assert self.num_groups == 1
        config = config or config_for(rows.dtype)
        share = triton.cdiv(rows.shape[0], self.lanes)
        share = max(MIN_LANE_ROWS, triton.cdiv(share, config.step_rows) * config.step_rows)
        self._launch(rows, None, 0, triton.cdiv(rows.shape[0], share), share, config)

    def _launch(
        self,
        rows: Tensor,
        offsets: Tensor | None,
        first_slot: int,
        num_slots: int,
        lane_rows: int,
        config: TileConfig | None,
    ) -> None:
        if rows.shape[0] == 0 or num_slots == 0:
            return
        config = config or config_for(rows.dtype)
        blocks = self._blocks
        tiles = _tile_table(blocks, config.tile, rows.device)
        slots = slice(first_slot, first_slot + num_slots)
        sums = self._sums[slots]
        with torch.cuda.device_of(rows):
            _accumulate[(tiles.shape[0], num_slots)](
                rows,
                tiles if offsets is None else offsets,
                tiles,
                sums,
                sums if self._carries is None else self._carries[slots],
                rows.shape[0],
                lane_rows,
                rows.stride(0),
                blocks.num_features,
                blocks.num_blocks,
                blocks.slot_elements,
                BLOCK=blocks.block,
                TILE=config.tile,
                STEP=config.step_rows,
                CHUNK=CHUNK_ROWS,
                LANES=offsets is None,
                EVEN=blocks.num_features % config.tile == 0,
                CARRY=self._carries is not None,
                PRECISION="ieee" if rows.dtype == torch.float32 else "tf32",
                num_warps=config.num_warps,
                num_stages=config.num_stages,
                maxnreg=config.max_registers,
            )

    def pack(self, out: Tensor, first_group: int) -> None:
        """Write packed triangles of groups from *first_group* on into out f32 [g, K(K+1)/2]."""
        blocks = self._blocks
        if out.shape[0] == 0:
            return
        with torch.cuda.device_of(out):
            _pack[(blocks.num_features, out.shape[0])](
                self._sums,
                self._sums if self._carries is None else self._carries,
                out,
                out.stride(0),
                first_group,
                self.lanes,
                blocks.num_features,
                blocks.num_blocks,
                blocks.slot_elements,
                BLOCK=blocks.block,
                CARRY=self._carries is not None,
                num_warps=1,
            )

    def diagonals(self) -> Tensor:
        """Sums of squares of each feature: f32 [groups, K]."""
        index = _diagonal_index(self._blocks, self._sums.device)
        return self._sums[:, index].view(self.num_groups, self.lanes, -1).sum(dim=1)


@lru_cache(maxsize=64)
def _tile_table(blocks: GramBlocks, tile: int, device: torch.device) -> Tensor:
    """First row and column of every tile: int32 [tiles, 2] on the device."""
    return torch.tensor(list(blocks.tiles(tile)), dtype=torch.int32).to(device)


@lru_cache(maxsize=64)
def _diagonal_index(blocks: GramBlocks, device: torch.device) -> Tensor:
    """Index in a slot of each diagonal element: int64 [K] on the device."""
    return torch.tensor(blocks.diagonal()).to(device)


@triton.jit(do_not_specialize=["num_rows", "lane_rows", "num_blocks"])
def _accumulate(
    rows: tl.tensor,
    offsets: tl.tensor,
    tiles: tl.tensor,
    sums: tl.tensor,
    carries: tl.tensor,
    num_rows: tl.tensor,
    lane_rows: tl.tensor,
    row_stride: tl.tensor,
    num_features: tl.tensor,
    num_blocks: tl.tensor,
    slot_elements: tl.tensor,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    EVEN: tl.constexpr,
    CARRY: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Add one tile of one slot's X^T X: programs are (tile, slot)."""
    first_m = tl.multiple_of(tl.load(tiles + 2 * tl.program_id(0)), TILE)
    first_n = tl.multiple_of(tl.load(tiles + 2 * tl.program_id(0) + 1), TILE)
    slot = tl.program_id(1)
    if LANES:
        begin = slot * lane_rows
        end = tl.minimum(begin + lane_rows, num_rows)
    else:
        begin = tl.load(offsets + slot)
        end = tl.load(offsets + slot + 1)

    m = first_m + tl.arange(0, TILE)
    n = first_n + tl.arange(0, TILE)
    r = tl.arange(0, STEP)
    first = rows + begin.to(tl.int64) * row_stride
    for chunk in range(begin, end, CHUNK):
        stop = tl.minimum(chunk + CHUNK, end)
        total = tl.zeros((TILE, TILE), dtype=tl.float32)
        left = first + r[:, None] * row_stride + m[None, :]
        right = first + r[:, None] * row_stride + n[None, :]
        for step in range(chunk, stop, STEP):
            live = (step + r < stop)[:, None]
            if EVEN:
                a = tl.load(left, mask=live, other=0.0)
                b = tl.load(right, mask=live, other=0.0)
            else:
                a = tl.load(left, mask=live & (m < num_features)[None, :], other=0.0)
                b = tl.load(right, mask=live & (n < num_features)[None, :], other=0.0)
            total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
            left += STEP * row_stride
            right += STEP * row_stride
        block_m = first_m // BLOCK
        block_n = first_n // BLOCK
        pair = block_m * num_blocks - block_m * (block_m - 1) // 2 + block_n - block_m
        place = slot.to(tl.int64) * slot_elements + pair * BLOCK * BLOCK
        place = tl.multiple_of(place + first_m % BLOCK * BLOCK + first_n % BLOCK, TILE)
        halves = tl.split(tl.permute(tl.reshape(total, (TILE, 2, TILE // 2)), (0, 2, 1)))
        for half in tl.static_range(2):
            _add_tile(halves[half], sums + place, carries + place, BLOCK, CARRY)
            place += TILE // 2
        first += CHUNK * row_stride


@triton.jit
def _add_tile(
    total: tl.tensor, sums: tl.tensor, carries: tl.tensor, BLOCK: tl.constexpr, CARRY: tl.constexpr
) -> None:
    """Add a tile to where it lies in storage, keeping what rounding drops."""
    i = tl.arange(0, total.shape[0])
    j = tl.arange(0, total.shape[1])
    place = i[:, None] * BLOCK + j[None, :]
    before = tl.load(sums + place)
    if CARRY:
        total += tl.load(carries + place).to(tl.float32)
    after = before + total
    tl.store(sums + place, after)
    if CARRY:
        added = after - before
        lost = (before - (after - added)) + (total - added)
        tl.store(carries + place, lost.to(tl.bfloat16))


@triton.jit(do_not_specialize=["first_group", "lanes", "num_blocks"])
def _pack(
    sums: tl.tensor,
    carries: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    first_group: tl.tensor,
    lanes: tl.tensor,
    num_features: tl.tensor,
    num_blocks: tl.tensor,
    slot_elements: tl.tensor,
    BLOCK: tl.constexpr,
    CARRY: tl.constexpr,
) -> None:
    """Write one row of one packed triangle: programs are (row, group)."""
    row = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    block_row = row // BLOCK
    first_pair = block_row * num_blocks - block_row * (block_row - 1) // 2 - block_row
    within = tl.arange(0, BLOCK)
    slot = (first_group + group) * lanes * slot_elements
    target = out + group * out_stride + row * num_features - row * (row - 1) // 2 - row
    for block_column in range(block_row, num_blocks):
        column = block_column * BLOCK + within
        place = slot + (first_pair + block_column) * BLOCK * BLOCK + row % BLOCK * BLOCK + within
        total = tl.zeros((BLOCK,), dtype=tl.float64)
        for _ in range(lanes):
            total += tl.load(sums + place).to(tl.float64)
            if CARRY:
                total += tl.load(carries + place).to(tl.float64)
            place += slot_elements
        wanted = (column >= row) & (column < num_features)
        tl.store(target + column, total.to(tl.float32), mask=wanted)
