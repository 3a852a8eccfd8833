"""One point in this process, on tiny workloads; tests/probe/test_process.py has real ones."""

import json
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import permutations
from types import SimpleNamespace

import pytest
import torch

from leadline.core.errors import DataError
from leadline.core.evidence import Evidence
from leadline.gate.choice import choose
from leadline.models.custom import load_workload
from leadline.probe import point, subject
from leadline.probe.failure import first_line, is_out_of_memory
from leadline.probe.memory import HostMemory
from leadline.probe.point import run_point
from leadline.probe.request import PointRequest, Subject


@pytest.fixture
def run(tiny_shards, workloads_dir, tmp_path, monkeypatch):
    """Measure a point of a tiny workload; other people's load on this machine does not count."""

    def measure(workload="clean", *, steady=True, **changes):
        if steady:
            monkeypatch.setattr(point, "timing_problems", lambda *_args, **_kwargs: [])
        request = PointRequest(
            subject=Subject(
                workload={"kind": "python", "object": f"tiny.py:{workload}"},
                base_dir=str(workloads_dir),
                shards=str(tiny_shards),
                device="cpu",
                seed=0,
            ),
            name="P1",
            micro_batch=2,
            seq_len=64,
            eval_batch=4,
            eval_batches=3,
            warmup_steps=2,
            steps=8,
            seconds=None,
            memory_limit_percent=101,
            steady_percent="3",
            checkpoint_dir=str(tmp_path / "checkpoints"),
        )
        return run_point(replace(request, **changes), lambda *_: None)

    return measure


def test_point_of_a_clean_workload_is_ok_and_plain_json(run):
    data = run()
    assert (data["status"], data["why"], data["failed_phase"]) == ("ok", "", None)
    assert json.loads(json.dumps(data, allow_nan=False)) == data


def test_point_rate_is_its_tokens_over_its_time_rounded_down(run):
    data = run()
    assert data["tokens"] == data["steps"] * data["micro_batch"] * data["seq_len"] == 8 * 2 * 64
    assert data["tok_s"] == data["tokens"] * 10**9 // data["wall_ns"]
    assert len(data["step_ns"]) == 8


def test_point_warm_up_holds_a_slow_first_step_apart(run):
    data = run("slow_first_step")
    assert data["warmup_seconds"] >= 0.5
    assert data["warmup_steps"] == 2


def test_point_by_seconds_counts_the_steps_it_took(run):
    data = run(steps=None, seconds=0.05)
    assert data["steps"] == len(data["step_ns"]) >= 2
    assert data["tokens"] == data["steps"] * 2 * 64


def test_point_removes_its_trial_checkpoint(run, tmp_path):
    data = run()
    assert data["checkpoint"]["bytes"] > 4 * 3 * data["parameters"]
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_point_with_a_timing_problem_is_rejected_with_it(run, monkeypatch):
    seen = []

    def problems(timing, *, steady_percent):
        seen.append((timing.whole.steps, steady_percent))
        return ["the halves differ"]

    monkeypatch.setattr(point, "timing_problems", problems)
    data = run(steady=False, steady_percent="2.5")
    assert (data["status"], data["why"]) == ("rejected", "the halves differ")
    assert seen == [(8, Fraction(5, 2))]


def test_g11_out_of_memory_in_train_names_train_and_its_batch(run):
    data = run("oom_in_train", warmup_steps=4)
    assert (data["status"], data["failed_phase"]) == ("oom", "train")
    assert "the train phase does not fit: out of memory at batch 2 x 64" in data["why"]


@pytest.mark.parametrize("workload", ["oom_in_eval", "host_oom_in_eval"])
def test_g11_out_of_memory_in_eval_names_eval_and_keeps_the_train_batch(run, workload):
    data = run(workload)
    assert (data["status"], data["failed_phase"], data["micro_batch"]) == ("oom", "eval", 2)
    assert "eval does not fit: out of memory at batch 4 x 64" in data["why"]


def test_point_after_one_out_of_memory_runs(run):
    run("oom_in_eval")
    assert run()["status"] == "ok"


def test_point_of_a_workload_that_raises_is_no_result(run):
    with pytest.raises(ZeroDivisionError):
        run("crash_in_train")


@pytest.mark.parametrize(
    ("error", "is_oom"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), False),
        (RuntimeError("out of memory of my own"), False),
        (ValueError("DefaultCPUAllocator"), False),
    ],
)
def test_g11_out_of_memory_is_told_by_its_kind(error, is_oom):
    assert is_out_of_memory(error) is is_oom


@pytest.mark.parametrize(("code", "is_oom"), [(2, True), (700, False)])
def test_g11_out_of_memory_of_the_driver_is_told_by_its_code(code, is_oom):
    error = torch.AcceleratorError("CUDA error: whatever it says")
    error.error_code = code
    assert is_out_of_memory(error) is is_oom


def test_out_of_memory_wrapped_by_a_compiler_is_seen():
    error = RuntimeError("backend failed")
    assert not is_out_of_memory(error)
    error.__cause__ = torch.OutOfMemoryError("trial kernel")
    assert is_out_of_memory(error)


def test_first_line_of_a_long_error_is_one_line():
    assert first_line(ValueError("one\ntwo")) == "ValueError: one"
    assert first_line(MemoryError()) == "MemoryError: no message"


def test_g13_eval_that_keeps_its_logits_is_rejected(run):
    data = run("keeps_logits")
    assert (data["status"], data["eval"]["status"]) == ("rejected", "grows")
    assert "eval memory grows" in data["why"]
    assert data["eval"]["held_bytes"] == sorted(data["eval"]["held_bytes"])


def test_g13_clean_eval_is_flat(run):
    assert run()["eval"]["status"] == "ok"


def test_point_with_nan_is_rejected_and_writes_no_checkpoint(run, tmp_path):
    data = run("nan_loss")
    assert data["status"] == "rejected"
    assert "a loss or gradient norm is NaN or Inf" in data["why"]
    assert "no checkpoint is written after step 10" in data["why"]
    assert "checkpoint" not in data
    assert not (tmp_path / "checkpoints" / "trial-P1").exists()


def test_point_with_nan_in_eval_alone_is_rejected(run, monkeypatch):
    nan = torch.tensor(float("nan"))
    monkeypatch.setattr(point.TrainStep, "evaluate", lambda *_: nan)
    data = run()
    assert (data["status"], data["why"]) == ("rejected", "the eval loss is NaN or Inf")
    assert data["eval"]["loss"] is None


def test_point_throttled_is_rejected_with_the_reason(run, monkeypatch):
    watcher = SimpleNamespace(
        reasons=("power brake",), notes=(), sample=lambda: None, restart=lambda: None
    )
    monkeypatch.setattr(point.throttle, "watch", lambda _device: watcher)
    data = run()
    assert (data["status"], data["throttled"]) == ("rejected", ["power brake"])
    assert data["why"] == "clocks were throttled: power brake"


def test_point_above_the_memory_limit_is_rejected_with_both_figures(run):
    data = run(memory_limit_percent=1)
    percent = data["memory"]["percent"]
    assert data["status"] == "rejected"
    assert data["why"] == f"peak is {percent} % of the device, limit 1 %"


def test_point_whose_allocator_had_to_retry_is_rejected(run, monkeypatch):
    monkeypatch.setattr(HostMemory, "allocator_retries", lambda _self: 2)
    data = run()
    assert data["status"] == "rejected"
    assert "retry 2 times" in data["why"]


def test_point_with_data_beyond_its_vocabulary_is_refused(run, workloads_dir, monkeypatch):
    small = replace(load_workload(workloads_dir, "tiny.py:clean"), vocab_size=256)
    monkeypatch.setattr(subject, "open_workload", lambda *_: small)
    with pytest.raises(DataError, match=r"vocabulary of 257 ids and clean has 256"):
        run()


@dataclass
class Compiling:
    """A clean workload with one compiled function, whose input grows in one call."""

    inner: object
    grows_at: int
    calls: int = 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def loss(self, model, inputs, targets):
        if model.training:
            self.calls += 1
        torch.compile(torch.sin, backend="eager", dynamic=False)(
            torch.ones(self.grows_at + (self.calls >= self.grows_at))
        )
        return self.inner.loss(model, inputs, targets)


@pytest.mark.slow
@pytest.mark.parametrize(("grows_at", "recompiles"), [(5, 1), (2, 0), (99, 0)])
def test_point_that_compiles_inside_the_window_is_rejected(
    run, workloads_dir, monkeypatch, grows_at, recompiles
):
    workload = Compiling(load_workload(workloads_dir, "tiny.py:clean"), grows_at)
    monkeypatch.setattr(point, "open_subject", lambda _subject: workload)
    data = run()
    assert data["recompiles"] == recompiles
    assert ("1 graphs were compiled inside the timed window" in data["why"]) is bool(recompiles)


def _measured(name, tok_s, status="ok", peak=5):
    data = {
        "name": name,
        "status": status,
        "why": "too big",
        "tok_s": tok_s,
        "micro_batch": tok_s,
        "seq_len": 512,
        "memory": {"device_peak_bytes": peak},
        "eval": {"batch": tok_s},
    }
    return Evidence(
        name=f"probe.{name}", green=True, reason="", inputs="", time="", sha256="", data=data
    )


def test_h08_figures_go_with_the_name_beside_them_in_any_order():
    points = [_measured("P1", 10), _measured("P2", 30), _measured("P3", 20)]
    oom = [_measured("P4", 99, status="oom"), _measured("P5", 30, peak=4)]
    for order in permutations(points + oom):
        data = choose(order).data
        assert (data["best_cfg"], data["tok_s"], data["eval"]["batch"]) == ("P5", 30, 30)
        assert data["reasons"]["P1"] == "fits, 10 tok/s"
        assert data["reasons"]["P4"] == "oom: too big"


def test_h08_missing_point_shifts_no_other():
    data = choose([_measured("P3", 20), _measured("P1", 10)]).data
    assert data["reasons"] == {"P1": "fits, 10 tok/s", "P3": "chosen: fastest of 2 that fit"}
