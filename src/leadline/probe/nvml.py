"""The few readings that only the driver's management library has."""

import os
from typing import Any

import torch


def driver_version() -> str | None:
    """Driver version, or None where the library gives none."""
    nvml, _ = _open()
    return None if nvml is None else str(nvml.nvmlSystemGetDriverVersion())


def mig_mode() -> str | None:
    """`enabled`, `disabled`, or None on cards without MIG."""
    nvml, handle = _open()
    if nvml is None:
        return None
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:
        return None  # the card has no MIG
    return "enabled" if current else "disabled"


def power_limit_watts() -> int | None:
    """Power limit in force, in watts: it decides how fast the card stays under load."""
    nvml, handle = _open()
    if nvml is None:
        return None
    try:
        return round(nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000)
    except nvml.NVMLError:
        return None  # not told by this card


def other_processes() -> list[dict[str, Any]]:
    """Processes on the card that are not ours: they take memory and time from a measurement."""
    nvml, handle = _open()
    if nvml is None:
        return []
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return []  # not permitted in this container
    ours = {os.getpid(), os.getppid()}
    return [
        {"pid": int(item.pid), "bytes": int(item.usedGpuMemory or 0)}
        for item in running
        if item.pid not in ours
    ]


def _open() -> tuple[Any, Any]:
    import pynvml

    try:
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError:
        return None, None  # no driver library here; the facts are then unknown, not guessed
