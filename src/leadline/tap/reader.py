"""Reading a tap: the public and stable door to Grams for any quantizer.

    from leadline.tap import GramReader

    with GramReader("grams/") as tap:
        for layer in tap.layers:
            hessian = tap.gram(layer, "down", expert=0) / tap.rows(layer)[0]

- Every call reads just the numbers it needs and keeps no file open.
- Grams are raw sums over rows, never means; `rows` are the counts to divide by.
- A tap that is not complete is refused unless the caller asks for what is there.
"""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from leadline.core.atomic import explained_os_errors
from leadline.core.canonical import sha256_file
from leadline.core.errors import DataError, IntegrityError, UsageError
from leadline.core.notes import Note
from leadline.tap.facts import EXPERT_FIELD, GramFacts, GramUser
from leadline.tap.key import TapKey
from leadline.tap.layer_file import LayerFile, open_layer_file
from leadline.tap.manifest import Manifest, read_manifest
from leadline.tap.triangle import packed_length, unpack

if TYPE_CHECKING:
    from leadline.tap.verify import TapReport

DOWN = "down"


class GramReader:
    """The Grams of one tap."""

    def __init__(self, path: str | PathLike[str], *, allow_partial: bool = False) -> None:
        """Open the tap at *path*; no Gram is read yet.

        Raises:
            DataError: no tap there, an unknown version, or one that is not complete and
                *allow_partial* is false.
            IntegrityError: grams.json was cut or edited.
        """
        self._folder = Path(path)
        self._manifest = read_manifest(self._folder)
        self._allow_partial = allow_partial
        if not self._manifest.complete and not allow_partial:
            missing = self._manifest.missing_layers
            lacking = f"layer {missing[0]} is missing" if missing else "its end is missing"
            raise DataError(
                f"{self._folder} is not complete: {len(self._manifest.sealed)} of "
                f"{len(self._manifest.planned_layers)} layers are sealed and {lacking}; "
                "run the tap again to go on, or read it with allow_partial=True"
            )
        self._files: dict[int, LayerFile] = {}

    @property
    def path(self) -> Path:
        """The folder of the tap."""
        return self._folder

    @property
    def manifest(self) -> Manifest:
        """What grams.json says."""
        return self._manifest

    @property
    def key(self) -> TapKey:
        """Model, corpus, type and schedule the Grams come from."""
        return self._manifest.key

    @property
    def notes(self) -> tuple[Note, ...]:
        """What was not done the ordinary way, over the whole tap."""
        return tuple(item.note for item in self._manifest.notes)

    @property
    def layers(self) -> tuple[int, ...]:
        """Sealed layers, in order."""
        return tuple(sorted(self._manifest.sealed))

    def targets(self, layer: int) -> tuple[str, ...]:
        """Names of the Grams of *layer*: `gate_up`, `down`, or a module's path in the layer."""
        return tuple(sorted(self.layer_file(layer).facts))

    def facts(self, layer: int, target: str) -> GramFacts:
        """Features, experts and users of one Gram."""
        facts = self.layer_file(layer).facts
        if target not in facts:
            raise UsageError(
                f"layer {layer} of {self._folder} has no Gram {target!r}; it has "
                f"{', '.join(sorted(facts)) or 'none'}"
            )
        return facts[target]

    def users(self, layer: int, target: str, *, expert: int | None = None) -> tuple[GramUser, ...]:
        """Every weight that is multiplied by the rows of a Gram, with its published names.

        With *expert*, its number stands in the names.
        """
        users = self.facts(layer, target).users
        if expert is None:
            return users
        return tuple(
            GramUser(
                parameter=user.parameter,
                published=tuple(name.replace(EXPERT_FIELD, str(expert)) for name in user.published),
            )
            for user in users
        )

    def gram(self, layer: int, target: str, *, expert: int | None = None) -> NDArray[np.float32]:
        """The raw sum of x x^T over the rows of a target: float32 [K, K], symmetric, fresh.

        Raises:
            UsageError: no such layer, target or expert, or *expert* is given where it cannot be.
            IntegrityError: the layer's file is not what was sealed.
        """
        facts = self.facts(layer, target)
        index = self._index(layer, facts, expert)
        length = packed_length(facts.num_features)
        packed = self.layer_file(layer).numbers(target, index * length, length)
        return unpack(packed, facts.num_features)

    def packed(self, layer: int, target: str) -> NDArray[np.float32]:
        """All sums of a target as stored: row-major upper triangles [..., K (K + 1) / 2]."""
        shape = self.facts(layer, target).shape
        count = int(np.prod(shape, dtype=np.int64))
        return self.layer_file(layer).numbers(target, 0, count).reshape(shape)

    def rows(self, layer: int, target: str = DOWN) -> NDArray[np.int64]:
        """Rows in each Gram of a target: int64 [experts], or int64 [] for a single Gram.

        Without *target*, the rows that reached each expert.
        """
        self.facts(layer, target)
        return self.layer_file(layer).rows(target)

    def layer_file(self, layer: int) -> LayerFile:
        """The file of a sealed layer, for reading in chunks what is larger than memory."""
        if layer not in self._files:
            self._files[layer] = open_sealed(self._folder, self._manifest, layer)
        return self._files[layer]

    def verify_layer(self, layer: int) -> None:
        """Hold the bytes of one layer's file against the hash it was sealed with.

        Raises:
            IntegrityError: they differ.
        """
        entry = self._manifest.entry(layer)
        path = self.layer_file(layer).path
        with explained_os_errors(path, "read"):
            found = sha256_file(path)
        if entry is None or found != entry.sha256:
            raise IntegrityError(
                f"{path} is not the file that was sealed: its sha256 differs; run the tap again to "
                "make this layer anew, after removing the file"
            )

    def verify(self) -> "TapReport":
        """Read every byte again and hold it against what was sealed.

        Raises:
            IntegrityError: something differs; the first difference is named.
        """
        from leadline.tap.verify import verify_tap

        report = verify_tap(self._folder, allow_partial=self._allow_partial)
        if not report.ok:
            raise IntegrityError(f"{self._folder}: {report.problems[0]}")
        return report

    def close(self) -> None:
        """Forget what was read of the files; none is kept open."""
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _index(self, layer: int, facts: GramFacts, expert: int | None) -> int:
        """Where *expert* lies in the file."""
        if facts.num_experts is None:
            if expert is not None:
                raise UsageError(
                    f"layer {layer}, {facts.name} is one Gram for all experts; leave expert out"
                )
            return 0
        if expert is None or not facts.first_expert <= expert < facts.end_expert:
            raise UsageError(
                f"layer {layer}, {facts.name} has Grams of the experts {facts.first_expert} to "
                f"{facts.end_expert - 1}, wanted one of them and not {expert}"
            )
        return expert - facts.first_expert


def open_sealed(folder: Path, manifest: Manifest, layer: int) -> LayerFile:
    """The file of a sealed layer, with its header checked.

    Raises:
        UsageError: the layer is not sealed.
        IntegrityError: the file is missing or not of the size it was sealed with.
    """
    entry = manifest.entry(layer)
    if entry is None or layer not in manifest.sealed:
        held: Mapping[bool, str] = {True: "it is not sealed yet", False: "it was not tapped"}
        raise UsageError(
            f"{folder} has no layer {layer}: {held[layer in manifest.planned_layers]}; it has "
            f"{len(manifest.sealed)} layers"
        )
    path = folder / entry.file
    with explained_os_errors(path, "read"):
        size = path.stat().st_size if path.is_file() else -1
    if size < 0:
        raise IntegrityError(f"{path} is missing; run the tap again to make this layer anew")
    if size != entry.num_bytes:
        raise IntegrityError(
            f"{path} has {size} bytes, sealed with {entry.num_bytes}; run the tap again to make "
            "this layer anew"
        )
    return open_layer_file(path, layer)
