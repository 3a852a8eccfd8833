"""A tap in another program's files: today RADGRAM2, the layout that Radiance reads.

`gram.r<rank>.<weight stem>.bin`, the stem being the packed weight's name without the index
of the expert: `blk.L.ffn_gate_up_exps` for the pooled input of the experts and
`blk.L.ffn_down_exps`; the file of one expert ends in `.<expert>`. The layout has names for
routed experts only, so other Grams are left out and counted.

The folder is there whole or not at all, and every layer is held against its hash first.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from leadline.core.errors import UsageError
from leadline.data.staging import staged_folder
from leadline.pack.space import disk_free_bytes, require_space
from leadline.tap.facts import GramFacts
from leadline.tap.folder import names_in
from leadline.tap.radgram import RadgramHeader, fits_u32, radgram_bytes, write_radgram
from leadline.tap.reader import GramReader

_STEMS = {"gate_up": "ffn_gate_up_exps", "down": "ffn_down_exps"}
_BLOCK_BYTES = 4096  # a file takes whole blocks of the disk

OnExported = Callable[[int, int], None]
"""Called with bytes written and bytes in all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportResult:
    """What was written, and what has no name in the layout."""

    out: str
    format: str
    files: int
    num_bytes: int
    left_out: tuple[str, ...]
    """Targets without a name in the layout, each once."""

    @property
    def document(self) -> dict[str, object]:
        """The result as JSON."""
        return {
            "out": self.out,
            "format": self.format,
            "files": self.files,
            "bytes": self.num_bytes,
            "left_out": list(self.left_out),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    layer: int
    facts: GramFacts
    expert: int | None

    @property
    def num_bytes(self) -> int:
        return radgram_bytes(self.facts.num_features)

    def name(self, rank: int) -> str:
        expert = "" if self.expert is None else f".{self.expert}"
        return f"gram.r{rank}.blk.{self.layer}.{_STEMS[self.facts.name]}{expert}.bin"


def export_radgram2(
    path: Path,
    out: Path,
    *,
    rank: int = 0,
    domain: int = 0,
    on_progress: OnExported | None = None,
) -> ExportResult:
    """Write the experts' Grams of the tap at *path* as RADGRAM2 files into the new folder *out*.

    Raises:
        UsageError: *out* holds something, a number does not fit the header, or the tap has no
            Gram of routed experts.
        DataError, IntegrityError: the tap is not complete, or is damaged.
        DiskSpaceError: the files do not fit; both numbers are named.
    """
    for name, value in (("rank", rank), ("domain", domain)):
        if not fits_u32(value):
            raise UsageError(f"{name} {value} is outside 0 to 2**32 - 1; RADGRAM2 holds a u32")
    if names_in(out):
        raise UsageError(f"{out} holds files already; choose an --out that is new or empty")
    with GramReader(path) as reader:
        files = list(_files(reader))
        if not files:
            raise UsageError(
                f"{path} has no Gram of routed experts, which are all that RADGRAM2 names; "
                "tap with --targets experts or all"
            )
        total = sum(file.num_bytes for file in files)
        require_space(out, total + _BLOCK_BYTES * len(files), disk_free_bytes(out), "the export")
        done = 0
        with staged_folder(out) as folder:
            for file in files:
                _write(reader, file, folder / file.name(rank), rank=rank, domain=domain)
                done += file.num_bytes
                if on_progress is not None:
                    on_progress(done, total)
        return ExportResult(
            out=str(out),
            format="radgram2",
            files=len(files),
            num_bytes=total,
            left_out=_left_out(reader),
        )


def _files(reader: GramReader) -> Iterator[_File]:
    for layer in reader.layers:
        reader.verify_layer(layer)
        for target in reader.targets(layer):
            facts = reader.facts(layer, target)
            if target not in _STEMS:
                continue
            if facts.num_experts is None:
                yield _File(layer=layer, facts=facts, expert=None)
            for expert in range(facts.first_expert, facts.end_expert):
                yield _File(layer=layer, facts=facts, expert=expert)


def _write(reader: GramReader, file: _File, path: Path, *, rank: int, domain: int) -> None:
    target = file.facts.name
    counts = reader.rows(file.layer, target)
    rows = counts if file.expert is None else counts[file.expert - file.facts.first_expert]
    header = RadgramHeader(
        num_features=file.facts.num_features, rank=rank, rows=int(rows), domain=domain
    )
    write_radgram(path, header, reader.gram(file.layer, target, expert=file.expert))


def _left_out(reader: GramReader) -> tuple[str, ...]:
    targets = {target for layer in reader.layers for target in reader.targets(layer)}
    return tuple(sorted(targets - set(_STEMS)))
