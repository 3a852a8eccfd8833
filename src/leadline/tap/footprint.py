"""Peak memory of this process, on the host and on the device."""

from pathlib import Path

import psutil
import torch

STATUS = Path("/proc/self/status")


class Footprint:
    """Watches from its making on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process = psutil.Process()
        self._peak_host = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self.sample()

    def sample(self) -> None:
        """Look once; where the kernel keeps its own high-water mark, this is not needed."""
        self._peak_host = max(self._peak_host, self._process.memory_info().rss)

    def peak_host_bytes(self) -> int:
        """Resident memory at its highest: the kernel's mark, which covers the whole process."""
        self.sample()
        if STATUS.is_file():
            for line in STATUS.read_text(encoding="ascii").splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return self._peak_host

    def peak_vram_bytes(self) -> int:
        """Device memory that torch's allocator held at its highest."""
        if self._device.type != "cuda":
            return 0
        return int(torch.cuda.max_memory_reserved(self._device))
