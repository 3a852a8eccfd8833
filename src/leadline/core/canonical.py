"""Canonical JSON bytes and sha256: the only place either is made.

Ledger and lock are hashed over RFC 8785 bytes. Floats are refused rather than
formatted, because two languages print the same float differently and a hash
then depends on the reader; measured values go in as integers or as decimal
strings.
"""

import hashlib
from pathlib import Path

import rfc8785

from leadline.core.errors import UsageError

_CHUNK_BYTES = 1 << 20
_MAX_SAFE_INTEGER = 2**53 - 1  # RFC 8785 section 3.2.2.3: beyond this, readers disagree

_TYPE_NAMES = "object, list, string, integer, true, false or null"


def canonical_bytes(value: object) -> bytes:
    """RFC 8785 bytes of *value*, which may hold no float.

    Raises:
        UsageError: a float, an integer beyond 2**53 - 1, or a type JSON lacks.
    """
    _refuse_inexact(value, "$")
    return rfc8785.dumps(value)  # type: ignore[arg-type]


def sha256_bytes(data: bytes) -> str:
    """Lower-case hexadecimal sha256 of *data*."""
    return hashlib.sha256(data).hexdigest()


def sha256_json(value: object) -> str:
    """Sha256 of the canonical bytes of *value*."""
    return sha256_bytes(canonical_bytes(value))


def sha256_file(path: Path) -> str:
    """Sha256 of a file, read in chunks so that size does not matter."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _refuse_inexact(value: object, where: str) -> None:
    if value is None or isinstance(value, (bool, str)):
        return
    if isinstance(value, int):
        if abs(value) > _MAX_SAFE_INTEGER:
            raise UsageError(
                f"{where} holds the integer {value}, beyond 2**53 - 1; "
                "write it as a decimal string"
            )
        return
    if isinstance(value, float):
        raise UsageError(
            f"{where} holds the float {value!r}; ledger and lock take integers or decimal strings"
        )
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _refuse_inexact(item, f"{where}[{index}]")
        return
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise UsageError(f"{where} has the key {key!r}, which is not a string")
            _refuse_inexact(item, f"{where}.{key}")
        return
    raise UsageError(f"{where} holds a {type(value).__name__}; JSON has {_TYPE_NAMES}")
