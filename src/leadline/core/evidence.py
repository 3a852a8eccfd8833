"""Evidence: what a phase found, kept as a readable file and tied to the ledger.

Rules
- One file a phase, `evidence/NAME.json`; floats are allowed there, because people read it.
- The file is written first, then its sha256 goes into the ledger. A kill in between
  leaves a file no ledger line vouches for, and such a file counts as missing.
- The last ledger line of a name decides. A file that no longer has the recorded hash
  is red, whatever it says.
- `inputs` is the hash of what the phase was given. A resumed gate reuses evidence only
  while its inputs are the same.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from leadline.core import atomic, canonical
from leadline.core.ledger import Ledger

SCHEMA = 1
FOLDER = "evidence"
LEDGER_FILE = "ledger.jsonl"
LEDGER_KIND = "evidence"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """One phase's finding."""

    name: str
    green: bool
    reason: str
    """Empty when green; otherwise one sentence that says what is wrong and what to do."""
    inputs: str
    time: str
    sha256: str
    """Of the file, as the ledger holds it."""
    data: Mapping[str, Any]


class EvidenceStore:
    """The evidence of one run directory."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.ledger = Ledger(run_dir / LEDGER_FILE)

    def path(self, name: str) -> Path:
        """Where the evidence *name* lies."""
        return self.run_dir / FOLDER / f"{name}.json"

    def record(
        self, name: str, *, green: bool, reason: str, inputs: str, data: Mapping[str, Any]
    ) -> Evidence:
        """Write the file, then its ledger line; a later record of a name supersedes it."""
        time = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        path = self.path(name)
        atomic.write_json(
            path,
            {
                "schema": SCHEMA,
                "name": name,
                "green": green,
                "reason": reason,
                "inputs": inputs,
                "time": time,
                "data": data,
            },
        )
        sha256 = canonical.sha256_file(path)
        self.ledger.append(
            LEDGER_KIND,
            {
                "name": name,
                "verdict": "green" if green else "red",
                "reason": reason,
                "inputs": inputs,
                "sha256": sha256,
            },
        )
        return Evidence(
            name=name,
            green=green,
            reason=reason,
            inputs=inputs,
            time=time,
            sha256=sha256,
            data=data,
        )

    def read(self) -> dict[str, Evidence]:
        """Every piece of evidence the ledger vouches for, by name.

        A file that is gone, edited or unreadable comes back red with the reason.

        Raises:
            IntegrityError: the ledger itself does not verify.
        """
        if not self.ledger.path.exists():
            return {}
        recorded: dict[str, Mapping[str, Any]] = {}
        for entry in self.ledger.entries():
            if entry.kind == LEDGER_KIND:
                recorded[str(entry.data["name"])] = entry.data
        return {name: self._read_one(name, line) for name, line in recorded.items()}

    def reusable(self, name: str, inputs: str) -> Evidence | None:
        """The green evidence *name* if it was found under the same *inputs*, else None."""
        evidence = self.read().get(name)
        if evidence is None or not evidence.green or evidence.inputs != inputs:
            return None
        return evidence

    def _read_one(self, name: str, line: Mapping[str, Any]) -> Evidence:
        path = self.path(name)
        try:
            data = path.read_bytes()
            if canonical.sha256_bytes(data) != line["sha256"]:
                return _unusable(
                    name,
                    f"evidence/{name}.json was changed after the ledger recorded it; "
                    "run the gate again to measure it anew",
                )
            content = json.loads(data)
            return Evidence(
                name=name,
                green=bool(content["green"]),
                reason=str(content["reason"]),
                inputs=str(content["inputs"]),
                time=str(content["time"]),
                sha256=str(line["sha256"]),
                data=content["data"],
            )
        except FileNotFoundError:
            return _unusable(
                name, f"evidence/{name}.json is gone; run the gate again to measure it anew"
            )
        except (OSError, ValueError, LookupError, TypeError) as error:
            return _unusable(name, f"evidence/{name}.json cannot be read: {error}")


def _unusable(name: str, reason: str) -> Evidence:
    return Evidence(name=name, green=False, reason=reason, inputs="", time="", sha256="", data={})
