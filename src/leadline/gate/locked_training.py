"""What a locked run trains: model, data, optimiser and shape, from its directory alone."""

from pathlib import Path

import torch

from leadline.core.evidence import EvidenceStore
from leadline.core.lockfile import read_lock
from leadline.gate.config import load_config
from leadline.gate.context import plain
from leadline.gate.runner import CONFIG_FILE
from leadline.probe.request import Subject
from leadline.probe.subject import open_subject
from leadline.train.settings import settings_from
from leadline.train.short_run import ShortRun


def locked_short_run(run_dir: Path, base_dir: Path, seconds: float) -> ShortRun:
    """The locked batch, length, seed and device of *run_dir*, for *seconds* of training.

    Relative paths of the configuration start at *base_dir*.

    Raises:
        LockError: *run_dir* holds no lock.
        DataError, UsageError: the workload cannot be opened, or not with these shards.
    """
    lock = read_lock(run_dir).payload
    config, _ = load_config(run_dir / CONFIG_FILE)
    shards = locked_shards(run_dir)
    subject = Subject(
        workload=plain(config.workload),
        base_dir=str(base_dir),
        shards=str(shards),
        device=locked_device(run_dir),
        seed=lock["seed"],
        optimizer=plain(config.optimizer),
    )
    return ShortRun(
        workload=open_subject(subject),
        shards=shards,
        device=torch.device(subject.device),
        settings=settings_from(subject.optimizer),
        seed=subject.seed,
        micro_batch=lock["micro_batch"],
        seq_len=lock["seq_len"],
        seconds=seconds,
    )


def locked_shards(run_dir: Path) -> Path:
    """The token shards that the gate of *run_dir* verified."""
    return run_dir / str(EvidenceStore(run_dir).read()["pack"].data["shards_dir"])


def locked_device(run_dir: Path) -> str:
    """Kind of device that the gate of *run_dir* measured: `cuda` or `cpu`."""
    return str(read_lock(run_dir).payload["environment"]["device_kind"])
