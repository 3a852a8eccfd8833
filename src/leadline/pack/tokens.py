"""Token counts of a pack, recomputed from what lies in it.

A tree may hold shards written by `leadline data pack`: a `manifest.json` with the keys
`splits` and `tokenizer`, and raw ids beside it. The counts it states are believed only
where they follow from the shards' own sizes and the width of an id.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from leadline.core.canonical import parse_canonical, sha256_bytes
from leadline.core.errors import IntegrityError
from leadline.core.manifest import MANIFEST_FILE, FileEntry, Manifest

SHARDS_MANIFEST_LIMIT_BYTES = 64 << 20
TOKENIZER_FILE = "tokenizer.json"

_ID_BYTES = {"uint16": 2, "uint32": 4}
_INDEX_ENTRY_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFacts:
    """One shard as its manifest lists it."""

    split: str
    path: str
    tokens: int
    documents: int
    bytes: int
    sha256: str
    index_bytes: int
    index_sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFacts:
    """One shards manifest of a pack, as it states itself."""

    path: str
    """Of the manifest, relative to the tree."""
    manifest_sha256: str
    train_tokens: int
    eval_tokens: int
    vocab_size: int
    dtype: str
    tokenizer_sha256: str
    shards: tuple[ShardFacts, ...]

    @property
    def folder(self) -> str:
        """What shard paths are relative to: empty, or ending in a slash."""
        return self.path.removesuffix(MANIFEST_FILE)

    @property
    def document(self) -> dict[str, Any]:
        """The facts a pack manifest repeats, in the form it holds."""
        return {
            "path": self.path,
            "manifest_sha256": self.manifest_sha256,
            "train_tokens": self.train_tokens,
            "eval_tokens": self.eval_tokens,
            "vocab_size": self.vocab_size,
            "dtype": self.dtype,
        }


def may_be_shards_manifest(path: str, size_bytes: int) -> bool:
    """True for a file worth handing to `read_token_facts`."""
    name = path.rsplit("/", 1)[-1]
    return name == MANIFEST_FILE and size_bytes <= SHARDS_MANIFEST_LIMIT_BYTES


def read_token_facts(data: bytes, path: str) -> TokenFacts | None:
    """The facts of a shards manifest; None when *data* is some other manifest.

    Raises:
        IntegrityError: a shards manifest that is malformed or was reformatted.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        # Somebody's own file of that name: hashed like any other, and no business of ours.
        return None
    if not isinstance(document, dict) or not {"splits", "tokenizer"} <= set(document):
        return None
    try:
        parse_canonical(data)
        return _facts(document, data, path)
    except IntegrityError as error:
        raise IntegrityError(f"{path} {error}; restore it or make the shards again") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(
            f"{path} is a malformed shards manifest ({type(error).__name__}: {error}); "
            "make the shards again with `leadline data pack`"
        ) from error


def recount(
    shard_manifests: Mapping[str, bytes], manifest: Manifest
) -> tuple[tuple[TokenFacts, ...], list[str]]:
    """Facts of every shards manifest, by path, and what does not follow from the files.

    A pack manifest that states token counts must state these.
    """
    files = {entry.path: entry for entry in manifest.files}
    found: list[TokenFacts] = []
    problems: list[str] = []
    for path, data in sorted(shard_manifests.items()):
        try:
            facts = read_token_facts(data, path)
        except IntegrityError as error:
            problems.append(str(error))
            continue
        if facts is not None:
            found.append(facts)
            problems += token_problems(facts, files)
    stated = manifest.extra.get("tokens")
    if stated is not None and stated != [facts.document for facts in found]:
        problems.append("the manifest states other token counts than the shards hold")
    return tuple(found), problems


def token_problems(facts: TokenFacts, files: Mapping[str, FileEntry]) -> list[str]:
    """Where a shards manifest does not follow from the files of its pack."""
    problems = list(_file_problems(facts, files))
    width_bytes = _ID_BYTES.get(facts.dtype)
    if width_bytes is None:
        return [*problems, f"{facts.path} has the dtype {facts.dtype!r}, wanted uint16 or uint32"]
    for shard in facts.shards:
        entry = files.get(facts.folder + shard.path)
        if entry is not None and entry.bytes != shard.tokens * width_bytes:
            problems.append(
                f"{entry.path} holds {entry.bytes / width_bytes:g} tokens of {facts.dtype} "
                f"where {facts.path} counts {shard.tokens}"
            )
    for split, stated in (("train", facts.train_tokens), ("eval", facts.eval_tokens)):
        counted = sum(shard.tokens for shard in facts.shards if shard.split == split)
        if counted != stated:
            problems.append(f"{facts.path} states {stated} {split} tokens, its shards {counted}")
    held_out = {shard.sha256 for shard in facts.shards if shard.split == "eval"}
    problems += [
        f"{facts.folder}{shard.path} is also an eval shard: held-out text must not be trained on"
        for shard in facts.shards
        if shard.split == "train" and shard.sha256 in held_out
    ]
    return problems


def listed_files(facts: TokenFacts) -> Iterator[tuple[str, int, str]]:
    """Path relative to the tree, size and sha256 of every shard and index."""
    for shard in facts.shards:
        yield facts.folder + shard.path, shard.bytes, shard.sha256
        index = facts.folder + shard.path.removesuffix(".bin") + ".idx"
        yield index, shard.index_bytes, shard.index_sha256


def _facts(document: dict[str, Any], data: bytes, path: str) -> TokenFacts:
    splits = document["splits"]
    facts = TokenFacts(
        path=path,
        manifest_sha256=sha256_bytes(data),
        train_tokens=splits["train"]["tokens"],
        eval_tokens=splits["eval"]["tokens"],
        vocab_size=document["tokenizer"]["vocab_size"],
        dtype=document["dtype"],
        tokenizer_sha256=document["tokenizer"]["sha256"],
        shards=tuple(
            _shard(split, item) for split in ("train", "eval") for item in splits[split]["shards"]
        ),
    )
    counts = (facts.train_tokens, facts.eval_tokens, facts.vocab_size)
    texts = (facts.dtype, facts.tokenizer_sha256)
    _demand(counts, texts)
    return facts


def _shard(split: str, item: dict[str, Any]) -> ShardFacts:
    names = ("path", "tokens", "documents", "bytes", "sha256", "index_bytes", "index_sha256")
    shard = ShardFacts(split=split, **{name: item[name] for name in names})
    counts = (shard.tokens, shard.documents, shard.bytes, shard.index_bytes)
    _demand(counts, (shard.path, shard.sha256, shard.index_sha256))
    return shard


def _demand(counts: tuple[object, ...], texts: tuple[object, ...]) -> None:
    for count in counts:
        if type(count) is not int or count < 0:
            raise TypeError(f"{count!r} is no count")
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{text!r} is no text")


def _file_problems(facts: TokenFacts, files: Mapping[str, FileEntry]) -> Iterator[str]:
    listed = {path for path, _, _ in listed_files(facts)}
    for path, size_bytes, sha256 in listed_files(facts):
        entry = files.get(path)
        if entry is None:
            yield f"{path} is missing and {facts.path} lists it"
        elif (entry.bytes, entry.sha256) != (size_bytes, sha256):
            yield f"{path} is not the file {facts.path} lists ({entry.bytes} bytes, {size_bytes})"
    for shard in facts.shards:
        if not shard.path.startswith(f"{shard.split}/"):
            yield f"{facts.path} lists {shard.path} as {shard.split}, but it lies elsewhere"
        if shard.index_bytes != shard.documents * _INDEX_ENTRY_BYTES:
            yield f"{facts.path} lists an index of {shard.path} that does not fit its documents"
    tokenizer = files.get(facts.folder + TOKENIZER_FILE)
    if tokenizer is not None and tokenizer.sha256 != facts.tokenizer_sha256:
        yield f"{tokenizer.path} is not the tokenizer that {facts.path} names"
    folders = (f"{facts.folder}train/", f"{facts.folder}eval/")
    for path in sorted(files):
        if path.startswith(folders) and path not in listed:
            yield f"{path} lies among the shards and {facts.path} does not list it"
