"""Canonical JSON bytes and sha256: the only place either is made.

Ledger and lock are hashed over RFC 8785 bytes. Floats are refused rather than
formatted, because two languages print the same float differently and a hash
then depends on the reader; measured values go in as integers or as decimal
strings.
"""

import hashlib
import json
from pathlib import Path

import rfc8785

from leadline.core.errors import IntegrityError, UsageError

_CHUNK_BYTES = 1 << 20
_MAX_SAFE_INTEGER = 2**53 - 1  # RFC 8785 section 3.2.2.3: beyond this, readers disagree

_MAX_DEPTH = 64  # our own documents are 6 deep; beyond this a parser's stack is at risk

_TYPE_NAMES = "object, list, string, integer, true, false or null"


def canonical_bytes(value: object) -> bytes:
    """RFC 8785 bytes of *value*, which may hold no float.

    Raises:
        UsageError: a float, an integer beyond 2**53 - 1, a type JSON lacks, text that is
            not Unicode (a lone surrogate), or nesting deeper than 64.
    """
    _refuse_inexact(value, "$", _MAX_DEPTH)
    return rfc8785.dumps(value)  # type: ignore[arg-type]


def parse_canonical(data: bytes) -> object:
    """The value whose canonical bytes are exactly *data*.

    Raises:
        IntegrityError: not JSON, or JSON that `canonical_bytes` would write differently;
            the text continues a sentence that names what was read.
    """
    try:
        value: object = json.loads(data.decode("utf-8"))
        same = canonical_bytes(value) == data
    except UsageError as error:
        raise IntegrityError(f"is not canonical JSON: {error}") from error
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"is not JSON: {error}") from error
    if not same:
        raise IntegrityError("is JSON but not its canonical form: some bytes were changed")
    return value


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


def _refuse_inexact(value: object, where: str, depth: int) -> None:
    if value is None or isinstance(value, bool):
        return
    if depth == 0:
        raise UsageError(f"{where[:80]}... is nested deeper than {_MAX_DEPTH}; flatten it")
    if isinstance(value, str):
        _refuse_surrogates(value, where)
    elif isinstance(value, int):
        _refuse_unsafe(value, where)
    elif isinstance(value, float):
        raise UsageError(
            f"{where} holds the float {value!r}; ledger and lock take integers or decimal strings"
        )
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _refuse_inexact(item, f"{where}[{index}]", depth - 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise UsageError(f"{where} has the key {key!r}, which is not a string")
            _refuse_surrogates(key, f"a key of {where}")
            _refuse_inexact(item, f"{where}.{key}", depth - 1)
    else:
        raise UsageError(f"{where} holds a {type(value).__name__}; JSON has {_TYPE_NAMES}")


def _refuse_unsafe(value: int, where: str) -> None:
    if abs(value) > _MAX_SAFE_INTEGER:
        raise UsageError(
            # Not the digits: Python refuses to print an integer of more than 4,300 of them.
            f"{where} holds an integer of {value.bit_length()} bits, beyond 2**53 - 1; "
            "write it as a decimal string"
        )


def _refuse_surrogates(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{where} holds {text[error.start]!r}, half of a character; write valid Unicode"
        ) from error
