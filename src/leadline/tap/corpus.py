"""A calibration corpus as token ids, checked whole before a weight is read.

- Every document counts: empty ones are left out and noted, long ones cut only where asked
  and noted, and none is dropped for its length.
- An id that the model has no row for, a document over its positions, or a corpus without
  a token is refused here, by document and position.
- `digest` is over ids and document boundaries: equal digests mean the same tap.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from leadline.core.errors import DataError, UsageError
from leadline.core.notes import Note
from leadline.tap.documents import Chat, Document, corpus_kind, read_documents
from leadline.tap.encoder import DocumentEncoder

OnDocuments = Callable[[int, int], None]
"""Called with the documents and tokens taken so far."""

_BATCH_DOCUMENTS = 256
_BATCH_CHARACTERS = 1 << 20  # bounds what the tokenizer holds; a longer document goes alone
_NAMED_IN_NOTE = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Documents to tap, in the corpus's order."""

    documents: list[NDArray[np.int32]]
    """Ids of each, at least one."""
    origins: tuple[str, ...]
    """Where each is from: `file.jsonl:3`, `tokens.npy[2]`, `folder/file.txt`."""
    num_tokens: int
    digest: str
    """Sha256 over ids and document boundaries."""
    tokenizer_digest: str
    """Sha256 over the tokenizer's files; empty where the corpus came as ids."""
    notes: tuple[Note, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document."""
        return tuple(ids.size for ids in self.documents)


def open_corpus(
    path: Path,
    tokenizer_dir: Path,
    *,
    vocab_size: int,
    max_document_tokens: int | None,
    max_positions: int | None,
    text_field: str | None = None,
    on_progress: OnDocuments | None = None,
) -> Corpus:
    """Read, tokenise and check the corpus at *path*.

    Text goes through the tokenizer in *tokenizer_dir*. A document over
    *max_document_tokens* keeps its first ids. None as a limit: no limit.

    Raises:
        UsageError: no such corpus, no tokenizer for text, or a limit that cannot be.
        DataError: a document that cannot be used, or none with a token.
    """
    path = Path(path)
    if max_document_tokens is not None and max_document_tokens < 1:
        raise UsageError(f"--max-document-tokens is {max_document_tokens}; give 1 or more")
    encoder = DocumentEncoder.open(Path(tokenizer_dir)) if corpus_kind(path).is_text else None
    taken = _Intake(
        vocab_size=vocab_size, max_document_tokens=max_document_tokens, max_positions=max_positions
    )
    documents = read_documents(path, text_field=text_field, skipped=taken.skipped_files)
    for batch in _batches(documents):
        rows = [item.content for item in batch] if encoder is None else encoder.encode(batch)
        for document, row in zip(batch, rows, strict=True):
            taken.add(document.origin, np.asarray(row))
        if on_progress is not None:
            on_progress(len(taken.documents), taken.num_tokens)
    if not taken.documents:
        raise DataError(
            f"the corpus {path} holds no token in {len(taken.empty)} documents; give documents "
            "with text or ids"
        )
    return Corpus(
        documents=taken.documents,
        origins=tuple(taken.origins),
        num_tokens=taken.num_tokens,
        digest=tokens_digest(taken.documents),
        tokenizer_digest="" if encoder is None else encoder.digest,
        notes=_notes(taken, 0 if encoder is None else encoder.spelled_marks),
    )


def tokens_digest(documents: list[NDArray[np.int32]]) -> str:
    """Sha256 over each document's length and ids, in order."""
    digest = hashlib.sha256(b"leadline corpus 1\n")
    for ids in documents:
        digest.update(ids.size.to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(ids, dtype="<i4").tobytes())
    return digest.hexdigest()


@dataclass(kw_only=True, slots=True)
class _Intake:
    """Documents as they come in: checked, cut and counted."""

    vocab_size: int
    max_document_tokens: int | None
    max_positions: int | None
    documents: list[NDArray[np.int32]] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    num_tokens: int = 0
    empty: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    cut_tokens: int = 0
    skipped_files: Counter[str] = field(default_factory=Counter)

    def add(self, origin: str, ids: NDArray[np.integer]) -> None:
        if not ids.size:
            self.empty.append(origin)
            return
        name = f"document {len(self.documents) + 1} ({origin})"
        self._refuse_foreign_ids(ids, name)
        limit = self.max_document_tokens
        if limit is not None and ids.size > limit:
            self.cut.append(origin)
            self.cut_tokens += ids.size - limit
            ids = ids[:limit]
        if self.max_positions is not None and ids.size > self.max_positions:
            raise DataError(
                f"{name} has {ids.size:,} tokens, and the model has {self.max_positions:,} "
                f"positions; cut documents with --max-document-tokens {self.max_positions}, or "
                "split them"
            )
        self.documents.append(ids.astype(np.int32))
        self.origins.append(origin)
        self.num_tokens += ids.size

    def _refuse_foreign_ids(self, ids: NDArray[np.integer], name: str) -> None:
        if int(ids.min()) >= 0 and int(ids.max()) < self.vocab_size:
            return
        place = int(np.argmax((ids < 0) | (ids >= self.vocab_size)))
        raise DataError(
            f"{name} holds the token id {ids[place]} at position {place}, wanted 0 to "
            f"{self.vocab_size - 1} for the model's vocabulary; use this model's tokenizer, and "
            "no padding"
        )


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += _characters(document)
        if len(batch) == _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _characters(document: Document) -> int:
    content = document.content
    if isinstance(content, str):
        return len(content)
    if isinstance(content, Chat):
        return sum(len(str(message.get("content"))) for message in content.messages)
    return 0


def _notes(taken: _Intake, spelled_marks: int) -> tuple[Note, ...]:
    notes = []
    skipped = dict(taken.skipped_files)
    empty_files = skipped.pop("empty", 0)
    # Stayed out of by rule (.git, __pycache__): no part of any corpus.
    skipped.pop("excluded_folder", None)
    empty = [*taken.empty, *([f"{empty_files} files of white space"] if empty_files else [])]
    if empty:
        detail = f"left out, no token: {_listed(empty)}"
        notes.append(
            Note(kind="document_empty", count=len(taken.empty) + empty_files, detail=detail)
        )
    if taken.cut:
        detail = (
            f"cut to {taken.max_document_tokens:,} tokens by --max-document-tokens, "
            f"{taken.cut_tokens:,} tokens left out: {_listed(taken.cut)}"
        )
        notes.append(Note(kind="document_truncated", count=len(taken.cut), detail=detail))
    if skipped:
        detail = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
        notes.append(Note(kind="file_skipped", count=sum(skipped.values()), detail=detail))
    if spelled_marks:
        detail = "the text spells a start or end token that the tokenizer adds: kept once"
        notes.append(Note(kind="special_token_spelled", count=spelled_marks, detail=detail))
    return tuple(notes)


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMED_IN_NOTE
    return ", ".join(names[:_NAMED_IN_NOTE]) + (f" and {more} more" if more > 0 else "")
