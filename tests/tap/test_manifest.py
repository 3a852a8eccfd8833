import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.core.canonical import canonical_bytes, sha256_json
from leadline.core.errors import DataError, IntegrityError
from leadline.core.notes import Note
from leadline.tap.manifest import (
    LayerEntry,
    LayerNote,
    Manifest,
    RowsSummary,
    read_manifest,
    write_manifest,
)

from .taps import flip_byte, toy_key, write_tap

counts = st.integers(0, 2**53 - 1)
summaries = st.builds(
    RowsSummary, total=counts, min=counts, median=counts, max=counts, without_rows=counts
)
entries = st.builds(
    LayerEntry,
    layer=counts,
    file=st.just("layer_00000.safetensors"),
    num_bytes=counts,
    sha256=st.text("0123456789abcdef", min_size=64, max_size=64),
    waves=counts,
    rows=st.dictionaries(st.text(), summaries, max_size=3),
)
notes = st.builds(
    LayerNote,
    layer=st.none() | counts,
    note=st.builds(Note, kind=st.just("a_kind"), count=counts, detail=st.text()),
)
manifests = st.builds(
    Manifest,
    key=st.just(toy_key()),
    parts=st.sampled_from([(), (toy_key(), toy_key(tokens=1))]),
    planned_layers=st.lists(counts, max_size=4).map(tuple),
    layers=st.lists(entries, max_size=3).map(tuple),
    notes=st.lists(notes, max_size=3).map(tuple),
    result=st.dictionaries(st.text(), counts | st.text() | st.booleans(), max_size=3),
    complete=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(manifest=manifests)
def test_manifest_comes_back_as_it_was_written(tmp_path_factory, manifest):
    folder = tmp_path_factory.mktemp("manifest")
    write_manifest(folder, manifest)
    assert read_manifest(folder) == manifest
    assert (folder / "grams.json").read_bytes() == manifest.to_bytes()


def rewrite(folder, edit, *, seal_again):
    """Edit grams.json and keep it canonical; with *seal_again* its digest fits as well."""
    path = folder / "grams.json"
    document = json.loads(path.read_bytes())
    edit(document)
    if seal_again:
        document.pop("digest", None)
        document["digest"] = sha256_json(document)
    path.write_bytes(canonical_bytes(document) + b"\n")


@pytest.fixture
def folder(tmp_path):
    return write_tap(tmp_path / "tap")


@pytest.mark.parametrize(
    "edit",
    [
        lambda d: d["key"].update(tokens=41),
        lambda d: d.update(complete=False),
        lambda d: d["layers"][0].update(bytes=1),
        lambda d: d["layers"].pop(),
        lambda d: d.pop("digest"),
        lambda d: d.update(note="x"),
    ],
)
def test_manifest_edited_into_other_canonical_json_is_told_by_its_digest(folder, edit):
    rewrite(folder, edit, seal_again=False)
    with pytest.raises(IntegrityError, match=r"grams\.json was edited or cut"):
        read_manifest(folder)


@pytest.mark.parametrize(
    "edit",
    [
        lambda d: d.pop("key"),
        lambda d: d.pop("parts"),
        lambda d: d["key"].pop("tokens"),
        lambda d: d["key"].update(tokens="40"),
        lambda d: d["layers"][0].update(file="../../layer_00000.safetensors"),
        lambda d: d["layers"][0].update(file=".hidden"),
        lambda d: d["layers"][0].update(bytes=-1),
        lambda d: d["layers"][0].update(layer=True),
        lambda d: d["layers"][0]["rows"]["down"].update(surprise=1),
        lambda d: d["layers"][0].update(rows=3),
        lambda d: d.update(notes=[{"layer": None}]),
        lambda d: d.update(planned_layers=7),
    ],
)
def test_manifest_of_another_shape_is_refused_though_its_digest_fits(folder, edit):
    rewrite(folder, edit, seal_again=True)
    with pytest.raises(IntegrityError, match="is damaged"):
        read_manifest(folder)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_t30_manifest_of_an_unknown_version_names_both(folder, version):
    rewrite(folder, lambda d: d.update(version=version), seal_again=True)
    with pytest.raises(DataError, match=f"version {version!r}, this program reads 1"):
        read_manifest(folder)


def test_manifest_of_another_program_is_refused(folder):
    rewrite(folder, lambda d: d.update(format="imatrix"), seal_again=True)
    with pytest.raises(DataError, match="'imatrix', wanted 'leadline-grams'"):
        read_manifest(folder)


@pytest.mark.parametrize("data", [b"", b"{", b"[]\n", b'"x"\n', b"\xff", b"[" * 9000])
def test_manifest_that_is_no_json_object_is_refused(folder, data):
    (folder / "grams.json").write_bytes(data)
    with pytest.raises(IntegrityError, match=r"grams\.json"):
        read_manifest(folder)


def test_manifest_cut_or_changed_anywhere_is_refused(folder):
    path = folder / "grams.json"
    whole = path.read_bytes()
    for size in range(0, len(whole), 37):
        path.write_bytes(whole[:size])
        with pytest.raises((IntegrityError, DataError)):
            read_manifest(folder)
    for offset in range(0, len(whole), 41):
        path.write_bytes(whole)
        flip_byte(path, offset)
        with pytest.raises((IntegrityError, DataError)):
            read_manifest(folder)


def test_layer_with_a_wave_missing_is_not_sealed():
    entry = LayerEntry(layer=0, file="x", num_bytes=1, sha256="", waves=1, rows={})
    manifest = Manifest(key=toy_key(num_waves=2), planned_layers=(0, 1), layers=(entry,))
    assert (manifest.sealed, manifest.missing_layers) == (frozenset(), (0, 1))
    both = replace(manifest, layers=(replace(entry, waves=2),))
    assert (both.sealed, both.missing_layers) == ({0}, (1,))
