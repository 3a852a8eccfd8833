"""What a tree of files may hold before it is packed, hashed or trained on.

- Regular files and folders only: links, devices, sockets and fifos are refused by name.
- Paths are relative, POSIX, UTF-8 and printable, mean the same on every system, and stay
  different on a disk that ignores case or rewrites accents.
- A git-LFS pointer is not the file it stands for, and an empty shard holds no tokens:
  hashing either would bless the damage, so both are refused.
"""

import os
import stat
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from leadline.core.atomic import explained_os_errors
from leadline.core.errors import DataError, UnsafePackError, UsageError

# A pointer file is at most 1,024 bytes and begins with its version line (git-lfs spec.md).
_POINTER_LIMIT_BYTES = 1024
_POINTER_STARTS = (b"version https://git-lfs.github.com/spec/", b"version https://hawser.")
_SHARD_SUFFIXES = (".bin", ".idx", ".npy", ".npz", ".safetensors", ".parquet", ".arrow")
_SHOWN_PROBLEMS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeFile:
    """One regular file of a tree."""

    path: str
    """Relative to the tree's root, with forward slashes."""
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """Everything found under a root."""

    files: tuple[TreeFile, ...]
    """Every regular file, in order of path; empty folders leave no trace."""
    unsafe: tuple[str, ...]
    """Links, devices and names that must not be packed, one sentence each."""
    hollow: tuple[str, ...]
    """Files that exist without their data, one sentence each."""


def walk_tree(root: Path, exclude: Iterable[str] = ()) -> tuple[TreeFile, ...]:
    """Every file under *root*, each fit to be hashed and packed, in order of path.

    Raises:
        UsageError: no folder at *root*.
        UnsafePackError: a link, device, socket, fifo or unusable name; all are listed.
        DataError: git-LFS pointers or empty shards; all are listed.
    """
    found = survey(root, exclude)
    if found.unsafe:
        raise UnsafePackError(f"{root} cannot be hashed or packed: {summary(found.unsafe)}")
    if found.hollow:
        raise DataError(f"{root} holds files without their data: {summary(found.hollow)}")
    return found.files


def survey(root: Path, exclude: Iterable[str] = ()) -> Survey:
    """Look at everything under *root* but the relative paths in *exclude*; links stay unfollowed.

    Raises:
        UsageError: no folder at *root*.
        LeadlineError: a folder or file cannot be read.
    """
    if not root.is_dir():
        raise UsageError(f"there is no folder at {root}; give the folder that holds the files")
    files: list[TreeFile] = []
    unsafe: list[str] = []
    hollow: list[str] = []
    left_out = set(exclude)
    with explained_os_errors(root, "read"):
        for path, info in _scan(root):
            if path in left_out:
                continue
            if refusal := _kind_problem(info.st_mode) or path_problem(path):
                unsafe.append(f"{path!r} {refusal}")
                continue
            files.append(TreeFile(path=path, bytes=info.st_size))
            if why := content_problem(root / path, info.st_size):
                hollow.append(f"{path} {why}")
    unsafe += collisions(file.path for file in files)
    files.sort(key=lambda file: file.path)
    return Survey(files=tuple(files), unsafe=tuple(sorted(unsafe)), hollow=tuple(sorted(hollow)))


def path_problem(path: str) -> str | None:
    """Why *path* may not name a file of a pack; None when it may."""
    if not path.isprintable():
        return "has a control character, or bytes that are not UTF-8, in its name; rename it"
    if "\\" in path or path[1:2] == ":":
        return "has a backslash or a drive letter, which leads elsewhere on another system"
    if path.startswith("/"):
        return "is an absolute path, which would be written outside the target"
    parts = path.split("/")
    if ".." in parts:
        return "climbs out of the target with '..'"
    if "" in parts or "." in parts:
        return "is not a plain relative path"
    return None


def collisions(paths: Iterable[str]) -> list[str]:
    """Paths that are one file on some disk: same but for case or accents, or file and folder."""
    problems: list[str] = []
    seen: dict[str, tuple[str, bool]] = {}
    folders: set[str] = set()
    for path in sorted(paths):
        parts = [(path, True)]
        folder = path.rpartition("/")[0]
        while folder and folder not in folders:
            folders.add(folder)
            parts.append((folder, False))
            folder = folder.rpartition("/")[0]
        for part, is_file in parts:
            other, other_is_file = seen.setdefault(_disk_name(part), (part, is_file))
            if other != part:
                problems.append(f"{part!r} and {other!r} are one name on some disks; rename one")
            elif is_file != other_is_file:
                problems.append(f"{part!r} would have to be both a file and a folder")
    return problems


def _disk_name(path: str) -> str:
    """What a path becomes on a disk that ignores case and rewrites accents."""
    if path.isascii():
        return path.lower()
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def content_problem(path: Path, size_bytes: int) -> str | None:
    """Why a regular file holds no data although it exists; None when it may well."""
    if size_bytes == 0:
        if path.suffix in _SHARD_SUFFIXES:
            return "is an empty shard (0 bytes); make it again"
        return None
    if size_bytes <= _POINTER_LIMIT_BYTES:
        with path.open("rb") as stream:
            if stream.read(64).startswith(_POINTER_STARTS):
                return (
                    f"is a git-LFS pointer of {size_bytes} bytes, not the data; "
                    "run `git lfs pull` there"
                )
    return None


def summary(problems: Sequence[str]) -> str:
    """All problems in one line, or the first twenty and how many more there are."""
    shown = "; ".join(problems[:_SHOWN_PROBLEMS])
    more = len(problems) - _SHOWN_PROBLEMS
    return f"{shown}; and {more} more" if more > 0 else shown


def _scan(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Relative path and status of everything under *root* that is not a folder."""
    prefixes = [""]
    while prefixes:
        prefix = prefixes.pop()
        with os.scandir(root / prefix) as entries:
            for entry in entries:
                path = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    prefixes.append(f"{path}/")
                else:
                    yield path, entry.stat(follow_symlinks=False)


def _kind_problem(mode: int) -> str | None:
    if stat.S_ISREG(mode):
        return None
    kinds = {
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFIFO: "a fifo",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a character device",
        stat.S_IFBLK: "a block device",
    }
    return f"is {kinds.get(stat.S_IFMT(mode), 'a special file')}; replace it by a regular file"
