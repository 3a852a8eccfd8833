import json
from dataclasses import replace

import psutil
import pytest
import torch
import torch.nn.functional as F

from leadline.core.errors import EnvironmentUnfitError
from leadline.probe import environment
from leadline.probe.environment import (
    bf16_on_cuda,
    device_facts,
    fingerprint,
    numeric_variables,
    run_attention_kernel,
    run_environment,
)
from leadline.probe.request import EnvironmentRequest

CPU = EnvironmentRequest(device="cpu", requirements=None)
FOUND = {
    "python": "3.11.1",
    "torch": "2.13.0",
    "cuda": "13.0",
    "variables": {},
    "device": {"kind": "cuda", "name": "Card", "driver": "1", "memory_bytes": 1},
    "distributions_sha256": "a",
}


@pytest.mark.parametrize(
    ("capability", "arch_list", "legal"),
    [
        ((7, 5), ["sm_75", "sm_80", "compute_75"], False),
        ((7, 0), ["compute_70"], False),
        ((8, 0), ["sm_80"], True),
        ((8, 6), ["sm_80"], True),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_90"], True),
        ((9, 0), ["sm_80"], False),
        ((9, 0), ["sm_80", "compute_80"], True),
        ((9, 0), ["compute_100"], False),
        ((9, 0), ["sm_90a"], True),
        ((9, 0), ["sm_80", "compute_90a"], True),
        ((10, 0), ["sm_90a"], False),
        ((10, 0), ["compute_90a"], False),
        ((10, 0), ["compute_90"], True),
        ((10, 3), ["sm_100a"], False),
        ((10, 3), ["sm_100f"], True),
        ((10, 3), ["compute_100f"], True),
        ((12, 0), ["compute_100f"], False),
        ((12, 0), ["sm_80", "sm_90"], False),
        ((12, 0), ["sm_80", "sm_90", "sm_120"], True),
        ((12, 1), ["sm_120"], True),
        ((9, 0), [], False),
        ((9, 0), ["gfx942"], False),
    ],
)
def test_g52_bf16_is_legal_only_where_the_wheel_has_code_for_the_card(capability, arch_list, legal):
    verdict = bf16_on_cuda(capability, arch_list)
    assert verdict.legal is legal
    assert f"{capability[0]}.{capability[1]}" in verdict.why


def test_g52_card_too_old_and_wheel_too_old_are_told_apart():
    assert "rent an Ampere" in bf16_on_cuda((7, 5), ["sm_75"]).why
    assert "built for sm_80, sm_90, not" in bf16_on_cuda((12, 0), ["sm_80", "sm_90"]).why
    assert "built for no GPU" in bf16_on_cuda((9, 0), []).why


def test_g52_attention_kernel_runs_here():
    assert run_attention_kernel("cpu")[1] == ""


def test_g52_attention_kernel_that_does_not_run_is_a_problem(monkeypatch):
    def no_image(*_args, **_kwargs):
        raise RuntimeError("no kernel image is available\nCompile with -g")

    monkeypatch.setattr(F, "scaled_dot_product_attention", no_image)
    problem = run_attention_kernel("cpu")[1]
    assert problem == "a bf16 attention kernel does not run: no kernel image is available"


@pytest.mark.parametrize("fault", ["not causal", "scaled", "nan"])
def test_g52_attention_kernel_with_wrong_numbers_is_a_problem(monkeypatch, fault):
    right = F.scaled_dot_product_attention

    def wrong(q, k, v, is_causal):
        if q.dtype is torch.float64:
            return right(q, k, v, is_causal=is_causal)
        out = right(q, k, v, is_causal=is_causal and fault != "not causal")
        return {"not causal": out, "scaled": out * 1.05, "nan": out * float("nan")}[fault]

    monkeypatch.setattr(F, "scaled_dot_product_attention", wrong)
    assert "kernel is wrong by" in run_attention_kernel("cpu")[1]


@pytest.mark.parametrize("key", FOUND)
def test_fingerprint_follows_each_of_its_parts(key):
    other = {"kind": "cuda", "name": "Another"} if key == "device" else "another"
    assert fingerprint({**FOUND, key: other}) != fingerprint(FOUND)


def test_fingerprint_of_a_cpu_does_not_follow_its_memory():
    machines = [{"kind": "cpu", "name": "C", "memory_bytes": size} for size in (1, 2)]
    assert len({fingerprint({**FOUND, "device": machine}) for machine in machines}) == 1


def test_variables_that_steer_the_numbers_are_kept_and_places_are_not():
    kept = {"NVIDIA_TF32_OVERRIDE": "1", "OMP_NUM_THREADS": "2", "TORCHINDUCTOR_FREEZING": "1"}
    dropped = {"PATH": "x", "TORCHINDUCTOR_CACHE_DIR": "x", "CUDA_PATH": "x", "CUDA_HOME": "x"}
    assert numeric_variables({**kept, **dropped}) == kept


def test_fingerprint_ignores_what_is_not_the_machine():
    assert fingerprint({**FOUND, "other_processes": [1], "problems": ["x"]}) == fingerprint(FOUND)


@pytest.fixture
def quick(monkeypatch):
    """The environment without its slow reading of every distribution."""
    monkeypatch.setattr(environment, "installed_distributions", lambda: {"torch": "2.13.0"})


def test_environment_of_this_machine_is_complete_json(quick):
    data = run_environment(CPU)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["problems"] == []
    assert data["bf16"]["legal"]
    assert len(data["fingerprint"]) == 64


def test_environment_fingerprint_does_not_follow_the_load(quick, monkeypatch):
    before = run_environment(CPU)["fingerprint"]
    ballast = torch.ones(32 << 20, dtype=torch.uint8)
    monkeypatch.setattr(psutil, "cpu_percent", lambda *_: 100.0)
    assert run_environment(CPU)["fingerprint"] == before
    assert ballast.numel()


def test_environment_with_another_version_is_unfit_and_names_it(quick, tmp_path):
    lock = tmp_path / "requirements.lock"
    lock.write_text("torch==2.12.0\n", encoding="utf-8")
    data = run_environment(replace(CPU, requirements=str(lock)))
    assert data["unpinned"] == ["torch 2.13.0 instead of 2.12.0"]
    assert "torch 2.13.0 instead of 2.12.0" in data["problems"][0]
    assert "requirements.lock" in data["problems"][0]


def test_environment_without_bf16_is_unfit(quick, monkeypatch):
    refused = environment.Verdict(legal=False, why="bf16 does not run on this CPU: no")
    monkeypatch.setattr(environment, "_bf16_verdict", lambda _device: refused)
    assert run_environment(CPU)["problems"] == [refused.why]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_cuda_where_there_is_none_is_refused():
    with pytest.raises(EnvironmentUnfitError, match="set device = 'cpu'"):
        device_facts("cuda")
