"""Which documents are held out.

The side of a document depends on its content, the seed and the fraction alone:
equal documents land on one side, and adding a file moves no other file.
"""

import hashlib
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction

from leadline.core.errors import DataError, UsageError
from leadline.data.manifest import SplitName

_RANKS = 2**64


def parse_eval_fraction(text: str) -> tuple[Fraction, str]:
    """Read a decimal string between 0 and 1, both excluded; also its shortest spelling.

    Raises:
        UsageError: not a number, or no room for one of the two sides.
    """
    try:
        number = Decimal(text)
    except InvalidOperation as error:
        raise UsageError(f"eval fraction {text!r} is not a number; give one like 0.02") from error
    if not number.is_finite() or not 0 < number < 1:
        raise UsageError(
            f"eval fraction {text} leaves nothing to train on or nothing to hold out; "
            "give a number above 0 and below 1, such as 0.02"
        )
    return Fraction(number), f"{number.normalize():f}"


def content_rank(sha256: str, seed: int) -> int:
    """Place of a document's content in the seeded draw: 0 to 2**64 - 1."""
    digest = hashlib.sha256(f"leadline-split|{seed}|{sha256}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def assign_splits(
    content_sha256s: Sequence[str], *, seed: int, eval_fraction: Fraction
) -> list[SplitName]:
    """The split of each document; a draw that leaves a side empty moves one content to it.

    Raises:
        DataError: all documents are equal, so one side has to stay empty.
    """
    ranks = {sha256: content_rank(sha256, seed) for sha256 in content_sha256s}
    if len(ranks) < 2:
        raise DataError(
            f"the corpus has {len(content_sha256s)} document(s) but {len(ranks)} distinct "
            "content, and a held-out split needs 2; add text that differs"
        )
    held_out = {sha256 for sha256, rank in ranks.items() if Fraction(rank, _RANKS) < eval_fraction}
    if not held_out:
        held_out = {min(ranks, key=lambda sha256: ranks[sha256])}
    elif len(held_out) == len(ranks):
        held_out.remove(max(ranks, key=lambda sha256: ranks[sha256]))
    return ["eval" if sha256 in held_out else "train" for sha256 in content_sha256s]
