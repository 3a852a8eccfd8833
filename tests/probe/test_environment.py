import json
from dataclasses import replace

import psutil
import pytest
import torch
import torch.nn.functional as F

from leadline.core.errors import EnvironmentUnfitError, UsageError
from leadline.probe import environment
from leadline.probe.environment import (
    bf16_on_cuda,
    check_workload,
    device_facts,
    fingerprint,
    installed_distributions,
    numeric_variables,
    run_attention_kernel,
    run_environment,
    unpinned_in,
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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seq_lens": (512, 4096)}, "seq_len of 4096.*max_seq_len is 1024"),
        ({"vocab_size": 4096}, "vocabulary is 4096.*rows for 2048"),
        ({"workload": {"kind": "dual-mind", "preset": "vast"}}, "preset 'vast' is unknown"),
    ],
)
def test_workload_that_cannot_do_what_will_be_asked_is_refused_first(change, words):
    request = replace(CPU, workload={"kind": "dual-mind", "preset": "tiny"})
    check_workload(request)
    with pytest.raises(UsageError, match=words):
        check_workload(replace(request, **change))


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


def _unpinned(tmp_path, text, installed):
    path = tmp_path / "requirements.lock"
    path.write_text(text, encoding="utf-8")
    return unpinned_in(path, installed)


@pytest.mark.parametrize(
    ("text", "installed", "expected"),
    [
        ("a==1.0\n", {"a": "1.0"}, []),
        ("a==1.0\n", {"a": "1.1"}, ["a 1.1 instead of 1.0"]),
        ("a==1.0\n", {"b": "9"}, ["a 1.0 is not installed"]),
        ("a==1.0 ; sys_platform == 'win32'\n", {"b": "9"}, []),
        ("A_b.c==1.0\n", {"a-b-c": "2"}, ["a-b-c 2 instead of 1.0"]),
        ("torch==2.13.0\n", {"torch": "2.13.0+cpu"}, []),
        ("torch==2.13.0+cu130\n", {"torch": "2.13.0+cpu"}, []),
        ("a==1.0 \\\n    --hash=sha256:00\n", {"a": "1.0"}, []),
        ("a==1.0 ; python_version < '3.12'\n", {"a": "1.0"}, []),
        ("a==1.0;python_version < '3.12'\na==2.0; python_version >= '3.12'\n", {"a": "2.0"}, []),
        (
            "a==1.0 ; python_version < '3.12'\na==2.0 ; python_version >= '3.12'\n",
            {"a": "3.0"},
            ["a 3.0 instead of 1.0 or 2.0"],
        ),
        ("a[extra,other]==1.0\n", {"a": "1.1"}, ["a 1.1 instead of 1.0"]),
        ("a == 1.0  # why\n", {"a": "1.1"}, ["a 1.1 instead of 1.0"]),
        ("# a==2.0\n    # via b==3\na==1.0\n", {"a": "1.0", "b": "1"}, []),
        ("a==1.0\nb>=2\nc\n", {"a": "1.0"}, ["b is not pinned with ==", "c is not pinned with =="]),
        ("a==1.0\nb==2.0\n", {"a": "1.0"}, ["b 2.0 is not installed"]),
        ("a==1.0 \\\n    --hash=sha256:00\nb==2 ; python_version < '3'\n", {"a": "1.0"}, []),
        ("b==1\na==1\n", {"a": "2", "b": "2"}, ["a 2 instead of 1", "b 2 instead of 1"]),
    ],
)
def test_unpinned_of_a_lock_names_what_differs(tmp_path, text, installed, expected):
    assert _unpinned(tmp_path, text, installed) == expected


def test_unpinned_of_a_file_without_pins_is_refused(tmp_path):
    with pytest.raises(EnvironmentUnfitError, match="pins no package"):
        _unpinned(tmp_path, "torch>=2\n", {"torch": "1.0"})


@pytest.mark.parametrize("kind", ["missing", "folder", "binary"])
def test_unpinned_of_an_unreadable_file_is_refused_by_name(tmp_path, kind):
    path = tmp_path / "requirements.lock"
    if kind == "folder":
        path.mkdir()
    elif kind == "binary":
        path.write_bytes(b"a==1\n\xff\xfe")
    with pytest.raises(EnvironmentUnfitError, match=r"requirements\.lock"):
        unpinned_in(path, {})


def test_installed_distributions_are_normalised_and_hold_torch():
    found = installed_distributions()
    assert found["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert [name for name in found if name != name.lower() or "_" in name] == []


def test_installed_distribution_twice_on_the_path_counts_as_the_first(tmp_path, monkeypatch):
    for place, version in (("first", "1.0"), ("second", "2.0")):
        info = tmp_path / place / f"twice_here-{version}.dist-info"
        info.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: twice_here\nVersion: {version}\n"
        (info / "METADATA").write_text(text, encoding="utf-8")
    for place in ("second", "first"):
        monkeypatch.syspath_prepend(str(tmp_path / place))
    assert installed_distributions()["twice-here"] == "1.0"
