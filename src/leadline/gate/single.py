"""One sweep point by itself: the gate's configuration, phases up to the data, one probe."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from leadline.core.errors import LeadlineError, LockError, UsageError
from leadline.core.evidence import EvidenceStore
from leadline.core.lockfile import LOCK_FILE
from leadline.core.source import source_sha256
from leadline.gate.config import load_config
from leadline.gate.context import GateContext
from leadline.gate.defaults import demo_config_path
from leadline.gate.phases import phases_of, point_request
from leadline.gate.run_folder import alone_in, refuse_inside_data
from leadline.gate.workload_files import workload_files
from leadline.probe.process import run_probe
from leadline.probe.progress import Progress

_BEFORE_A_PROBE = ("environment", "pack")


def probe_once(
    point_name: str,
    *,
    steps: int | None,
    config_path: Path | None,
    out: Path,
    on_progress: Callable[[Progress], None],
) -> dict[str, Any]:
    """Measure *point_name*; environment and hash gate come first, and must be green.

    Raises:
        UsageError: the configuration has no such point, or *out* holds what no gate made.
        LockError: *out* is a locked run, or a gate is at work there.
        LeadlineError: environment or data are red.
    """
    path = config_path or demo_config_path()
    config, _ = load_config(path)
    base_dir = path.resolve().parent
    points = {point.name: point for point in config.sweep.points}
    if point_name not in points:
        raise UsageError(f"no point {point_name!r} in {path.name}; it has {', '.join(points)}")
    refuse_inside_data(out, config, base_dir)
    with alone_in(out):
        if (out / LOCK_FILE).exists():
            raise LockError(
                f"{out} is a locked run, and a probe would replace its evidence; "
                "choose another --out"
            )
        ctx = GateContext(
            config=config,
            base_dir=base_dir,
            run_dir=out.resolve(),
            store=EvidenceStore(out),
            code_sha256=source_sha256(),
            workload_files=workload_files(config.workload, base_dir),
            on_progress=on_progress,
        )
        _prepare(ctx)
        request = point_request(ctx, points[point_name])
        if steps is not None:
            request = replace(request, steps=steps, seconds=None)
        return run_probe(request, ctx.work_dir, f"probe-{point_name}", on_progress)


def _prepare(ctx: GateContext) -> None:
    """Record environment and data, which must be green."""
    for phase in phases_of(ctx.config.sweep.points):
        if phase.name not in _BEFORE_A_PROBE:
            continue
        finding = phase.run(ctx)
        if not finding.green:
            raise LeadlineError(f"{phase.title} is red: {finding.reason}")
        ctx.store.record(
            phase.name, green=True, reason="", inputs=phase.inputs(ctx), data=finding.data
        )
