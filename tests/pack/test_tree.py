import pytest

from leadline.core.canonical import sha256_file
from leadline.core.errors import IntegrityError, UsageError
from leadline.core.manifest import build_manifest, read_manifest, write_manifest
from leadline.pack.build import build_pack
from leadline.pack.tree import verify_folder, verify_tree
from leadline.pack.verify import verify_pack


def test_verify_tree_of_an_untouched_tree_is_ok_and_shows_its_control(tree):
    report = verify_tree(tree, build_manifest(tree))
    assert (report.ok, report.files, report.bytes) == (True, 3, 773)
    assert report.negative_control.found
    assert report.tarball_sha256 is None


def test_verify_tree_lists_every_problem_and_runs_no_control(tree):
    manifest = build_manifest(tree)
    (tree / "a.txt").write_text("alphb")
    (tree / "new").write_text("x")
    report = verify_tree(tree, manifest)
    assert len(report.problems) == 2
    assert (report.ok, report.negative_control) == (False, None)


def test_verify_tree_of_an_unpacked_pack_recounts_its_tokens(shards, tmp_path):
    packed = build_pack(shards, tmp_path / "out")
    verify_pack(packed.tarball, tmp_path / "target")
    report = verify_tree(tmp_path / "target", read_manifest(packed.manifest_path))
    assert (report.ok, report.train_tokens) == (True, 300)


def test_verify_folder_with_a_manifest_of_ours_is_ok(tree):
    write_manifest(tree / "manifest.json", build_manifest(tree))
    report = verify_folder(tree)
    assert report.ok
    assert report.manifest_sha256 == sha256_file(tree / "manifest.json")


def test_verify_folder_of_token_shards_is_ok_and_counts_them(shards):
    report = verify_folder(shards)
    assert (report.ok, report.train_tokens, report.eval_tokens) == (True, 300, 20)
    assert report.manifest_sha256 == sha256_file(shards / "manifest.json")


@pytest.mark.parametrize(
    "path",
    ["train/shard-00000.bin", "eval/shard-00000.bin", "train/shard-00000.idx", "tokenizer.json"],
)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_verify_folder_of_damaged_token_shards_is_red(shards, path, damage):
    content = bytearray((shards / path).read_bytes())
    if damage == "remove":
        (shards / path).unlink()
    else:
        content[3] ^= 1
        (shards / path).write_bytes(content if damage == "flip" else content[:-1])
    report = verify_folder(shards)
    assert not report.ok
    assert any(path in problem for problem in report.problems)


def test_verify_folder_with_a_file_nobody_lists_is_red(shards):
    (shards / "train/shard-00001.bin").write_bytes(b"xx")
    assert not verify_folder(shards).ok


def test_verify_folder_without_a_manifest_says_what_would_help(tree):
    with pytest.raises(IntegrityError, match=r"holds no manifest\.json"):
        verify_folder(tree)


def test_verify_folder_with_somebody_elses_manifest_is_refused(tree):
    (tree / "manifest.json").write_text('{"name": "app"}')
    with pytest.raises(IntegrityError, match="manifest"):
        verify_folder(tree)


def test_verify_folder_of_a_missing_folder_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="no folder"):
        verify_folder(tmp_path / "nowhere")


def test_verify_tree_without_a_single_byte_has_no_control_and_is_red(tmp_path):
    (tmp_path / "e").mkdir()
    (tmp_path / "e/empty.py").write_text("")
    report = verify_tree(tmp_path / "e", build_manifest(tmp_path / "e"))
    assert not report.ok
    assert "negative control" in report.problems[0]
