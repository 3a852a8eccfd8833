"""Micro-batches of a wave, and the waves of a corpus; numbers only, no tensors.

- A micro-batch is right-padded, so its documents have similar lengths: padding is
  computed and thrown away.
- Longest first: the batch that needs most memory runs before anything else has been done.
- Every document is in exactly one batch, and equal lengths give equal batches: which
  documents share a batch decides the rounding of their sums.
- A document is never cut here. One longer than a batch has a batch of its own; one that
  the residuals' room does not hold is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from leadline.core.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Documents that cross a layer side by side, padded on the right to one length."""

    documents: tuple[int, ...]
    """Their places in the corpus, longest first."""
    length: int
    """Positions of each row: the length of the longest document."""
    lengths: tuple[int, ...]
    """Tokens of each document."""

    @property
    def tokens(self) -> int:
        """Positions computed, padding included."""
        return self.length * len(self.documents)

    @property
    def padding_tokens(self) -> int:
        """Positions that hold no token."""
        return self.tokens - sum(self.lengths)


def micro_batches(
    lengths: Sequence[int], *, max_tokens: int, max_padding_percent: int = 10
) -> list[MicroBatch]:
    """Batches of documents of *lengths* tokens, longest first.

    No cut of the documents in that order has fewer batches within the two limits.

    Raises:
        UsageError: a limit that cannot be, or a document without a token.
    """
    if max_tokens < 1:
        raise UsageError(f"a micro-batch of {max_tokens} tokens holds nothing; give at least 1")
    if not 0 <= max_padding_percent <= 99:
        raise UsageError(
            f"padding of {max_padding_percent} percent of a micro-batch cannot be; give 0 to 99"
        )
    refuse_empty_documents(lengths)
    order = sorted(range(len(lengths)), key=lambda document: (-lengths[document], document))
    batches: list[MicroBatch] = []
    begin = tokens = 0
    # With falling lengths the share of padding only rises, so the longest run that fits is best.
    for place, document in enumerate(order):
        positions = lengths[order[begin]] * (place - begin + 1)
        padding = positions - (tokens + lengths[document])
        if place > begin and (
            positions > max_tokens or 100 * padding > max_padding_percent * positions
        ):
            batches.append(_batch(order[begin:place], lengths))
            begin, tokens = place, 0
        tokens += lengths[document]
    if order:
        batches.append(_batch(order[begin:], lengths))
    return batches


def waves(batches: Sequence[MicroBatch], capacity_tokens: int) -> list[list[MicroBatch]]:
    """*batches* cut into waves that hold at most *capacity_tokens* positions each.

    The waves one after another are *batches*, so that a wave is a range of them; no cut
    into ranges has fewer. Each wave is one more pass over all weights.

    Raises:
        UsageError: a batch that alone passes the capacity, with its longest document.
    """
    cut: list[list[MicroBatch]] = []
    tokens = 0
    for batch in batches:
        if batch.tokens > capacity_tokens:
            raise UsageError(_too_wide(batch, capacity_tokens))
        if not cut or tokens + batch.tokens > capacity_tokens:
            cut.append([])
            tokens = 0
        cut[-1].append(batch)
        tokens += batch.tokens
    return cut


def refuse_empty_documents(lengths: Sequence[int]) -> None:
    """Hold every length to at least one token.

    Raises:
        UsageError: a document without a token, with its number.
    """
    for document, length in enumerate(lengths):
        if length < 1:
            raise UsageError(
                f"document {document + 1} of {len(lengths)} has {length} tokens, wanted 1 or "
                "more; leave empty documents out"
            )


def _batch(documents: Sequence[int], lengths: Sequence[int]) -> MicroBatch:
    return MicroBatch(
        documents=tuple(documents),
        length=lengths[documents[0]],
        lengths=tuple(lengths[document] for document in documents),
    )


def _too_wide(batch: MicroBatch, capacity_tokens: int) -> str:
    what = f"document {batch.documents[0] + 1} of {batch.length:,} tokens"
    way_out = "--max-document-tokens"
    if len(batch.documents) > 1:
        what = (
            f"a micro-batch of {len(batch.documents)} documents of up to {batch.length:,} tokens "
            f"({batch.tokens:,} with padding)"
        )
        way_out = "--micro-batch-tokens"
    return (
        f"{what} does not fit the residuals' room of {capacity_tokens:,} tokens; "
        f"raise --vram-mib or --host-pool-mib, or lower {way_out}"
    )
