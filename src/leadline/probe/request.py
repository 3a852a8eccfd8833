"""What a probe process is asked: plain values, written as JSON beside its result."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from leadline.core import atomic
from leadline.core.errors import ProbeError


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The model, data and device that every measurement of a gate shares."""

    workload: Mapping[str, Any]
    """The `[workload]` table."""
    base_dir: str
    """Folder that relative paths in the workload start from."""
    shards: str
    """Folder of verified token shards."""
    device: str
    """`cuda` or `cpu`."""
    seed: int
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `train.settings.StepSettings`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TwinRequest:
    """Two lanes over the same batches."""

    subject: Subject
    steps: int
    micro_batch: int
    seq_len: int
    tolerance: float
    settle_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PointRequest:
    """One point of the sweep, with its eval batches and one checkpoint."""

    subject: Subject
    name: str
    micro_batch: int
    seq_len: int
    eval_batch: int
    eval_batches: int
    warmup_steps: int
    steps: int | None
    seconds: float | None
    memory_limit_percent: int
    steady_percent: str
    """Decimal; the half windows may differ by this much."""
    checkpoint_dir: str
    """Where the trial checkpoint is written and deleted again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentRequest:
    """What the machine is, and whether it can run bf16."""

    device: str
    requirements: str | None
    """A pinned requirements file to hold the installed versions against."""
    workload: Mapping[str, Any] | None = None
    """The `[workload]` table, opened here so that a wrong one is told before anything is spent."""
    base_dir: str = "."
    """Folder that relative paths in the workload start from."""
    seq_lens: tuple[int, ...] = ()
    """Sequence lengths that will be asked of the workload."""
    vocab_size: int | None = None
    """Ids the data will use, where that is known already."""


Request = TwinRequest | PointRequest | EnvironmentRequest
_KINDS: Mapping[str, type[Request]] = {
    "twin": TwinRequest,
    "point": PointRequest,
    "environment": EnvironmentRequest,
}


def kind_of(request: Request) -> str:
    """The word that names the request's class on disk."""
    return next(kind for kind, cls in _KINDS.items() if isinstance(request, cls))


def write_request(path: Path, request: Request) -> None:
    """Write *request* for a process to read."""
    atomic.write_json(path, {"kind": kind_of(request), **asdict(request)})


def read_request(path: Path) -> Request:
    """Read what `write_request` wrote.

    Raises:
        ProbeError: the file is not a request.
    """
    try:
        content = json.loads(path.read_bytes())
        cls = _KINDS[content.pop("kind")]
        if "subject" in content:
            content["subject"] = Subject(**content["subject"])
        if "seq_lens" in content:
            content["seq_lens"] = tuple(content["seq_lens"])
        return cls(**content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProbeError(f"{path} is not a probe request: {error}") from error
