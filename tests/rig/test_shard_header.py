"""The header of one safetensors file: what is refused, and that nothing else gets through."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from leadline.core.errors import IntegrityError, LeadlineError, UsageError
from leadline.rig.shard_header import read_shard_header

from .shard_files import header_of, write_raw, write_shard

SHAPES = {"a": (2, 3), "b": (), "c": (0, 4), "d": (5,)}


def test_header_gives_absolute_offsets(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "x.safetensors", SHAPES)
    entries = {entry.name: entry for entry in read_shard_header(path).entries}
    data = path.read_bytes()
    with safe_open(path, "np") as file:
        for name, shape in SHAPES.items():
            entry = entries[name]
            assert entry.shape == shape
            assert data[entry.begin : entry.end] == file.get_tensor(name).tobytes()


def test_metadata_is_no_tensor(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, **header_of({"a": (2,)})}
    path = write_raw(tmp_path / "x.safetensors", header, 4)
    assert [entry.name for entry in read_shard_header(path).entries] == ["a"]


def test_gap_between_tensors_is_let_through(tmp_path: Path) -> None:
    header = header_of({"a": (2,)})
    header["b"] = {"dtype": "F16", "shape": [1], "data_offsets": [64, 66]}
    path = write_raw(tmp_path / "x.safetensors", header, 66)
    assert [entry.num_bytes for entry in read_shard_header(path).entries] == [4, 2]


@pytest.mark.parametrize("cut", [1, 1024, 4000])
def test_t43_shard_cut_short_is_refused_with_both_lengths(tmp_path: Path, cut: int) -> None:
    path = write_shard(tmp_path / "model-2.safetensors", {"a": (40, 50)})
    whole = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(IntegrityError, match=r"model-2\.safetensors is cut short") as caught:
        read_shard_header(path)
    assert f"{whole:,}" in str(caught.value)
    assert f"{whole - cut:,}" in str(caught.value)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 20])
def test_t43_shard_cut_inside_its_header_is_refused(tmp_path: Path, length: int) -> None:
    path = write_shard(tmp_path / "x.safetensors", {"a": (4,)})
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(IntegrityError, match="fetch"):
        read_shard_header(path)


def test_bytes_behind_the_last_tensor_are_refused(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "x.safetensors", {"a": (4,)})
    path.write_bytes(path.read_bytes() + b"!")
    with pytest.raises(IntegrityError, match="longer than its header says"):
        read_shard_header(path)


def test_lfs_pointer_is_told_from_weights(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    with pytest.raises(IntegrityError, match="Git LFS pointer"):
        read_shard_header(path)


def test_header_length_beyond_reason_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(IntegrityError, match="header has"):
        read_shard_header(path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dtype": "F16", "shape": [3], "data_offsets": [0, 4]}, "6 bytes but is given 4"),
        ({"dtype": "F16", "shape": [-2], "data_offsets": [0, 4]}, "shape"),
        ({"dtype": "F16", "shape": [2.0], "data_offsets": [0, 4]}, "shape"),
        ({"dtype": "F16", "shape": [True], "data_offsets": [0, 2]}, "shape"),
        ({"dtype": "F16", "shape": [2], "data_offsets": [4, 0]}, "data_offsets"),
        ({"dtype": "F16", "shape": [2], "data_offsets": [0, 2, 4]}, "data_offsets"),
        ({"dtype": "F16", "shape": [2], "data_offsets": [-4, 0]}, "data_offsets"),
        ({"dtype": "F16", "shape": [2]}, "data_offsets"),
        ({"dtype": 16, "shape": [2], "data_offsets": [0, 4]}, "dtype"),
        ({"dtype": "C64", "shape": [2], "data_offsets": [0, 16]}, "unknown dtype C64"),
        (["F16"], "wanted dtype"),
    ],
)
def test_entry_that_cannot_be_is_refused_by_name(tmp_path: Path, fields: Any, said: str) -> None:
    path = write_raw(tmp_path / "x.safetensors", {"odd.weight": fields}, 4)
    with pytest.raises(IntegrityError, match=r"odd\.weight") as caught:
        read_shard_header(path)
    assert said in str(caught.value)


@pytest.mark.parametrize("text", [b"[]", b"{", b"\xff\xfe", b'{"a": {}, "a": {}}', b"[" * 9999])
def test_header_that_is_no_object_of_unique_names_is_refused(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(IntegrityError, match=r"x\.safetensors"):
        read_shard_header(write_raw(tmp_path / "x.safetensors", text, 0))


def test_tensors_that_share_bytes_are_refused(tmp_path: Path) -> None:
    header = header_of({"a": (4,), "b": (4,)})
    header["b"]["data_offsets"] = [6, 14]
    path = write_raw(tmp_path / "x.safetensors", header, 14)
    with pytest.raises(IntegrityError, match="a and b share bytes"):
        read_shard_header(path)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "F4", "F6_E2M3"])
def test_quantised_dtype_is_refused_with_the_way_out(tmp_path: Path, dtype: str) -> None:
    path = write_raw(tmp_path / "x.safetensors", header_of({"w": (4,)}, dtype, 1), 4)
    with pytest.raises(UsageError, match="dequantise it first"):
        read_shard_header(path)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(at=st.integers(0, 400), value=st.integers(0, 255))
def test_any_changed_byte_is_refused_or_leaves_a_sound_header(
    tmp_path: Path, at: int, value: int
) -> None:
    path = write_shard(tmp_path / "x.safetensors", SHAPES)
    data = bytearray(path.read_bytes())
    data[at % len(data)] = value
    path.write_bytes(data)
    try:
        header = read_shard_header(path)
    except LeadlineError:
        return
    ends = [(entry.begin, entry.end) for entry in header.entries]
    assert ends == sorted(ends)
    assert max(end for _, end in ends) == len(data) == header.file_bytes
    assert json.loads(header.raw[8:])
