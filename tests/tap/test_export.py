import errno
import os
import struct

import numpy as np
import pytest

from leadline.core.errors import DataError, DiskSpaceError, IntegrityError, UsageError
from leadline.tap.export import export_radgram2
from leadline.tap.radgram import read_radgram
from leadline.tap.reader import GramReader
from leadline.tap.store import TapStore

from .taps import EXPERTS, HIDDEN, INNER, ToyRows, flip_byte, toy_key, write_tap


@pytest.fixture
def path(tmp_path):
    return write_tap(tmp_path / "tap", ToyRows(linear=True))


def test_export_writes_one_file_for_each_gram_under_the_names_of_the_layout(path, tmp_path):
    result = export_radgram2(path, tmp_path / "out")
    wanted = {f"gram.r0.blk.{layer}.ffn_gate_up_exps.bin" for layer in range(3)} | {
        f"gram.r0.blk.{layer}.ffn_down_exps.{expert}.bin"
        for layer in range(3)
        for expert in range(EXPERTS)
    }
    assert {file.name for file in (tmp_path / "out").iterdir()} == wanted
    size = sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    assert (result.files, result.num_bytes) == (3 * (EXPERTS + 1), size)
    assert result.left_out == ("self_attn.q_proj",)


def test_radgram2_file_is_a_header_of_32_bytes_and_the_full_square(path, tmp_path):
    export_radgram2(path, tmp_path / "out", rank=3, domain=5)
    data = (tmp_path / "out" / "gram.r3.blk.2.ffn_down_exps.6.bin").read_bytes()
    rows = int(GramReader(path).rows(2)[6])
    assert data[:32] == b"RADGRAM2" + struct.pack("<IIQII", INNER, 3, rows, 5, 0)
    assert len(data) == 32 + 4 * INNER * INNER
    square = np.frombuffer(data[32:], "<f4").reshape(INNER, INNER)
    assert (square == GramReader(path).gram(2, "down", expert=6)).all()


def test_radgram2_file_of_the_pooled_gram_comes_back(path, tmp_path):
    export_radgram2(path, tmp_path / "out")
    header, gram = read_radgram(tmp_path / "out" / "gram.r0.blk.1.ffn_gate_up_exps.bin")
    assert (header.num_features, header.rows, header.rank, header.domain) == (HIDDEN, 40, 0, 0)
    assert (gram == GramReader(path).gram(1, "gate_up")).all()


def test_gate_up_of_each_expert_has_the_experts_number(tmp_path):
    rows = ToyRows(layers=1)
    grams, counts = rows.grams(0)
    with TapStore.open(tmp_path / "tap", toy_key(gate_up="expert"), rows.plan) as store:
        store.seal(0, {"gate_up": grams["down"]}, {"gate_up": counts["down"]})
        store.finish({})
    export_radgram2(tmp_path / "tap", tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        f"gram.r0.blk.0.ffn_gate_up_exps.{expert}.bin" for expert in range(EXPERTS)
    }


def test_export_of_some_experts_names_them_by_their_own_number(tmp_path):
    rows = ToyRows(layers=1, experts=range(5, 7))
    write_tap(tmp_path / "tap", rows, first_expert=5, end_expert=7)
    export_radgram2(tmp_path / "tap", tmp_path / "out")
    header, gram = read_radgram(tmp_path / "out" / "gram.r0.blk.0.ffn_down_exps.6.bin")
    assert header.rows == rows.grams(0)[1]["down"][1]
    assert (gram == GramReader(tmp_path / "tap").gram(0, "down", expert=6)).all()


def test_export_without_routed_experts_is_refused(tmp_path):
    rows = ToyRows(layers=1, linear=True)
    grams, counts = rows.grams(0)
    name = "self_attn.q_proj"
    with TapStore.open(tmp_path / "tap", toy_key(), rows.plan) as store:
        store.seal(0, {name: grams[name]}, {name: counts[name]})
        store.finish({})
    with pytest.raises(UsageError, match="no Gram of routed experts"):
        export_radgram2(tmp_path / "tap", tmp_path / "out")


def test_export_into_a_folder_that_holds_something_is_refused(path, tmp_path):
    (tmp_path / "out").mkdir()
    export_radgram2(path, tmp_path / "out")
    with pytest.raises(UsageError, match="holds files already"):
        export_radgram2(path, tmp_path / "out")


@pytest.mark.parametrize("change", [{"rank": -1}, {"rank": 2**32}, {"domain": 2**32}])
def test_number_that_no_u32_holds_is_refused(path, tmp_path, change):
    (name, value), *_ = change.items()
    with pytest.raises(UsageError, match=f"{name} {value} is outside"):
        export_radgram2(path, tmp_path / "out", **change)


def test_export_of_a_damaged_or_broken_off_tap_is_refused(path, tmp_path):
    flip_byte(path / "layer_00002.safetensors", -1)
    with pytest.raises(IntegrityError, match=r"layer_00002.*sha256 differs"):
        export_radgram2(path, tmp_path / "out")
    half = write_tap(tmp_path / "half", stop_after=1)
    with pytest.raises(DataError, match="not complete"):
        export_radgram2(half, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_t92_export_that_does_not_fit_is_refused_with_both_numbers(path, tmp_path, monkeypatch):
    monkeypatch.setattr("leadline.tap.export.disk_free_bytes", lambda path: 12_345)
    with pytest.raises(DiskSpaceError, match=r"12345 bytes\) free and the export needs"):
        export_radgram2(path, tmp_path / "out")


@pytest.mark.parametrize("at", [1, 5, 27])
def test_t92_export_on_a_disk_that_fills_leaves_nothing(path, tmp_path, monkeypatch, at):
    writes = []

    def fill(handle):
        writes.append(handle)
        if len(writes) >= at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fill)
    with pytest.raises(DiskSpaceError, match="disk is full"):
        export_radgram2(path, tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["tap"]


@pytest.mark.parametrize("damage", [lambda p: p.write_bytes(p.read_bytes()[:-1]), flip_byte])
def test_read_radgram_of_a_damaged_file_is_refused(path, tmp_path, damage):
    export_radgram2(path, tmp_path / "out")
    file = tmp_path / "out" / "gram.r0.blk.0.ffn_gate_up_exps.bin"
    damage(file) if damage is not flip_byte else flip_byte(file, 3)
    with pytest.raises(IntegrityError, match="export it again"):
        read_radgram(file)
