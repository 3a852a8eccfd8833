"""What a layer file says about each of its Grams, apart from the numbers.

A Gram is the raw sum of x x^T over the rows x that reach its users: never a mean. All
users of a Gram read the very same rows, so one Gram serves them all and names them all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leadline.tap.triangle import packed_length

EXPERT_FIELD = "{expert}"
ROWS_PREFIX = "rows."


@dataclass(frozen=True, kw_only=True, slots=True)
class GramUser:
    """A weight that is multiplied by the rows of a Gram."""

    parameter: str
    """Its name in the model."""
    published: tuple[str, ...]
    """Its names in the checkpoint; `{expert}` stands for the number of the expert."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GramFacts:
    """One Gram, or one for each expert, under one name in one layer file."""

    name: str
    """`gate_up`, `down`, either behind `PREFIX/`, or the module's path inside the layer."""
    num_features: int
    users: tuple[GramUser, ...]
    num_experts: int | None
    """Experts of the module; None: a single Gram."""
    first_expert: int
    end_expert: int
    """One past the last expert in the file; 0 for a single Gram."""
    rows_per_token: int | None
    """Rows each token of the corpus gives, over all experts; None where that varies."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the packed sums in the file."""
        length = packed_length(self.num_features)
        if self.num_experts is None:
            return (length,)
        return (self.end_expert - self.first_expert, length)

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """Shape of the row counts in the file."""
        return self.shape[:-1]

    @property
    def has_all_experts(self) -> bool:
        """Whether every expert of the module is in the file; true for a single Gram."""
        if self.num_experts is None:
            return True
        return self.first_expert == 0 and self.end_expert == self.num_experts

    @property
    def document(self) -> dict[str, Any]:
        """The facts as JSON, without the name."""
        return {
            "num_features": self.num_features,
            "users": [
                {"parameter": user.parameter, "published": list(user.published)}
                for user in self.users
            ],
            "num_experts": self.num_experts,
            "first_expert": self.first_expert,
            "end_expert": self.end_expert,
            "rows_per_token": self.rows_per_token,
            "sum": "raw",
        }


def parse_facts(name: str, document: Mapping[str, Any]) -> GramFacts:
    """The facts that `GramFacts.document` wrote.

    Raises:
        KeyError, TypeError, ValueError: a field is missing, of the wrong type, or out of range.
    """
    facts = GramFacts(
        name=name,
        num_features=_count(document["num_features"]),
        users=tuple(
            GramUser(
                parameter=_text(user["parameter"]),
                published=tuple(_text(published) for published in user["published"]),
            )
            for user in document["users"]
        ),
        num_experts=_optional(document["num_experts"]),
        first_expert=_count(document["first_expert"]),
        end_expert=_count(document["end_expert"]),
        rows_per_token=_optional(document["rows_per_token"]),
    )
    if document["sum"] != "raw":
        raise ValueError(f"gram {name} is a {document['sum']!r} sum, wanted a raw one")
    if not facts.first_expert <= facts.end_expert <= (facts.num_experts or 0):
        raise ValueError(
            f"gram {name} has experts {facts.first_expert} to {facts.end_expert} of "
            f"{facts.num_experts}"
        )
    return facts


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no name")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _optional(value: object) -> int | None:
    return None if value is None else _count(value)
