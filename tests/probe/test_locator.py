from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leadline.core.errors import ProbeError
from leadline.probe.errorband import Rule
from leadline.probe.locator import LocatorReport, locate_divergence

from .planted import FAULTS, VOCAB, NarrowVariance, Norm, PlainSoftmax, RunningMean, Stack


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """These tensors are too small to share; threads that wait for each other cost seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def stack(seed: int = 0, *, memory_slots: int = 300, scale: float = 1.0) -> Stack:
    torch.manual_seed(seed)
    model = Stack(blocks=2, memory_slots=memory_slots)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(scale)
    return model


def plant(model: Stack, place: str, fault: nn.Module) -> None:
    parent, _, name = place.rpartition(".")
    setattr(model.get_submodule(parent), name, fault)


def language_loss(length: int, device: str = "cpu") -> Callable[[nn.Module], Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (1, length + 1), generator=generator).to(device)

    def forward(model: nn.Module) -> Tensor:
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    return forward


def locate(model: nn.Module, forward: Callable[[nn.Module], Tensor]) -> LocatorReport:
    return locate_divergence(model, forward, device_type="cpu")


def locate_in(module: nn.Module, *shape: int, seed: int = 0) -> LocatorReport:
    """Locate in a model of `first`, a projection, and `part`, the module under test."""
    torch.manual_seed(seed)
    model = nn.Sequential()
    model.add_module("first", nn.Linear(shape[-1], shape[-1]))
    model.add_module("part", module)
    x = torch.randn(shape)
    return locate(model, lambda model: model(x).float().square().mean())


def accused(report: LocatorReport) -> list[tuple[str, str]]:
    return [(accusation.module, accusation.rule) for accusation in report.accused]


RULES = {
    "online-softmax": Rule.ACCUMULATION,
    "plain-softmax": Rule.REDUCTION,
    "running-mean": Rule.ACCUMULATION,
    "narrow-mean": Rule.REDUCTION,
    "narrow-variance": Rule.OUT_OF_BAND,
    "overflowing-exponent": Rule.NOT_FINITE,
    "half": Rule.HARD_CODED,
    "half-out-of-range": Rule.HARD_CODED,
    "bfloat16": Rule.HARD_CODED,
    "unguarded-reduction": Rule.HARD_CODED,
}


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_locator_planted_fault_is_the_only_one_named(fault: str, layer: int) -> None:
    place, make, memory_slots, length = FAULTS[fault]
    model = stack(memory_slots=memory_slots)
    plant(model, f"blocks.{layer}.{place}", make())
    report = locate(model, language_loss(length))
    assert accused(report) == [(f"blocks.{layer}.{place}", RULES[fault])]
    assert report.accused[0].module_class == make.__name__


# On CUDA autocast itself takes softmax and sum in fp32, so those two are no faults there.
GUARDED_ON_CUDA = {"online-softmax", "plain-softmax"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("fault", FAULTS)
def test_locator_planted_fault_on_cuda_is_named_unless_autocast_guards_it(fault: str) -> None:
    place, make, memory_slots, length = FAULTS[fault]
    model = stack(memory_slots=memory_slots)
    plant(model, f"blocks.1.{place}", make())
    report = locate_divergence(model.cuda(), language_loss(length, "cuda"), device_type="cuda")
    wanted = [] if fault in GUARDED_ON_CUDA else [(f"blocks.1.{place}", RULES[fault])]
    assert accused(report) == wanted


@pytest.mark.parametrize("scale", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_locator_clean_stack_accuses_nobody(seed: int, scale: float) -> None:
    model = stack(seed, memory_slots=4096, scale=scale)
    report = locate(model, language_loss(32))
    assert accused(report) == []
    judged = report.modules_checked + len([n for n, _ in report.skipped if n != "(forward)"])
    assert judged == 32  # every module with a forward of its own


def test_locator_two_faults_are_named_in_completion_order() -> None:
    model = stack()
    plant(model, "blocks.1.inner_norm", NarrowVariance())
    plant(model, "blocks.0.attention.read", PlainSoftmax())
    report = locate(model, language_loss(300))
    assert [a.module for a in report.accused] == ["blocks.0.attention.read", "blocks.1.inner_norm"]


def test_locator_overflow_names_the_operation() -> None:
    place, make, memory_slots, length = FAULTS["overflowing-exponent"]
    model = stack(memory_slots=memory_slots)
    plant(model, f"blocks.1.{place}", make())
    assert "first from exp in bfloat16" in locate(model, language_loss(length)).accused[0].detail


class Inflates(nn.Module):
    """Too large by a share in bf16 only, as a biased reduction makes it."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.share) if x.dtype == torch.bfloat16 else x * 1


def test_locator_error_beyond_the_band_is_accused() -> None:
    assert accused(locate_in(Inflates(0.02), 2, 300, 8)) == [("part", Rule.OUT_OF_BAND)]


def test_locator_error_of_one_rounding_is_not_accused() -> None:
    assert accused(locate_in(Inflates(2**-9), 2, 300, 8)) == []


class InflatesFewRows(Inflates):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((super().forward(x[:, :24]), x[:, 24:] * 1), dim=1)


def few_rows_report(loss: Callable[[Tensor], Tensor]) -> LocatorReport:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), InflatesFewRows(0.5))
    x = torch.randn(1, 300, 8)
    return locate(model, lambda model: loss(model(x).float().square()))


def test_locator_error_in_a_few_rows_is_not_accused() -> None:
    assert accused(few_rows_report(lambda squares: squares[:, 24:].mean())) == []


def test_locator_error_in_a_few_rows_that_moves_the_loss_is_told_of_the_whole() -> None:
    report = few_rows_report(torch.mean)
    assert accused(report) == [("(forward)", Rule.OUT_OF_BAND)]
    assert "no part of it by itself" in report.accused[0].detail


def test_locator_module_that_no_care_could_save_is_skipped_with_reason() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Norm(8))
    nn.init.constant_(model[0].bias, 1000.0)
    x = torch.randn(1, 300, 8)
    report = locate(model, lambda model: model(x).square().mean())
    assert accused(report) == []
    assert "no care avoids" in dict(report.skipped)["1"]


class Returns(nn.Module):
    """A running mean over tokens handed out in a container, taken in as a keyword."""

    def __init__(self, wrap: Callable[[Tensor], Any], *, faulty: bool) -> None:
        super().__init__()
        self.wrap = wrap
        self.faulty = faulty

    def forward(self, *, inputs: dict[str, Tensor]) -> Any:
        x = inputs["x"]
        mean = RunningMean()(x) if self.faulty else x.float().cumsum(1)
        return self.wrap(mean)


class Wrapped(nn.Module):
    def __init__(self, part: Returns, unwrap: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.part = part
        self.unwrap = unwrap

    def forward(self, x: Tensor) -> Tensor:
        return self.unwrap(self.part(inputs={"x": x}))


@dataclass
class Carrier:
    label: str
    value: Tensor


class Pair(NamedTuple):
    label: str
    value: Tensor


WRAPPINGS: list[tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = [
    (lambda t: (None, [t]), lambda o: o[1][0]),
    (lambda t: {"value": t, "count": 3}, lambda o: o["value"]),
    (lambda t: Carrier("mean", t), lambda o: o.value),
    (lambda t: Pair("mean", t), lambda o: o.value),
]


@pytest.mark.parametrize("faulty", [True, False])
@pytest.mark.parametrize("wrapping", WRAPPINGS, ids=["tuple", "dict", "dataclass", "namedtuple"])
def test_locator_result_in_a_container_is_judged(wrapping: Any, faulty: bool) -> None:
    wrap, unwrap = wrapping
    report = locate_in(Wrapped(Returns(wrap, faulty=faulty), unwrap), 2, 512, 8)
    wanted = [("part.part", Rule.ACCUMULATION)] if faulty else []
    assert accused(report) == wanted


class Twice(nn.Module):
    """One shared module, called on few tokens and then on all of them."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(x[:, :16]).sum(1, keepdim=True, dtype=torch.float32) + self.shared(x)


def test_locator_shared_module_is_accused_once_with_its_call() -> None:
    report = locate_in(Twice(RunningMean()), 2, 512, 8)
    assert accused(report) == [("part.shared", Rule.ACCUMULATION)]
    assert "in call 2 of it" in report.accused[0].detail


class WritesToInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return x + 1


def test_locator_module_that_writes_to_its_input_is_clean() -> None:
    assert accused(locate_in(WritesToInput(), 2, 300, 8)) == []


@pytest.mark.parametrize("dropout", [nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.Dropout1d(0.5)])
def test_locator_dropout_in_training_is_clean(dropout: nn.Module) -> None:
    report = locate_in(nn.Sequential(dropout, nn.Linear(8, 8)), 4, 300, 8)
    assert (accused(report), report.skipped) == ([], ())


def test_locator_attention_with_dropout_is_clean() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.5, batch_first=True)
    assert accused(locate_in(layer, 2, 300, 16)) == []


class AddsNoise(nn.Module):
    """Draws other numbers for bf16 than for fp32, as generators of some devices do."""

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(1 if x.dtype == torch.bfloat16 else 2)
        return x + torch.rand_like(x)


def test_locator_module_that_draws_noise_is_skipped_with_reason() -> None:
    report = locate_in(AddsNoise(), 2, 300, 8)
    assert accused(report) == []
    assert dict(report.skipped)["part"] == "it draws random numbers, which differ between dtypes"


class Counts(nn.Module):
    """Depends on how often it was called: no replay repeats it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def test_locator_module_with_hidden_state_is_skipped_with_reason() -> None:
    report = locate_in(Counts(), 2, 300, 8)
    assert accused(report) == []
    assert dict(report.skipped)["part"] == "a second fp32 run of it gives another result"


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def test_locator_module_never_called_is_told() -> None:
    assert locate_in(Unused(), 2, 4, 8).skipped == (
        ("part.spare.0", "this forward does not call it"),
    )


class OwnWeight(nn.Module):
    """Uses a parameter itself, beside a child, and takes the fault into its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.child = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return RunningMean.forward(self, self.child(x) @ self.weight)  # type: ignore[arg-type]


def test_locator_fault_beside_a_clean_child_names_the_parent() -> None:
    assert accused(locate_in(OwnWeight(), 2, 512, 8)) == [("part", Rule.ACCUMULATION)]


def test_locator_fault_in_the_loss_names_the_code_around_the_model() -> None:
    model = nn.Linear(8, 400)
    x = torch.randn(2, 8)
    report = locate(model, lambda model: -torch.log_softmax(model(x), -1)[:, 0].mean())
    assert accused(report) == [("(forward)", Rule.REDUCTION)]


class SoftmaxOfProjection(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(super().forward(x), -1)


def test_locator_fault_in_the_model_itself_names_the_model() -> None:
    x = torch.randn(2, 8)
    report = locate(SoftmaxOfProjection(8, 300), lambda model: model(x).float().square().sum())
    assert accused(report) == [("(model)", Rule.REDUCTION)]


class KeepsHalf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.half()


def test_locator_half_that_stops_the_fp32_lane_is_still_named() -> None:
    model = nn.Sequential(KeepsHalf(), nn.Linear(8, 8))
    x = torch.randn(2, 8)
    report = locate(model, lambda model: model(x).sum())
    assert accused(report) == [("0", Rule.HARD_CODED)]
    assert all("fp32 forward stopped in 1" in reason for _, reason in report.skipped)


def test_locator_half_weights_name_their_module() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).half())
    x = torch.randn(2, 8)
    assert accused(locate(model, lambda model: model(x).sum())) == [("1", Rule.HARD_CODED)]


class MixesDtypes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(4, x.shape[-1])
        return total.index_add_(0, torch.zeros(x.shape[0], dtype=torch.long), x)


def test_locator_module_that_fails_in_bf16_is_named() -> None:
    report = locate_in(MixesDtypes(), 4, 8)
    assert accused(report) == [("part", Rule.FAILS)]
    assert "index_add" in report.accused[0].detail


def test_locator_model_that_fails_in_fp32_is_a_probe_error() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(9, 8))
    with pytest.raises(ProbeError, match="fp32 forward stopped in 1"):
        locate(model, lambda model: model(torch.randn(2, 8)).sum())


class NegativeRoot(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float().abs().neg().sqrt()


def test_locator_nan_in_both_lanes_names_where_it_begins() -> None:
    report = locate_in(nn.Sequential(NegativeRoot(), nn.Linear(8, 8)), 2, 8)
    assert accused(report) == [("part.0", Rule.NAN_IN_FP32)]


class Masks(nn.Module):
    """A row of minus infinities and fp32's smallest number, which bf16 cannot hold."""

    def forward(self, x: Tensor) -> Tensor:
        x[..., 0] = -torch.inf
        x[..., 1] = torch.finfo(torch.float32).min if x.dtype == torch.float32 else -torch.inf
        return torch.softmax(x, -1, dtype=torch.float32)


def test_locator_infinite_mask_is_clean() -> None:
    assert accused(locate_in(Masks(), 2, 300, 300)) == []


def global_state() -> tuple[Any, ...]:
    return (
        torch.get_float32_matmul_precision(),
        torch.is_autocast_enabled("cpu"),
        torch.is_grad_enabled(),
        torch.get_rng_state().tolist(),
    )


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("planted")


@pytest.mark.parametrize("last", [nn.Identity(), Raises()])
def test_locator_leaves_model_and_process_as_they_were(last: nn.Module) -> None:
    torch.manual_seed(7)
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5), last)
    model[0].eval()
    torch.set_float32_matmul_precision("high")
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before, training = global_state(), [module.training for module in model.modules()]
    try:
        locate(model, lambda model: model.train()(torch.randn(4, 8)).sum())
    except ProbeError as error:
        assert "planted" in str(error)  # noqa: PT017
    assert global_state() == before
    torch.set_float32_matmul_precision("highest")
    assert [module.training for module in model.modules()] == training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_locator_same_seed_gives_the_same_report() -> None:
    model = stack()
    plant(model, "blocks.1.pool", RunningMean())
    reports = [locate(model, language_loss(300)) for _ in range(2)]
    assert reports[0] == reports[1]


def test_locator_tells_progress_up_to_the_last_call() -> None:
    told: list[tuple[int, int]] = []
    x = torch.randn(2, 8)
    locate_divergence(
        nn.Linear(8, 8),
        lambda model: model(x).sum(),
        device_type="cpu",
        on_progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(1, 2), (2, 2)]
