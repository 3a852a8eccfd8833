"""The Triton kernels by themselves, small: on a CUDA device, else in Triton's interpreter.

The interpreter is slow Python on the CPU and is asked for by TRITON_INTERPRET=1 before
Triton loads. It knows no bf16, so fp16 stands in for it; Triton 3.6's needs numpy < 2.4.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from leadline.tap.gram_blocks import GramBlocks

from .grams import offsets_of, packed_gram, packed_grams, relative_error

if TYPE_CHECKING:
    from leadline.tap.grouped_gram import BlockGrams

# The interpreter's own, on every number that it takes out of an array.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim:DeprecationWarning"
)

TOLERANCE = 1e-6
BLOCK = 32
HALF = torch.float16


@pytest.fixture(scope="module")
def device() -> str:
    """Where Triton runs here."""
    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no CUDA device, and TRITON_INTERPRET=1 is not set")
    pytest.importorskip("triton", reason="no CUDA device, and Triton is not installed")
    return "cpu"


def small_config(tile: int = 32) -> Any:
    from leadline.tap.grouped_gram import TileConfig

    return TileConfig(tile=tile, step_rows=16, num_warps=4, num_stages=2)


def small_grams(
    groups: int, width: int, device: str, *, carry: bool = False, lanes: int = 1
) -> "BlockGrams":
    from leadline.tap.grouped_gram import BlockGrams

    blocks = GramBlocks(num_features=width, block=BLOCK)
    return BlockGrams(groups, blocks, lanes=lanes, carry=carry, device=torch.device(device))


def random_rows(n: int, width: int, device: str, *, dtype: torch.dtype = HALF) -> Tensor:
    generator = torch.Generator().manual_seed(n * 1000 + width)
    return torch.randn(n, width, generator=generator).to(dtype).to(device)


def packed(grams: "BlockGrams", groups: int, width: int, device: str) -> Tensor:
    out = torch.full((groups, width * (width + 1) // 2), float("nan"), device=device)
    grams.pack(out, 0)
    return out


def worst_error(found: Tensor, rows: Tensor, sizes: Sequence[int]) -> float:
    return max(map(relative_error, found, packed_grams(rows, offsets_of(sizes))))


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize("tile", [16, 32])
@pytest.mark.parametrize("width", [16, 40, 64])
def test_kernel_any_width_and_tile_equals_float64(
    device: str, width: int, tile: int, dtype: torch.dtype
) -> None:
    sizes = (1, 0, 16, 33)
    rows = random_rows(50, width, device, dtype=dtype)
    grams = small_grams(4, width, device)
    grams.add_groups(rows, offsets_of(sizes, device), 0, small_config(tile))
    assert worst_error(packed(grams, 4, width, device), rows, sizes) < TOLERANCE


def test_t87_kernel_reads_neither_neighbours_nor_rows_behind_the_end(device: str) -> None:
    rows = random_rows(60, 40, device)
    rows[:7] = rows[20:29] = rows[50:] = float("nan")
    grams = small_grams(2, 40, device)
    grams.add_groups(
        rows[:], torch.tensor([7, 20], dtype=torch.int32).to(device), 0, small_config()
    )
    grams.add_groups(
        rows[:], torch.tensor([29, 50], dtype=torch.int32).to(device), 1, small_config()
    )
    found = packed(grams, 2, 40, device)
    assert relative_error(found[0], packed_gram(rows[7:20])) < TOLERANCE
    assert relative_error(found[1], packed_gram(rows[29:50])) < TOLERANCE


def test_t86_kernel_leaves_the_sums_of_an_empty_group_as_they_were(device: str) -> None:
    rows = random_rows(40, 40, device)
    grams = small_grams(3, 40, device, carry=True)
    grams.add_groups(rows, offsets_of((10, 20, 10), device), 0, small_config())
    before = packed(grams, 3, 40, device)
    grams.add_groups(rows, offsets_of((20, 0, 20), device), 0, small_config())
    after = packed(grams, 3, 40, device)
    assert torch.equal(after[1], before[1])
    assert not torch.equal(after[0], before[0])


def test_kernel_group_longer_than_a_chunk_equals_float64(device: str) -> None:
    from leadline.tap.grouped_gram import CHUNK_ROWS

    sizes = (5, 2 * CHUNK_ROWS + 21)
    rows = random_rows(sum(sizes), 16, device)
    grams = small_grams(2, 16, device)
    grams.add_groups(rows, offsets_of(sizes, device), 0, small_config(16))
    assert worst_error(packed(grams, 2, 16, device), rows, sizes) < TOLERANCE


@pytest.mark.parametrize("carry", [True, False])
@pytest.mark.parametrize("n", [1, 512, 513, 1700])
def test_kernel_rows_spread_over_lanes_sum_to_the_whole(device: str, n: int, carry: bool) -> None:
    rows = random_rows(n, 16, device)
    grams = small_grams(1, 16, device, carry=carry, lanes=3)
    grams.add_rows(rows, small_config(16))
    assert relative_error(packed(grams, 1, 16, device)[0], packed_gram(rows)) < TOLERANCE
    diagonal = rows.double().square().sum(dim=0)
    assert torch.allclose(grams.diagonals()[0].double(), diagonal, rtol=1e-5)


def test_t16_kernel_with_carry_keeps_what_many_additions_drop(device: str) -> None:
    """A plain sum of 400 batches of rows near 3 is off by what the carry keeps."""
    rows = (3 + 0.01 * random_rows(37, 16, device).float()).to(HALF)
    errors = {}
    for carry in (False, True):
        grams = small_grams(1, 16, device, carry=carry)
        for _ in range(400):
            grams.add_groups(rows, offsets_of((37,), device), 0, small_config(16))
        found = packed(grams, 1, 16, device)[0]
        errors[carry] = relative_error(found, 400 * packed_gram(rows))
    assert errors[True] < 1e-7
    assert errors[False] > 5 * errors[True]


@pytest.mark.parametrize("shift", [0, 1, 8])
def test_kernel_rows_apart_and_off_the_alignment_equal_float64(device: str, shift: int) -> None:
    wide = random_rows(50, 61, device)
    rows = wide[3:, shift : shift + 40]
    grams = small_grams(2, 40, device)
    grams.add_groups(rows, offsets_of((30, 17), device), 0, small_config())
    assert worst_error(packed(grams, 2, 40, device), rows, (30, 17)) < TOLERANCE


def test_pack_writes_nothing_outside_its_rows(device: str) -> None:
    grams = small_grams(3, 40, device)
    grams.add_groups(
        random_rows(30, 40, device), offsets_of((10, 10, 10), device), 0, small_config()
    )
    whole = packed(grams, 3, 40, device)
    out = torch.full((3, 820), -7.0, device=device)
    grams.pack(out[1:2], 2)
    assert torch.equal(out[1], whole[2])
    assert (out[[0, 2]] == -7.0).all()


def test_half_configuration_fits_cards_with_99_kib_of_shared_memory() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from leadline.tap.grouped_gram import HALF_CONFIG

    steps_bytes = HALF_CONFIG.num_stages * 2 * HALF_CONFIG.tile * HALF_CONFIG.step_rows * 2
    assert steps_bytes <= 99 * 1024
