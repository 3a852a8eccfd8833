"""The run directory: a gate's own or nobody's, and one gate at a time in it.

A gate replaces what lies under the names it uses there (data, build, pack, gate.toml), so it
works only in a folder that is new, empty, or marked by an earlier gate or probe.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from leadline.core.atomic import explained_os_errors
from leadline.core.errors import LockError, UsageError
from leadline.core.evidence import LEDGER_FILE
from leadline.gate.config import GateConfig

_WORK_FOLDER = "work"
_GUARD_FILE = ".gate.guard"
_MARKS = (LEDGER_FILE, _GUARD_FILE)


@contextmanager
def alone_in(run_dir: Path) -> Iterator[None]:
    """Make the run directory and hold it against a second gate; a killed holder lets go.

    Raises:
        UsageError: the folder holds files that no gate or probe made.
        LockError: another one is at work there.
    """
    _refuse_foreign(run_dir)
    guard_path = run_dir / _GUARD_FILE
    with explained_os_errors(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    guard = FileLock(guard_path)
    try:
        guard.acquire(timeout=0)
    except Timeout as error:
        raise LockError(
            f"another gate is at work in {run_dir}; wait for it or choose another --out"
        ) from error
    except OSError:
        with explained_os_errors(guard_path):
            raise
    try:
        with explained_os_errors(run_dir):
            (run_dir / _WORK_FOLDER).mkdir(exist_ok=True)
        yield
    finally:
        guard.release()


def refuse_inside_data(run_dir: Path, config: GateConfig, base_dir: Path) -> None:
    """Refuse a run directory inside the text or shards it is about: it would become part of them.

    Raises:
        UsageError: it lies there.
    """
    for key in ("text", "shards"):
        named = getattr(config.data, key)
        if named is None or named == "stdlib":
            continue
        if run_dir.resolve().is_relative_to((base_dir / named).resolve()):
            raise UsageError(
                f"--out {run_dir} lies inside [data] {key} = {named!r}, which it would spoil; "
                "choose an --out elsewhere"
            )


def _refuse_foreign(run_dir: Path) -> None:
    if not run_dir.is_dir() or any((run_dir / name).exists() for name in _MARKS):
        return
    with explained_os_errors(run_dir, "read"):
        foreign = next(run_dir.iterdir(), None)
    if foreign is not None:
        raise UsageError(
            f"{run_dir} holds {foreign.name} and no gate's ledger: a gate would replace files of "
            "others there; choose an --out that is new or empty"
        )
