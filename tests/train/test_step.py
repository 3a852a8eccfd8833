from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from leadline.models.custom import load_workload
from leadline.train.precision import Precision
from leadline.train.step import StepSettings, TrainStep, build_optimizer

CPU = torch.device("cpu")
IDS = torch.arange(64).view(2, 32)
SGD = StepSettings(learning_rate=1.0, warmup_steps=1, clip_norm=1.0)


class Weight(nn.Module):
    """One weight of three numbers."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))


@dataclass(frozen=True, kw_only=True, slots=True)
class Slope:
    """A workload whose gradient is (slope, 0, 0), whatever the batch."""

    slope: float
    name: str = "slope"
    vocab_size: int = 257

    def build(self):
        return Weight()

    def loss(self, model, inputs, targets):
        return model.w[0] * self.slope

    def compile(self, model):
        pass


def _sgd_step(slope, precision=Precision.FP32):
    """A step with plain gradient descent at rate 1: the change is the clipped gradient."""
    step = TrainStep(Slope(slope=slope), device=CPU, precision=precision, settings=SGD, seed=0)
    step.optimizer = torch.optim.SGD(step.model.parameters(), lr=1.0)
    _, norm = step(IDS, IDS)
    return norm.item(), step.model.w.detach()


@pytest.fixture
def tiny(workloads_dir):
    """A train step of the clean tiny workload."""

    def make(precision=Precision.FP32, **changed):
        return TrainStep(
            load_workload(workloads_dir, "tiny.py:clean"),
            device=CPU,
            precision=precision,
            settings=StepSettings(**changed),
            seed=0,
        )

    return make


@pytest.mark.parametrize("precision", list(Precision))
def test_g17_gradient_below_the_limit_is_applied_whole(precision):
    norm, weight = _sgd_step(0.5, precision)
    assert norm == 0.5
    assert weight.tolist() == [-0.5, 0, 0]


@pytest.mark.parametrize("precision", list(Precision))
def test_g17_gradient_above_the_limit_is_clipped_and_logged_true(precision):
    norm, weight = _sgd_step(4.0, precision)
    assert norm == 4.0
    assert weight.norm().item() == pytest.approx(1.0, abs=1e-5)


@settings(deadline=None, max_examples=25)
@given(st.floats(2.0**-10, 2.0**16, width=32))
def test_g17_logged_norm_of_any_gradient_is_the_true_one(slope):
    norm, weight = _sgd_step(slope)
    assert norm == pytest.approx(slope, rel=1e-6)
    assert weight.norm().item() == pytest.approx(min(slope, 1.0), rel=1e-5)


def test_step_returns_fp32_scalars_that_hold_no_graph(tiny):
    loss, norm = tiny(Precision.BF16)(IDS, IDS + 1)
    for value in (loss, norm):
        assert (value.dtype, value.ndim, value.requires_grad) == (torch.float32, 0, False)


def test_step_leaves_no_gradient_behind(tiny):
    step = tiny()
    step(IDS, IDS + 1)
    assert [weight.grad for weight in step.model.parameters()] == [None] * 5
    assert step.steps_done == 1


def test_step_learning_rate_climbs_over_the_warm_up(tiny):
    step, rates = tiny(learning_rate=0.4, warmup_steps=4), []
    for _ in range(6):
        step(IDS, IDS + 1)
        rates.append(step.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_step_lowers_the_loss_of_a_batch_it_sees_again(tiny):
    step = tiny(learning_rate=1e-2, warmup_steps=1)
    losses = [step(IDS, IDS + 1)[0].item() for _ in range(20)]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("precision", list(Precision))
def test_step_keeps_weights_and_state_in_fp32(tiny, precision):
    step = tiny(precision)
    step(IDS, IDS + 1)
    state = [value for held in step.optimizer.state.values() for value in held.values()]
    dtypes = {tensor.dtype for tensor in (*step.model.parameters(), *state)}
    assert dtypes == {torch.float32}


def test_lanes_of_one_seed_begin_from_the_same_weights(tiny):
    lanes = [tiny(precision).model.state_dict() for precision in Precision]
    assert all(torch.equal(lanes[0][name], lanes[1][name]) for name in lanes[0])


class _Watched(torch.autograd.Function):
    seen: list = []  # noqa: RUF012 - emptied by its only test

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        _Watched.seen.append(torch.backends.mkldnn.matmul.fp32_precision)
        _Watched.seen.append(torch.is_autocast_enabled("cpu"))
        return grad


def test_g19_backward_takes_its_products_in_fp32_too(any_fp32_setting):
    class Watching(Slope):
        __slots__ = ()

        def loss(self, model, inputs, targets):
            return _Watched.apply(model.w[0] * 1.0)

    _Watched.seen.clear()
    step = TrainStep(
        Watching(slope=1.0), device=CPU, precision=Precision.BF16, settings=SGD, seed=0
    )
    step(IDS, IDS)
    assert _Watched.seen == ["ieee", False]


def test_evaluation_changes_nothing_and_keeps_nothing(tiny):
    step = tiny()
    before = [weight.clone() for weight in step.model.parameters()]
    loss = step.evaluate(IDS, IDS + 1)
    assert not loss.requires_grad
    assert step.model.training
    assert all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))
    assert step.steps_done == 0


def test_evaluation_that_fails_leaves_the_model_in_training(tiny):
    step = tiny()
    with pytest.raises(IndexError):
        step.evaluate(IDS + 1000, IDS)
    assert step.model.training


def _decayed(model):
    groups = build_optimizer(model, replace(StepSettings(), weight_decay=0.3)).param_groups
    decays = {id(w): group["weight_decay"] for group in groups for w in group["params"]}
    return {name: decays.get(id(weight)) for name, weight in model.named_parameters()}


def test_optimizer_decays_matrices_and_nothing_else():
    model = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4)})
    expected = {"embed.weight": 0.0, "head.weight": 0.3, "head.bias": 0.0}
    assert _decayed(model) == expected


def test_optimizer_takes_a_tied_head_once_and_without_decay():
    model = nn.ModuleDict({"head": nn.Linear(3, 4, bias=False), "embed": nn.Embedding(4, 3)})
    model["head"].weight = model["embed"].weight
    assert _decayed(model) == {"head.weight": 0.0}


def test_optimizer_leaves_frozen_weights_alone():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["a"].requires_grad_(False)
    decayed = _decayed(model)
    assert (decayed["a.weight"], decayed["b.weight"]) == (None, 0.3)
