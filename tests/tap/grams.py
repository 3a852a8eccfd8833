"""Grams in float64, row range by row range: what the fast sums are held against."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def offsets_of(sizes: Sequence[int], device: str = "cpu") -> Tensor:
    """Offsets int32 [G + 1] of groups of these sizes, the first at row 0."""
    ends = torch.tensor([0, *sizes]).cumsum(0)
    return ends.to(torch.int32).to(device)


def packed_gram(rows: Tensor) -> Tensor:
    """Packed upper triangle of rows^T rows: float64 on the CPU."""
    full = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64)
    for part in rows.split(100_000):
        wide = part.to("cpu", torch.float64)
        full.addmm_(wide.T, wide)
    row, column = torch.triu_indices(rows.shape[1], rows.shape[1])
    return full[row, column]


def packed_grams(rows: Tensor, offsets: Tensor) -> Tensor:
    """One packed triangle for each group: float64 [G, K (K + 1) / 2] on the CPU."""
    return torch.stack([packed_gram(rows[begin:end]) for begin, end in pairwise(offsets.tolist())])


def full_gram(packed: Tensor, num_features: int) -> Tensor:
    """Symmetric float64 matrix of a packed triangle."""
    row, column = torch.triu_indices(num_features, num_features)
    full = torch.zeros(num_features, num_features, dtype=torch.float64)
    full[row, column] = packed.to("cpu", torch.float64)
    full[column, row] = full[row, column]
    return full


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted; 0 where both are zero."""
    difference = (found.to("cpu", torch.float64) - wanted).norm()
    return 0.0 if difference == 0 else float(difference / wanted.norm())
