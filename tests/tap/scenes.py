"""Taps of one small model, each of a shape that a broken run has to take up again.

The model weighs 3.7 MB, so that budgets of whole MiB bite: hidden 128, four MoE layers of
16 experts, BF16. The residuals of a token are 256 bytes, a layer's weights 0.9 MB.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leadline.tap.verify import verify_tap

from .conftest import Checkpoints
from .families import random_documents
from .processes import CommandServer, Ended
from .tapping import command, file_hashes

LAYERS = 4
Fault = tuple[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """A shape of tap."""

    documents: int
    """Of 64 tokens."""
    flags: dict[str, Any]
    waves: int = 1
    micro_batches: int = 1
    saves_residuals: bool = True
    """Whether the corpus is so small that residual checkpoints are worth it."""

    def arguments(self, checkpoint: Path, out: Path, **flags: Any) -> list[str]:
        """The command line of a tap into *out*."""
        documents = random_documents([64] * self.documents)
        return command(checkpoint, documents, out, **{"dtype": "bfloat16", **self.flags, **flags})


ROOMY = {"vram_mib": 64, "host_pool_mib": 4}
SCENES = {
    "small corpus": Scene(documents=3, flags={**ROOMY, "micro_batch_tokens": 64}, micro_batches=3),
    "large corpus": Scene(
        documents=20,
        flags={**ROOMY, "micro_batch_tokens": 128},
        micro_batches=10,
        saves_residuals=False,
    ),
    "waves": Scene(
        documents=64,
        flags={"vram_mib": 2, "host_pool_mib": 1},
        waves=2,
        micro_batches=64,
        saves_residuals=False,
    ),
    "waves of groups of experts": Scene(
        documents=6, flags={"vram_mib": 1, "host_pool_mib": 1}, waves=3, micro_batches=6
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """A tap that nothing broke."""

    path: Path
    hashes: dict[str, str]
    seconds: float
    steps: int
    """As `faults.die_at` counts them."""
    result: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Runs scenes on one checkpoint."""

    server: CommandServer
    checkpoint: Path

    def run(self, scene: str, out: Path, *, fault: Fault | None = None, **flags: Any) -> Ended:
        """Run a scene's command to its end."""
        return self.server.run(SCENES[scene].arguments(self.checkpoint, out, **flags), fault=fault)

    def broken(self, scene: str, out: Path, after_s: float, number: int) -> Ended:
        """Run a scene's command and send it a signal."""
        running = self.server.start(SCENES[scene].arguments(self.checkpoint, out))
        running.signal_after(after_s, number)
        return running.wait()


Wholes = Callable[[str], Whole]


def play_whole(stage: Stage, scene: str, out: Path) -> Whole:
    """Run a scene that nothing breaks, and see that it has the shape it is meant to have."""
    ended = stage.run(scene, out, fault=("die_at", {}))
    result, wanted = ended.result, SCENES[scene]
    assert result["waves"] == wanted.waves
    assert result["micro_batches"] == wanted.micro_batches
    return Whole(
        path=out,
        hashes=dict(file_hashes(out)),
        seconds=ended.told["seconds"],
        steps=ended.told["steps"],
        result=result,
    )


def build_small_model(checkpoints: Checkpoints, **config: Any) -> Path:
    """The checkpoint of all scenes."""
    shape = {
        "hidden_size": 128,
        "num_hidden_layers": LAYERS,
        "num_experts": 16,
        "moe_intermediate_size": 64,
        "intermediate_size": 64,
        "head_dim": 32,
        "mlp_only_layers": [],
    }
    return checkpoints("qwen3_moe", **{**shape, **config})


def assert_sound(tap: Path, *, tidy: bool = False) -> None:
    """A broken-off tap holds sealed layers or nothing; *tidy*: no temporary file either."""
    if (tap / "grams.json").exists():
        assert verify_tap(tap, allow_partial=True).problems == ()
    if tidy:
        assert not list(tap.rglob("*.tmp"))


def assert_same_tap(tap: Path, whole: Whole) -> None:
    """The files of a tap are those of an unbroken one, and nothing lies beside them."""
    assert dict(file_hashes(tap)) == whole.hashes
    assert verify_tap(tap).ok
    assert names(tap) == names(whole.path)


def names(tap: Path) -> list[str]:
    """Everything in a tap's folder."""
    return sorted(str(path.relative_to(tap)) for path in tap.rglob("*"))
