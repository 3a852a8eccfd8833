"""Whether the shards on disk are the shards of their manifest.

Every byte is read. All problems are returned, none repaired; an empty list
means the folder holds exactly what was packed.
"""

import hashlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path, PurePosixPath

import numpy as np

from leadline.core.canonical import sha256_file
from leadline.core.errors import DataError
from leadline.data.corpus import is_lfs_pointer
from leadline.data.manifest import (
    DTYPE_BYTES,
    INDEX_ENTRY_BYTES,
    MANIFEST_NAME,
    SPLIT_NAMES,
    TOKENIZER_NAME,
    Shard,
    ShardsManifest,
    Split,
    SplitName,
    load_manifest,
)
from leadline.data.shards import little_endian

_CHUNK_BYTES = 1 << 22

OnChecked = Callable[[int, int], None]
"""Called with bytes checked and bytes in all."""


def check_shards(root: Path, *, on_progress: OnChecked | None = None) -> list[str]:
    """Every way in which ROOT differs from its manifest, as sentences; empty when none."""
    root = Path(root)
    try:
        manifest = load_manifest(root)
    except DataError as error:
        return [str(error)]
    problems = [*_check_counts(manifest), *_check_names(root, manifest)]
    problems += _check_tokenizer(root, manifest)
    shards = [(name, shard) for name in SPLIT_NAMES for shard in manifest.split(name).shards]
    total_bytes = sum(shard.bytes for _, shard in shards)
    done_bytes = 0
    for name, shard in shards:
        if not _is_inside(shard.path, name):
            problems.append(f"{shard.path} is listed under {name} but is no {name}/*.bin path")
            continue
        problems += _check_shard(root, shard, manifest)
        done_bytes += shard.bytes
        if on_progress is not None:
            on_progress(done_bytes, total_bytes)
    return problems


def _is_inside(path: str, name: SplitName) -> bool:
    parts = PurePosixPath(path).parts
    return len(parts) == 2 and parts[0] == name and path.endswith(".bin") and ".." not in parts


def _check_counts(manifest: ShardsManifest) -> Iterator[str]:
    for name in SPLIT_NAMES:
        split: Split = manifest.split(name)
        for unit in ("tokens", "documents"):
            listed = sum(getattr(shard, unit) for shard in split.shards)
            if listed != getattr(split, unit):
                yield (f"{name} claims {getattr(split, unit)} {unit} but its shards list {listed}")
        if not split.shards:
            yield f"{name} has no shard"
    if manifest.tokenizer.end_of_text >= manifest.vocab_size:
        yield (
            f"end-of-text id {manifest.tokenizer.end_of_text} is outside the vocabulary "
            f"of {manifest.vocab_size}"
        )
    train = {shard.sha256: shard.path for shard in manifest.train.shards}
    for shard in manifest.eval.shards:
        if shard.sha256 in train:
            yield f"{shard.path} equals {train[shard.sha256]}: held-out text would be trained on"


def _check_names(root: Path, manifest: ShardsManifest) -> Iterator[str]:
    wanted = {MANIFEST_NAME, TOKENIZER_NAME, *SPLIT_NAMES}
    for name in SPLIT_NAMES:
        for shard in manifest.split(name).shards:
            wanted |= {shard.path, shard.index_path}
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root).as_posix()
        if relative not in wanted:
            yield f"{relative} is not in the manifest"
        elif path.is_symlink():
            yield f"{relative} is a symbolic link; shards must be files of their own"


def _check_tokenizer(root: Path, manifest: ShardsManifest) -> Iterator[str]:
    path = root / TOKENIZER_NAME
    if not path.is_file():
        yield f"{TOKENIZER_NAME} is missing"
    elif sha256_file(path) != manifest.tokenizer.sha256:
        yield f"{TOKENIZER_NAME} is not the file the ids were made with: its sha256 differs"


def _check_shard(root: Path, shard: Shard, manifest: ShardsManifest) -> Iterator[str]:
    width_bytes = DTYPE_BYTES[manifest.dtype]
    if shard.tokens == 0 or shard.documents == 0:
        yield f"{shard.path} is empty: {shard.tokens} tokens in {shard.documents} documents"
    if shard.bytes != shard.tokens * width_bytes:
        yield (
            f"{shard.path} lists {shard.bytes} bytes for {shard.tokens} tokens of "
            f"{width_bytes} bytes"
        )
    ids_ok = yield from _check_size(root / shard.path, shard.path, shard.bytes)
    index_ok = yield from _check_size(root / shard.index_path, shard.index_path, shard.index_bytes)
    if ids_ok:
        yield from _check_ids(root, shard, manifest)
    if index_ok:
        yield from _check_index(root, shard, manifest, read_ids=ids_ok)


def _check_size(path: Path, name: str, wanted_bytes: int) -> Generator[str, None, bool]:
    """Yield problems of size; return whether the content is worth reading."""
    if not path.is_file():
        yield f"{name} is missing"
        return False
    size_bytes = path.stat().st_size
    with path.open("rb") as stream:
        head = stream.read(64)
    if is_lfs_pointer(head, size_bytes):
        yield (
            f"{name} is a git-lfs pointer of {size_bytes} bytes, not {wanted_bytes} bytes of "
            "data; run `git lfs pull`"
        )
        return False
    if size_bytes != wanted_bytes:
        yield f"{name} has {size_bytes} bytes, {wanted_bytes} listed"
        return False
    return True


def _check_ids(root: Path, shard: Shard, manifest: ShardsManifest) -> Iterator[str]:
    dtype = little_endian(manifest.dtype)
    digest = hashlib.sha256()
    max_id, offset, outside = 0, 0, False
    with (root / shard.path).open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            ids = np.frombuffer(chunk[: len(chunk) // dtype.itemsize * dtype.itemsize], dtype)
            if ids.size:
                max_id = max(max_id, int(ids.max()))
            if max_id >= manifest.vocab_size and not outside:
                outside = True
                at = int(np.argmax(ids >= manifest.vocab_size))
                yield (
                    f"{shard.path} holds the id {ids[at]} at token {offset + at}, outside the "
                    f"vocabulary of {manifest.vocab_size}"
                )
            offset += ids.size
    if max_id != shard.max_id:
        yield f"{shard.path} has the largest id {max_id}, {shard.max_id} listed"
    if digest.hexdigest() != shard.sha256:
        yield f"{shard.path} is not the file that was packed: its sha256 differs"


def _check_index(
    root: Path, shard: Shard, manifest: ShardsManifest, *, read_ids: bool
) -> Iterator[str]:
    data = (root / shard.index_path).read_bytes()
    if hashlib.sha256(data).hexdigest() != shard.index_sha256:
        yield f"{shard.index_path} is not the file that was packed: its sha256 differs"
    if len(data) != shard.documents * INDEX_ENTRY_BYTES:
        yield f"{shard.index_path} has {len(data)} bytes for {shard.documents} documents"
        return
    starts = np.frombuffer(data, "<u8").astype(np.int64)
    inside = starts.size and starts[0] == 0 and starts[-1] < shard.tokens
    if not inside or (np.diff(starts) <= 0).any():
        yield f"{shard.index_path} does not rise from 0 to below {shard.tokens}"
        return
    if read_ids and shard.bytes == shard.tokens * DTYPE_BYTES[manifest.dtype]:
        ids = np.memmap(root / shard.path, dtype=little_endian(manifest.dtype), mode="r")
        closing = np.append(starts[1:], shard.tokens) - 1
        if (ids[closing] != manifest.tokenizer.end_of_text).any():
            yield f"{shard.path} has a document that does not end in the end-of-text id"
