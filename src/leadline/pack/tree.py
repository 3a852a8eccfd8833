"""Verify a plain folder: against a manifest in hand, or the `manifest.json` it holds.

A folder's own manifest is either one of ours (`core/manifest.py`) or that of token shards
(`leadline data pack`), which lists shards, indexes and the tokenizer.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from leadline.core.atomic import explained_os_errors
from leadline.core.canonical import sha256_bytes
from leadline.core.errors import IntegrityError, UsageError
from leadline.core.manifest import MANIFEST_FILE, FileEntry, Manifest, check_manifest
from leadline.pack.control import control_problem
from leadline.pack.progress import Meter, OnProgress
from leadline.pack.report import PackReport
from leadline.pack.space import FreeBytes, disk_free_bytes
from leadline.pack.tokens import (
    TOKENIZER_FILE,
    TokenFacts,
    listed_files,
    may_be_shards_manifest,
    read_token_facts,
    recount,
)
from leadline.pack.unpack import SPACE_FACTOR


def verify_tree(
    root: Path,
    manifest: Manifest,
    *,
    exclude: Iterable[str] = (),
    on_progress: OnProgress | None = None,
    free_bytes: FreeBytes = disk_free_bytes,
) -> PackReport:
    """Verify a folder against *manifest*, with the negative control.

    *exclude* names relative paths the manifest does not cover, such as itself.

    Raises:
        UsageError: no folder at *root*.
        IntegrityError: a checker that is blind.
    """
    exclude = tuple(exclude)
    meter = Meter("check files", manifest.total_bytes, on_progress)
    problems = check_manifest(root, manifest, exclude=exclude, on_bytes=meter)
    paths = [*(entry.path for entry in manifest.files), *exclude]
    tokens, token_faults = recount(_shard_manifests(root, paths), manifest)
    problems += token_faults
    control = None
    if not problems:
        control, problems = control_problem(manifest, lambda entry: (root / entry.path).open("rb"))
    return PackReport(
        source=root,
        problems=tuple(problems),
        tarball_sha256=None,
        manifest_sha256=manifest.sha256,
        files=len(manifest.files),
        bytes=manifest.total_bytes,
        tokens=tokens,
        negative_control=control,
        free_bytes=free_bytes(root),
        needed_bytes=SPACE_FACTOR * manifest.total_bytes,
    )


def verify_folder(
    root: Path,
    *,
    on_progress: OnProgress | None = None,
    free_bytes: FreeBytes = disk_free_bytes,
) -> PackReport:
    """Verify a folder against the `manifest.json` in it; see `verify_tree`.

    Raises:
        UsageError: no folder at *root*.
        IntegrityError: no manifest, a malformed one, or a checker that is blind.
    """
    if not root.is_dir():
        raise UsageError(f"there is no folder at {root}; give a NAME.tar or a folder")
    path = root / MANIFEST_FILE
    if not path.is_file() or path.is_symlink():
        raise IntegrityError(
            f"{root} holds no {MANIFEST_FILE}, so nothing says what should be in it; "
            "give a folder made by `leadline data pack`, or the tarball"
        )
    with explained_os_errors(path, "read"):
        data = path.read_bytes()
    facts = read_token_facts(data, MANIFEST_FILE)
    if facts is None:
        manifest = Manifest.from_bytes(data, str(path))
    else:
        manifest = _manifest_of_shards(root, facts)
    report = verify_tree(
        root, manifest, exclude=[MANIFEST_FILE], on_progress=on_progress, free_bytes=free_bytes
    )
    return replace(report, manifest_sha256=sha256_bytes(data))


def _manifest_of_shards(root: Path, facts: TokenFacts) -> Manifest:
    entries = [
        FileEntry(path=path, bytes=size_bytes, sha256=sha256)
        for path, size_bytes, sha256 in listed_files(facts)
    ]
    tokenizer = root / TOKENIZER_FILE
    # The shards manifest records the tokenizer's hash and not its size; the hash decides.
    size_bytes = tokenizer.stat().st_size if tokenizer.is_file() else 0
    entries.append(FileEntry(path=TOKENIZER_FILE, bytes=size_bytes, sha256=facts.tokenizer_sha256))
    return Manifest(files=tuple(sorted(entries, key=lambda entry: entry.path)))


def _shard_manifests(root: Path, paths: Iterable[str]) -> dict[str, bytes]:
    found = {}
    for path in paths:
        file = root / path
        if file.is_file() and may_be_shards_manifest(path, file.stat().st_size):
            with explained_os_errors(file, "read"):
                found[path] = file.read_bytes()
    return found
