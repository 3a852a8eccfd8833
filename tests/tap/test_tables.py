"""The n-gram table of a tap: which rows are read, and how many bytes, at any step width."""

from collections.abc import Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from leadline.rig.skeleton import Skeleton
from leadline.tap import GramReader

from ..rig.page_cache import drop_pages
from .conftest import Checkpoints
from .families import END_OF_TEXT, random_documents
from .processes import CommandServer
from .reference import relative_error
from .tapping import assert_same_grams, command, record

FAMILY = "qwen4_exp"
WAVE: dict[str, Any] = {"targets": "linear", "micro_batch_tokens": 64}
PAGE = 4096


@pytest.fixture(autouse=True)
def small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count an n-gram table of any size as one that is placed apart."""
    floor = partialmethod(Skeleton.gather_tables, floor=1)
    monkeypatch.setattr(Skeleton, "gather_tables", floor)


def step(width: int) -> dict[str, Any]:
    return {"targets": "linear", "schedule": "step", "max_num_batched_tokens": width}


def table_grams(tap: Path) -> list[NDArray[np.float32]]:
    """Grams of what was looked up: inputs of the projections behind each table."""
    with GramReader(tap) as reader:
        return [
            reader.gram(layer, target)
            for layer in reader.layers
            for target in reader.targets(layer)
            if any("ple.key_proj" in user.parameter for user in reader.users(layer, target))
        ]


def assert_same_rows(left: Path, right: Path, *, tables: int = 2) -> None:
    """Both taps looked up the same rows, as often."""
    ours, theirs = table_grams(left), table_grams(right)
    assert len(ours) == len(theirs) == tables
    for one, other in zip(ours, theirs, strict=True):
        assert np.linalg.norm(other) > 0
        assert relative_error(one, other.astype(np.float64)) < 1e-6


def test_t42_document_in_chunks_of_seven_has_the_rows_of_the_whole(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    documents = random_documents((40,))
    record(checkpoints(FAMILY), documents, tmp_path / "whole", **WAVE)
    record(checkpoints(FAMILY), documents, tmp_path / "cut", **step(7))
    assert_same_rows(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize("flags", [WAVE, step(5)], ids=["wave", "step"])
def test_t42_ngram_does_not_reach_over_an_end_of_text(
    checkpoints: Checkpoints, tmp_path: Path, flags: dict[str, Any]
) -> None:
    first, second = ([*ids, END_OF_TEXT] for ids in random_documents((13, 18), seed=3))
    record(checkpoints(FAMILY), [first + second], tmp_path / "joined", **flags)
    record(checkpoints(FAMILY), [first, second], tmp_path / "apart", **flags)
    assert_same_rows(tmp_path / "joined", tmp_path / "apart")


def test_t42_ngram_reaches_over_any_other_token(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """The comparison itself: without the end of text the rows differ."""
    first, second = ([*ids, 7] for ids in random_documents((13, 18), seed=3))
    record(checkpoints(FAMILY), [first + second], tmp_path / "joined", **WAVE)
    record(checkpoints(FAMILY), [first, second], tmp_path / "apart", **WAVE)
    pairs = zip(table_grams(tmp_path / "joined"), table_grams(tmp_path / "apart"), strict=True)
    assert all(relative_error(one, other.astype(np.float64)) > 1e-3 for one, other in pairs)


@pytest.mark.parametrize(("lengths", "widths"), [((9, 1, 14), (1, 7)), ([512] * 17, (8192, 8193))])
def test_t69_any_step_width_looks_up_the_same_rows(
    checkpoints: Checkpoints, tmp_path: Path, lengths: Sequence[int], widths: tuple[int, int]
) -> None:
    """8,193 tokens in a step of a table with four heads: 32,772 rows at once."""
    documents = random_documents(lengths)
    taps = [tmp_path / str(width) for width in widths]
    two_layers = {"layer_types": ["linear_attention", "full_attention"], "ple_layer_ids": [1]}
    checkpoint = checkpoints(FAMILY, num_hidden_layers=2, **two_layers)
    for width, tap in zip(widths, taps, strict=True):
        flags = {**step(width), "max_num_seqs": 32, "kv_tokens": 8704}
        result = record(checkpoint, documents, tap, **flags)
        assert result["steps"] == -(-sum(lengths) // width)
    assert_same_rows(*taps, tables=1)
    with GramReader(taps[0]) as left, GramReader(taps[1]) as right:
        assert_same_grams(left, right, 1e-5)


@pytest.fixture(scope="module")
def wide_table(checkpoints: Checkpoints) -> Path:
    """Two tables of 80,000 rows of 12 bytes: 1.9 MB beside 0.3 MB of other weights."""
    path = checkpoints(FAMILY, ngram_vocab_size_base=20_000)
    for shard in path.glob("*.safetensors"):
        drop_pages(shard)
    return path


@pytest.mark.slow
def test_t67_only_the_rows_used_are_read(
    server: CommandServer, wide_table: Path, tmp_path: Path
) -> None:
    documents = random_documents((20, 13))
    results = {}
    for placement in ("disk", "ram"):
        arguments = command(
            wide_table,
            documents,
            tmp_path / placement,
            micro_batch_tokens=64,
            targets="linear",
            ngram_placement=placement,
        )
        results[placement] = server.run(arguments, fault=("small_tables", {})).result
    heads, tables, row_bytes = 4, 2, 12
    looked_up = 33 * heads * tables
    for_rows = results["disk"]["bytes_read"] - results["disk"]["planned_bytes"]
    assert 0 < for_rows <= looked_up * row_bytes
    from_disk = results["disk"]["bytes_from_disk"] - results["disk"]["bytes_read"]
    assert from_disk < looked_up * 2 * PAGE
    whole = results["ram"]["bytes_read"] - results["disk"]["planned_bytes"]
    assert whole >= tables * heads * 20_000 * row_bytes
    with GramReader(tmp_path / "disk") as left, GramReader(tmp_path / "ram") as right:
        assert_same_grams(left, right, 0.0)
