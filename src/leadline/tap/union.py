"""Taps of one corpus, each with its own experts or layers, seen as one.

Several rigs may share a corpus: each taps some experts, or some layers. Together they
hold what one rig would have: nothing twice, nothing missing. A Gram that is not split by
expert may lie in each of them; the one beside the lowest expert is taken.
"""

from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from leadline.core.errors import DataError, UsageError
from leadline.tap.facts import GramFacts
from leadline.tap.key import TapKey
from leadline.tap.layer_file import LayerFile
from leadline.tap.reader import GramReader
from leadline.tap.rows import place
from leadline.tap.triangle import packed_length


class CorpusTaps:
    """The taps of one corpus; *readers* in any order."""

    def __init__(self, readers: list[GramReader]) -> None:
        """Look at what each tap holds; no Gram is read.

        Raises:
            UsageError: an expert or a layer is in two of them.
            DataError: an expert or a layer is in none of them.
        """
        self._readers = sorted(readers, key=_order)
        self._pieces = {layer: self._collect(layer) for layer in self.layers}
        self._refuse_gap()
        self.facts = {layer: self._union(layer) for layer in self.layers}

    @property
    def corpora(self) -> frozenset[str]:
        """Digests of the recorded corpora; more than one where a tap is a merge."""
        return corpora(self._readers[0])

    @property
    def key(self) -> TapKey:
        """The key of the whole; the fields about parts cover them all."""
        keys = [reader.key for reader in self._readers]
        return replace(
            keys[0],
            first_layer=min(key.first_layer for key in keys),
            end_layer=max(key.end_layer for key in keys),
            first_expert=None,
            end_expert=None,
        )

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layers that any of the taps holds."""
        return tuple(sorted({layer for reader in self._readers for layer in reader.layers}))

    @property
    def readers(self) -> tuple[GramReader, ...]:
        """The taps, in an order that does not depend on how they were given."""
        return tuple(self._readers)

    def verify_layer(self, layer: int) -> None:
        """Hold the files of a layer against the hashes they were sealed with.

        Raises:
            IntegrityError: one differs.
        """
        for reader in self._readers:
            if layer in reader.layers:
                reader.verify_layer(layer)

    def rows(self, layer: int, name: str) -> NDArray[np.int64]:
        """Row counts of all experts, or of the single Gram."""
        pieces = self._pieces[layer][name]
        counts = [piece.rows(name) for piece in pieces]
        return counts[0] if self.facts[layer][name].num_experts is None else np.concatenate(counts)

    def numbers(self, layer: int, name: str, begin: int, count: int) -> NDArray[np.float32]:
        """*count* sums from *begin* on, counted over the triangles of all experts in order."""
        pieces = self._pieces[layer][name]
        if self.facts[layer][name].num_experts is None:
            return pieces[0].numbers(name, begin, count)
        out, done = [], begin
        for piece in pieces:
            facts = piece.facts[name]
            length = packed_length(facts.num_features)
            start, end = facts.first_expert * length, facts.end_expert * length
            if start <= done < min(end, begin + count):
                taken = min(end, begin + count) - done
                out.append(piece.numbers(name, done - start, taken))
                done += taken
        return out[0] if len(out) == 1 else np.concatenate(out)

    def _collect(self, layer: int) -> dict[str, list[LayerFile]]:
        pieces: dict[str, list[LayerFile]] = {}
        for reader in self._readers:
            if layer in reader.layers:
                file = reader.layer_file(layer)
                for name in file.facts:
                    pieces.setdefault(name, []).append(file)
        for name, files in pieces.items():
            files.sort(key=lambda file: _first_expert(file, name))
        return pieces

    def _union(self, layer: int) -> dict[str, GramFacts]:
        return {
            name: _union_facts(layer, name, files) for name, files in self._pieces[layer].items()
        }

    def _refuse_gap(self) -> None:
        end = min(reader.key.first_layer for reader in self._readers)
        for reader in sorted(self._readers, key=lambda reader: reader.key.first_layer):
            if reader.key.first_layer > end:
                raise DataError(
                    f"layers {end} to {reader.key.first_layer - 1} are in none of the taps of this "
                    "corpus; give the tap that holds them as well"
                )
            end = max(end, reader.key.end_layer)


def corpora(reader: GramReader) -> frozenset[str]:
    """Digests of the corpora that a tap was recorded from."""
    return frozenset(source.corpus_digest for source in reader.manifest.sources)


def _order(reader: GramReader) -> tuple[int, int, str]:
    return (reader.key.first_expert or 0, reader.key.first_layer, reader.key.digest)


def _first_expert(file: LayerFile, name: str) -> int:
    """Where a file's experts begin; a single Gram goes by the experts beside it."""
    if file.facts[name].num_experts is not None:
        return file.facts[name].first_expert
    return min((facts.first_expert for facts in file.facts.values()), default=0)


def _union_facts(layer: int, name: str, files: list[LayerFile]) -> GramFacts:
    facts = [file.facts[name] for file in files]
    first = facts[0]
    for other, file in zip(facts[1:], files[1:], strict=True):
        same = replace(other, first_expert=first.first_expert, end_expert=first.end_expert)
        if same != first:
            raise UsageError(
                f"{place(layer, first)} differs between {files[0].path.parent} and "
                f"{file.path.parent} in its features, experts or "
                "users; only taps of one model can be merged"
            )
    if first.num_experts is None:
        _refuse_same_single(layer, name, files)
        return first
    _refuse_overlap_and_gap(layer, first.num_experts, files, name)
    return replace(first, first_expert=0, end_expert=first.num_experts)


def _refuse_same_single(layer: int, name: str, files: list[LayerFile]) -> None:
    """A Gram of all rows may lie in two taps only where their experts are split."""
    if len(files) == 1:
        return
    for file in files:
        if all(facts.has_all_experts for facts in file.facts.values()):
            raise _counted_twice(f"layer {layer}, {name}", files[0], files[1])


def _refuse_overlap_and_gap(
    layer: int, num_experts: int, files: list[LayerFile], name: str
) -> None:
    end = 0
    for number, file in enumerate(files):
        facts = file.facts[name]
        if facts.first_expert < end:
            raise _counted_twice(
                f"expert {facts.first_expert} of layer {layer}, {name}", files[number - 1], file
            )
        if facts.first_expert > end:
            raise _missing(layer, name, end, facts.first_expert)
        end = facts.end_expert
    if end < num_experts:
        raise _missing(layer, name, end, num_experts)


def _counted_twice(what: str, left: LayerFile, right: LayerFile) -> UsageError:
    return UsageError(
        f"{what} is in {left.path.parent} and in {right.path.parent}, both of the same corpus, "
        "whose rows would count twice; leave one of them out"
    )


def _missing(layer: int, name: str, begin: int, end: int) -> DataError:
    return DataError(
        f"experts {begin} to {end - 1} of layer {layer}, {name} are in none of the taps of this "
        "corpus; give the tap that holds them as well"
    )
