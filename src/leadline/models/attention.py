"""Attention of dual-mind: a local and a global path, and a memory, in one call.

Shapes: B batch, H heads (first half local, second half global), T tokens, M memory
slots, D head width. Every head sees all M slots, which stand in front of the
sequence; then local heads see the last `window` tokens and global heads all tokens
so far. One softmax runs over memory and context together.

Two ways to the same numbers:
- compiled bf16 on CUDA: FlexAttention with a block mask, so that blocks outside the
  window are never computed and no mask is read from memory;
- everywhere else (CPU, the twin's fp32 lane, eager replays by the divergence locator):
  scaled dot-product attention with the same mask as a boolean tensor.
Both keep the softmax in fp32 whatever the dtype of q, k and v.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def dual_path_mask(num_heads: int, memory_slots: int, window: int) -> MaskMod:
    """Return the rule that says whether head h lets query q see key-value position kv."""

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        del b
        token = kv - memory_slots
        in_reach = (h >= num_heads // 2) | (q - token < window)
        return (token < 0) | ((token <= q) & in_reach)

    return visible


def dense_mask(visible: MaskMod, num_heads: int, q_len: int, kv_len: int) -> Tensor:
    """The rule as a bool tensor [H, T, M + T] on the default device."""
    h = torch.arange(num_heads)[:, None, None]
    q = torch.arange(q_len)[None, :, None]
    kv = torch.arange(kv_len)[None, None, :]
    return visible(torch.zeros(()), h, q, kv)


def block_mask(visible: MaskMod, num_heads: int, q_len: int, kv_len: int) -> BlockMask:
    """The rule as FlexAttention's block mask, shared by every batch row."""
    return create_block_mask(
        visible,
        B=None,
        H=num_heads,
        Q_LEN=q_len,
        KV_LEN=kv_len,
        device=torch.get_default_device(),
    )


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | Tensor) -> Tensor:
    """Attention of q [B, H, T, D] over k, v [B, H, M + T, D]; returns [B, H, T, D]."""
    if isinstance(mask, BlockMask):
        out = flex_attention(q, k, v, block_mask=mask)
        assert isinstance(out, Tensor)
        return out
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
