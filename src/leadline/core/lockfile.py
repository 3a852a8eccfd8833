"""`config.lock.json`: what was measured and decided, written once.

Canonical JSON of integers and strings. The three keys of the procedure stand at the
top level (`locked_budget_tokens`, `best_cfg`, `tok_s`), beside everything they came
from. The ledger's head and line count at the moment of locking are inside, and the
lock's own sha256 is the ledger's next line, so neither can be cut or changed alone.

A lock is never overwritten: it is linked into place, which fails where one exists.
Unknown keys are kept, so that an older reader does not lose a newer writer's.
"""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leadline.core import canonical
from leadline.core.atomic import explained_os_errors, fsync_folder
from leadline.core.errors import LeadlineError, LockError
from leadline.core.ledger import Head

SCHEMA = 1
LOCK_FILE = "config.lock.json"
WRITTEN_KIND = "lock.written"
_INTEGERS = (
    "schema",
    "locked_budget_tokens",
    "tok_s",
    "total_steps",
    "tokens_in_steps",
    "micro_batch",
    "seq_len",
    "ledger_lines",
)
_STRINGS = ("best_cfg", "code_sha256", "manifest_sha256", "environment_fingerprint", "ledger_head")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigLock:
    """A lock's content; `payload` is the whole document, the properties its main keys."""

    payload: Mapping[str, Any]

    def __post_init__(self) -> None:
        """Hold the main keys to their types.

        Raises:
            LockError: a key is missing or of the wrong type, or the schema is unknown.
        """
        for names, kind in ((_INTEGERS, int), (_STRINGS, str)):
            for name in names:
                value = self.payload.get(name)
                if not isinstance(value, kind) or isinstance(value, bool):
                    raise LockError(
                        f"{LOCK_FILE} key {name} is {value!r}, wanted {kind.__name__}; "
                        "it was edited or is not a lock of this program"
                    )
        if self.payload["schema"] != SCHEMA:
            raise LockError(
                f"{LOCK_FILE} has schema {self.payload['schema']}, this program reads {SCHEMA}; "
                "use the version of leadline that wrote it"
            )

    @property
    def anchor(self) -> Head:
        """Ledger head and length when the lock was made."""
        return Head(lines=self.payload["ledger_lines"], hash=self.payload["ledger_head"])

    @property
    def content(self) -> bytes:
        """The bytes of the file."""
        return canonical.canonical_bytes(dict(self.payload)) + b"\n"

    @property
    def sha256(self) -> str:
        """Hash of the file's bytes, as the ledger records it."""
        return canonical.sha256_bytes(self.content)


def write_lock(run_dir: Path, lock: ConfigLock) -> Path:
    """Write the lock of *run_dir*; refuses to replace one.

    Raises:
        LockError: a lock is there already.
        DiskSpaceError: the disk is full; nothing is left behind.
    """
    path = run_dir / LOCK_FILE
    with explained_os_errors(path):
        handle, name = tempfile.mkstemp(prefix=".lock.", suffix=".tmp", dir=run_dir)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(lock.content)
                stream.flush()
                os.fsync(stream.fileno())
            Path(name).chmod(0o444)
            os.link(name, path)
        except FileExistsError as error:
            raise LockError(
                f"{path} exists; a lock is never overwritten, choose another run directory"
            ) from error
        finally:
            Path(name).unlink()
        fsync_folder(run_dir)
    return path


def read_lock(run_dir: Path) -> ConfigLock:
    """Read a lock and hold its bytes against their canonical form.

    Raises:
        LockError: no lock, not JSON, not canonical, or a key missing.
    """
    path = run_dir / LOCK_FILE
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise LockError(f"{path} does not exist; `leadline gate run` writes it") from error
    except OSError as error:
        raise LockError(f"{path} cannot be read: {error.strerror}; check the path") from error
    try:
        payload = canonical.parse_canonical(data.removesuffix(b"\n"))
    except LeadlineError as error:
        raise LockError(f"{path} is not a lock: {error}; it was edited or cut") from error
    if not isinstance(payload, dict):
        raise LockError(f"{path} is not a lock: it holds no JSON object")
    lock = ConfigLock(payload=payload)
    if lock.content != data:
        raise LockError(f"{path} is not in canonical form; it was edited after it was written")
    return lock
