"""`leadline data` as people run it: exit codes, one sentence, nothing half-written."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from leadline.cli.app import main
from leadline.data.manifest import load_manifest

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:" + b"4d7a2146" * 8 + b"\nsize 1073741824\n"
)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `leadline data ...` in this process: exit code, stdout, stderr."""

    def call(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main(["data", *map(str, words)])
        printed = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, printed.out, printed.err

    return call


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of ten short documents."""
    root = tmp_path / "text"
    root.mkdir()
    for number in range(10):
        (root / f"{number}.txt").write_text(f"fathom {number}\n" * 20, encoding="utf-8")
    return root


def _one_sentence(err: str) -> str:
    lines = [line for line in err.splitlines() if line.startswith("leadline: ")]
    assert len(lines) == 1
    assert "Traceback" not in err
    return lines[0]


def test_pack_prints_a_summary(run: Run, text: Path, tmp_path: Path) -> None:
    code, out, _ = run("pack", text, "--out", tmp_path / "s", "--tokenizer", "bytes")
    assert code == 0
    assert "from 10 documents; skipped: nothing" in out


def test_pack_json_agrees_with_the_manifest(run: Run, text: Path, tmp_path: Path) -> None:
    code, out, _ = run("pack", text, "--out", tmp_path / "s", "--vocab-size", 270, "--json")
    manifest = load_manifest(tmp_path / "s")
    assert code == 0
    assert json.loads(out) == {
        "out": str(tmp_path / "s"),
        "already_there": False,
        "manifest_sha256": manifest.sha256,
        "vocab_size": manifest.vocab_size,
        "dtype": "uint16",
        "train_tokens": manifest.train.tokens,
        "eval_tokens": manifest.eval.tokens,
        "documents": 10,
        "source_bytes": 10 * 180,
        "skipped": {},
    }


def test_pack_again_says_already_there(run: Run, text: Path, tmp_path: Path) -> None:
    words = ("pack", text, "--out", tmp_path / "s", "--tokenizer", "bytes")
    run(*words)
    code, out, _ = run(*words)
    assert (code, "was already there" in out) == (0, True)
    assert json.loads(run(*words, "--json")[1])["already_there"] is True


def test_pack_takes_the_standard_library_and_a_given_tokenizer(
    run: Run, text: Path, tmp_path: Path
) -> None:
    run("pack", text, "--out", tmp_path / "a", "--vocab-size", 270)
    tokenizer = tmp_path / "a" / "tokenizer.json"
    words = ("pack", "stdlib", "--out", tmp_path / "b", "--max-bytes", 60_000)
    code, out, _ = run(*words, "--tokenizer", tokenizer, "--json")
    assert code == 0
    assert json.loads(out)["source_bytes"] <= 60_000
    assert load_manifest(tmp_path / "b").tokenizer.kind == "given"


def test_verify_is_green_for_whole_shards(run: Run, text: Path, tmp_path: Path) -> None:
    run("pack", text, "--out", tmp_path / "s", "--tokenizer", "bytes")
    assert run("verify", tmp_path / "s")[0] == 0
    assert json.loads(run("verify", tmp_path / "s", "--json")[1]) == {"ok": True, "problems": []}


def test_verify_is_red_for_damaged_shards(run: Run, text: Path, tmp_path: Path) -> None:
    run("pack", text, "--out", tmp_path / "s", "--tokenizer", "bytes")
    (tmp_path / "s" / "train" / "shard-00000.idx").unlink()
    code, out, _ = run("verify", tmp_path / "s", "--json")
    expected = {"ok": False, "problems": ["train/shard-00000.idx is missing"]}
    assert (code, json.loads(out)) == (1, expected)
    assert "red    train/shard-00000.idx is missing" in run("verify", tmp_path / "s")[1]


def test_verify_of_no_shards_is_red(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("verify", tmp_path / "nowhere")
    assert (code, "leadline data pack" in out) == (1, True)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no usable text"),
        ({"a.bin": b"\0\1\2", "b.bin": b"\xff\xfe"}, "1 binary, 1 undecodable"),
        ({"a.txt": b"x", "b.txt": POINTER}, "git-lfs pointer"),
        ({"a.txt": b"only one"}, "held-out split needs 2"),
    ],
)
def test_pack_of_unusable_text_fails_with_one_sentence(
    run: Run, tmp_path: Path, files: dict[str, bytes], words: str
) -> None:
    root = tmp_path / "text"
    root.mkdir()
    for name, data in files.items():
        (root / name).write_bytes(data)
    code, _, err = run("pack", root, "--out", tmp_path / "s")
    assert code == 1
    assert words in _one_sentence(err)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--eval-fraction", "0"), "eval fraction 0"),
        (("--eval-fraction", "1"), "eval fraction 1"),
        (("--vocab-size", "256"), "vocabulary of 256 cannot be trained; give 257"),
        (("--tokenizer", "gone.json"), "no tokenizer 'gone.json'"),
        (("--tokenizer", "bytes", "--vocab-size", "8192"), "this tokenizer has 257"),
        (("--seed", "-1"), "seed is -1"),
        (("--max-bytes", "0"), "max bytes is 0"),
    ],
)
def test_pack_with_an_impossible_option_is_a_usage_error(
    run: Run, text: Path, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    code, _, err = run("pack", text, "--out", tmp_path / "s", *options)
    assert code == 2
    assert words in _one_sentence(err)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_pack_of_no_name_is_a_usage_error(run: Run, tmp_path: Path) -> None:
    code, _, err = run("pack", "", "--out", tmp_path / "s")
    assert code == 2
    assert "no text is named" in _one_sentence(err)


def test_pack_of_a_line_nested_too_deep_names_the_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "deep.jsonl").write_text("[" * 100_000 + "]" * 100_000, encoding="utf-8")
    code, _, err = run("pack", tmp_path / "deep.jsonl", "--out", tmp_path / "s")
    assert code == 1
    assert "is not JSON" in _one_sentence(err)


def test_pack_of_a_missing_folder_is_a_usage_error(run: Run, tmp_path: Path) -> None:
    code, _, err = run("pack", tmp_path / "gone", "--out", tmp_path / "s")
    assert code == 2
    assert "give a folder of text" in _one_sentence(err)


def test_pack_with_a_corrupt_tokenizer_fails_with_one_sentence(
    run: Run, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "t.json").write_bytes(b'{"model": ')
    words = ("--tokenizer", tmp_path / "t.json")
    code, _, err = run("pack", text, "--out", tmp_path / "s", *words)
    assert code == 1
    assert "t.json is not a tokenizer.json" in _one_sentence(err)
    assert not (tmp_path / "s").exists()


def test_pack_over_a_folder_of_other_things_is_a_usage_error(
    run: Run, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "mine.txt").write_bytes(b"mine")
    code, _, err = run("pack", text, "--out", tmp_path / "s")
    assert code == 2
    assert "choose another folder" in _one_sentence(err)
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["mine.txt"]


def test_pack_under_a_file_is_a_usage_error(run: Run, text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    code, _, err = run("pack", text, "--out", tmp_path / "file" / "s", "--tokenizer", "bytes")
    assert code == 2
    assert "it is a file" in _one_sentence(err)


def test_pack_into_a_read_only_place_fails_with_one_sentence(
    run: Run, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *arguments: object, **options: object) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    code, _, err = run("pack", text, "--out", tmp_path / "s", "--tokenizer", "bytes")
    assert code == 1
    assert "Read-only file system; choose a folder you may write to" in _one_sentence(err)


def test_pack_error_in_json_carries_the_same_words(run: Run, text: Path, tmp_path: Path) -> None:
    words = ("pack", text, "--out", tmp_path / "s", "--eval-fraction", "1", "--json")
    _, out, err = run(*words)
    error = json.loads(out)["error"]
    assert error["kind"] == "UsageError"
    assert error["message"] in err
