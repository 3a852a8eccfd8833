"""Running `leadline tap record` in this process, and holding its Grams against the reference."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typer.testing import CliRunner

from leadline.cli.app import app
from leadline.tap import GramReader

from .families import write_corpus
from .reference import ReferenceGrams, relative_error


def command(
    checkpoint: Path, documents: Sequence[Sequence[int]] | Path, out: Path, **flags: Any
) -> list[str]:
    """Arguments of a tap of *documents* (ids, or a corpus on disk) on the CPU, with `--json`.

    Flags are those of the command line, with underscores; None leaves one out, True is a
    flag without a value.
    """
    corpus = documents
    if not isinstance(corpus, Path):
        corpus = write_corpus(out.with_name(f"{out.name}.jsonl"), documents)  # type: ignore[arg-type]
    given = {"device": "cpu", "dtype": "float32", "vram_mib": 512, "host_pool_mib": 64, **flags}
    arguments = ["tap", "record", str(checkpoint), "--corpus", str(corpus), "--out", str(out)]
    for name, value in given.items():
        words = [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        arguments += [] if value is None else words
    return [*arguments, "--json"]


def record(
    checkpoint: Path, documents: Sequence[Sequence[int]] | Path, out: Path, **flags: Any
) -> dict[str, Any]:
    """Run `command` in this process; what `--json` prints. Errors come through as raised."""
    arguments = command(checkpoint, documents, out, **flags)
    ran = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    result: dict[str, Any] = json.loads(ran.stdout)
    return result


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One Gram of a tap beside its reference."""

    name: str
    error: float
    rows: int
    wanted_rows: int


def compare(reader: GramReader, wanted: ReferenceGrams) -> list[Compared]:
    """Every Gram of the reference with the tap's, found by the weight that reads its rows.

    A weight of the reference that no Gram names, or one named twice, fails at once; so
    does a Gram that names a weight the reference does not have.
    """
    grams = _by_weight(reader)
    compared: list[Compared] = []
    for module, sums in wanted.experts.items():
        first = next(w for w in grams if w.startswith(f"{module}.") and "up_proj" in w)
        layer, target = grams.pop(first)
        if reader.facts(layer, target).num_experts is None:
            gram, rows = reader.gram(layer, target), reader.rows(layer, target)
            compared.append(_one(first, gram, rows, sums.gate_up, sums.tokens))
        else:
            compared += _each(reader, layer, target, first, sums.gate_up_of, sums.rows)
        down = f"{module}.down_proj"
        compared += _each(reader, *grams.pop(down), down, sums.down, sums.rows)
    for module, linear in wanted.linears.items():
        weight = f"{module}.weight"
        layer, target = grams.pop(weight)
        gram, rows = reader.gram(layer, target), reader.rows(layer, target)
        compared.append(_one(weight, gram, rows, linear.gram, linear.rows))
    assert not grams, f"the tap has Grams that the reference has not: {sorted(grams)}"
    return compared


def assert_equal(reader: GramReader, wanted: ReferenceGrams, tolerance: float) -> None:
    """Counts exactly, Grams within a relative Frobenius error, the worst ones named."""
    compared = compare(reader, wanted)
    counts = [one for one in compared if one.rows != one.wanted_rows]
    assert not counts, f"{len(counts)} of {len(compared)} row counts differ: {counts[:6]}"
    far = sorted((c for c in compared if not c.error <= tolerance), key=lambda c: -c.error)
    assert not far, f"{len(far)} of {len(compared)} Grams are off by more than {tolerance}: " + (
        ", ".join(f"{c.name} {c.error:.2e} ({c.rows} rows)" for c in far[:6])
    )


def assert_same_grams(left: GramReader, right: GramReader, tolerance: float) -> None:
    """Two taps hold the same targets, counts and, to *tolerance*, sums."""
    assert left.layers == right.layers
    for layer in left.layers:
        assert left.targets(layer) == right.targets(layer)
        for target in left.targets(layer):
            assert np.array_equal(left.rows(layer, target), right.rows(layer, target)), (
                f"layer {layer}, {target}: rows {left.rows(layer, target)} and "
                f"{right.rows(layer, target)}"
            )
            ours, theirs = left.packed(layer, target), right.packed(layer, target)
            pairs = zip(np.atleast_2d(ours), np.atleast_2d(theirs), strict=True)
            for expert, (a, b) in enumerate(pairs):
                error = relative_error(a, b.astype(np.float64))
                assert error <= tolerance, f"layer {layer}, {target}, {expert}: {error:.2e}"


def _by_weight(reader: GramReader) -> dict[str, tuple[int, str]]:
    """Layer and target of the Gram that serves each weight, by the weight's name in the model."""
    found: dict[str, tuple[int, str]] = {}
    for layer in reader.layers:
        for target in reader.targets(layer):
            for user in reader.users(layer, target):
                assert user.parameter not in found, f"{user.parameter} has two Grams"
                found[user.parameter] = (layer, target)
    return found


def _each(
    reader: GramReader,
    layer: int,
    target: str,
    name: str,
    wanted: NDArray[np.float64],
    wanted_rows: NDArray[np.int64],
) -> list[Compared]:
    rows = reader.rows(layer, target)
    return [
        _one(
            f"{name}[{expert}]",
            reader.gram(layer, target, expert=expert),
            rows[expert],
            wanted[expert],
            wanted_rows[expert],
        )
        for expert in range(len(wanted))
    ]


def _one(
    name: str, gram: NDArray[Any], rows: Any, wanted: NDArray[np.float64], wanted_rows: Any
) -> Compared:
    return Compared(
        name=name,
        error=relative_error(gram, wanted),
        rows=int(rows),
        wanted_rows=int(wanted_rows),
    )


def file_hashes(tap: Path) -> Mapping[str, str]:
    """Sha256 of every sealed layer file, as grams.json lists them."""
    document = json.loads((tap / "grams.json").read_text(encoding="utf-8"))
    return {entry["file"]: entry["sha256"] for entry in document["layers"]}
