import json
import struct

import numpy as np
import pytest
from safetensors import safe_open

from leadline.core.errors import DataError, DiskSpaceError, IntegrityError
from leadline.tap import layer_file
from leadline.tap.layer_file import array_block, open_layer_file, write_layer_file

from .taps import EXPERTS, HIDDEN, ToyRows, write_tap


@pytest.fixture
def path(tmp_path):
    return write_tap(tmp_path / "tap", ToyRows(layers=1)) / "layer_00000.safetensors"


def header_of(path):
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def write_with(path, header, body):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def test_layer_file_opens_in_the_safetensors_library(path):
    grams, rows = ToyRows(layers=1).grams(0)
    with safe_open(path, framework="numpy") as file:
        assert sorted(file.keys()) == ["down", "gate_up", "rows.down", "rows.gate_up"]
        assert (file.get_tensor("down") == grams["down"].packed).all()
        assert file.get_tensor("rows.down").tolist() == rows["down"].tolist()
        assert file.get_tensor("rows.gate_up").shape == ()
        metadata = file.metadata()
    assert (metadata["format"], metadata["layer"]) == ("leadline-grams-layer", "0")
    down = json.loads(metadata["grams"])["down"]
    assert (down["sum"], down["num_features"], down["num_experts"]) == ("raw", 4, EXPERTS)
    assert down["users"][0]["published"] == ["model.layers.0.mlp.experts.{expert}.down_proj.weight"]


def test_layer_file_holds_rows_first_so_that_every_tensor_is_aligned(path):
    header, _ = header_of(path)
    begins = {name: entry["data_offsets"][0] for name, entry in header.items() if name[0] != "_"}
    assert sorted(begins, key=begins.get) == ["rows.down", "rows.gate_up", "down", "gate_up"]
    assert begins["rows.gate_up"] % 8 == 0


def test_layer_file_of_equal_content_is_equal_bytes_whatever_the_order(tmp_path):
    grams, rows = ToyRows().grams(0)
    facts = {name: gram.facts(name) for name, gram in grams.items()}
    blocks = [array_block(f"rows.{name}", count) for name, count in rows.items()]
    blocks += [array_block(name, gram.packed) for name, gram in grams.items()]
    one = write_layer_file(tmp_path / "a", 0, facts, blocks)
    reordered = dict(sorted(facts.items(), reverse=True))
    two = write_layer_file(tmp_path / "b", 0, reordered, blocks[::-1])
    assert one == two
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_layer_file_without_a_gram_is_a_file(tmp_path):
    written = write_layer_file(tmp_path / "a", 7, {}, [])
    assert open_layer_file(tmp_path / "a", 7).facts == {}
    assert written.num_bytes == (tmp_path / "a").stat().st_size


def test_numbers_are_read_in_parts_and_in_chunks(path, monkeypatch):
    monkeypatch.setattr(layer_file, "CHUNK_NUMBERS", 7)
    file = open_layer_file(path, 0)
    whole = ToyRows(layers=1).grams(0)[0]["down"].packed.reshape(-1)
    assert file.numbers("down", 13, 5).tolist() == whole[13:18].tolist()
    chunks = list(file.chunks("down"))
    assert [chunk.size for chunk in chunks[:-1]] == [7] * (len(chunks) - 1)
    assert np.concatenate(chunks).tolist() == whole.tolist()


def test_layer_file_written_in_many_flushes_is_the_same_file(tmp_path, path, monkeypatch):
    monkeypatch.setattr(layer_file, "_FLUSH_BYTES", 64)
    other = write_tap(tmp_path / "other", ToyRows(layers=1))
    assert (other / "layer_00000.safetensors").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("kept", [0, 4, 8, 100, -100, -1])
def test_layer_file_that_was_cut_is_refused_before_a_number_is_read(path, kept):
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(IntegrityError, match="tap this layer again"):
        open_layer_file(path, 0)


def test_layer_file_with_a_byte_too_many_is_refused(path):
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(IntegrityError, match="the file has"):
        open_layer_file(path, 0)


def test_layer_file_cut_while_it_is_read_is_an_error_and_no_zeros(path):
    file = open_layer_file(path, 0)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(IntegrityError, match="cut while it was read"):
        file.numbers("gate_up", 0, HIDDEN * (HIDDEN + 1) // 2)


def _swap(header):
    header["down"]["data_offsets"], header["gate_up"]["data_offsets"] = (
        header["gate_up"]["data_offsets"],
        header["down"]["data_offsets"],
    )


def _edit_grams(header, **change):
    grams = json.loads(header["__metadata__"]["grams"])
    grams["down"].update(change)
    header["__metadata__"]["grams"] = json.dumps(grams)


@pytest.mark.parametrize(
    "edit",
    [
        lambda h: h["down"].update(dtype="F16"),
        lambda h: h["down"].update(shape=[4, 20]),
        lambda h: h["down"].update(shape=[-8, -10]),
        lambda h: h["down"].update(shape=[8.0, 10]),
        lambda h: h["down"].update(data_offsets=[0, 320]),
        lambda h: h["rows.down"].update(dtype="I32"),
        lambda h: h.pop("rows.down"),
        lambda h: h.pop("gate_up"),
        lambda h: h.pop("__metadata__"),
        lambda h: h["__metadata__"].pop("grams"),
        lambda h: h["__metadata__"].update(grams="{"),
        lambda h: h["__metadata__"].update(layer="4"),
        lambda h: h.update(surprise={"dtype": "F32", "shape": [0], "data_offsets": [492, 492]}),
        lambda h: _edit_grams(h, num_features=5),
        lambda h: _edit_grams(h, num_features=-4),
        lambda h: _edit_grams(h, end_expert=9),
        lambda h: _edit_grams(h, first_expert=3),
        lambda h: _edit_grams(h, num_experts=None),
        lambda h: _edit_grams(h, sum="mean"),
        lambda h: _edit_grams(h, users=[{"parameter": 3, "published": []}]),
        _swap,
    ],
)
def test_layer_file_with_an_edited_header_is_refused(path, edit):
    header, body = header_of(path)
    edit(header)
    write_with(path, header, body)
    with pytest.raises(IntegrityError, match=r"header is damaged .*tap this layer again"):
        open_layer_file(path, 0)


@pytest.mark.parametrize("text", [b"", b"[]", b"7", b"{", b"\xff\xff", b'"x"', b"[" * 9000])
def test_layer_file_whose_header_is_no_object_is_refused(path, text):
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(IntegrityError, match="no layer file"):
        open_layer_file(path, 0)


@pytest.mark.parametrize("change", [{"version": "2"}, {"format": "other"}])
def test_t30_layer_file_of_another_version_is_refused_with_both(path, change):
    header, body = header_of(path)
    header["__metadata__"].update(change)
    write_with(path, header, body)
    with pytest.raises(DataError, match=r"this program reads .* of version 1"):
        open_layer_file(path, 0)


def test_write_layer_file_that_fails_midway_leaves_nothing(tmp_path):
    def chunks():
        yield np.zeros(3, np.float32)
        raise OSError(28, "No space left on device")

    facts = ToyRows().grams(0)[0]["gate_up"].facts("gate_up")
    block = layer_file.Block(name="gate_up", dtype="F32", shape=(21,), chunks=chunks)
    with pytest.raises(DiskSpaceError, match="disk is full"):
        write_layer_file(tmp_path / "layer", 0, {"gate_up": facts}, [block])
    assert list(tmp_path.iterdir()) == []
