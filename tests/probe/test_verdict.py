import math
import random
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.core.errors import ProbeError
from leadline.probe.verdict import Lane, TwinVerdict, judge_twin, mean_loss, spike_steps

STEPS = 200


def falling(steps: int = STEPS, noise: float = 0.02, seed: int = 0) -> list[float]:
    """A learning curve: from 7 nats towards 4, with noise."""
    source = random.Random(seed)
    return [4 + 3 * math.exp(-step / 60) + source.gauss(0, noise) for step in range(steps)]


def lane(losses: list[float] | None = None, **changes: Any) -> Lane:
    losses = falling() if losses is None else losses
    facts: dict[str, Any] = {
        "losses": losses,
        "grad_norms": [1.0] * len(losses),
        "batch_hashes": [f"{step:064x}" for step in range(len(losses))],
        "initial_weights_sha256": "a" * 64,
        "matmul_error": 3e-7,
    }
    return Lane(**(facts | changes))


def changed(step: int, by: float) -> list[float]:
    losses = falling()
    losses[step - 1] += by
    return losses


def problem_with(verdict: TwinVerdict, *words: str) -> bool:
    return any(all(word in text for word in words) for text in verdict.problems)


def test_judge_twin_equal_lanes_is_green() -> None:
    verdict = judge_twin(lane(), lane(matmul_error=None))
    assert (verdict.green, verdict.problems, verdict.worst_delta) == (True, (), 0.0)


def test_judge_twin_one_step_beyond_tolerance_is_red_at_that_step() -> None:
    verdict = judge_twin(lane(), lane(changed(130, -0.06)))
    assert not verdict.green
    assert verdict.worst_step == 130
    assert problem_with(verdict, "step 130", "0.0600")


def test_judge_twin_all_steps_just_within_tolerance_is_green() -> None:
    verdict = judge_twin(lane(), lane([loss + 0.049 for loss in falling()]))
    assert verdict.green
    assert verdict.final_delta == pytest.approx(0.049)


def test_judge_twin_difference_at_last_settling_step_is_not_judged() -> None:
    assert judge_twin(lane(), lane(changed(20, 0.3))).green


def test_judge_twin_difference_at_first_settled_step_is_judged() -> None:
    assert judge_twin(lane(), lane(changed(21, 0.3))).worst_step == 21


def test_judge_twin_other_batch_names_its_first_step() -> None:
    hashes = list(lane().batch_hashes)
    hashes[42:] = ["f" * 64] * (STEPS - 42)
    verdict = judge_twin(lane(), lane(batch_hashes=hashes))
    assert not verdict.green
    assert problem_with(verdict, "other batches", "step 43")


def test_judge_twin_other_initial_weights_is_red() -> None:
    verdict = judge_twin(lane(), lane(initial_weights_sha256="b" * 64))
    assert problem_with(verdict, "other weights", "aaaaaaaaaaaa", "bbbbbbbbbbbb")


@pytest.mark.parametrize(
    "short",
    [
        lane(falling()[:150]),
        lane(grad_norms=[1.0] * 150),
        lane(batch_hashes=["0" * 64] * 150),
        lane([]),
    ],
)
def test_judge_twin_lanes_of_other_length_is_red(short: Lane) -> None:
    verdict = judge_twin(lane(), short)
    assert not verdict.green
    assert problem_with(verdict, "must be equal")


def test_judge_twin_too_few_steps_to_judge_is_red() -> None:
    verdict = judge_twin(lane(falling(20)), lane(falling(20)))
    assert (verdict.green, verdict.worst_delta) == (False, None)
    assert problem_with(verdict, "20 steps", "run more")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["losses", "grad_norms"])
@pytest.mark.parametrize("which", ["fp32", "bf16"])
def test_judge_twin_number_not_finite_names_lane_and_step(
    which: str, field: str, value: float
) -> None:
    values = list(getattr(lane(), field))
    values[76] = value
    sides = {"fp32": lane(), "bf16": lane()} | {which: lane(**{field: values})}
    verdict = judge_twin(sides["fp32"], sides["bf16"])
    assert not verdict.green
    assert problem_with(verdict, which, "step 77")


def test_judge_twin_spike_in_both_lanes_alike_is_red() -> None:
    verdict = judge_twin(lane(changed(90, 2.0)), lane(changed(90, 2.0)))
    assert problem_with(verdict, "fp32 lane spikes", "step 90")
    assert problem_with(verdict, "bf16 lane spikes", "step 90")


def test_g19_tf32_product_in_fp32_lane_is_red() -> None:
    verdict = judge_twin(lane(matmul_error=3e-4), lane())
    assert not verdict.green
    assert problem_with(verdict, "3.0e-04", "not fp32")


@pytest.mark.parametrize("error", [None, math.nan, 1e-5])
def test_g19_unproven_fp32_lane_is_red(error: float | None) -> None:
    assert not judge_twin(lane(matmul_error=error), lane()).green


def test_g19_reduced_precision_product_is_told_from_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, 256, 256, generator=generator, dtype=torch.float64)
    exact = left.float().double() @ right.float().double()
    ten_bits = [
        (m.float().view(torch.int32) & -(1 << 13)).view(torch.float32) for m in (left, right)
    ]

    def error(product: torch.Tensor) -> float:
        return float((product.double() - exact).norm() / exact.norm())

    assert judge_twin(lane(matmul_error=error(left.float() @ right.float())), lane()).green
    assert not judge_twin(lane(matmul_error=error(ten_bits[0] @ ten_bits[1])), lane()).green


def train_one_weight(dtype: torch.dtype, update: float) -> tuple[list[float], tuple[str, ...]]:
    """200 SGD updates of one weight that starts at 1; its values and names below fp32."""
    model = torch.nn.ParameterDict({"weight": torch.nn.Parameter(torch.ones((), dtype=dtype))})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    values = []
    for _ in range(STEPS):
        model["weight"].grad = torch.tensor(-update, dtype=dtype)
        optimizer.step()
        values.append(model["weight"].item())
    return values, tuple(n for n, p in model.named_parameters() if p.dtype != torch.float32)


@pytest.mark.parametrize(("update", "wanted"), [(0.001, 1.2), (-0.001, 0.8)])
def test_g14_fp32_master_weight_takes_small_updates(update: float, wanted: float) -> None:
    values, narrow = train_one_weight(torch.float32, update)
    assert values[-1] == pytest.approx(wanted, abs=1e-4)
    assert judge_twin(lane(values), lane(values, low_precision_parameters=narrow)).green


@pytest.mark.parametrize("update", [0.001, -0.001])
def test_g14_pure_bf16_weight_stays_and_is_red_by_name(update: float) -> None:
    values, narrow = train_one_weight(torch.bfloat16, update)
    assert values[-1] == 1.0
    verdict = judge_twin(lane(values), lane(values, low_precision_parameters=narrow))
    assert not verdict.green
    assert problem_with(verdict, "bf16 lane", "weight", "below fp32")


def test_g14_pure_bf16_weight_is_red_by_its_loss_too() -> None:
    wide, _ = train_one_weight(torch.float32, 0.001)
    narrow, _ = train_one_weight(torch.bfloat16, 0.001)
    verdict = judge_twin(lane(wide), lane(narrow))
    assert verdict.worst_step == STEPS
    assert verdict.worst_delta == pytest.approx(0.2, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_g15_mean_of_thousand_ones_is_one(dtype: torch.dtype) -> None:
    losses = torch.ones(1000, dtype=dtype)
    assert mean_loss(losses.unbind()) == 1.0


def test_g15_bf16_running_sum_is_the_fault_that_mean_loss_avoids() -> None:
    total = torch.zeros((), dtype=torch.bfloat16)
    for loss in torch.ones(1000, dtype=torch.bfloat16):
        total += loss
    assert float(total) / 1000 == 0.256


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_g15_mean_loss_is_the_exact_mean_rounded(losses: list[float]) -> None:
    exact = sum(Fraction(loss) for loss in losses) / len(losses)
    assert mean_loss(losses) == pytest.approx(float(exact), rel=1e-15, abs=1e-300)


def test_mean_loss_of_nothing_is_refused() -> None:
    with pytest.raises(ProbeError, match="0 losses"):
        mean_loss([])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), noise=st.sampled_from([0.0, 0.01, 0.05, 0.15]))
def test_spike_steps_ordinary_noise_has_none(seed: int, noise: float) -> None:
    assert spike_steps(falling(noise=noise, seed=seed)) == ()


def test_spike_steps_rate_warm_up_plateau_then_fall_has_none() -> None:
    plateau = [7.0 + 0.02 * math.sin(step) for step in range(60)]
    assert spike_steps(plateau + falling(140)) == ()


def test_spike_steps_sudden_fall_is_no_spike() -> None:
    assert spike_steps([7.0] * 50 + [4.0] * 50) == ()


def test_spike_steps_jump_into_a_higher_level_is_found_at_its_start() -> None:
    assert spike_steps([4.0] * 50 + [5.0] * 50)[0] == 51


@settings(max_examples=40, deadline=None)
@given(step=st.integers(21, STEPS), height=st.floats(1.25, 50), seed=st.integers(0, 100))
def test_spike_steps_planted_spike_is_found(step: int, height: float, seed: int) -> None:
    losses = falling(noise=0.01, seed=seed)
    losses[step - 1] += height
    assert step in spike_steps(losses)


def test_spike_steps_not_finite_losses_do_not_hide_a_spike() -> None:
    losses = falling(noise=0.01)
    losses[99] = math.nan
    losses[100] += 3
    assert spike_steps(losses) == (101,)
