"""Opening what a request names: the workload, held against the data it will read."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leadline.core.errors import DataError, UsageError
from leadline.data import load_manifest
from leadline.models.opening import open_workload
from leadline.models.workload import Workload
from leadline.probe.request import EnvironmentRequest, Subject


def open_subject(subject: Subject) -> Workload:
    """Open the workload of *subject*.

    Raises:
        DataError: the shards hold ids that the model has no row for.
        UsageError: the workload cannot be opened.
    """
    workload = open_workload(subject.workload, Path(subject.base_dir))
    needed = load_manifest(Path(subject.shards)).vocab_size
    if needed > workload.vocab_size:
        raise DataError(
            f"the shards at {subject.shards} use a vocabulary of {needed} ids and "
            f"{workload.name} has {workload.vocab_size}; set [data] vocab_size to at most that, "
            "or give the model more"
        )
    return workload


def check_workload(request: EnvironmentRequest) -> None:
    """Open the workload and hold it against what the gate will ask of it.

    Raises:
        UsageError: it cannot be opened, or a sequence length or vocabulary is beyond it.
    """
    assert request.workload is not None
    workload = open_workload(request.workload, Path(request.base_dir))
    longest = getattr(workload, "max_seq_len", None)
    asked = max(request.seq_lens, default=0)
    if longest is not None and asked > longest:
        raise UsageError(
            f"a seq_len of {asked} is asked of {workload.name}, whose max_seq_len is {longest}; "
            "shorten the point or the twin, or raise max_seq_len"
        )
    if request.vocab_size is not None and request.vocab_size > workload.vocab_size:
        raise UsageError(
            f"the data's vocabulary is {request.vocab_size} and {workload.name} has rows for "
            f"{workload.vocab_size} ids; set [data] vocab_size to at most that, or give the "
            "model more"
        )


def to_device(ids: Any, device: torch.device) -> Tensor:
    """Move int64 ids to the device without making the host wait."""
    tensor = torch.from_numpy(ids)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor
