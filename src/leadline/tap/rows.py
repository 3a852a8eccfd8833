"""What must hold of a Gram and of the rows that were counted into it.

- Conservation: rows over all experts = tokens x rows per token.
- The diagonal is finite and not negative. As |x y| <= (x^2 + y^2) / 2, a sum that is finite
  on the diagonal is finite everywhere, so this finds any NaN or Inf in the rows.
- A Gram that no row reached is exactly zero, and its expert is noted.
"""

import numpy as np
from numpy.typing import NDArray

from leadline.core.errors import IntegrityError, NonFiniteStateError
from leadline.core.notes import Note
from leadline.tap.facts import GramFacts
from leadline.tap.manifest import RowsSummary
from leadline.tap.triangle import diagonal_positions

_NAMED_IN_NOTE = 16


def check_gram(
    layer: int, facts: GramFacts, packed: NDArray[np.float32], *, first: int = 0
) -> None:
    """Hold the diagonals of Grams [..., K (K + 1) / 2] to what a sum of squares can be.

    *first* is the place in the file of the first Gram given.

    Raises:
        NonFiniteStateError: NaN, Inf or a negative square; layer, Gram and expert are named.
    """
    diagonals = packed[..., diagonal_positions(facts.num_features)]
    good = np.isfinite(diagonals) & (diagonals >= 0)
    if good.all():
        return
    *index, feature = np.argwhere(~good)[0].tolist()
    value = diagonals[(*index, feature)]
    raise NonFiniteStateError(
        f"{place(layer, facts, first + sum(index))} has {value} on its diagonal at feature "
        f"{feature}, wanted a finite sum of squares; look for NaN or Inf in the weights and "
        "activations of this layer"
    )


def check_rows(layer: int, facts: GramFacts, rows: NDArray[np.int64], tokens: int) -> None:
    """Hold the rows of a Gram, over all its experts, against the tokens of the corpus.

    Raises:
        IntegrityError: rows were lost or counted twice, or a count is below zero.
    """
    if (rows < 0).any():
        raise IntegrityError(f"{place(layer, facts)} has a row count of {rows.min()}, below zero")
    if facts.rows_per_token is None or not facts.has_all_experts:
        return
    wanted, found = tokens * facts.rows_per_token, int(rows.sum())
    if found != wanted:
        raise IntegrityError(
            f"{place(layer, facts)} counted {found} rows, wanted {wanted} ({tokens} tokens x "
            f"{facts.rows_per_token}): rows passed the tap by or twice; nothing of it was kept"
        )


def starved_experts(layer: int, facts: GramFacts, rows: NDArray[np.int64]) -> list[Note]:
    """A note where no token reached some of the experts of a down projection."""
    if not rows.ndim or not facts.name.endswith("down") or rows.all():
        return []
    starved = np.flatnonzero(rows == 0).tolist()
    numbers = [str(facts.first_expert + expert) for expert in starved]
    listed = ", ".join(numbers[:_NAMED_IN_NOTE]) + (", ..." if numbers[_NAMED_IN_NOTE:] else "")
    detail = f"{place(layer, facts)}: no token reached expert {listed}"
    return [Note(kind="expert_without_rows", count=len(starved), detail=detail)]


def summarize(rows: NDArray[np.int64]) -> RowsSummary:
    """Total, smallest, middle and largest count, and how many are zero."""
    ordered = np.sort(rows.reshape(-1))
    if ordered.size == 0:
        return RowsSummary(total=0, min=0, median=0, max=0, without_rows=0)
    return RowsSummary(
        total=int(ordered.sum()),
        min=int(ordered[0]),
        median=int(ordered[(ordered.size - 1) // 2]),
        max=int(ordered[-1]),
        without_rows=int((ordered == 0).sum()),
    )


def place(layer: int, facts: GramFacts, index: int | None = None) -> str:
    """How a message names a Gram; *index* is its place in the file."""
    if index is None or facts.num_experts is None:
        return f"layer {layer}, {facts.name}"
    return f"layer {layer}, {facts.name}, expert {facts.first_expert + index}"
