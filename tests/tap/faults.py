"""Faults that a forked command suffers: applied in the child, before it begins."""

import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partialmethod
from pathlib import Path
from typing import Any

TOLD: dict[str, Any] = {}
"""What a fault tells the test at the end of the command."""


def die_at(step: int | None = None) -> None:
    """Kill -9 before the nth step of the tap; without it, count the steps.

    A step is a stage of a layer that computes, or anything that changes the disk.
    """
    from leadline.rig.layer_pass import LayerPass
    from leadline.tap import layer_file, residual_checkpoint

    TOLD["steps"] = 0

    def before(operation: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            TOLD["steps"] += 1
            if TOLD["steps"] == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **kwargs)

        return counted

    os.fsync = before(os.fsync)
    for name in ("open", "replace", "unlink", "mkdir"):
        setattr(Path, name, before(getattr(Path, name)))
    layer_file._pieces = before(layer_file._pieces)
    residual_checkpoint.as_bytes = before(residual_checkpoint.as_bytes)
    LayerPass._cross = before(LayerPass._cross)  # type: ignore[method-assign]


def fail_in_layer(layer: int) -> None:
    """An error in the middle of a layer, of the kind that nobody foresaw."""
    from leadline.tap.gram_tap import GramTap

    collect = GramTap.end_stage

    def end_stage(self: GramTap) -> None:
        if self._layer == layer:
            raise RuntimeError(f"planted in layer {layer}")
        collect(self)

    GramTap.end_stage = end_stage  # type: ignore[method-assign]


def seal_slowly(seconds: float) -> None:
    """Every seal takes so long; the process's peak memory after each layer is told."""
    from leadline.tap.footprint import Footprint
    from leadline.tap.store import TapStore

    seal, sample = TapStore.seal, Footprint.sample
    TOLD["peaks"] = []

    def slow(self: TapStore, *args: Any, **kwargs: Any) -> bool:
        time.sleep(seconds)
        return seal(self, *args, **kwargs)

    def told(self: Footprint) -> None:
        sample(self)
        TOLD["peaks"].append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

    TapStore.seal = slow  # type: ignore[method-assign]
    Footprint.sample = told  # type: ignore[method-assign]


def limit_memory(more_bytes: int) -> None:
    """Address space beyond what the process has at its start: mappings of files included."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def small_tables() -> None:
    """Count an n-gram table of any size as one that is placed apart."""
    from leadline.rig.skeleton import Skeleton

    Skeleton.gather_tables = partialmethod(  # type: ignore[assignment,method-assign]
        Skeleton.gather_tables, floor=1
    )


def spare_nothing() -> None:
    """The disk holds the Grams to come and not a byte more; then the last layer fails."""
    from leadline.tap.store import TapStore

    TapStore.bytes_to_spare = property(lambda store: 0)  # type: ignore[assignment,method-assign]
    fail_in_layer(3)


def fill_disk(layer: int, filler: str) -> None:
    """Another program takes all space of the disk as a layer is about to be sealed."""
    from leadline.tap.store import TapStore

    seal = TapStore.seal

    def sealed(self: TapStore, number: int, *args: Any, **kwargs: Any) -> bool:
        if number == layer:
            with Path(filler).open("wb", buffering=0) as stream, suppress(OSError):
                while True:
                    stream.write(bytes(4096))
        return seal(self, number, *args, **kwargs)

    TapStore.seal = sealed  # type: ignore[method-assign]
