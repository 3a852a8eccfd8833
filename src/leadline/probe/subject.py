"""Opening what a request names: the workload, held against the data it will read."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leadline.core.errors import DataError
from leadline.data import load_manifest
from leadline.models.opening import open_workload
from leadline.models.workload import Workload
from leadline.probe.request import Subject


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


def to_device(ids: Any, device: torch.device) -> Tensor:
    """Move int64 ids to the device without making the host wait."""
    tensor = torch.from_numpy(ids)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor
