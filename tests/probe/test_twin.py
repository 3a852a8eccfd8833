"""The numerics twin end to end on tiny workloads: the verdict itself is in test_verdict.py."""

import json
from dataclasses import replace

import pytest
import torch

from leadline.core.errors import ProbeError
from leadline.models.custom import load_workload
from leadline.probe import twin
from leadline.probe.request import Subject, TwinRequest
from leadline.probe.twin import low_precision_parameters, run_twin, weights_hash
from leadline.probe.verdict import MATMUL_ERROR_LIMIT
from leadline.train.precision import Precision
from leadline.train.step import StepSettings, TrainStep


@pytest.fixture
def run(tiny_shards, workloads_dir):
    """Run the twin of a tiny workload over 40 steps."""

    def measure(workload, on_progress=lambda *_: None, optimizer=None, **changes):
        request = TwinRequest(
            subject=Subject(
                workload={"kind": "python", "object": f"tiny.py:{workload}"},
                base_dir=str(workloads_dir),
                shards=str(tiny_shards),
                device="cpu",
                seed=0,
                optimizer=optimizer or {},
            ),
            steps=40,
            micro_batch=2,
            seq_len=96,
            tolerance=0.05,
            settle_steps=10,
        )
        return run_twin(replace(request, **changes), on_progress)

    return measure


@pytest.fixture
def step(workloads_dir):
    """A train step of a tiny workload in fp32."""

    def make(workload="clean", seed=0):
        return TrainStep(
            load_workload(workloads_dir, f"tiny.py:{workload}"),
            device=torch.device("cpu"),
            precision=Precision.FP32,
            settings=StepSettings(),
            seed=seed,
        )

    return make


def _one_step(step):
    ids = torch.arange(64).view(2, 32)
    return step(ids, ids + 1)


def test_twin_of_a_clean_workload_is_green_and_accuses_nobody(run):
    data = run("clean")
    assert (data["green"], data["problems"], data["accused"]) == (True, [], [])
    assert data["worst_delta"] <= 0.05
    assert data["modules_checked"] == 0


def test_twin_result_is_plain_json_green_or_red(run):
    for workload in ("clean", "nan_loss"):
        data = run(workload, steps=12)
        assert json.loads(json.dumps(data, allow_nan=False)) == data


def test_twin_of_a_mean_summed_in_bf16_is_red_and_names_the_module(run):
    data = run("faulty_mean")
    assert not data["green"]
    assert "the bf16 loss is" in data["problems"][0]
    assert [(item["module"], item["rule"]) for item in data["accused"]] == [
        ("pool", "accumulation in bfloat16")
    ]


def test_twin_of_a_faulty_workload_is_wrong_in_the_bf16_lane_alone(run):
    faulty, clean = run("faulty_mean"), run("clean")
    assert faulty["fp32"]["losses"] == pytest.approx(clean["fp32"]["losses"], abs=1e-4)
    assert faulty["worst_delta"] > 2 * clean["worst_delta"]


def test_g14_twin_with_weights_in_bf16_is_red_and_names_them(run):
    data = run("bf16_weights", steps=12)
    told = [text for text in data["problems"] if "held below fp32" in text]
    assert ["fp32 lane" in told[0], "bf16 lane" in told[1]] == [True, True]
    assert "embed.weight" in told[0]


def test_twin_whose_divergence_cannot_be_located_keeps_what_the_lanes_showed(run, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise ProbeError("out of device memory")

    monkeypatch.setattr(twin, "locate_divergence", refuse)
    data = run("faulty_mean")
    assert not data["green"]
    assert data["worst_delta"] > 0.05
    assert len(data["bf16"]["losses"]) == 40
    assert "could not be located: out of device memory" in data["problems"][-1]


def test_twin_tells_how_far_its_learning_rate_got(run):
    data = run("clean", optimizer={"learning_rate": 1e-3, "warmup_steps": 80})
    assert data["last_learning_rate"] == pytest.approx(0.5e-3)
    assert data["peak_learning_rate"] == 1e-3


def test_twin_with_nan_is_red_and_says_from_which_step(run):
    data = run("nan_loss", steps=12)
    assert not data["green"]
    assert "the loss of the fp32 lane is nan at step 3" in " ".join(data["problems"])
    assert data["fp32"]["losses"][2] is None


def test_twin_lanes_share_weights_and_batches(run):
    first, again = run("clean", steps=12), run("clean", steps=12)
    keys = ("initial_weights_sha256", "batches_sha256", "fp32", "bf16")
    for key in keys[:2]:
        assert first[key] == again[key]
    assert first["fp32"]["losses"] == again["fp32"]["losses"]
    assert first["bf16"]["losses"] != first["fp32"]["losses"]


def test_g19_twin_proves_its_fp32_lane_whatever_was_set_before(run, any_fp32_setting):
    data = run("clean", steps=12)
    assert data["matmul_error"] < MATMUL_ERROR_LIMIT


def test_g19_twin_whose_fp32_is_not_fp32_is_red(run, monkeypatch):
    monkeypatch.setattr(twin, "matmul_error", lambda _device: 3e-4)
    data = run("clean", steps=12)
    assert not data["green"]
    assert "the fp32 lane is not fp32" in data["problems"][0]


def test_twin_tells_its_progress_through_both_lanes(run):
    told = []
    run("clean", lambda *item: told.append(item), steps=12)
    assert [("fp32 lane", 12, 12) in told, ("bf16 lane", 12, 12) in told] == [True, True]


def test_weights_hash_follows_seed_value_and_name(step):
    base = weights_hash(step().model)
    assert weights_hash(step().model) == base
    assert weights_hash(step(seed=1).model) != base
    changed = step().model
    with torch.no_grad():
        changed.embed.weight[0, 0] = torch.nextafter(changed.embed.weight[0, 0], torch.tensor(9.0))
    assert weights_hash(changed) != base


def test_weights_hash_of_equal_bytes_under_another_name_is_another():
    one, other = torch.nn.Module(), torch.nn.Module()
    one.a = other.b = torch.nn.Parameter(torch.ones(3))
    assert weights_hash(one) != weights_hash(other)


def test_low_precision_parameters_of_fp32_weights_and_state_are_none(step):
    made = step()
    _one_step(made)
    assert low_precision_parameters(made) == ()


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_low_precision_optimizer_state_names_its_parameter(step, key):
    made = step()
    _one_step(made)
    state = made.optimizer.state[made.model.head.weight]
    state[key] = state[key].to(torch.bfloat16)
    assert low_precision_parameters(made) == ("head.weight",)


def test_low_precision_frozen_weight_does_not_count(step):
    made = step()
    made.model.embed.to(torch.float16).requires_grad_(False)
    assert low_precision_parameters(made) == ()
