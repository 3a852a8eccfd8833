"""How far one tensor is from another: relative error by rows, and lost elements.

A row is what lies along the last axis: a token's features, a query's weights. Rows
and a quantile over them are used instead of one norm because a mixture-of-experts
router that meets a near-tie sends a few tokens elsewhere under any rounding at all:
those rows are far off in a healthy model and would own the norm.
"""

import torch
from torch import Tensor

BFLOAT16_MAX = torch.finfo(torch.bfloat16).max
SMALL_ROW = 0.1
"""Rows below this share of the typical row are measured against that share instead:
a row that is zero but for rounding has no meaningful relative error."""
SATURATED = 2.0
"""Largest error told; two unrelated rows of equal size differ by 1.4."""


def row_error(reference: Tensor, other: Tensor, quantile: float) -> float:
    """The *quantile* over rows of |other - reference| / |reference|, at most 2.

    Elements of either that are not finite, or that bf16 cannot hold (the fp32 minimum
    of an additive mask), count as equal; `lost_elements` is the judge of those.
    """
    usable = _representable(reference) & torch.isfinite(other)
    exact = torch.where(usable, reference, 0).double()
    found = torch.where(usable, other, 0).double()
    scale = exact.abs().amax() if exact.numel() else exact.new_zeros(())
    if not scale > 0:
        return SATURATED if found.numel() and bool((found != 0).any()) else 0.0
    rows = (exact / scale).reshape(-1, exact.shape[-1] if exact.ndim else 1)
    gaps = (found / scale).reshape(rows.shape) - rows
    size = rows.square().sum(-1)
    floor = SMALL_ROW**2 * size.mean()
    errors = (gaps.square().sum(-1) / (size + floor)).sqrt()
    rank = round(quantile * (errors.numel() - 1))
    return min(float(errors.sort().values[rank]), SATURATED)


def lost_elements(reference: Tensor, other: Tensor) -> int:
    """Elements that are NaN or infinite in *other* though bf16 could hold the reference."""
    return int((_representable(reference) & ~torch.isfinite(other)).sum())


def _representable(reference: Tensor) -> Tensor:
    return torch.isfinite(reference) & (reference.abs() <= BFLOAT16_MAX)
