"""Documents of a calibration corpus as they lie on disk: text, chats or token ids.

- The kind follows the name: `.jsonl`, `.txt` or `.md`, `.npy`, `.bin` of token shards, or
  a folder of text or of shards.
- Nothing is tokenised, checked against a vocabulary or cut here (`leadline.tap.corpus`).
- A line or file that is not what its name says is refused and named. In a folder of text,
  what is no text is skipped and counted by reason.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leadline.core.atomic import explained_os_errors
from leadline.core.errors import DataError, UsageError
from leadline.data.corpus import CorpusSource, is_lfs_pointer
from leadline.data.corpus import read_documents as read_text_folder
from leadline.data.manifest import MANIFEST_NAME, SPLIT_NAMES
from leadline.tap.token_files import read_array, read_shards

FIELDS = ("text", "prompt", "messages")
_TEXT_SUFFIXES = (".txt", ".md")
_NOT_TEXT_SUFFIXES = (".jsonl", ".npy", ".bin")


class CorpusKind(Enum):
    """How a corpus is stored."""

    JSONL = "jsonl"
    TEXT_FILE = "text file"
    TEXT_FOLDER = "text folder"
    ARRAY = "token array"
    SHARDS = "token shards"

    @property
    def is_text(self) -> bool:
        """Whether a tokenizer is needed."""
        return self not in (CorpusKind.ARRAY, CorpusKind.SHARDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """Messages for the model's chat template."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    """Descriptions of tools, for templates that show them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One document and the place where a person finds it."""

    origin: str
    content: str | Chat | NDArray[np.integer]


def corpus_kind(path: Path) -> CorpusKind:
    """How the corpus at *path* is stored, from names alone.

    Raises:
        UsageError: nothing there, or a name that says nothing known.
    """
    if not path.exists():
        raise UsageError(
            f"no corpus at {path}: give a .jsonl, .txt or .npy file, a folder of text, or "
            "token shards"
        )
    if path.is_dir():
        return _folder_kind(path)
    kinds = {".jsonl": CorpusKind.JSONL, ".npy": CorpusKind.ARRAY, ".bin": CorpusKind.SHARDS}
    kinds |= dict.fromkeys(_TEXT_SUFFIXES, CorpusKind.TEXT_FILE)
    if path.suffix not in kinds:
        raise UsageError(
            f"the corpus {path} ends in {path.suffix or 'nothing'}, wanted one of "
            f"{', '.join(kinds)}; convert it, or put text files into a folder and give the folder"
        )
    return kinds[path.suffix]


def read_documents(
    path: Path, *, text_field: str | None = None, skipped: Counter[str] | None = None
) -> Iterator[Document]:
    """Yield the documents at *path* in an order that never varies.

    *text_field* names the field of a .jsonl line to take; None takes the one of `text`,
    `prompt` and `messages` that the file uses. *skipped* counts files of a folder by reason.

    Raises:
        UsageError: no such corpus, or a field asked of what has none.
        DataError: something that is not what its name says, named by line, file or row.
    """
    kind = corpus_kind(path)
    if text_field is not None and kind is not CorpusKind.JSONL:
        raise UsageError(f"{path} is no .jsonl file, so it has no field {text_field!r} to take")
    if kind is CorpusKind.JSONL:
        yield from _read_lines(path, text_field)
    elif kind is CorpusKind.TEXT_FILE:
        yield Document(origin=path.name, content=_read_text(path))
    elif kind is CorpusKind.TEXT_FOLDER:
        for found in read_text_folder(CorpusSource(root=path), skipped=skipped):
            yield Document(origin=found.path, content=found.text)
    else:
        rows = read_array(path) if kind is CorpusKind.ARRAY else read_shards(path)
        for origin, ids in rows:
            yield Document(origin=origin, content=ids)


def _folder_kind(path: Path) -> CorpusKind:
    is_root = (path / MANIFEST_NAME).is_file() and (path / SPLIT_NAMES[0]).is_dir()
    is_split = path.name in SPLIT_NAMES and (path.parent / MANIFEST_NAME).is_file()
    if is_root or is_split:
        return CorpusKind.SHARDS
    with explained_os_errors(path, "read"):
        strange = sorted(p.name for p in path.iterdir() if p.suffix in _NOT_TEXT_SUFFIXES)
    if strange:
        raise UsageError(
            f"the folder {path} holds {strange[0]}, which is not plain text; "
            "give that file itself, or a folder of text alone"
        )
    return CorpusKind.TEXT_FOLDER


def _read_text(path: Path) -> str:
    with explained_os_errors(path, "read"):
        data = path.read_bytes()
    _refuse_pointer(data[:64], len(data), path)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text (byte {error.start}); convert it to UTF-8"
        ) from error
    if "\0" in text:
        raise DataError(f"{path} holds a NUL at character {text.index(chr(0))}; it is no text")
    return text


def _read_lines(path: Path, text_field: str | None) -> Iterator[Document]:
    field, first_line = text_field, 0
    with explained_os_errors(path, "read"), path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if number == 1:
                _refuse_pointer(line[:64], path.stat().st_size, path)
            if not line.strip():
                continue
            value = _parse_line(line, f"{path}:{number}")
            found = text_field or _only_field(value, f"{path}:{number}")
            if field is None:
                field, first_line = found, number
            if found != field:
                raise DataError(
                    f"{path}:{number} has `{found}` where line {first_line} has `{field}`; "
                    "split the file, or name the field to take with --text-field"
                )
            content = _line_content(value, field, f"{path}:{number}")
            yield Document(origin=f"{path.name}:{number}", content=content)


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON ({error}); write one JSON object a line") from error
    if not isinstance(value, dict):
        raise DataError(
            f"{where} is a JSON {type(value).__name__}, wanted an object with a field of "
            f"{', '.join(FIELDS)}"
        )
    return value


def _only_field(value: dict[str, Any], where: str) -> str:
    found = [name for name in FIELDS if name in value]
    if len(found) != 1:
        raise DataError(
            f"{where} has {' and '.join(f'`{name}`' for name in found) or 'none'} of "
            f"{', '.join(FIELDS)}, wanted exactly one; name the field to take with --text-field"
        )
    return found[0]


def _line_content(value: dict[str, Any], field: str, where: str) -> str | Chat:
    content = value.get(field)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(
            f"{where} has {_spelled(content)} under `{field}`, wanted a string or a list of "
            "messages"
        )
    for place, message in enumerate(content):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(
                f"{where} has a message {place + 1} without a role, wanted an object with `role` "
                "and `content`"
            )
    tools = value.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{where} has {_spelled(tools)} under `tools`, wanted a list")
    return Chat(messages=content, tools=tools or None)


def _spelled(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _refuse_pointer(head: bytes, size_bytes: int, path: Path) -> None:
    if is_lfs_pointer(head, size_bytes):
        raise DataError(f"{path} is a git-lfs pointer, not a corpus; run `git lfs pull`")
