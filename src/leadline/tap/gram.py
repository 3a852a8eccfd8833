"""Grams: sums of x x^T over rows x, of one stream of rows or of one per group.

- Raw sums, never means; what a row weighs does not depend on the batch it came in.
- Products and sums are fp32 or wider whatever the rows' dtype. On the CPU sums are
  float64; on a CUDA device they are fp32 with a carry (see `grouped_gram`).
- Equal calls on one device give equal bits.
- No call waits for the device, `add` least of all; results stay on the device.
- NaN or Inf in a row stays visible in the Gram of its group and reaches no other.
"""

from typing import Protocol

import torch
from torch import Tensor

from leadline.tap.gram_blocks import GramBlocks

_CPU_ROWS = 4096  # rows widened to float64 at a time, to bound the copy
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class GramSum:
    """Sum of x x^T over all rows given."""

    def __init__(self, num_features: int, *, device: torch.device | str, carry: bool = True):
        """Start from zero; `gram_bytes` says what is allocated.

        carry: keep on CUDA what each addition rounds away, for half again the bytes;
        without it `needs_carry` tells how many additions are still good.
        """
        self.num_features = num_features
        self.device = torch.device(device)
        self.rows = 0
        """Rows summed so far."""
        self._sums = _accumulators(1, num_features, self.device, single=True, carry=carry)

    @property
    def num_bytes(self) -> int:
        """Bytes held on the device."""
        return self._sums.num_bytes

    def add(self, rows: Tensor) -> None:
        """Add rows [n, K]; n = 0 is fine."""
        self._sums.add_rows(_checked(rows, self.num_features, self.device))
        self.rows += rows.shape[0]

    def packed(self, out: Tensor | None = None) -> Tensor:
        """Packed upper triangle f32 [K (K + 1) / 2], row by row, on the device."""
        length = packed_length(self.num_features)
        if out is None:
            out = torch.empty(length, dtype=torch.float32, device=self.device)
        assert out.shape == (length,)
        self._sums.pack(out[None], 0)
        return out

    def nonfinite(self) -> Tensor:
        """Whether NaN or Inf came in or arose: a bool without axes, on the device."""
        return ~self._sums.diagonals().isfinite().all()

    def clear(self) -> None:
        """Start anew from zero; no memory is given back."""
        self._sums.clear()
        self.rows = 0


class GroupedGramSum:
    """One sum of x x^T for each group of rows, such as the rows routed to each expert."""

    def __init__(
        self,
        num_groups: int,
        num_features: int,
        *,
        device: torch.device | str,
        carry: bool = True,
    ):
        """Start from zero; `grouped_gram_bytes` says what is allocated.

        carry: as for `GramSum`.
        """
        self.num_groups = num_groups
        self.num_features = num_features
        self.device = torch.device(device)
        self.counts = torch.zeros(num_groups, dtype=torch.int64, device=self.device)
        """Rows summed so far for each group: int64 [G] on the device."""
        self._sums = _accumulators(num_groups, num_features, self.device, single=False, carry=carry)

    @property
    def num_bytes(self) -> int:
        """Bytes held on the device."""
        return self._sums.num_bytes + self.counts.nbytes

    def add(self, rows: Tensor, offsets: Tensor, *, first_group: int = 0) -> None:
        """Add rows [n, K] sorted by group; group g has rows offsets[g] to offsets[g + 1].

        offsets: int32 [G + 1] on the device, not falling, at most n (not looked at on
        CUDA: that would wait for the device). Rows outside them take no part. Fewer
        offsets tell of the groups from *first_group* on only.
        """
        rows = _checked(rows, self.num_features, self.device)
        present = offsets.numel() - 1
        assert offsets.dtype == torch.int32
        assert offsets.device == rows.device
        assert 0 <= first_group <= first_group + present <= self.num_groups
        self._sums.add_groups(rows, offsets, first_group)
        self.counts[first_group : first_group + present] += offsets.diff()

    def packed(self, out: Tensor | None = None, *, groups: range | None = None) -> Tensor:
        """Packed upper triangles f32 [G, K (K + 1) / 2], row by row, on the device.

        groups: consecutive groups to give; all by default. Taking a few at a time
        bounds the memory of the result; nothing else is allocated.
        """
        groups = range(self.num_groups) if groups is None else groups
        shape = (len(groups), packed_length(self.num_features))
        if out is None:
            out = torch.empty(shape, dtype=torch.float32, device=self.device)
        assert groups.step == 1
        assert 0 <= groups.start <= groups.stop <= self.num_groups
        assert out.shape == shape
        self._sums.pack(out, groups.start)
        return out

    def nonfinite_groups(self) -> Tensor:
        """Groups where NaN or Inf came in or arose: bool [G] on the device."""
        return ~self._sums.diagonals().isfinite().all(dim=1)

    def clear(self) -> None:
        """Start anew from zero; no memory is given back."""
        self._sums.clear()
        self.counts.zero_()


def packed_length(num_features: int) -> int:
    """Numbers in a packed upper triangle."""
    return num_features * (num_features + 1) // 2


class _Accumulators(Protocol):
    """Where sums are kept, by kind of device."""

    @property
    def num_bytes(self) -> int: ...

    def clear(self) -> None: ...

    def add_rows(self, rows: Tensor) -> None: ...

    def add_groups(self, rows: Tensor, offsets: Tensor, first_group: int) -> None: ...

    def pack(self, out: Tensor, first_group: int) -> None: ...

    def diagonals(self) -> Tensor: ...


def _accumulators(
    num_groups: int, num_features: int, device: torch.device, *, single: bool, carry: bool
) -> _Accumulators:
    if device.type != "cuda":
        return _Float64Grams(num_groups, num_features, device)
    from leadline.tap.grouped_gram import BlockGrams

    blocks = GramBlocks(num_features=num_features)
    lanes = blocks.lanes if single else 1
    return BlockGrams(num_groups, blocks, lanes=lanes, carry=carry, device=device)


def _checked(rows: Tensor, num_features: int, device: torch.device) -> Tensor:
    """The rows without history, dense along the features."""
    assert rows.ndim == 2
    assert rows.shape[1] == num_features, f"rows {tuple(rows.shape)}, width {num_features}"
    assert rows.device.type == device.type
    assert rows.dtype in _DTYPES, f"rows of {rows.dtype}"
    rows = rows.detach()
    return rows if rows.stride(1) == 1 else rows.contiguous()


class _Float64Grams:
    """Whole matrices in float64, group after group: for the CPU, where models are tiny."""

    def __init__(self, num_groups: int, num_features: int, device: torch.device) -> None:
        shape = (num_groups, num_features, num_features)
        self._sums = torch.zeros(shape, dtype=torch.float64, device=device)

    @property
    def num_bytes(self) -> int:
        return self._sums.nbytes

    def clear(self) -> None:
        self._sums.zero_()

    def add_rows(self, rows: Tensor) -> None:
        self._add(0, rows)

    def add_groups(self, rows: Tensor, offsets: Tensor, first_group: int) -> None:
        bounds = offsets.tolist()
        assert bounds == sorted(bounds), f"offsets fall: {bounds}"
        assert bounds[0] >= 0, f"offsets begin at {bounds[0]}"
        assert bounds[-1] <= rows.shape[0], f"offsets end at {bounds[-1]} of {rows.shape[0]} rows"
        for group in range(len(bounds) - 1):
            self._add(first_group + group, rows[bounds[group] : bounds[group + 1]])

    def _add(self, group: int, rows: Tensor) -> None:
        for part in rows.split(_CPU_ROWS):
            if part.shape[0]:
                wide = part.to(torch.float64)
                self._sums[group].addmm_(wide.T, wide)

    def pack(self, out: Tensor, first_group: int) -> None:
        width = self._sums.shape[-1]
        row, column = torch.triu_indices(width, width, device=out.device)
        for number in range(out.shape[0]):
            out[number].copy_(self._sums[first_group + number, row, column])

    def diagonals(self) -> Tensor:
        return self._sums.diagonal(dim1=1, dim2=2)
