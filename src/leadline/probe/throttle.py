"""Whether the card slowed its clocks during the measurement, and why it says it did."""

import time
from typing import Protocol

import torch

_SAMPLE_SECONDS = 1.0
# Power capping at the card's own limit is its normal state under full load, and a run
# will meet it too; the reasons below mean the rate would not be seen again.
_REASONS = {
    "nvmlClocksEventReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksEventReasonSwThermalSlowdown": "software thermal slowdown",
    "nvmlClocksEventReasonHwThermalSlowdown": "hardware thermal slowdown",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power brake",
}
_OLD_NAMES = {
    "nvmlClocksEventReasonHwSlowdown": "nvmlClocksThrottleReasonHwSlowdown",
    "nvmlClocksEventReasonSwThermalSlowdown": "nvmlClocksThrottleReasonSwThermalSlowdown",
    "nvmlClocksEventReasonHwThermalSlowdown": "nvmlClocksThrottleReasonHwThermalSlowdown",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
}


class ThrottleWatch(Protocol):
    """Collects reasons while sampled."""

    reasons: tuple[str, ...]

    def sample(self) -> None:
        """Look, at most once a second."""


class NoThrottle:
    """A device that reports no clock events."""

    reasons: tuple[str, ...] = ()

    def sample(self) -> None:
        """Nothing to read."""


class CudaThrottle:
    """Clock event reasons of one CUDA device, through NVML."""

    def __init__(self, index: int) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml = pynvml
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self._masks = {
            getattr(pynvml, name, None) or getattr(pynvml, _OLD_NAMES[name]): words
            for name, words in _REASONS.items()
        }
        self.reasons: tuple[str, ...] = ()
        self._last = 0.0

    def sample(self) -> None:
        """Read the reasons in force now and keep new ones."""
        now = time.monotonic()
        if now - self._last < _SAMPLE_SECONDS:
            return
        self._last = now
        bits = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        seen = {words for mask, words in self._masks.items() if bits & mask}
        self.reasons = tuple(sorted({*self.reasons, *seen}))


def watch(device: torch.device) -> ThrottleWatch:
    """The watch for *device*."""
    if device.type != "cuda":
        return NoThrottle()
    return CudaThrottle(torch.cuda.current_device() if device.index is None else device.index)
