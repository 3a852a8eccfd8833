"""How a probe process ends, told by stand-ins for the interpreter and by a few real ones."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
import torch

from leadline.core.errors import DataError, LeadlineError, ProbeError
from leadline.probe import process
from leadline.probe.process import run_probe
from leadline.probe.progress import Progress, ProgressPipe, parse_progress
from leadline.probe.request import EnvironmentRequest, PointRequest, Subject, write_request

REQUEST = EnvironmentRequest(device="cpu", requirements=None)
LOG_NAME = r"probe-P1\.log"


@pytest.fixture
def served_by(tmp_path, monkeypatch):
    """Run a probe whose process is this shell script, with the result's path in $result."""

    def serve(script, on_progress=lambda _progress: None):
        path = tmp_path / "python"
        result = tmp_path / "probe-P1.result.json"
        path.write_text(f"#!/bin/sh\nresult='{result}'\n{script}\n", encoding="utf-8")
        path.chmod(0o755)
        monkeypatch.setattr(process.sys, "executable", str(path))
        return run_probe(REQUEST, tmp_path, "probe-P1", on_progress)

    return serve


def _result(**content):
    return f"cat > \"$result\" <<'END'\n{json.dumps(content)}\nEND"


def test_probe_that_ends_well_gives_its_data(served_by):
    assert served_by(_result(ok=True, data={"tok_s": 5})) == {"tok_s": 5}


def test_probe_that_refuses_raises_its_own_error(served_by):
    with pytest.raises(DataError, match=r"^no room$"):
        served_by(_result(ok=False, kind="DataError", message="no room"))


def test_probe_that_refuses_in_an_unknown_way_raises_the_base_error(served_by):
    with pytest.raises(LeadlineError, match=r"^odd$"):
        served_by(_result(ok=False, kind="NewerError", message="odd"))


@pytest.mark.parametrize("name", ["KILL", "TERM", "SEGV", "ABRT"])
def test_probe_killed_names_the_signal_and_the_log(served_by, name):
    with pytest.raises(ProbeError, match=f"environment process .* by SIG{name}.*{LOG_NAME}"):
        served_by(f"kill -{name} $$")


def test_probe_killed_after_its_result_is_still_an_error(served_by):
    with pytest.raises(ProbeError, match="SIGKILL"):
        served_by(_result(ok=True, data={}) + "\nkill -KILL $$")


def test_probe_that_crashed_names_code_cause_and_log(served_by):
    lines = "Traceback\\n  File x\\nValueError: seven\\n\\nSet TORCH_LOGS for more\\n"
    with pytest.raises(ProbeError, match=f"code 3: ValueError: seven; see .*{LOG_NAME}"):
        served_by(f"printf '{lines}' >&2; exit 3")


@pytest.mark.parametrize(("said", "told"), [("", "it said nothing"), ("gone away", "gone away")])
def test_probe_that_crashed_without_an_exception_tells_its_last_word(served_by, said, told):
    with pytest.raises(ProbeError, match=f"code 1: {told}"):
        served_by(f"echo '{said}' >&2; exit 1")


def test_probe_that_leaves_no_result_is_an_error(served_by, tmp_path):
    (tmp_path / "probe-P1.result.json").write_text('{"ok": true, "data": {"old": 1}}')
    with pytest.raises(ProbeError, match="code 0"):
        served_by("exit 0")


def test_probe_progress_is_told_and_other_output_is_not(served_by):
    told = []
    line = json.dumps({"phase": "timed", "done": 3, "total": 9})
    served_by(f"echo noise; echo '{line}'; echo '[]'\n" + _result(ok=True, data={}), told.append)
    assert told == [Progress(phase="timed", done=3, total=9)]


def test_probe_that_prints_what_is_no_text_goes_on(served_by):
    script = "printf '\\377\\376\\n'\n" + _result(ok=True, data={"x": 1})
    assert served_by(script) == {"x": 1}


def test_probe_is_killed_when_the_caller_stops_waiting(served_by, tmp_path):
    line = json.dumps({"phase": "start", "done": 0, "total": None})

    def stop(_progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        served_by(f"echo $$ > '{tmp_path}/pid'; echo '{line}'; exec sleep 100", stop)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("chosen", [None, "active"])
def test_probe_threads_wait_passively_unless_the_caller_chose(served_by, monkeypatch, chosen):
    monkeypatch.delenv("OMP_WAIT_POLICY")
    if chosen:
        monkeypatch.setenv("OMP_WAIT_POLICY", chosen)
    data = served_by('echo "{\\"ok\\": true, \\"data\\": \\"$OMP_WAIT_POLICY\\"}" > "$result"')
    assert data == (chosen or "passive")


@pytest.mark.parametrize(
    "line", ["", "\n", "text", "[]", "1", "null", '"x"', "{}", '{"phase": 1}', "{", "NaN"]
)
def test_progress_of_anything_else_is_none(line):
    assert parse_progress(line) is None


def test_progress_is_written_as_it_is_read(capsys):
    ProgressPipe()("timed", 4, 4)
    assert parse_progress(capsys.readouterr().out) == Progress(phase="timed", done=4, total=4)


def test_progress_too_soon_is_left_out_but_never_the_end(capsys):
    pipe = ProgressPipe()
    for done in range(1, 101):
        pipe("timed", done, 100)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 100
    assert parse_progress(lines[-1]).done == 100


def _point(shards, workloads_dir, out, workload, device="cpu"):
    return PointRequest(
        subject=Subject(
            workload={"kind": "python", "object": f"tiny.py:{workload}"},
            base_dir=str(workloads_dir),
            shards=str(shards),
            device=device,
            seed=0,
        ),
        name="P1",
        micro_batch=4,
        seq_len=64,
        eval_batch=8,
        eval_batches=3,
        warmup_steps=2,
        steps=20,
        seconds=None,
        memory_limit_percent=101,
        steady_percent="100",
        checkpoint_dir=str(out / "checkpoints"),
    )


@pytest.fixture(scope="module")
def real_points(tiny_shards, workloads_dir, tmp_path_factory):
    """Three points one after the other in real processes: clean, out of memory, clean."""
    out = tmp_path_factory.mktemp("points")
    return [
        run_probe(_point(tiny_shards, workloads_dir, out, workload), out, name, lambda _: None)
        for name, workload in (("a", "clean"), ("b", "oom_in_eval"), ("c", "clean"))
    ]


@pytest.mark.slow
def test_g10_each_point_has_a_process_of_its_own(real_points):
    assert len({data["pid"] for data in real_points} | {os.getpid()}) == 4


@pytest.mark.slow
def test_g10_point_after_another_finds_the_memory_of_a_cold_start(real_points):
    first, _, third = (data["memory"]["allocator_peak_bytes"] for data in real_points)
    assert third == pytest.approx(first, rel=0.05)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_g10_points_of_one_configuration_have_equal_peaks_on_the_card(
    tiny_shards, workloads_dir, tmp_path
):
    request = _point(tiny_shards, workloads_dir, tmp_path, "clean", "cuda")
    found = [run_probe(request, tmp_path, name, lambda _: None) for name in ("a", "b")]
    for key in ("device_start_bytes", "device_peak_bytes", "allocator_peak_bytes"):
        first, second = (data["memory"][key] for data in found)
        assert second == pytest.approx(first, rel=0.01)
    assert found[0]["pid"] != found[1]["pid"]


@pytest.mark.slow
def test_g11_out_of_memory_in_eval_is_told_as_that_and_the_batch_stays(real_points):
    data = real_points[1]
    assert (data["status"], data["failed_phase"]) == ("oom", "eval")
    assert data["why"].startswith("eval does not fit: out of memory at batch 8 x 64")
    assert (data["micro_batch"], data["seq_len"]) == (4, 64)
    assert data["steps"] == 20


@pytest.mark.slow
def test_g11_point_after_one_out_of_memory_runs(real_points):
    assert real_points[2]["status"] != "oom"
    assert real_points[2]["checkpoint"]["bytes"] > 0


@pytest.mark.slow
def test_probe_of_a_workload_that_raises_tells_its_exception(tiny_shards, workloads_dir, tmp_path):
    request = _point(tiny_shards, workloads_dir, tmp_path, "crash_in_train")
    with pytest.raises(ProbeError, match="ZeroDivisionError: a fault of the workload's own"):
        run_probe(request, tmp_path, "probe-P1", lambda _: None)


PARENT = """
import sys
from pathlib import Path
from leadline.probe.process import run_probe
from leadline.probe.request import read_request
path = Path(sys.argv[1])
run_probe(read_request(path), path.parent, "child", lambda p: print(p.phase, flush=True))
"""


@pytest.mark.slow
def test_probe_whose_parent_is_killed_leaves_no_orphan(tiny_shards, tmp_path):
    # It reports nothing while it sleeps, so no broken pipe ends it either.
    (tmp_path / "tiny.py").write_text("import time\ntime.sleep(100)\n", encoding="utf-8")
    write_request(tmp_path / "in.json", _point(tiny_shards, tmp_path, tmp_path, "asleep"))
    command = [sys.executable, "-c", PARENT, str(tmp_path / "in.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "start\n"
        workers = psutil.Process(parent.pid).children()
        parent.kill()
    alive = psutil.wait_procs(workers, timeout=10)[1]
    for worker in alive:
        worker.kill()
    assert (len(workers), alive) == (1, [])


@pytest.mark.slow
def test_probe_whose_parent_died_before_it_looked_ends_itself(tmp_path):
    write_request(tmp_path / "in.json", EnvironmentRequest(device="cpu", requirements=None))
    files = [str(tmp_path / "in.json"), str(tmp_path / "out.json")]
    command = [sys.executable, "-P", "-m", "leadline.probe.worker", *files]
    # Process 1 stands for a parent that is no longer ours.
    ended = subprocess.run([*command, "1"], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert not (tmp_path / "out.json").exists()


@pytest.mark.slow
def test_probe_takes_no_module_from_the_callers_folder(tmp_path, monkeypatch):
    (tmp_path / "statistics.py").write_text("raise SystemExit('not yours')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    request = EnvironmentRequest(device="cpu", requirements=None)
    assert run_probe(request, tmp_path, "environment", lambda _: None)["problems"] == []


@pytest.mark.slow
def test_probe_does_not_wait_for_a_process_the_model_left_behind(tiny_shards, tmp_path):
    (tmp_path / "tiny.py").write_text(
        "import subprocess\nsubprocess.Popen(['sleep', '60'])\nclean = 3\n", encoding="utf-8"
    )
    request = _point(tiny_shards, tmp_path, tmp_path, "clean")
    with pytest.raises(LeadlineError, match="not a workload"):
        run_probe(request, tmp_path, "probe-P1", lambda _: None)
    left = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "60"]]
    assert left  # it still runs, so the probe ended before it
    for orphan in left:
        orphan.kill()
