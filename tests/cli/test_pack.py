import io
import json
import os
import subprocess
import sys
import tarfile

import pytest

from leadline.cli.app import main
from leadline.core.canonical import sha256_bytes
from leadline.core.manifest import FileEntry, Manifest, write_manifest


def _run(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, words)))
    out, err = capsys.readouterr()
    return ended.value.code, out, err


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    (root / "sub").mkdir(parents=True)
    (root / "a.txt").write_text("alpha")
    (root / "sub/b.bin").write_bytes(bytes(range(256)) * 4)
    return root


@pytest.fixture
def tarball(tree, tmp_path, capsys):
    assert _run(capsys, "pack", "build", tree, "--out", tmp_path / "out")[0] == 0
    return tmp_path / "out" / "tree.tar"


def _is_one_sentence(err, *named):
    assert err.count("\n") == 1
    assert err.startswith("leadline: ")
    assert "Traceback" not in err
    assert "unexpected" not in err
    for word in named:
        assert word in err


def test_pack_build_json_holds_hashes_and_paths(tree, tmp_path, capsys):
    code, out, _ = _run(
        capsys, "pack", "build", tree, "--out", tmp_path / "o", "--name", "n", "--json"
    )
    result = json.loads(out)
    assert code == 0
    assert result["tarball_sha256"] == sha256_bytes((tmp_path / "o/n.tar").read_bytes())
    assert result["manifest_sha256"] == sha256_bytes((tmp_path / "o/n.manifest.json").read_bytes())
    assert (result["files"], result["already_there"]) == (2, False)


def test_pack_verify_json_holds_the_control_and_the_counts(tarball, capsys):
    code, out, _ = _run(capsys, "pack", "verify", tarball, "--json")
    result = json.loads(out)
    assert (code, result["ok"], result["problems"], result["files"]) == (0, True, [], 2)
    assert result["negative_control"]["found"] is True


def test_pack_verify_prints_verdict_and_control(tarball, capsys):
    code, out, _ = _run(capsys, "pack", "verify", tarball)
    assert code == 0
    assert "planted byte flip" in out
    assert "2 files" in out


def test_pack_verify_unpacks_and_the_folder_verifies_too(tree, tmp_path, capsys):
    from leadline.core.manifest import build_manifest

    write_manifest(tree / "manifest.json", build_manifest(tree))
    _run(capsys, "pack", "build", tree, "--out", tmp_path / "o")
    target = tmp_path / "target"
    assert _run(capsys, "pack", "verify", tmp_path / "o/tree.tar", "--unpack", target)[0] == 0
    code, out, _ = _run(capsys, "pack", "verify", target, "--json")
    assert (code, json.loads(out)["files"]) == (0, 2)


def test_pack_build_over_another_pack_exits_two_and_with_overwrite_zero(tree, tarball, capsys):
    (tree / "a.txt").write_text("alphb")
    words = ("pack", "build", tree, "--out", tarball.parent)
    code, _, err = _run(capsys, *words)
    assert code == 2
    _is_one_sentence(err, "--overwrite")
    assert _run(capsys, *words, "--overwrite")[0] == 0
    assert _run(capsys, "pack", "verify", tarball)[0] == 0


def test_pack_build_again_says_it_was_there(tree, tarball, capsys):
    assert "already there" in _run(capsys, "pack", "build", tree, "--out", tarball.parent)[1]


def test_pack_build_reports_what_the_allow_list_let_through(tree, tmp_path, capsys):
    (tree / "a.txt").write_text("hf_" + "aB3" * 12)
    (tree / ".leadlineallow").write_text("a.txt huggingface-token\nb.txt private-key\n")
    code, _, err = _run(capsys, "pack", "build", tree, "--out", tmp_path / "o")
    assert code == 0
    assert "lets through a.txt:1 huggingface-token" in err
    assert "'b.txt private-key' lets nothing through" in err


# Bad input: exit code, one sentence, nothing half-written.


@pytest.mark.parametrize("command", ["build", "verify"])
def test_pack_of_a_missing_path_exits_two(tmp_path, capsys, command):
    words = ["pack", command, tmp_path / "nowhere"]
    words += ["--out", tmp_path / "o"] if command == "build" else []
    code, out, err = _run(capsys, *words)
    assert (code, out) == (2, "")
    _is_one_sentence(err, "nowhere")


def test_pack_build_without_out_exits_two(tree, capsys):
    code, _, err = _run(capsys, "pack", "build", tree)
    assert code == 2
    assert "--out" in err


def test_pack_verify_of_a_truncated_tarball_exits_one_and_says_so(tarball, capsys):
    tarball.write_bytes(tarball.read_bytes()[:700])
    code, out, err = _run(capsys, "pack", "verify", tarball)
    assert (code, err) == (1, "")
    assert "has 700 bytes where" in out
    assert "sub/b.bin is missing" in out


def test_pack_build_of_a_tree_with_a_link_exits_one_and_writes_nothing(tree, tmp_path, capsys):
    (tree / "link").symlink_to("/etc/passwd")
    code, _, err = _run(capsys, "pack", "build", tree, "--out", tmp_path / "o")
    assert code == 1
    _is_one_sentence(err, "'link' is a symbolic link")
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE])
def test_pack_verify_of_a_crafted_tarball_exits_one_and_unpacks_nothing(tmp_path, capsys, kind):
    path = tmp_path / "evil.tar"
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("../x" if kind == tarfile.REGTYPE else "x")
        info.type, info.size, info.linkname = kind, 1, "/etc/passwd"
        tar.addfile(info, io.BytesIO(b"x"))
    data = path.read_bytes()
    entry = FileEntry(path="x", bytes=1, sha256=sha256_bytes(b"x"))
    extra = {"tarball": {"name": path.name, "bytes": len(data), "sha256": sha256_bytes(data)}}
    write_manifest(tmp_path / "evil.manifest.json", Manifest(files=(entry,), extra=extra))
    code, _, err = _run(capsys, "pack", "verify", path, "--unpack", tmp_path / "deep" / "t")
    assert code == 1
    _is_one_sentence(err, "nothing was unpacked")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["evil.manifest.json", "evil.tar"]


def test_pack_build_of_a_tree_with_a_secret_exits_one_and_never_shows_it(tree, tmp_path, capsys):
    token = "ghp_" + "aB3" * 12
    (tree / "conf.py").write_text(f"x = 1\nkey = '{token}'\n")
    code, out, err = _run(capsys, "pack", "build", tree, "--out", tmp_path / "o", "--json")
    assert code == 1
    assert json.loads(out)["error"]["kind"] == "UnsafePackError"
    assert "conf.py:2 github-token" in err
    assert token not in out + err
    assert not (tmp_path / "o").exists()


def test_g38_pack_build_over_a_pointer_exits_one(tree, tmp_path, capsys):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    (tree / "sub/b.bin").write_text(pointer)
    code, _, err = _run(capsys, "pack", "build", tree, "--out", tmp_path / "o")
    assert code == 1
    _is_one_sentence(err, f"git-LFS pointer of {len(pointer)} bytes")


def test_pack_build_into_a_file_used_as_a_folder_exits_one(tree, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    code, _, err = _run(capsys, "pack", "build", tree, "--out", tmp_path / "file")
    assert code == 1
    _is_one_sentence(err, "cannot write")


def test_pack_verify_unpack_over_something_exits_two(tarball, tree, capsys):
    code, _, err = _run(capsys, "pack", "verify", tarball, "--unpack", tree)
    assert code == 2
    _is_one_sentence(err, "not an empty folder")


def test_pack_verify_unpack_of_a_folder_exits_two(tree, tmp_path, capsys):
    code, _, err = _run(capsys, "pack", "verify", tree, "--unpack", tmp_path / "t")
    assert code == 2
    _is_one_sentence(err, "goes with a tarball")


def _limited(limit_bytes, *words):
    """The command in a process that may write no file longer than the limit."""
    code = (
        "import resource, sys; from leadline.cli.app import main\n"
        "limit = int(sys.argv[1]); resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))\n"
        "main(sys.argv[2:])"
    )
    command = [sys.executable, "-c", code, str(limit_bytes), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_pack_build_that_the_disk_cuts_short_exits_one_and_leaves_nothing(tree, tmp_path):
    done = _limited(2000, "pack", "build", tree, "--out", tmp_path / "o")
    assert done.returncode == 1
    _is_one_sentence(done.stderr, "largest file")
    assert list((tmp_path / "o").iterdir()) == []


def test_pack_verify_unpack_that_the_disk_cuts_short_leaves_nothing(tree, tmp_path, capsys):
    (tree / "sub/b.bin").write_bytes(bytes(5000))
    # The flipped copy must fit, or the control would fail first: it takes the smaller file.
    _run(capsys, "pack", "build", tree, "--out", tmp_path / "o")
    target = tmp_path / "new" / "target"
    done = _limited(3000, "pack", "verify", tmp_path / "o/tree.tar", "--unpack", target)
    assert done.returncode == 1
    _is_one_sentence(done.stderr, "largest file")
    assert not (tmp_path / "new").exists() or list((tmp_path / "new").iterdir()) == []


@pytest.fixture
def full_disk(tmp_path):
    """A real disk of 64 KiB."""
    place = tmp_path / "full"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tiny disk needs root and a kernel that lets it")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_pack_build_onto_a_full_disk_names_both_numbers(tree, full_disk, capsys):
    (tree / "big.txt").write_bytes(b"x" * 100_000)
    code, _, err = _run(capsys, "pack", "build", tree, "--out", full_disk)
    assert code == 1
    _is_one_sentence(err, "65536 bytes", "choose another disk")
    assert list(full_disk.iterdir()) == []


def test_pack_verify_unpack_onto_a_full_disk_names_both_numbers(tree, full_disk, tmp_path, capsys):
    (tree / "big.txt").write_bytes(b"x" * 40_000)
    _run(capsys, "pack", "build", tree, "--out", tmp_path / "o")
    code, _, err = _run(
        capsys, "pack", "verify", tmp_path / "o/tree.tar", "--unpack", full_disk / "t"
    )
    assert code == 1
    _is_one_sentence(err, "65536 bytes", "twice the pack")
    assert list(full_disk.iterdir()) == []
