"""The identity of the code that measures: a hash over leadline's own source files."""

import hashlib
from pathlib import Path

import leadline
from leadline.core.canonical import sha256_file


def source_sha256() -> str:
    """Sha256 over (path, sha256) of every .py file of the package."""
    root = Path(leadline.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0{sha256_file(path)}\n".encode())
    return digest.hexdigest()
