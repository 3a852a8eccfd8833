"""Reads past the page cache, the fall-back, and files that end early."""

import errno
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.core.errors import IntegrityError, LeadlineError
from leadline.rig.direct_file import PAGE_BYTES, DirectFile, page_ceil, page_floor

from .page_cache import drop_pages, resident_pages

SIZE = 5 * PAGE_BYTES + 1234


@pytest.fixture(scope="module")
def blob(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("direct") / "blob.bin"
    path.write_bytes(os.urandom(SIZE))
    return path


def read(file: DirectFile, begin: int, end: int) -> bytes:
    memory = memoryview(mmap.mmap(-1, max(page_ceil(end) - page_floor(begin), PAGE_BYTES)))
    file.read(memory[: page_ceil(end) - page_floor(begin)], begin, end)
    return bytes(memory[begin - page_floor(begin) : end - page_floor(begin)])


@pytest.mark.parametrize("direct", [True, False])
@given(bounds=st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted))
@settings(max_examples=50, deadline=None)
def test_read_of_any_bytes_gives_them(blob: Path, direct: bool, bounds: list[int]) -> None:
    file = DirectFile(blob, direct=direct)
    begin, end = bounds
    assert read(file, begin, end) == blob.read_bytes()[begin:end]
    file.close()


def test_pages_seen_by_the_kernel_grow_with_a_plain_read(blob: Path) -> None:
    drop_pages(blob)
    blob.read_bytes()
    assert resident_pages(blob) == 6


@pytest.mark.parametrize("direct", [True, False])
def test_read_leaves_no_page_in_the_cache(blob: Path, direct: bool) -> None:
    drop_pages(blob)
    file = DirectFile(blob, direct=direct)
    for begin, end in ((0, SIZE), (5000, 5001), (SIZE - 3, SIZE)):
        read(file, begin, end)
        assert resident_pages(blob) == 0
    file.close()


def refuse_direct_open(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    system_open = os.open

    def opened(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return system_open(path, flags)

    monkeypatch.setattr(os, "open", opened)


def refuse_reads(
    monkeypatch: pytest.MonkeyPatch, code: int, refused: Callable[[int, int], bool]
) -> None:
    """Fail the reads for which *refused* (descriptor, offset) holds."""
    system_read = os.preadv

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if refused(descriptor, offset):
            raise OSError(code, os.strerror(code))
        return system_read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)


def is_direct(descriptor: int) -> bool:
    fcntl = pytest.importorskip("fcntl")
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_file_system_that_refuses_the_flag_is_read_buffered(
    blob: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    refuse_direct_open(monkeypatch, code)
    file = DirectFile(blob)
    assert not file.is_direct
    assert read(file, 1, SIZE) == blob.read_bytes()[1:]
    file.close()


def test_file_system_that_refuses_direct_reads_is_read_buffered(
    blob: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_reads(monkeypatch, errno.EINVAL, lambda descriptor, _: is_direct(descriptor))
    file = DirectFile(blob)
    assert file.is_direct
    assert read(file, 1, SIZE) == blob.read_bytes()[1:]
    assert not file.is_direct
    file.close()


def test_read_the_disk_refuses_names_the_file(blob: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_reads(monkeypatch, errno.EIO, lambda _, offset: offset > 0)
    file = DirectFile(blob)
    with pytest.raises(LeadlineError, match=r"cannot read .*blob\.bin: Input/output error"):
        read(file, 5000, 6000)
    file.close()


@pytest.mark.parametrize("most", [1, 100, PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES])
@pytest.mark.parametrize("direct", [True, False])
def test_reads_that_come_in_parts_are_put_together(
    blob: Path, monkeypatch: pytest.MonkeyPatch, most: int, direct: bool
) -> None:
    system_read = os.preadv

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return min(system_read(descriptor, buffers, offset), most)

    monkeypatch.setattr(os, "preadv", preadv)
    file = DirectFile(blob, direct=direct)
    assert read(file, 4000, SIZE) == blob.read_bytes()[4000:]
    assert file.is_direct == (direct and most >= PAGE_BYTES)
    file.close()


def test_reads_that_come_back_empty_end_with_an_error(
    blob: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    file = DirectFile(blob)
    with pytest.raises(IntegrityError, match=r"ends at byte 4,096 where bytes 5,000 to 6,000"):
        read(file, 5000, 6000)
    file.close()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("found", [0, 1, PAGE_BYTES, 2 * PAGE_BYTES + 17, SIZE - 1])
def test_t43_file_cut_short_names_file_expected_and_found(
    tmp_path: Path, direct: bool, found: int
) -> None:
    path = tmp_path / "model-00002.safetensors"
    path.write_bytes(bytes(SIZE))
    file = DirectFile(path, direct=direct)
    os.truncate(path, found)
    with pytest.raises(IntegrityError, match=rf"model-00002.* byte {found:,} .* to {SIZE:,} "):
        read(file, 100, SIZE)
    file.close()


def test_file_that_is_absent_is_named(tmp_path: Path) -> None:
    with pytest.raises(LeadlineError, match=r"gone\.bin: No such file"):
        DirectFile(tmp_path / "gone.bin")


def open_files() -> set[str]:
    return {str(path) for path in Path("/proc/self/fd").iterdir()}


def test_closed_file_leaves_no_descriptor(blob: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_reads(monkeypatch, errno.EINVAL, lambda descriptor, _: is_direct(descriptor))
    before = open_files()
    file = DirectFile(blob)
    read(file, 0, 10)
    file.close()
    assert open_files() == before
    with pytest.raises(ValueError, match="closed"):
        read(file, 0, 10)
