"""Small trees to pack, and the token shards some of them hold."""

import hashlib

import pytest

from leadline.core.canonical import canonical_bytes
from leadline.pack.build import build_pack


def _digest(data):
    return hashlib.sha256(data).hexdigest()


def _write(root, path, content):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(content)


@pytest.fixture
def tree(tmp_path):
    """Three files in two folders."""
    root = tmp_path / "tree"
    _write(root, "a.txt", b"alpha")
    _write(root, "sub/b.bin", bytes(range(256)) * 3)
    _write(root, "sub/empty.py", b"")
    return root


@pytest.fixture
def packed(tree, tmp_path):
    """The pack of `tree`."""
    return build_pack(tree, tmp_path / "out", "demo")


@pytest.fixture
def shards(tmp_path):
    """Token shards as `leadline data pack` lays them out: 300 train and 20 eval tokens."""
    root = tmp_path / "shards"
    _write(root, "tokenizer.json", b'{"tokenizer":1}')
    splits = {}
    for split, tokens in (("train", 300), ("eval", 20)):
        data = b"".join((n % 250).to_bytes(2, "little") for n in range(tokens))
        _write(root, f"{split}/shard-00000.bin", data)
        _write(root, f"{split}/shard-00000.idx", bytes(8))
        shard = {
            "path": f"{split}/shard-00000.bin",
            "tokens": tokens,
            "documents": 1,
            "max_id": 249,
            "bytes": len(data),
            "sha256": _digest(data),
            "index_bytes": 8,
            "index_sha256": _digest(bytes(8)),
        }
        splits[split] = {"tokens": tokens, "documents": 1, "shards": [shard]}
    tokenizer = {
        "kind": "bytes",
        "sha256": _digest(b'{"tokenizer":1}'),
        "vocab_size": 257,
        "end_of_text": 256,
    }
    manifest = {"schema": 1, "dtype": "uint16", "splits": splits, "tokenizer": tokenizer}
    _write(root, "manifest.json", canonical_bytes(manifest))
    return root
