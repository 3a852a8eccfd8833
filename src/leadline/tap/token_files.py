"""Token ids as they lie on disk: a NumPy array, or the shards of `leadline data pack`.

- An array of one dimension is one document; of two, a document a row.
- Shards keep their documents, each with its closing token. A folder of shards means its
  training split; `eval/` and single `.bin` files are taken when named.
- Ids come as they are stored; the vocabulary is checked by who asks.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from leadline.core.atomic import explained_os_errors
from leadline.core.canonical import sha256_bytes
from leadline.core.errors import DataError, UsageError
from leadline.data.corpus import is_lfs_pointer
from leadline.data.manifest import (
    MANIFEST_NAME,
    SPLIT_NAMES,
    Shard,
    ShardsManifest,
    load_manifest,
)
from leadline.data.shards import little_endian

TokenRow = tuple[str, NDArray[np.integer]]
"""Where the ids of a document are from, and the ids."""


def read_array(path: Path) -> Iterator[TokenRow]:
    """Yield the documents of a .npy file of integers.

    Raises:
        DataError: no such array, numbers that are no integers, or more than two dimensions.
    """
    ids = _open_array(path)
    if ids.ndim == 1:
        yield path.name, ids
    elif ids.ndim == 2:
        for row, document in enumerate(ids):
            yield f"{path.name}[{row}]", document
    else:
        raise DataError(
            f"{path} has the shape {ids.shape}, wanted [tokens] for one document or "
            "[documents, tokens]"
        )


def read_shards(path: Path) -> Iterator[TokenRow]:
    """Yield the documents of a folder of shards, of one of its splits, or of one .bin file.

    Raises:
        UsageError: a .bin file that no manifest lists.
        DataError: a manifest or shard that is missing, damaged or not what was packed.
    """
    split: str = SPLIT_NAMES[0]
    only: str | None = None
    if path.is_dir() and path.name in SPLIT_NAMES and (path.parent / MANIFEST_NAME).is_file():
        root, split = path.parent, path.name
    elif path.is_dir():
        root = path
    else:
        root, split, only = path.parent.parent, path.parent.name, f"{path.parent.name}/{path.name}"
        if split not in SPLIT_NAMES or not (root / MANIFEST_NAME).is_file():
            raise UsageError(
                f"{path} has no {MANIFEST_NAME} of token shards above it to say what its bytes "
                "are; give a folder made by `leadline data pack`, or save the ids as .npy"
            )
    manifest = load_manifest(root)
    shards = [s for s in manifest.split(split).shards if only is None or s.path == only]
    if not shards:
        raise UsageError(f"{root / MANIFEST_NAME} lists no shard of {path}; give one it lists")
    for shard in shards:
        yield from _read_shard(root, manifest, shard)


def _open_array(path: Path) -> NDArray[np.integer]:
    with explained_os_errors(path, "read"):
        with path.open("rb") as stream:
            if is_lfs_pointer(stream.read(64), path.stat().st_size):
                raise DataError(f"{path} is a git-lfs pointer, not an array; run `git lfs pull`")
        try:
            # Mapped, so that a damaged header cannot ask for more memory than the file has.
            ids = np.lib.format.open_memmap(path, mode="r")
        except (ValueError, EOFError) as error:
            raise DataError(
                f"{path} is no whole .npy file of numbers ({error}); save it with numpy.save"
            ) from error
    if not np.issubdtype(ids.dtype, np.integer):
        raise DataError(
            f"{path} holds {ids.dtype} numbers, and token ids are integers; save it as int32"
        )
    return ids


def _read_shard(root: Path, manifest: ShardsManifest, shard: Shard) -> Iterator[TokenRow]:
    data = _verified(root / shard.path, shard.sha256)
    index = _verified(root / shard.index_path, shard.index_sha256)
    dtype = little_endian(manifest.dtype)
    starts = np.frombuffer(index[: len(index) // 8 * 8], "<u8").astype(np.int64)
    whole = len(data) == shard.tokens * dtype.itemsize and starts.size == shard.documents > 0
    if not whole or starts[0] != 0 or (np.diff(starts, append=shard.tokens) <= 0).any():
        raise DataError(
            f"{root / shard.index_path} does not cut {shard.tokens} tokens into {shard.documents} "
            "documents; pack the text again"
        )
    ids = np.frombuffer(data, dtype)
    ends = np.append(starts[1:], shard.tokens)
    for place, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        yield f"{shard.path}[{place}]", ids[start:end]


def _verified(path: Path, sha256: str) -> bytes:
    with explained_os_errors(path, "read"):
        data = path.read_bytes()
    if sha256_bytes(data) != sha256:
        raise DataError(
            f"{path} ({len(data)} bytes) is not the file its {MANIFEST_NAME} lists: the sha256 "
            "differs; restore it or pack the text again"
        )
    return data
