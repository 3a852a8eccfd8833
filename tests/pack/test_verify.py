import io
import tarfile
from contextlib import suppress
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leadline.core.canonical import sha256_bytes
from leadline.core.errors import (
    DiskSpaceError,
    IntegrityError,
    LeadlineError,
    UnsafePackError,
    UsageError,
)
from leadline.core.manifest import (
    FileEntry,
    Manifest,
    check_manifest,
    read_manifest,
    write_manifest,
)
from leadline.pack import control
from leadline.pack import tar as tar_module
from leadline.pack.build import build_pack
from leadline.pack.unpack import unpack
from leadline.pack.verify import verify_pack

_FUZZ = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def _craft(folder, *members, files=None):
    """A tar of *members* (info, content) whose manifest is right about everything else."""
    folder.mkdir(exist_ok=True)
    path = folder / "bad.tar"
    with tarfile.open(path, "w") as tar:
        for info, content in members:
            info.size = len(content) if info.isreg() else info.size
            tar.addfile(info, io.BytesIO(content) if info.isreg() else None)
    if files is None:
        files = [(info.name, content) for info, content in members if info.isreg()]
    _write_manifest(path, files)
    return path


def _write_manifest(path, files):
    entries = [
        FileEntry(path=name, bytes=len(content), sha256=sha256_bytes(content))
        for name, content in sorted(dict(files).items())
    ]
    data = path.read_bytes()
    tarball = {"name": path.name, "bytes": len(data), "sha256": sha256_bytes(data)}
    manifest = Manifest(files=tuple(entries), extra={"tarball": tarball})
    write_manifest(path.with_name("bad.manifest.json"), manifest)


def _info(name, kind=tarfile.REGTYPE, link=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def test_verify_of_a_sound_pack_is_ok_and_shows_its_control(packed):
    report = verify_pack(packed.tarball)
    assert (report.ok, report.problems, report.files, report.bytes) == (True, (), 3, 773)
    assert report.tarball_sha256 == packed.tarball_sha256
    assert report.manifest_sha256 == packed.manifest_sha256
    assert report.negative_control.found
    assert report.unpacked_to is None


def test_verify_recounts_tokens_from_the_shards_in_the_tar(shards, tmp_path):
    report = verify_pack(build_pack(shards, tmp_path / "out").tarball)
    assert (report.ok, report.train_tokens, report.eval_tokens) == (True, 300, 20)


def test_verify_with_a_blind_checker_is_refused(packed, monkeypatch):
    blind = partial(control.negative_control, checker=lambda *_: None)
    monkeypatch.setattr(control, "negative_control", blind)
    with pytest.raises(IntegrityError, match="blind"):
        verify_pack(packed.tarball)


@pytest.fixture
def pristine(packed):
    """The pack's bytes, since examples of one test share and change its file."""
    return packed.tarball.read_bytes()


@pytest.fixture
def recorded(packed):
    """The pack's manifest before any example forges it."""
    return read_manifest(packed.manifest_path)


# Every change of a byte, of the order or of the length is found.


def _is_red(packed, data):
    packed.tarball.write_bytes(data)
    try:
        report = verify_pack(packed.tarball)
    except LeadlineError:
        return
    assert not report.ok
    assert report.negative_control is None


@given(data=st.data())
@_FUZZ
def test_verify_finds_any_single_byte_change_in_a_tarball(packed, pristine, data):
    content = bytearray(pristine)
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    _is_red(packed, bytes(content))


@given(data=st.data())
@_FUZZ
def test_verify_finds_any_truncation_of_a_tarball(packed, pristine, data):
    _is_red(packed, pristine[: data.draw(st.integers(0, len(pristine) - 1))])


@given(data=st.data())
@_FUZZ
def test_verify_finds_any_deletion_from_a_tarball(packed, pristine, data):
    at = data.draw(st.integers(0, len(pristine) - 1))
    length = data.draw(st.sampled_from([1, 7, 512, 1024]))
    _is_red(packed, pristine[:at] + pristine[at + length :])


@given(data=st.data())
@_FUZZ
def test_verify_finds_any_swap_of_blocks_in_a_tarball(packed, pristine, data):
    blocks = [pristine[at : at + 512] for at in range(0, len(pristine), 512)]
    first, second = data.draw(st.tuples(*[st.integers(0, len(blocks) - 1)] * 2))
    if blocks[first] == blocks[second]:
        return
    blocks[first], blocks[second] = blocks[second], blocks[first]
    _is_red(packed, b"".join(blocks))


@given(data=st.data())
@_FUZZ
def test_verify_finds_a_change_of_content_though_the_tars_own_hash_was_made_anew(
    packed, pristine, recorded, data
):
    with tarfile.open(fileobj=io.BytesIO(pristine)) as tar:
        spans = [(m.offset_data, m.size) for m in tar if m.size]
    at, size = data.draw(st.sampled_from(spans))
    content = bytearray(pristine)
    content[at + data.draw(st.integers(0, size - 1))] ^= data.draw(st.integers(1, 255))
    packed.tarball.write_bytes(content)
    tarball = {**recorded.extra["tarball"], "sha256": sha256_bytes(bytes(content))}
    forged = Manifest(files=recorded.files, extra={**recorded.extra, "tarball": tarball})
    write_manifest(packed.manifest_path, forged)
    (problem,) = verify_pack(packed.tarball).problems
    assert "has the sha256" in problem


@given(data=st.data())
@_FUZZ
def test_verify_survives_any_damage_to_headers_with_an_error_of_ours(tmp_path_factory, data):
    # The manifest is made to fit the damaged tar, so that the reader itself is on trial.
    folder = tmp_path_factory.mktemp("headers")
    path = _craft(folder, (_info("a" * 120), b"x" * 600), (_info("b"), b"y"))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 1600))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    _write_manifest(path, [("a" * 120, b"x" * 600), ("b", b"y")])
    with suppress(LeadlineError):
        verify_pack(path)


def test_verify_lists_missing_extra_repeated_and_resized_members_together(tmp_path):
    path = _craft(
        tmp_path,
        (_info("twice"), b"x"),
        (_info("twice"), b"x"),
        (_info("extra"), b"x"),
        (_info("grown"), b"xxxx"),
        files=[("twice", b"x"), ("gone", b"x"), ("grown", b"x")],
    )
    assert verify_pack(path).problems == (
        "twice is in the tar twice",
        "extra is in the tar and not in the manifest",
        "grown has 4 bytes where 1 are recorded",
        "gone is missing from the tar",
    )


def test_verify_of_a_truncated_pack_says_how_much_is_left(packed):
    packed.tarball.write_bytes(packed.tarball.read_bytes()[:1000])
    problems = verify_pack(packed.tarball).problems
    assert problems[0] == "demo.tar has 1000 bytes where 10240 are recorded"
    assert "sub/empty.py is missing from the tar" in problems


@pytest.mark.parametrize(
    "content", [b"", b"no tar at all", b"\x1f\x8b\x08" + b"\0" * 600, b"\0" * 10_240]
)
def test_verify_of_anything_but_a_tar_is_red(packed, content):
    _is_red(packed, content)


# Members that would write elsewhere, or are no files.


@pytest.mark.parametrize(
    "name",
    ["../x", "a/../../x", "/etc/x", "C:/x", "C:x", "..\\x", "a\\b", "a/./b", "a//b", "a\nb", ".."],
)
def test_verify_of_a_member_path_that_escapes_is_refused(tmp_path, name):
    path = _craft(tmp_path, (_info(name), b"x"), files=[("x", b"x")])
    with pytest.raises(UnsafePackError, match="nothing was unpacked"):
        verify_pack(path, tmp_path / "target")
    assert not (tmp_path / "target").exists()
    assert not (tmp_path.parent / "x").exists()


@pytest.mark.parametrize(
    ("info", "named"),
    [
        (_info("l", tarfile.SYMTYPE, "/etc/passwd"), "symbolic link to '/etc/passwd'"),
        (_info("l", tarfile.LNKTYPE, "a"), "hard link to 'a'"),
        (_info("d", tarfile.CHRTYPE), "device or fifo"),
        (_info("d", tarfile.BLKTYPE), "device or fifo"),
        (_info("p", tarfile.FIFOTYPE), "device or fifo"),
        (_info("f", tarfile.DIRTYPE), "folder entry"),
        (_info("c", tarfile.CONTTYPE), "no regular file"),
        (_info("v", b"V"), "no regular file"),
    ],
)
def test_verify_of_a_member_that_is_no_plain_file_is_refused(tmp_path, info, named):
    path = _craft(tmp_path, (_info("a"), b"x"), (info, b""), files=[("a", b"x")])
    with pytest.raises(UnsafePackError, match=named):
        verify_pack(path)


def test_verify_of_a_sparse_member_is_refused(tmp_path):
    info = _info("s")
    info.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.map": "0,1"}
    path = _craft(tmp_path, (info, b"x"))
    with pytest.raises(UnsafePackError, match="sparse"):
        verify_pack(path)


def test_verify_of_a_header_of_megabytes_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tar_module, "_HEADER_LIMIT_BYTES", 30_000)
    info = _info("a")
    info.pax_headers = {"comment": "x" * 200_000}
    path = _craft(tmp_path, (info, b"x"))
    with pytest.raises(UnsafePackError, match="header of more than 30000 bytes"):
        verify_pack(path)


def test_verify_of_a_size_beyond_the_recorded_one_reads_none_of_it(tmp_path, monkeypatch):
    path = _craft(tmp_path, (_info("bomb"), b"\0" * 5_000_000), files=[("bomb", b"\0")])
    checked = []
    monkeypatch.setattr("leadline.pack.verify.check_stream", lambda *a: checked.append(a))
    assert verify_pack(path).problems == ("bomb has 5000000 bytes where 1 are recorded",)
    assert checked == []


@pytest.mark.timeout(60)
def test_verify_of_a_size_beyond_all_disks_comes_back_at_once(tmp_path):
    info = _info("a")
    info.pax_headers = {"size": str(2**70)}
    path = _craft(tmp_path, (info, b"x"))
    assert any("the tar breaks off" in problem for problem in verify_pack(path).problems)


# Manifests that are missing, wrong or somebody else's.


def test_verify_of_a_missing_pack_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="no pack at"):
        verify_pack(tmp_path / "nowhere.tar")


def test_verify_without_a_manifest_names_the_one_it_wants(packed):
    packed.manifest_path.unlink()
    with pytest.raises(IntegrityError, match=r"no manifest demo\.manifest\.json"):
        verify_pack(packed.tarball)


def test_verify_with_a_manifest_of_a_tree_is_refused(packed):
    manifest = read_manifest(packed.manifest_path)
    write_manifest(packed.manifest_path, Manifest(files=manifest.files))
    with pytest.raises(IntegrityError, match="does not say which tarball"):
        verify_pack(packed.tarball)


def test_verify_of_a_renamed_pack_is_red(packed):
    packed.tarball.rename(packed.tarball.with_name("other.tar"))
    packed.manifest_path.rename(packed.manifest_path.with_name("other.manifest.json"))
    (problem,) = verify_pack(packed.tarball.with_name("other.tar")).problems
    assert problem == "the manifest is that of demo.tar, not of other.tar"


# Unpacking.


def test_unpack_gives_back_every_file(packed, tmp_path):
    report = verify_pack(packed.tarball, tmp_path / "new" / "target")
    assert report.unpacked_to == tmp_path / "new" / "target"
    manifest = read_manifest(packed.manifest_path)
    assert check_manifest(report.unpacked_to, manifest) == []
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["target"]


def test_unpack_into_an_empty_folder_is_fine(packed, tmp_path):
    (tmp_path / "target").mkdir()
    assert verify_pack(packed.tarball, tmp_path / "target").unpacked_to


def test_unpack_over_anything_is_refused_and_leaves_it_alone(packed, tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target/mine").write_text("x")
    with pytest.raises(UsageError, match="not an empty folder"):
        verify_pack(packed.tarball, tmp_path / "target")
    assert (tmp_path / "target/mine").read_text() == "x"


@pytest.mark.parametrize("make", ["write_text", "symlink_to"])
def test_unpack_over_a_file_or_link_is_refused(packed, tmp_path, make):
    getattr(tmp_path / "target", make)(str(tmp_path))
    with pytest.raises(UsageError, match="not an empty folder"):
        verify_pack(packed.tarball, tmp_path / "target")


def test_unpack_of_a_red_pack_is_not_begun(packed, tmp_path):
    content = bytearray(packed.tarball.read_bytes())
    content[600] ^= 1
    packed.tarball.write_bytes(content)
    report = verify_pack(packed.tarball, tmp_path / "target")
    assert (report.ok, report.unpacked_to) == (False, None)
    assert not (tmp_path / "target").exists()


def test_unpack_with_less_than_twice_the_pack_free_names_both_numbers(packed, tmp_path):
    with pytest.raises(DiskSpaceError) as caught:
        verify_pack(packed.tarball, tmp_path / "target", free_bytes=lambda path: 20_479)
    assert "20479 bytes" in str(caught.value)
    assert "20480 bytes" in str(caught.value)


def test_unpack_with_exactly_twice_the_pack_free_goes_on(packed, tmp_path):
    report = verify_pack(packed.tarball, tmp_path / "target", free_bytes=lambda path: 20_480)
    assert (report.free_bytes, report.needed_bytes) == (20_480, 20_480)


@pytest.mark.parametrize("fault", ["_recheck", "_sync_folders", "_write"])
def test_unpack_that_fails_midway_leaves_nothing(packed, tmp_path, monkeypatch, fault):
    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"leadline.pack.unpack.{fault}", fail)
    (tmp_path / "new").mkdir()
    with pytest.raises(DiskSpaceError):
        verify_pack(packed.tarball, tmp_path / "new/target")
    assert list((tmp_path / "new").iterdir()) == []


def test_unpack_of_a_pack_exchanged_after_it_was_verified_is_refused(packed, tmp_path):
    manifest = read_manifest(packed.manifest_path)
    other = _craft(tmp_path / "other", (_info("a.txt"), b"longer than alpha"))
    with pytest.raises(IntegrityError, match=r"changed while it was unpacked: a\.txt"):
        unpack(other, tmp_path / "target", manifest)
    other = _craft(tmp_path / "other", (_info("a.txt"), b"alphb"))
    with pytest.raises(IntegrityError, match=r"a\.txt has the sha256"):
        unpack(other, tmp_path / "target", manifest)
    assert not (tmp_path / "target").exists()


def test_unpack_of_a_disk_that_stores_other_bytes_is_refused(packed, tmp_path, monkeypatch):
    def lying_write(path, content, entry, meter):
        path.write_bytes(content.read(10_000).replace(b"alpha", b"alphb"))

    monkeypatch.setattr("leadline.pack.unpack._write", lying_write)
    with pytest.raises(IntegrityError, match=r"came out different on the disk: a\.txt"):
        verify_pack(packed.tarball, tmp_path / "target")
    assert not (tmp_path / "target").exists()
