"""Packed upper triangles: how a symmetric matrix is kept in half its bytes.

Row-major upper triangle: row 0 whole, row 1 from its diagonal on, and so forth; a
matrix of K x K becomes K (K + 1) / 2 numbers. Nothing is rounded or averaged.
"""

from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from leadline.core.errors import UsageError

Number = TypeVar("Number", bound=np.generic)

_BLOCK = 64  # columns mirrored at once: source and target both stay in a core's cache


def packed_length(num_features: int) -> int:
    """Numbers in the packed triangle of a matrix of *num_features* rows."""
    return num_features * (num_features + 1) // 2


def pack(full: NDArray[Number]) -> NDArray[Number]:
    """Upper triangle of the last two axes [..., K, K], packed to [..., K (K + 1) / 2].

    The lower triangle is not looked at.

    Raises:
        UsageError: the last two axes are no square.
    """
    if full.ndim < 2 or full.shape[-1] != full.shape[-2]:
        raise UsageError(f"a Gram of shape {full.shape} is not square in its last two axes")
    num_features = full.shape[-1]
    packed = np.empty((*full.shape[:-2], packed_length(num_features)), full.dtype)
    begin = 0
    for row in range(num_features):
        end = begin + num_features - row
        packed[..., begin:end] = full[..., row, row:]
        begin = end
    return packed


def unpack(packed: NDArray[Number], num_features: int) -> NDArray[Number]:
    """Symmetric [..., K, K] of the packed [..., K (K + 1) / 2]; mirrored exactly.

    Raises:
        UsageError: the length is not that of *num_features*.
    """
    if packed.ndim < 1 or packed.shape[-1] != packed_length(num_features):
        raise UsageError(
            f"a packed Gram of shape {packed.shape} is not that of {num_features} features, "
            f"which has {packed_length(num_features)} numbers"
        )
    full = np.empty((*packed.shape[:-1], num_features, num_features), packed.dtype)
    begin = 0
    for row in range(num_features):
        end = begin + num_features - row
        full[..., row, row:] = packed[..., begin:end]
        begin = end
    _mirror(full)
    return full


@lru_cache(maxsize=16)
def diagonal_positions(num_features: int) -> NDArray[np.int64]:
    """Where the diagonal lies in the packed triangle: int64 [K], not to be written to."""
    rows = np.arange(num_features, dtype=np.int64)
    positions = rows * num_features - rows * (rows - 1) // 2
    positions.flags.writeable = False
    return positions


def _mirror(full: NDArray[np.generic]) -> None:
    """Copy the upper triangle of the last two axes onto the lower one, block by block."""
    num_features = full.shape[-1]
    for left in range(0, num_features, _BLOCK):
        right = min(left + _BLOCK, num_features)
        for row in range(left + 1, right):
            full[..., row, left:row] = full[..., left:row, row]
        for top in range(right, num_features, _BLOCK):
            bottom = min(top + _BLOCK, num_features)
            full[..., top:bottom, left:right] = np.swapaxes(
                full[..., left:right, top:bottom], -1, -2
            )
