"""A seeded order of the windows of one epoch, computed and not stored.

A balanced Feistel network permutes the numbers below a power of four; numbers
that fall outside the wanted range are sent through it again until they fall
inside (cycle walking), which keeps the map one-to-one. Any position can
be asked for at once, so resuming costs nothing and memory does not grow.

- The order depends on the seed, the epoch and the number of windows alone:
  not on workers, batch size, global random state, or what was asked before.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from leadline.core.errors import UsageError

_ROUNDS = 6  # four suffice for a pseudo-random permutation (Luby and Rackoff); two spare
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's constants
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

Positions = NDArray[np.uint64]


class WindowOrder:
    """One-to-one map from positions in an epoch to window numbers."""

    def __init__(self, num_windows: int, *, seed: int, epoch: int) -> None:
        if num_windows < 1:
            raise UsageError(f"an order needs at least 1 window, got {num_windows}")
        self._num_windows = num_windows
        self._half_bits = max(1, ((num_windows - 1).bit_length() + 1) // 2)
        self._half_mask = np.uint64((1 << self._half_bits) - 1)
        self._keys = _round_keys(seed, epoch)

    def at(self, positions: Positions) -> Positions:
        """Window numbers at *positions*, each of which is below the number of windows."""
        values = self._permute(positions)
        while (outside := values >= self._num_windows).any():
            values[outside] = self._permute(values[outside])
        return values

    def _permute(self, values: Positions) -> Positions:
        shift = np.uint64(self._half_bits)
        left, right = values >> shift, values & self._half_mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right + key) & self._half_mask)
        return (left << shift) | right


def _round_keys(seed: int, epoch: int) -> Positions:
    digest = hashlib.shake_256(f"leadline-order|{seed}|{epoch}".encode()).digest(8 * _ROUNDS)
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _mix(values: Positions) -> Positions:
    """Splitmix64's finaliser: every input bit reaches every output bit."""
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))
