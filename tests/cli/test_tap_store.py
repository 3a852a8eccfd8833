"""`leadline tap verify`, `export` and `merge`, as typed."""

import json
from pathlib import Path

import pytest

from leadline.cli.app import main

from ..tap.taps import ToyRows, flip_byte, write_tap


def command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


def test_verify_of_a_whole_tap_is_green(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tap(tmp_path / "tap")
    code, out, _ = command(capsys, "tap", "verify", path)
    assert (code, out.split()[0]) == (0, "green")
    assert "3 layers, 27 Grams of 40 tokens" in out
    code, out, _ = command(capsys, "tap", "verify", path, "--json")
    assert (code, json.loads(out)["ok"], json.loads(out)["layers"]) == (0, True, 3)


def test_verify_of_a_damaged_tap_is_red_and_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tap(tmp_path / "tap")
    flip_byte(path / "layer_00001.safetensors", -1)
    code, out, _ = command(capsys, "tap", "verify", path)
    assert (code, out.split()[0]) == (1, "red")
    code, out, _ = command(capsys, "tap", "verify", path, "--json")
    assert code == 1
    assert "layer_00001.safetensors" in json.loads(out)["problems"][0]


def test_verify_of_a_broken_off_tap_is_red_unless_partial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tap(tmp_path / "tap", stop_after=2)
    assert command(capsys, "tap", "verify", path)[0] == 1
    assert command(capsys, "tap", "verify", path, "--partial")[0] == 0


def test_verify_of_no_tap_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = command(capsys, "tap", "verify", tmp_path)
    assert (code, out) == (1, "")
    assert "holds no grams.json" in err


def test_export_writes_and_tells_what_was_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tap(tmp_path / "tap", ToyRows(linear=True))
    words = ("tap", "export", path, "--format", "radgram2", "--out", tmp_path / "out", "--rank", 2)
    code, out, err = command(capsys, *words, "--json")
    assert (code, json.loads(out)["files"]) == (0, 27)
    assert "self_attn.q_proj has no name in radgram2" in err
    assert (tmp_path / "out" / "gram.r2.blk.0.ffn_gate_up_exps.bin").is_file()


def test_export_to_an_unknown_format_lists_the_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tap(tmp_path / "tap")
    code, _, err = command(
        capsys, "tap", "export", path, "--format", "imatrix", "--out", tmp_path / "out"
    )
    assert code == 2
    assert "imatrix is unknown; known: radgram2" in err


def test_merge_adds_two_taps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taps = [write_tap(tmp_path / digest, corpus_digest=digest) for digest in "ab"]
    code, out, _ = command(capsys, "tap", "merge", *taps, "--out", tmp_path / "m", "--json")
    assert code == 0
    assert json.loads(out) == {
        "taps": 2,
        "corpora": 2,
        "layers": 3,
        "documents": 6,
        "tokens": 80,
        "tap_dir": str(tmp_path / "m"),
    }
    assert command(capsys, "tap", "verify", tmp_path / "m")[0] == 0


def test_merge_of_one_tap_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tap(tmp_path / "tap")
    code, _, err = command(capsys, "tap", "merge", path, "--out", tmp_path / "m")
    assert code == 2
    assert "name two or more" in err
