"""A tap that is killed, signalled or fails goes on to the very files of an unbroken one."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leadline.rig.checkpoint import Checkpoint
from leadline.tap.manifest import read_manifest

from .conftest import Checkpoints
from .processes import CommandServer
from .scenes import (
    LAYERS,
    SCENES,
    Stage,
    Whole,
    Wholes,
    assert_same_tap,
    assert_sound,
    build_small_model,
    play_whole,
)

pytestmark = pytest.mark.slow

KILLED = -signal.SIGKILL
MOMENTS = {"small corpus": 8, "large corpus": 5, "waves": 2, "waves of groups of experts": 5}
"""Twenty moments in all."""


@pytest.fixture(scope="module")
def stage(server: CommandServer, checkpoints: Checkpoints) -> Stage:
    return Stage(server=server, checkpoint=build_small_model(checkpoints))


@pytest.fixture(scope="module")
def wholes(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Wholes:
    known: dict[str, Whole] = {}

    def get(scene: str) -> Whole:
        if scene not in known:
            known[scene] = play_whole(stage, scene, tmp_path_factory.mktemp("whole") / "tap")
        return known[scene]

    return get


@pytest.mark.parametrize("scene", SCENES)
def test_killed_at_random_moments_ends_in_the_same_files(
    stage: Stage, wholes: Wholes, tmp_path: Path, scene: str
) -> None:
    whole, chance = wholes(scene), np.random.default_rng(len(scene))
    codes = []
    for number in range(MOMENTS[scene]):
        out = tmp_path / f"tap-{number}"
        moment = float(chance.uniform(0.15, 0.9)) * whole.seconds
        codes.append(stage.broken(scene, out, moment, signal.SIGKILL).code)
        assert_sound(out)
        assert stage.run(scene, out).code == 0
        assert_same_tap(out, whole)
    assert set(codes) <= {KILLED, 0}
    assert KILLED in codes, "every moment came too late to break anything"


@pytest.mark.parametrize(
    ("scene", "points"), [("small corpus", 7), ("waves of groups of experts", 5)]
)
def test_t74_killed_before_a_step_ends_in_the_same_files(
    stage: Stage, wholes: Wholes, tmp_path: Path, scene: str, points: int
) -> None:
    """Steps of the second half: seals and residual checkpoints take turns there."""
    whole, chance = wholes(scene), np.random.default_rng(74)
    steps = chance.choice(np.arange(whole.steps // 4, whole.steps + 1), points, replace=False)
    for step in sorted(steps.tolist()):
        out = tmp_path / f"tap-{step}"
        assert stage.run(scene, out, fault=("die_at", {"step": step})).code == KILLED, step
        assert_sound(out)
        assert stage.run(scene, out).code == 0, step
        assert_same_tap(out, whole)


def test_t74_killed_again_and_again_ends_in_the_same_files(
    stage: Stage, wholes: Wholes, tmp_path: Path
) -> None:
    scene, out = "waves of groups of experts", tmp_path / "tap"
    whole = wholes(scene)
    for step in (83, 3, 41, 60, 17):
        assert stage.run(scene, out, fault=("die_at", {"step": step})).code == KILLED, step
        assert_sound(out)
    assert stage.run(scene, out).code == 0
    assert_same_tap(out, whole)


@pytest.mark.parametrize("scene", ["small corpus", "large corpus"])
def test_t70_error_in_the_last_layer_costs_only_that_layer(
    stage: Stage, wholes: Wholes, tmp_path: Path, scene: str
) -> None:
    out = tmp_path / "tap"
    failed = stage.run(scene, out, fault=("fail_in_layer", {"layer": LAYERS - 1}))
    assert failed.code == 1
    assert "planted in layer 3" in failed.stderr
    assert read_manifest(out).sealed == {0, 1, 2}
    assert_sound(out, tidy=True)
    read = stage.run(scene, out).result["bytes_read"]
    assert_same_tap(out, wholes(scene))
    tensors = Checkpoint.open(stage.checkpoint).tensors
    wanted = (f"model.layers.{LAYERS - 1}.", "model.norm.")
    last = sum(t.num_bytes for name, t in tensors.items() if name.startswith(wanted))
    again = last if SCENES[scene].saves_residuals else wholes(scene).result["bytes_read"]
    assert read == again


def test_t92_disk_without_room_for_residuals_takes_the_tap(
    stage: Stage, wholes: Wholes, tmp_path: Path
) -> None:
    whole, out = wholes("small corpus"), tmp_path / "tap"
    assert "planted" in stage.run("small corpus", out, fault=("spare_nothing", {})).stderr
    assert not (out / "work").exists()
    assert stage.run("small corpus", out).result["bytes_read"] == whole.result["bytes_read"]
    assert_same_tap(out, whole)


def cut(layer: Path) -> None:
    with layer.open("r+b") as stream:
        stream.truncate(layer.stat().st_size // 2)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "cut at half": cut,
    "gone": Path.unlink,
    "empty": lambda layer: layer.write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_t71_layer_that_is_not_whole_is_tapped_anew(
    stage: Stage, wholes: Wholes, tmp_path: Path, damage: str
) -> None:
    whole, out = wholes("small corpus"), tmp_path / "tap"
    shutil.copytree(whole.path, out)
    DAMAGES[damage](out / "layer_00001.safetensors")
    assert stage.run("small corpus", out).result["bytes_read"] > 0
    assert_same_tap(out, whole)


def test_t71_folder_that_is_empty_is_a_tap_to_begin(
    stage: Stage, wholes: Wholes, tmp_path: Path
) -> None:
    (tmp_path / "tap").mkdir()
    assert stage.run("small corpus", tmp_path / "tap").code == 0
    assert_same_tap(tmp_path / "tap", wholes("small corpus"))


def test_tap_that_is_complete_is_told_again_and_nothing_is_read(
    stage: Stage, wholes: Wholes
) -> None:
    whole = wholes("small corpus")
    before = {path: path.stat().st_mtime_ns for path in whole.path.iterdir()}
    again = stage.run("small corpus", whole.path)
    assert again.result == whole.result
    assert again.counters["read_bytes"] < whole.result["checkpoint_bytes"] // 2
    assert {path: path.stat().st_mtime_ns for path in whole.path.iterdir()} == before


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 130)]
)
def test_t93_stop_signal_at_random_moments_leaves_layers_sealed_or_no_trace(
    stage: Stage, wholes: Wholes, tmp_path: Path, number: int, code: int
) -> None:
    """Ten moments each; a tap goes on where the signal before stopped it."""
    scene, chance, out = "waves of groups of experts", np.random.default_rng(number), tmp_path / "0"
    whole, codes = wholes(scene), []
    for round_number in range(10):
        moment = float(chance.uniform(0.1, 0.9)) * whole.seconds
        ended = stage.broken(scene, out, moment, number)
        codes.append(ended.code)
        assert "Traceback" not in ended.stderr
        assert ended.code == 0 or ended.stderr == "leadline: stopped\n"
        assert_sound(out, tidy=True)
        if ended.code == 0:
            assert_same_tap(out, whole)
            out = tmp_path / str(round_number + 1)
    assert set(codes) <= {code, 0}
    assert codes.count(code) >= 3
    assert stage.run(scene, out).code == 0
    assert_same_tap(out, whole)
