"""Whether the card slowed its clocks during the measurement, and why it says it did."""

import time
from collections.abc import Mapping
from typing import Any, Protocol

import torch

_SAMPLE_SECONDS = 1.0
_REASONS = {
    "nvmlClocksEventReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksEventReasonSwThermalSlowdown": "software thermal slowdown",
    "nvmlClocksEventReasonHwThermalSlowdown": "hardware thermal slowdown",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power brake",
}
# A card at its own power limit is in its normal state under full load, and a run meets it too.
_NOTES = {"nvmlClocksEventReasonSwPowerCap": "power limit of the card"}
_RENAMED = ("ClocksEventReason", "ClocksThrottleReason")  # older libraries have the second


class ThrottleWatch(Protocol):
    """Collects what the clocks report while sampled."""

    reasons: tuple[str, ...]
    """Why a rate measured now would not be seen again."""
    notes: tuple[str, ...]
    """What a reader should know and no point is rejected for."""

    def sample(self) -> None:
        """Look, at most once a second."""

    def restart(self) -> None:
        """Forget what was seen so far: the warm-up is not the measurement."""


class NoThrottle:
    """A device whose clock events are not to be read."""

    reasons: tuple[str, ...] = ()

    def __init__(self, *notes: str) -> None:
        self.notes = notes

    def sample(self) -> None:
        """Nothing to read."""

    def restart(self) -> None:
        """Nothing to forget."""


class CudaThrottle:
    """Clock event reasons of one CUDA device, through NVML."""

    def __init__(self, index: int) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml = pynvml
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self._reasons = _masks(pynvml, _REASONS)
        self._notes = _masks(pynvml, _NOTES)
        self._readable = True
        self._last = 0.0
        self.restart()

    def restart(self) -> None:
        """Forget reasons and notes."""
        self.reasons: tuple[str, ...] = ()
        self.notes: tuple[str, ...] = ()

    def sample(self) -> None:
        """Read the reasons in force now and keep new ones."""
        now = time.monotonic()
        if not self._readable or now - self._last < _SAMPLE_SECONDS:
            return
        self._last = now
        try:
            bits = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        except self._nvml.NVMLError as error:
            self._readable = False
            self.notes = (*self.notes, f"clock events cannot be read: {error}")
            return
        self.reasons = _merged(self.reasons, self._reasons, bits)
        self.notes = _merged(self.notes, self._notes, bits)


def watch(device: torch.device) -> ThrottleWatch:
    """The watch for *device*; one that notes why where the driver's library cannot be used."""
    if device.type != "cuda":
        return NoThrottle()
    import pynvml

    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        return CudaThrottle(index)
    except pynvml.NVMLError as error:
        return NoThrottle(f"clock events cannot be read: {error}")


def _masks(nvml: Any, named: Mapping[str, str]) -> dict[int, str]:
    return {
        getattr(nvml, name, None) or getattr(nvml, name.replace(*_RENAMED)): words
        for name, words in named.items()
    }


def _merged(seen: tuple[str, ...], masks: Mapping[int, str], bits: int) -> tuple[str, ...]:
    return tuple(sorted({*seen, *(words for mask, words in masks.items() if bits & mask)}))
