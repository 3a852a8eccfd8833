"""Several taps of one model made into one, by addition.

- Taps of different corpora are added: raw sums and counts, so each token weighs the same
  whatever tap it came from.
- Taps of one corpus that hold different experts or layers are joined; a row is never
  counted twice, and an expert or layer that none of them holds is an error.
- The result does not depend on the order of the taps, bit for bit: sums are taken in
  float64 in the order of the corpora's digests and rounded to float32 once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leadline.core.canonical import sha256_json
from leadline.core.errors import DataError, UsageError
from leadline.core.notes import Note
from leadline.tap.facts import ROWS_PREFIX
from leadline.tap.key import TapKey, first_difference
from leadline.tap.layer_file import CHUNK_NUMBERS, Block, array_block
from leadline.tap.manifest import LayerNote
from leadline.tap.reader import GramReader
from leadline.tap.store import StorePlan, TapStore, planned_layer_bytes
from leadline.tap.union import CorpusTaps, corpora

OnMerged = Callable[[int, int], None]
"""Called with bytes merged and bytes in all, as planned."""

_MAY_DIFFER = frozenset(
    {
        *("documents", "tokens", "corpus_digest", "max_document_tokens"),
        *("first_layer", "end_layer", "first_expert", "end_expert"),
        *("schedule", "num_waves", "micro_batch_tokens", "step_tokens", "max_num_seqs"),
        *("experts_per_group", "batches_digest", "kv_tokens", "tokenizer_digest"),
    }
)
"""Sums over other tokens, or the same sums in another order of rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeResult:
    """What was merged."""

    taps: int
    corpora: int
    layers: int
    documents: int
    tokens: int
    tap_dir: str

    @property
    def document(self) -> dict[str, object]:
        """The result as JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def merge_taps(
    paths: Sequence[Path], out: Path, *, on_progress: OnMerged | None = None
) -> MergeResult:
    """Write the sum of the taps at *paths* as a tap at *out*; broken off, it goes on.

    Raises:
        UsageError: fewer than two taps, taps of different models or targets, or a corpus
            that would count twice.
        DataError: a tap is not complete, or an expert or layer is missing; it is named.
        IntegrityError: a tap is damaged.
        DiskSpaceError: the result does not fit.
    """
    if len(paths) < 2:
        raise UsageError(f"merge got {len(paths)} taps; name two or more")
    readers = [GramReader(path) for path in paths]
    _refuse_unlike(readers)
    sides = _sides(readers)
    _refuse_unlike_layers(sides)
    key, layers = _merged_key(sides), sides[0].layers
    parts = {source.digest: source for reader in readers for source in reader.manifest.sources}
    plan = StorePlan(layer_bytes={layer: _planned_bytes(sides[0], layer) for layer in layers})
    notes = _joined_notes(sides)
    ordered = tuple(parts[digest] for digest in sorted(parts))
    with TapStore.open(out, key, plan, parts=ordered) as store:
        done_bytes, total_bytes = 0, sum(plan.layer_bytes.values())
        for layer in layers:
            if layer not in store.sealed:
                own = [item.note for item in notes if item.layer == layer]
                # A damaged sum would be sealed anew under a hash of its own.
                for side in sides:
                    side.verify_layer(layer)
                _merge_layer(store, sides, layer, own)
            done_bytes += plan.layer_bytes[layer]
            if on_progress is not None:
                on_progress(done_bytes, total_bytes)
        store.add_notes([item.note for item in notes if item.layer is None])
        store.finish({"merged_corpora": len(_all_corpora(sides)), "merged_taps": len(parts)})
    return MergeResult(
        taps=len(paths),
        corpora=len(_all_corpora(sides)),
        layers=len(layers),
        documents=key.documents,
        tokens=key.tokens,
        tap_dir=str(out),
    )


def _all_corpora(sides: Sequence[CorpusTaps]) -> frozenset[str]:
    """Digests of every corpus in the merge."""
    return frozenset().union(*(side.corpora for side in sides))


def _refuse_unlike(readers: Sequence[GramReader]) -> None:
    first = readers[0]
    for other in readers[1:]:
        differs = first_difference(first.key, other.key, besides=_MAY_DIFFER)
        tokenizers = {first.key.tokenizer_digest, other.key.tokenizer_digest} - {""}
        if differs is None and len(tokenizers) < 2:
            continue
        field = "tokenizer_digest" if differs is None else differs.field
        left, right = getattr(first.key, field), getattr(other.key, field)
        raise UsageError(
            f"{first.path} has {field} = {left!r} and {other.path} has {right!r}; only taps that "
            "agree in it can be merged"
        )


def _sides(readers: Sequence[GramReader]) -> list[CorpusTaps]:
    """The taps by corpus, in the order of the corpora's digests."""
    groups: dict[frozenset[str], list[GramReader]] = {}
    for reader in readers:
        groups.setdefault(corpora(reader), []).append(reader)
    seen: dict[str, GramReader] = {}
    for digests, group in groups.items():
        for digest in digests:
            if digest in seen:
                raise UsageError(
                    f"{seen[digest].path} and {group[0].path} both hold the corpus {digest[:12]}, "
                    "whose rows would count twice; leave one of them out"
                )
            seen[digest] = group[0]
    return [CorpusTaps(groups[digests]) for digests in sorted(groups, key=sorted)]


def _refuse_unlike_layers(sides: Sequence[CorpusTaps]) -> None:
    first = sides[0]
    for other in sides[1:]:
        for one, two in ((first, other), (other, first)):
            lacking = [layer for layer in one.layers if layer not in two.layers]
            if lacking:
                raise DataError(
                    f"layer {lacking[0]} ({len(lacking)} such) is in {one.readers[0].path} and "
                    f"missing from {two.readers[0].path}; every corpus must have passed the same "
                    "layers"
                )
        for layer in first.layers:
            if first.facts[layer] != other.facts[layer]:
                raise UsageError(_difference_in_layer(first, other, layer))


def _difference_in_layer(first: CorpusTaps, other: CorpusTaps, layer: int) -> str:
    left, right = first.facts[layer], other.facts[layer]
    name = min(name for name in {*left, *right} if left.get(name) != right.get(name))
    return (
        f"layer {layer}, {name} differs between {first.readers[0].path} and "
        f"{other.readers[0].path} in its features, experts or users, or is in one of them only; "
        "only taps of one model and the same targets can be merged"
    )


def _merged_key(sides: Sequence[CorpusTaps]) -> TapKey:
    keys = [side.key for side in sides]
    tokenizers = {key.tokenizer_digest for key in keys} - {""}
    digests = sorted(_all_corpora(sides))
    return replace(
        keys[0],
        tokenizer_digest=min(tokenizers, default=""),
        max_document_tokens=_common(keys, "max_document_tokens", None),
        documents=sum(key.documents for key in keys),
        tokens=sum(key.tokens for key in keys),
        corpus_digest=digests[0] if len(digests) == 1 else sha256_json(digests),
        first_layer=min(key.first_layer for key in keys),
        end_layer=max(key.end_layer for key in keys),
        schedule=_common(keys, "schedule", "mixed"),
        num_waves=1,
        micro_batch_tokens=_common(keys, "micro_batch_tokens", 0),
        experts_per_group=_common(keys, "experts_per_group", 0),
        batches_digest="",
        step_tokens=_common(keys, "step_tokens", 0),
        max_num_seqs=_common(keys, "max_num_seqs", 0),
        kv_tokens=_common(keys, "kv_tokens", 0),
    )


def _common(keys: Sequence[TapKey], field: str, otherwise: Any) -> Any:
    """The value of *field* that all keys share, else *otherwise*."""
    values = {getattr(key, field) for key in keys}
    return values.pop() if len(values) == 1 else otherwise


def _planned_bytes(side: CorpusTaps, layer: int) -> int:
    facts = side.facts[layer].values()
    return planned_layer_bytes({one.name: (one.num_features, one.num_experts) for one in facts})


def _joined_notes(sides: Sequence[CorpusTaps]) -> list[LayerNote]:
    """Notes of all taps, each saying which corpus it is about, in an order of their own."""
    joined = set()
    for side in sides:
        for reader in side.readers:
            of = "" if reader.manifest.parts else f"corpus {reader.key.corpus_digest[:12]}: "
            for item in reader.manifest.notes:
                note = Note(
                    kind=item.note.kind, count=item.note.count, detail=f"{of}{item.note.detail}"
                )
                joined.add(LayerNote(layer=item.layer, note=note))
    return sorted(joined, key=lambda item: (item.layer or 0, item.note.kind, str(item)))


def _merge_layer(
    store: TapStore, sides: Sequence[CorpusTaps], layer: int, notes: Sequence[Note]
) -> None:
    facts = sides[0].facts[layer]
    rows = {name: _sum_rows([side.rows(layer, name) for side in sides]) for name in facts}
    blocks = [array_block(ROWS_PREFIX + name, count) for name, count in rows.items()]
    blocks += [_sum_block(sides, layer, name) for name in facts]
    store.seal_blocks(layer, facts, blocks, rows, notes)


def _sum_rows(counts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Row counts of several taps of the same Gram, added."""
    return np.asarray(np.sum(np.stack(counts), axis=0, dtype=np.int64))


def _sum_block(sides: Sequence[CorpusTaps], layer: int, name: str) -> Block:
    shape = sides[0].facts[layer][name].shape
    total = int(np.prod(shape, dtype=np.int64))

    def chunks() -> Iterator[NDArray[Any]]:
        for begin in range(0, total, CHUNK_NUMBERS):
            count = min(CHUNK_NUMBERS, total - begin)
            if len(sides) == 1:
                yield sides[0].numbers(layer, name, begin, count)
                continue
            added = np.zeros(count, dtype=np.float64)
            for side in sides:
                added += side.numbers(layer, name, begin, count)
            yield added.astype(np.float32)

    return Block(name=name, dtype="F32", shape=shape, chunks=chunks)
