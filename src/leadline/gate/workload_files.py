"""The files a workload is made from: part of what is measured, and so of the lock.

A `python` workload is a file of the user's with whatever it imports from beside it, found by
reading its import statements (nothing is run here); a `transformers` one may be a config.json.
Installed packages are not followed: their versions are in the environment's fingerprint.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from leadline.core.canonical import sha256_file
from leadline.core.errors import UsageError

_KEYS = {"python": "object", "transformers": "config"}


def workload_files(workload: Mapping[str, Any], base_dir: Path) -> dict[str, str]:
    """Absolute path to sha256 of every file that the `[workload]` table names or leads to.

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
    paths = _with_imports(path) if key == "object" else {path}
    return {str(each): sha256_file(each) for each in sorted(paths)}


def _with_imports(file: Path) -> set[Path]:
    """*file* and every file under its folder that it imports, directly or not."""
    found: set[Path] = set()
    waiting = [file]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _imported(path, file.parent)
    return found


def _imported(path: Path, root: Path) -> Iterator[Path]:
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        raise UsageError(f"[workload] {path} is not Python: {error}") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _module_files(root, alias.name)
        elif isinstance(node, ast.ImportFrom):
            # Relative to the importing file's package, or to the folder on the path.
            base = path.parents[node.level - 1] if node.level else root
            yield from _module_files(base, node.module or "")
            for alias in node.names:
                name = f"{node.module}.{alias.name}" if node.module else alias.name
                yield from _module_files(base, name)


def _module_files(base: Path, name: str) -> Iterator[Path]:
    """The module's file and the `__init__.py` of every package on the way, where they exist."""
    place = base
    for part in filter(None, name.split(".")):
        place = place / part
        for candidate in (place / "__init__.py", place.with_suffix(".py")):
            if candidate.is_file():
                yield candidate.resolve()


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
