"""The files a workload is made from: part of what is measured, and so of the lock.

A `python` workload is a file of the user's, a `transformers` one may be a config.json. Only
the file named is hashed; what it imports is the user's own to pin.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leadline.core.canonical import sha256_file
from leadline.core.errors import UsageError

_KEYS = {"python": "object", "transformers": "config"}


def workload_files(workload: Mapping[str, Any], base_dir: Path) -> dict[str, str]:
    """Absolute path to sha256 of every file that the `[workload]` table names.

    Raises:
        UsageError: a file is missing.
    """
    key = _KEYS.get(str(workload.get("kind")))
    named = None if key is None else workload.get(key)
    if not isinstance(named, str):
        return {}
    path = (base_dir / (named.partition(":")[0] if key == "object" else named)).resolve()
    if not path.is_file():
        raise UsageError(
            f"[workload] {key} is {named!r} and there is no file at {path}; "
            "paths start from the folder of the configuration"
        )
    return {str(path): sha256_file(path)}


def workload_problems(locked: Mapping[str, str]) -> list[str]:
    """In what the workload's files differ from the hashes that were locked."""
    problems = []
    for name, sha256 in locked.items():
        path = Path(name)
        if not path.is_file():
            problems.append(f"workload: {path} is gone; put back the file that was measured")
        elif sha256_file(path) != sha256:
            problems.append(f"workload: {path} is not what was locked; put it back, or gate anew")
    return problems
