"""Notes: what was not done the ordinary way, counted and named.

A skipped document, an expert that no token reached, a weight that holds NaN and was never
used: each becomes one note, so that a result can list them and a strict run can turn red.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from leadline.core.errors import DataError

_KIND = re.compile(r"[a-z][a-z0-9_]{0,99}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """One kind of deviation, how often it happened, and where."""

    kind: str
    """Lower-case words joined by underscores, the same for every case: `document_skipped`."""
    count: int
    """How many cases this note stands for."""
    detail: str
    """What a person needs to find them: names, numbers, the rule that was applied."""

    def __post_init__(self) -> None:
        """Hold the fields to their forms.

        Raises:
            ValueError: a kind that is no slug, or a count below 0.
        """
        if not _KIND.fullmatch(self.kind):
            raise ValueError(f"note kind {self.kind!r} is not lower-case words and underscores")
        if self.count < 0:
            raise ValueError(f"note {self.kind} counts {self.count}, wanted 0 or more")

    @property
    def document(self) -> dict[str, object]:
        """The note as JSON."""
        return {"kind": self.kind, "count": self.count, "detail": self.detail}

    def __str__(self) -> str:
        return f"{self.kind} ({self.count}): {self.detail}"


def parse_note(document: Mapping[str, object]) -> Note:
    """The note that `Note.document` wrote; further keys are left alone.

    Raises:
        DataError: a key is missing or of the wrong type.
    """
    kind, count, detail = document.get("kind"), document.get("count"), document.get("detail")
    wrong = DataError(f"note {dict(document)!r} needs kind, count of 0 or more, and detail")
    if not isinstance(kind, str) or not isinstance(detail, str):
        raise wrong
    if not isinstance(count, int) or isinstance(count, bool):
        raise wrong
    if not _KIND.fullmatch(kind) or count < 0:
        raise wrong
    return Note(kind=kind, count=count, detail=detail)
