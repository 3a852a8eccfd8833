import json
from dataclasses import replace

import numpy as np
import pytest

from leadline.core.canonical import canonical_bytes, sha256_file, sha256_json
from leadline.tap import verify
from leadline.tap.layer_file import array_block, write_layer_file
from leadline.tap.manifest import read_manifest, write_manifest
from leadline.tap.rows import summarize
from leadline.tap.verify import verify_tap

from .taps import EXPERTS, INNER, ToyRows, flip_byte, write_tap


@pytest.fixture
def path(tmp_path):
    return write_tap(tmp_path / "tap")


def problems(path, **kwargs):
    return verify_tap(path, **kwargs).problems


def reseal(path, layer, grams, rows):
    """Put other numbers under valid hashes, as a faulty recorder would have sealed them."""
    facts = {name: gram.facts(name) for name, gram in grams.items()}
    blocks = [array_block(f"rows.{name}", count) for name, count in rows.items()]
    blocks += [array_block(name, gram.packed) for name, gram in grams.items()]
    manifest = read_manifest(path)
    entry = manifest.entry(layer)
    written = write_layer_file(path / entry.file, layer, facts, blocks)
    entry = replace(
        entry,
        num_bytes=written.num_bytes,
        sha256=written.sha256,
        rows={name: summarize(count) for name, count in rows.items()},
    )
    others = [other for other in manifest.layers if other.layer != layer]
    write_manifest(path, replace(manifest, layers=(*others, entry)))


def changed(grams, name, place, value):
    packed = grams[name].packed.copy()
    packed[place] = value
    return {**grams, name: replace(grams[name], packed=packed)}


def test_verify_of_a_whole_tap_reports_what_it_read(path):
    report = verify_tap(path)
    size = sum(file.stat().st_size for file in path.glob("layer_*"))
    assert report.document == {
        "ok": True,
        "problems": [],
        "complete": True,
        "layers": 3,
        "grams": 3 * (EXPERTS + 1),
        "tokens": 40,
        "bytes": size,
        "tap_dir": str(path),
    }


def test_verify_finds_one_changed_byte_anywhere_in_a_layer(path):
    file = path / "layer_00001.safetensors"
    whole = file.read_bytes()
    for offset in range(0, len(whole), 61):
        flip_byte(file, offset)
        (problem,) = problems(path)
        assert "layer_00001.safetensors" in problem, offset
        file.write_bytes(whole)
    assert problems(path) == ()


def test_verify_goes_on_after_a_problem_and_names_each(path):
    flip_byte(path / "layer_00000.safetensors", -1)
    (path / "layer_00001.safetensors").unlink()
    (path / "layer_00002.safetensors").write_bytes(b"")
    found = problems(path)
    assert [text for text in ("sha256 differs", "is missing", "has 0 bytes") if text in str(found)]
    assert len(found) == 3


def test_verify_of_a_broken_off_tap_names_the_first_layer_missing(tmp_path):
    path = write_tap(tmp_path / "tap", stop_after=1)
    (problem,) = problems(path)
    assert problem.startswith("layer 1 is not sealed (2 of 3 are missing)")
    assert problems(path, allow_partial=True) == ()


def test_verify_of_a_tap_without_its_end_says_so(tmp_path):
    path = write_tap(tmp_path / "tap", stop_after=3)
    assert "broken off before its end" in problems(path)[0]


def test_verify_finds_a_layer_file_that_nobody_listed(path):
    (path / "layer_00009.safetensors").write_bytes(b"x")
    assert problems(path) == (
        "layer_00009.safetensors lies in the folder and is not listed in grams.json",
    )


def test_verify_finds_a_layer_listed_twice(path):
    manifest = read_manifest(path)
    write_manifest(path, replace(manifest, layers=(*manifest.layers, manifest.layers[0])))
    assert "lists the layers [0, 1, 2, 0]" in problems(path)[0]


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ((5, 0), np.nan, "expert 5 has nan on its diagonal"),
        ((5, 0), -2.0, "expert 5 has -2.0 on its diagonal"),
        ((7, 1), np.nan, "expert 7 holds NaN or Inf"),
        ((7, 2), np.inf, "expert 7 holds NaN or Inf"),
    ],
)
def test_verify_finds_numbers_that_no_sum_of_squares_has(path, place, value, message):
    grams, rows = ToyRows().grams(1)
    reseal(path, 1, changed(grams, "down", place, value), rows)
    (problem,) = problems(path)
    assert f"layer 1, down, {message}" in problem


def test_verify_finds_a_gram_without_rows_that_is_not_zero(path):
    grams, rows = ToyRows().grams(1)
    taken = rows["down"].copy()
    taken[0], taken[3] = taken[0] + taken[3], 0
    reseal(path, 1, grams, {**rows, "down": taken})
    (problem,) = problems(path)
    assert "layer 1, down, expert 3 is not zero although no row reached it" in problem
    reseal(path, 1, changed(grams, "down", 3, 0.0), {**rows, "down": taken})
    assert problems(path) == ()


@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_verify_finds_rows_that_are_not_conserved(path, name):
    grams, rows = ToyRows().grams(1)
    reseal(path, 1, grams, {**rows, name: rows[name] + 1})
    (problem,) = problems(path)
    assert problem.startswith(f"layer 1, {name} counted")


def test_verify_finds_counts_that_grams_json_shows_otherwise(path):
    file = path / "grams.json"
    document = json.loads(file.read_bytes())
    document.pop("digest")
    document["layers"][2]["rows"]["down"]["min"] = 0
    file.write_bytes(canonical_bytes({**document, "digest": sha256_json(document)}) + b"\n")
    assert problems(path) == ("layer 2, down has other row counts than grams.json shows",)


def test_verify_finds_grams_that_grams_json_does_not_list(path):
    grams, rows = ToyRows(linear=True).grams(0)
    reseal(path, 0, grams, rows)
    manifest = read_manifest(path)
    entry = manifest.entry(0)
    less = replace(entry, rows={"down": entry.rows["down"]})
    others = [other for other in manifest.layers if other.layer]
    write_manifest(path, replace(manifest, layers=(less, *others)))
    (problem,) = problems(path)
    assert "has the Grams ['down', 'gate_up', 'self_attn.q_proj'], listed ['down']" in problem


def test_verify_in_small_chunks_names_the_same_expert(path, monkeypatch):
    monkeypatch.setattr(verify, "CHUNK_NUMBERS", 3 * INNER * (INNER + 1) // 2)
    grams, rows = ToyRows().grams(1)
    reseal(path, 1, changed(grams, "down", (7, 1), np.nan), rows)
    assert "layer 1, down, expert 7 holds" in problems(path)[0]


def test_verify_reads_a_layer_file_and_changes_nothing(path):
    before = {file.name: sha256_file(file) for file in path.iterdir()}
    seen = []
    verify_tap(path, on_progress=lambda done, total: seen.append((done, total)))
    assert {file.name: sha256_file(file) for file in path.iterdir()} == before
    assert [done == total for done, total in seen] == [False, False, True]
