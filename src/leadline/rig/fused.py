"""Elementwise work around the grouped products, fused on CUDA.

What `transformers` does in several passes over the routed rows, in one, with the same
roundings at the same places. Imported only where there is a CUDA device: needs Triton.

Shapes: N tokens, k experts a token, R = N * k rows, H hidden, I expert width.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [R, 2 I] in halves: [R, I]; silu is rounded to the dtype first."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if rows:
        _silu_mul[(rows, triton.cdiv(width, BLOCK))](
            gate_up, out, width, gate_up.stride(0), BLOCK=BLOCK, num_warps=4
        )
    return out


def weighted_sum(out: Tensor, back: Tensor, weights: Tensor) -> Tensor:
    """Sum over j of weights [N, k] times rows *out* [R, H] at *back* [N, k], in fp32: [N, H]."""
    tokens, top_k = back.shape
    result = out.new_empty(tokens, out.shape[1])
    if tokens:
        _weighted_sum[(tokens, triton.cdiv(out.shape[1], BLOCK))](
            out,
            back,
            weights.contiguous(),
            result,
            out.shape[1],
            top_k,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return result


@triton.jit
def _silu_mul(
    gate_up: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < width
    gate = tl.load(gate_up + row * stride + column, mask=live, other=0.0)
    up = tl.load(gate_up + row * stride + width + column, mask=live, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide * tl.sigmoid(wide)).to(gate.dtype)
    tl.store(out + row * width + column, activated * up, mask=live)


@triton.jit
def _weighted_sum(
    rows: tl.tensor,
    back: tl.tensor,
    weights: tl.tensor,
    result: tl.tensor,
    width: tl.tensor,
    top_k: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in range(top_k):
        row = tl.load(back + token * top_k + choice)
        weight = tl.load(weights + token * top_k + choice).to(tl.float32)
        value = tl.load(rows + row * width + column, mask=live, other=0.0)
        total += weight * value.to(tl.float32)
    tl.store(result + token * width + column, total.to(result.dtype.element_ty), mask=live)
