"""Chunked cross-entropy against torch's own on whole logits, in float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from leadline.models.cross_entropy import linear_cross_entropy


def problem(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 8, generator=generator, dtype=torch.float64)
    head = torch.randn(13, 8, generator=generator, dtype=torch.float64)
    targets = torch.randint(13, (tokens,), generator=generator)
    return hidden.requires_grad_(), head.requires_grad_(), targets


@settings(deadline=None, max_examples=30)
@given(tokens=st.integers(1, 40), chunk=st.integers(1, 50))
def test_loss_and_gradients_equal_whole_logits_for_any_chunk(tokens: int, chunk: int) -> None:
    hidden, head, targets = problem(tokens)
    whole = F.cross_entropy(hidden @ head.T, targets)
    wanted = torch.autograd.grad(whole, (hidden, head))
    loss = linear_cross_entropy(hidden, head, targets, chunk)
    found = torch.autograd.grad(loss, (hidden, head))
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(found, wanted)


def test_gradient_passes_the_numerical_check() -> None:
    hidden, head, targets = problem(7)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, targets, 3), (hidden, head)
    )


def test_loss_scaled_by_the_caller_scales_the_gradients() -> None:
    hidden, head, targets = problem(6)
    single = torch.autograd.grad(linear_cross_entropy(hidden, head, targets, 4), head)[0]
    triple = torch.autograd.grad(3 * linear_cross_entropy(hidden, head, targets, 4), head)[0]
    torch.testing.assert_close(triple, 3 * single)


def test_bf16_hidden_states_give_an_fp32_loss_and_fp32_head_gradient() -> None:
    hidden, head, targets = problem(9)
    low = hidden.detach().bfloat16().requires_grad_()
    master = head.detach().float().requires_grad_()
    loss = linear_cross_entropy(low, master, targets, 4)
    loss.backward()
    assert loss.dtype == torch.float32
    assert master.grad is not None
    assert master.grad.dtype == torch.float32


def test_evaluation_keeps_no_gradient() -> None:
    hidden, head, targets = problem(9)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, head, targets, 4)
    assert not loss.requires_grad


def test_a_huge_logit_does_not_overflow() -> None:
    hidden = torch.full((2, 1), 1e4)
    head = torch.tensor([[1.0], [-1.0]])
    loss = linear_cross_entropy(hidden, head, torch.tensor([0, 1]), 1)
    assert loss.item() == pytest.approx(1e4)
