"""Builders the data tests share: a tree of text, and shards of chosen ids."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leadline.core.canonical import sha256_bytes
from leadline.data.manifest import ShardsManifest, SourceFacts, Split, TokenizerFacts
from leadline.data.shards import SplitWriter, choose_dtype

MakeShards = Callable[..., Path]
MakeText = Callable[..., Path]


@pytest.fixture
def text_tree(tmp_path: Path) -> MakeText:
    """Make TMP/text with these files; without any, twelve different short documents."""

    def make(files: dict[str, bytes] | None = None) -> Path:
        root = tmp_path / "text"
        chosen = files or {
            f"{number:02d}.txt": (f"document {number}: the lead is heavy\n" * 9).encode()
            for number in range(12)
        }
        for name, data in chosen.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return root

    return make


HELD_OUT = [[9, 8, 7, 6, 5, 4, 3, 2, 1]]


def _write_split(root: Path, name: str, documents: Sequence[Sequence[int]], **facts: Any) -> Split:
    with SplitWriter(root, name, end_of_text=0, **facts) as writer:
        for ids in documents:
            writer.append(np.array(ids, dtype=np.uint32), "a document")
        return writer.finish()


def _write_manifest(root: Path, dtype: str, vocab_size: int, train: Split, held_out: Split) -> None:
    (root / "tokenizer.json").write_bytes(b"{}")
    manifest = ShardsManifest(
        dtype=dtype,
        tokenizer=TokenizerFacts(
            kind="given", sha256=sha256_bytes(b"{}"), vocab_size=vocab_size, end_of_text=0
        ),
        train=train,
        eval=held_out,
        source=SourceFacts(files=train.documents + 1, bytes=0, sha256="0" * 64, skipped={}),
        seed=0,
        eval_fraction="0.02",
        request={},
    )
    (root / "manifest.json").write_bytes(manifest.to_bytes())


@pytest.fixture
def make_shards(tmp_path: Path) -> MakeShards:
    """Make shards of chosen documents (without their closing id 0) and one held-out document."""

    def make(
        documents: Sequence[Sequence[int]],
        *,
        vocab_size: int = 1000,
        shard_tokens: int = 2**24,
        dtype: str | None = None,
        name: str = "shards",
    ) -> Path:
        root = tmp_path / name
        root.mkdir()
        chosen = choose_dtype(vocab_size, dtype)
        facts = {"dtype": chosen, "vocab_size": vocab_size, "shard_tokens": shard_tokens}
        train = _write_split(root, "train", documents, **facts)
        held_out = _write_split(root, "eval", HELD_OUT, **facts)
        _write_manifest(root, chosen, vocab_size, train, held_out)
        return root

    return make


@pytest.fixture
def counting_shards(make_shards: MakeShards) -> MakeShards:
    """Make *shards* shards of *tokens* ids each, all different ids, so that windows differ."""

    def make(*, shards: int, tokens: int, name: str = "shards") -> Path:
        documents = [
            list(range(1 + number * (tokens - 1), 1 + (number + 1) * (tokens - 1)))
            for number in range(shards)
        ]
        vocab_size = shards * tokens + 1
        return make_shards(documents, vocab_size=vocab_size, shard_tokens=tokens, name=name)

    return make
