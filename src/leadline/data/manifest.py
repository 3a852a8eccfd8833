"""The manifest of a folder of token shards: its types, its JSON, its reader.

`manifest.json` is canonical JSON of integers and strings, so its sha256 is the
identity of the data: a loader state and a lock both carry it. The layout is
described in docs/data.md; `SCHEMA` rises when a reader of today would misread.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_origin

from leadline.core.canonical import canonical_bytes, sha256_bytes
from leadline.core.errors import DataError

SCHEMA = 1
MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
DTYPE_BYTES = {"uint16": 2, "uint32": 4}
INDEX_ENTRY_BYTES = 8

SplitName = Literal["train", "eval"]
SPLIT_NAMES: tuple[SplitName, ...] = ("train", "eval")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFacts:
    """The tokenizer that made the ids."""

    kind: str
    sha256: str
    vocab_size: int
    """Smallest vocabulary a model needs: the largest id plus one."""
    end_of_text: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One file of ids and its index of document starts; paths are relative to the root."""

    path: str
    tokens: int
    documents: int
    max_id: int
    bytes: int
    sha256: str
    index_bytes: int
    index_sha256: str

    @property
    def index_path(self) -> str:
        """Path of the file of document starts."""
        return str(PurePosixPath(self.path).with_suffix(".idx"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """One side of the corpus: what is trained on, or what is held out."""

    tokens: int
    documents: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFacts:
    """The text the ids were made from."""

    files: int
    bytes: int
    sha256: str
    """Sha256 of the canonical JSON list of (path, sha256), in path order."""
    skipped: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardsManifest:
    """Everything a reader of the shards needs, and everything that made them."""

    dtype: str
    tokenizer: TokenizerFacts
    train: Split
    eval: Split
    source: SourceFacts
    seed: int
    eval_fraction: str
    request: Mapping[str, int | str]
    """The remaining inputs: equal requests over equal text give equal bytes."""

    @property
    def vocab_size(self) -> int:
        """Smallest vocabulary a model needs."""
        return self.tokenizer.vocab_size

    def split(self, name: str) -> Split:
        """The split called *name*."""
        if name not in SPLIT_NAMES:
            raise DataError(f"no split {name!r}; the shards have {' and '.join(SPLIT_NAMES)}")
        return self.train if name == "train" else self.eval

    def to_bytes(self) -> bytes:
        """The canonical bytes of manifest.json."""
        value = asdict(self)
        value["schema"] = SCHEMA
        value["splits"] = {"train": value.pop("train"), "eval": value.pop("eval")}
        return canonical_bytes(value)

    @property
    def sha256(self) -> str:
        """Sha256 of manifest.json: the identity of the data."""
        return sha256_bytes(self.to_bytes())


def load_manifest(root: Path) -> ShardsManifest:
    """Read ROOT/manifest.json; the shards themselves are not opened.

    Raises:
        DataError: no manifest, not JSON, another schema, or a key missing or of a wrong type.
    """
    path = Path(root) / MANIFEST_NAME
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"no readable token shards at {root}: {MANIFEST_NAME}: {error.strerror}; "
            "make them with `leadline data pack`"
        ) from error
    try:
        manifest = _parse(json.loads(data))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is not a shards manifest of schema {SCHEMA} "
            f"({type(error).__name__}: {error}); pack the text again"
        ) from error
    if manifest.to_bytes() != data:
        raise DataError(f"{path} was rewritten after packing; restore it or pack the text again")
    return manifest


def _parse(value: dict[str, Any]) -> ShardsManifest:
    if value["schema"] != SCHEMA:
        raise ValueError(f"schema {value['schema']!r}")
    manifest = ShardsManifest(
        dtype=value["dtype"],
        tokenizer=TokenizerFacts(**value["tokenizer"]),
        train=_parse_split(value["splits"]["train"]),
        eval=_parse_split(value["splits"]["eval"]),
        source=SourceFacts(**value["source"]),
        seed=value["seed"],
        eval_fraction=value["eval_fraction"],
        request=value["request"],
    )
    if manifest.dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {manifest.dtype!r}, known are {', '.join(DTYPE_BYTES)}")
    for part in (manifest, manifest.tokenizer, manifest.source):
        _refuse_wrong_types(part)
    return manifest


def _parse_split(value: dict[str, Any]) -> Split:
    shards = tuple(Shard(**shard) for shard in value["shards"])
    split = Split(tokens=value["tokens"], documents=value["documents"], shards=shards)
    for part in (split, *shards):
        _refuse_wrong_types(part)
    return split


def _refuse_wrong_types(part: object) -> None:
    """Every count is a natural number, every name a string, every table holds only those."""
    for field in fields(part):  # type: ignore[arg-type]
        value = getattr(part, field.name)
        if field.type is int:
            fits = _is_count(value)
        elif field.type is str:
            fits = isinstance(value, str)
        elif get_origin(field.type) is Mapping:
            fits = all(isinstance(item, str) or _is_count(item) for item in value.values())
        else:
            continue
        if not fits:
            raise TypeError(f"{field.name} is {value!r}")


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0
