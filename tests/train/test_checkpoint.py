import json
import resource
import signal
import subprocess
import sys
import warnings

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

from leadline.core.errors import DiskSpaceError, LeadlineError, NonFiniteStateError
from leadline.models.custom import load_workload
from leadline.train.checkpoint import write_checkpoint
from leadline.train.precision import Precision
from leadline.train.step import StepSettings, TrainStep

IDS = torch.arange(64).view(2, 32)
LOADER = {"position": 12, "seed": 7, "manifest_sha256": "a" * 64}


def _trained(workloads_dir, steps):
    step = TrainStep(
        load_workload(workloads_dir, "tiny.py:clean"),
        device=torch.device("cpu"),
        precision=Precision.BF16,
        settings=StepSettings(learning_rate=1e-2, warmup_steps=1),
        seed=0,
    )
    for _ in range(steps):
        step(IDS, IDS + 1)
    return step


@pytest.fixture
def step(workloads_dir):
    """A tiny model after three steps."""
    return _trained(workloads_dir, 3)


def _loaded(path, workloads_dir):
    """The state at *path*, read into a fresh model after one step of its own."""
    fresh = _trained(workloads_dir, 1)
    model, optimizer = get_state_dict(fresh.model, fresh.optimizer)
    state = {"model": model, "optimizer": optimizer, "step": 0, "loader": dict.fromkeys(LOADER)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(state, checkpoint_id=str(path), no_dist=True)
    return state


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_checkpoint_written_holds_the_state_of_the_step(step, workloads_dir, tmp_path):
    write_checkpoint(tmp_path / "one", step, LOADER)
    state = _loaded(tmp_path / "one", workloads_dir)
    model, optimizer = get_state_dict(step.model, step.optimizer)
    assert (state["step"], state["loader"]) == (3, LOADER)
    assert all(torch.equal(state["model"][name], model[name]) for name in model)
    for name, held in optimizer["state"].items():
        assert all(torch.equal(state["optimizer"]["state"][name][k], held[k]) for k in held)


def test_checkpoint_is_measured_in_bytes_on_disk(step, tmp_path):
    written = write_checkpoint(tmp_path / "deep" / "one", step, LOADER)
    files = [path for path in written.path.rglob("*") if path.is_file()]
    assert written.bytes == sum(path.stat().st_size for path in files) > 0
    assert written.wall_ns > 0
    assert _names(tmp_path / "deep") == ["one"]


def test_checkpoint_that_exists_is_never_replaced(step, workloads_dir, tmp_path):
    write_checkpoint(tmp_path / "one", step, LOADER)
    step(IDS, IDS + 1)
    with pytest.raises(LeadlineError, match="never replaced"):
        write_checkpoint(tmp_path / "one", step, LOADER)
    assert _loaded(tmp_path / "one", workloads_dir)["step"] == 3


def _poison(step, where, value):
    if where == "weight":
        step.model.head.weight.data[3, 1] = value
    elif where == "buffer":
        step.model.register_buffer("seen", torch.tensor([0.0, value]))
    else:
        step.optimizer.state[step.model.head.weight][where][0, 0] = value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["weight", "buffer", "exp_avg", "exp_avg_sq"])
def test_g20_state_that_is_not_finite_is_refused_by_name(step, tmp_path, where, value):
    _poison(step, where, value)
    name = "model.seen" if where == "buffer" else r"head\.weight"
    with pytest.raises(NonFiniteStateError, match=f"after step 3: NaN or Inf in .*{name}"):
        write_checkpoint(tmp_path / "one", step, LOADER)
    assert _names(tmp_path) == []


def test_g20_diverged_step_leaves_the_older_checkpoint_to_load(step, workloads_dir, tmp_path):
    write_checkpoint(tmp_path / "step-3", step, LOADER)
    handle = step.model.mix.weight.register_hook(lambda grad: grad * float("nan"))
    step(IDS, IDS + 1)
    handle.remove()
    with pytest.raises(NonFiniteStateError, match="after step 4"):
        write_checkpoint(tmp_path / "step-4", step, LOADER)
    assert _names(tmp_path) == ["step-3"]
    state = _loaded(tmp_path / "step-3", workloads_dir)
    assert all(bool(weight.isfinite().all()) for weight in state["model"].values())


def test_h05_disk_that_fills_up_leaves_the_older_checkpoint_alone(step, workloads_dir, tmp_path):
    size = write_checkpoint(tmp_path / "one", step, LOADER).bytes
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, hard))
    try:
        with pytest.raises(DiskSpaceError, match="two"):
            write_checkpoint(tmp_path / "two", step, LOADER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert _names(tmp_path) == ["one"]
    assert _loaded(tmp_path / "one", workloads_dir)["step"] == 3


def test_checkpoint_without_room_for_its_last_sync_leaves_nothing(step, tmp_path, full_disk):
    with pytest.raises(DiskSpaceError, match="disk is full"):
        write_checkpoint(tmp_path / "one", step, LOADER)
    assert _names(tmp_path) == []


def test_g24_leftover_of_a_killed_write_is_replaced(step, workloads_dir, tmp_path):
    leftover = tmp_path / ".one.tmp"
    leftover.mkdir()
    (leftover / "__0_0.distcp").write_bytes(b"half")
    (leftover / "stale").write_bytes(b"old")
    written = write_checkpoint(tmp_path / "one", step, LOADER)
    assert _names(tmp_path) == ["one"]
    assert "stale" not in _names(written.path)
    assert _loaded(tmp_path / "one", workloads_dir)["step"] == 3


# Writes checkpoint `one`, then dies in the middle of `two`, in a fork for each moment.
KILLED = """
import json, os, pathlib, resource, signal, sys
import torch
from leadline.models.custom import load_workload
from leadline.train import checkpoint
from leadline.train.precision import Precision
from leadline.train.step import StepSettings, TrainStep

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

step = TrainStep(
    load_workload(pathlib.Path(sys.argv[1]), "tiny.py:clean"),
    device=torch.device("cpu"), precision=Precision.BF16,
    settings=StepSettings(learning_rate=1e-2, warmup_steps=1), seed=0,
)
ids, loader = torch.arange(64).view(2, 32), json.loads(sys.argv[3])
for _ in range(3):
    step(ids, ids + 1)
for moment in sys.argv[4:]:
    folder = pathlib.Path(sys.argv[2]) / moment
    size = checkpoint.write_checkpoint(folder / "one", step, loader).bytes
    child = os.fork()
    if child == 0:
        if moment == "half":  # the kernel ends the process at the byte that passes the limit
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))
        elif moment == "synced":
            pathlib.Path.replace = die
        else:
            real = checkpoint.fsync_folder
            checkpoint.fsync_folder = lambda path: die() if path == folder else real(path)
        checkpoint.write_checkpoint(folder / "two", step, loader)
        os._exit(0)
    print(os.WTERMSIG(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.slow
def test_g22_kill_at_any_moment_leaves_no_partial_checkpoint(step, workloads_dir, tmp_path):
    moments = ["half", "synced", "renamed"]
    command = [sys.executable, "-c", KILLED, str(workloads_dir), str(tmp_path)]
    command += [json.dumps(LOADER), *moments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    signals = [int(line) for line in done.stdout.split()]
    assert signals == [signal.SIGXFSZ, signal.SIGKILL, signal.SIGKILL]
    for moment in moments:
        folder = tmp_path / moment
        whole = ["one", "two"] if moment == "renamed" else ["one"]
        assert [name for name in _names(folder) if not name.startswith(".")] == whole
        for name in whole:
            assert _names(folder / name) == _names(tmp_path / "half" / "one")
        write_checkpoint(folder / "three", step, LOADER)
        if moment != "renamed":
            assert (folder / ".two.tmp").is_dir()
            write_checkpoint(folder / "two", step, LOADER)
        assert _loaded(folder / "two", workloads_dir)["step"] == 3
