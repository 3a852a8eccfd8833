from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from leadline.probe.isolation import isolated


@pytest.mark.parametrize(
    "drop",
    [
        lambda x: F.dropout(x, 0.5, training=True),
        lambda x: F.dropout(input=x, p=0.5),
        lambda x: F.alpha_dropout(x, 0.5, training=True),
        lambda x: torch.dropout(x, 0.5, True),
    ],
)
def test_isolated_dropout_returns_its_input(drop) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(8, 8)
    with isolated(nn.Identity(), "cpu"):
        assert torch.equal(drop(x), x)


@pytest.mark.parametrize("positional", [True, False])
def test_isolated_attention_dropout_is_off(positional: bool) -> None:
    q = torch.randn(1, 2, 8, 4)
    plain = F.scaled_dot_product_attention(q, q, q)
    with isolated(nn.Identity(), "cpu"):
        if positional:
            dropped = F.scaled_dot_product_attention(q, q, q, None, 0.5)
        else:
            dropped = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    assert torch.equal(dropped, plain)


def test_isolated_compiled_module_runs_eagerly_and_is_compiled_again() -> None:
    model = nn.Linear(4, 4)
    model.compile(backend="eager")
    compiled = model._compiled_call_impl
    with isolated(model, "cpu"):
        assert model._compiled_call_impl is None
    assert model._compiled_call_impl is compiled


def test_isolated_compiled_function_is_seen_by_hooks_of_its_modules() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    wrapped = torch.compile(model, backend="eager")
    calls = []
    handle = model[0].register_forward_hook(lambda *_: calls.append(1))
    with isolated(model, "cpu"):
        wrapped(torch.randn(2, 4))
    handle.remove()
    assert calls == [1]


class Replaces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(3))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table = torch.ones(5)
        self.count += 1
        return x


def work_in_isolation(model: nn.Module, *, fails: bool) -> None:
    with isolated(model, "cpu"):
        model(torch.zeros(1))
        if fails:
            raise ZeroDivisionError


@pytest.mark.parametrize("fails", [False, True])
def test_isolated_buffers_come_back_by_identity_and_value(fails: bool) -> None:
    model = Replaces()
    table = model.table
    with suppress(ZeroDivisionError):
        work_in_isolation(model, fails=fails)
    assert model.table is table
    assert model.count == 0
