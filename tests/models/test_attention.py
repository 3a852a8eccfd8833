"""The two ways to dual-path attention against a literal loop over positions."""

import pytest
import torch
from torch import Tensor

from leadline.models.attention import attend, block_mask, dense_mask, dual_path_mask

HEADS, TOKENS, SLOTS, WINDOW, WIDTH = 4, 12, 3, 4, 8
BF16_ERROR = 1e-2  # two bf16 roundings of the operands and one of the result, 2**-9 each


def literal_attention(q: Tensor, k: Tensor, v: Tensor, slots: int, window: int) -> Tensor:
    """One head, one query, one softmax at a time, in float64."""
    batch, heads, tokens, width = q.shape
    out = torch.zeros(batch, heads, tokens, width, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for t in range(tokens):
                first = max(0, t - window + 1) if h < heads // 2 else 0
                seen = [*range(slots), *range(slots + first, slots + t + 1)]
                scores = torch.stack([q[b, h, t].double() @ k[b, h, j].double() for j in seen])
                weights = torch.softmax(scores / width**0.5, dim=0)
                out[b, h, t] = sum(
                    w * v[b, h, j].double() for w, j in zip(weights, seen, strict=True)
                )
    return out


def inputs(tokens: int = TOKENS, width: int = WIDTH) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, HEADS, tokens, width), *2 * ((2, HEADS, SLOTS + tokens, width),))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


def test_attend_with_the_dense_mask_equals_the_literal_loop() -> None:
    q, k, v = inputs()
    mask = dense_mask(dual_path_mask(HEADS, SLOTS, WINDOW), HEADS, TOKENS, SLOTS + TOKENS)
    wanted = literal_attention(q, k, v, SLOTS, WINDOW)
    torch.testing.assert_close(attend(q, k, v, mask).double(), wanted, rtol=1e-5, atol=1e-6)


def test_dense_mask_lets_a_local_head_see_its_window_and_the_memory_only() -> None:
    mask = dense_mask(dual_path_mask(2, 1, 2), 2, 4, 5)
    assert mask[0].int().tolist() == [
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 1, 1, 0],
        [1, 0, 0, 1, 1],
    ]


def test_dense_mask_lets_a_global_head_see_all_tokens_so_far() -> None:
    mask = dense_mask(dual_path_mask(2, 1, 2), 2, 4, 5)
    assert torch.equal(mask[1], torch.ones(4, 5).tril(1).bool())


@pytest.mark.gpu
def test_flex_and_dense_mask_agree_on_the_device() -> None:
    q, k, v = (x.to("cuda", torch.bfloat16) for x in inputs(tokens=256, width=64))
    rule = dual_path_mask(HEADS, SLOTS, 32)
    with torch.device("cuda"):
        blocks = block_mask(rule, HEADS, 256, SLOTS + 256)
        dense = dense_mask(rule, HEADS, 256, SLOTS + 256)
    flex = torch.compile(attend, dynamic=False)(q, k, v, blocks).double()
    exact = attend(q.double(), k.double(), v.double(), dense)
    assert float((flex - exact).norm() / exact.norm()) < BF16_ERROR
