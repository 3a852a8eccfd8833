"""RUN/report.html: one self-contained page from whatever a run directory holds.

- The page asks the network for nothing: style and drawings are inside it, and its own
  content policy forbids the rest.
- Every value from a run is escaped by the template engine; only the drawings of this
  package, which escape for themselves, are taken as they are.
- The same run gives the same bytes: no clock is read here.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from leadline._version import __version__
from leadline.core.atomic import write_bytes
from leadline.core.gate import PROBE_PREFIX
from leadline.report import provenance
from leadline.report.budget import budget_view, checkpoint_view
from leadline.report.record import RunRecord, read_run
from leadline.report.summary import summary_view
from leadline.report.sweep import sweep_view
from leadline.report.twin import twin_view

REPORT_FILE = "report.html"
_DEFAULT_MEMORY_LIMIT_PERCENT = 80.0  # the procedure's headroom rule

_CODE = re.compile("`([^`]+)`")
# Legal in JSON, illegal in HTML; a value that holds one must not break the page.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """How a section of the page stands."""

    state: str
    """green, red or missing."""
    reason: str


def build_report(run_dir: Path) -> Path:
    """Write the report into *run_dir* and return its path.

    A run that is half-finished or damaged gives a page that says so.

    Raises:
        UsageError: *run_dir* is not a run directory.
        DiskSpaceError: the disk is full; an earlier report stays as it was.
        LeadlineError: the folder cannot be written.
    """
    page = render(read_run(run_dir))
    path = run_dir / REPORT_FILE
    write_bytes(path, page.encode("utf-8", errors="replace"))
    return path


def render(record: RunRecord) -> str:
    """The page as text."""
    text = _templates().get_template("page.html").render(_views(record))
    return _CONTROL.sub("\ufffd", text)


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("leadline.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["prose"] = _prose
    return environment


def _prose(text: str) -> Markup:
    """Escaped text with `code` in backticks set as code."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))


def _views(record: RunRecord) -> dict[str, Any]:
    probes = {name: record.data(f"{PROBE_PREFIX}{name}") for name in record.points}
    measured = {
        name: data for name, data in probes.items() if f"{PROBE_PREFIX}{name}" in record.evidence
    }
    reasons = {name: record.evidence[f"{PROBE_PREFIX}{name}"].reason for name in measured}
    return {
        "version": __version__,
        "summary": summary_view(record),
        "standing": _standings(record),
        "twin": twin_view(record.data("twin")),
        "sweep": sweep_view(measured, record.data("choice"), reasons, _memory_limit(record)),
        "unmeasured": [name for name in record.points if name not in measured],
        "budget": budget_view(record.data("budget")),
        "checkpoint": checkpoint_view(record.data("checkpoint")),
        "pack": provenance.pack_figures(record.data("pack")),
        "environment": provenance.environment_figures(record.data("environment")),
        "distributions": provenance.distributions(record.data("environment")),
        "disposition": provenance.disposition_figures(record.data("disposition")),
        "lock": record.lock,
        "lock_figures": provenance.lock_figures(record.lock),
        "ledger": provenance.ledger_view(record),
        "config_text": record.config_text,
    }


def _memory_limit(record: RunRecord) -> float:
    chosen = record.config.number("sweep", "memory_limit_percent")
    return _DEFAULT_MEMORY_LIMIT_PERCENT if chosen is None else chosen


def _standings(record: RunRecord) -> dict[str, Standing]:
    """Section name to its standing; the sweep stands with all its points and the choice."""
    names = ("environment", "pack", "twin", "checkpoint", "budget", "disposition")
    standings = {name: _standing(record, (name,)) for name in names}
    points = tuple(f"{PROBE_PREFIX}{name}" for name in record.points)
    standings["sweep"] = _standing(record, (*points, "choice"))
    return standings


def _standing(record: RunRecord, names: tuple[str, ...]) -> Standing:
    found = [record.evidence[name] for name in names if name in record.evidence]
    red = [evidence for evidence in found if not evidence.green]
    if red:
        reasons = dict.fromkeys(evidence.reason for evidence in red if evidence.reason)
        return Standing(state="red", reason=" / ".join(reasons))
    if len(found) < len(names):
        return Standing(state="missing", reason="")
    return Standing(state="green", reason="")
