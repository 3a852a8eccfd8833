"""The first reading of a corpus: what is in it, and on which side each document falls.

A `PackJob` is a pack with every input checked and nothing written yet. Reading
the text again goes through `reread`, which refuses text that changed since.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from leadline.core.canonical import sha256_bytes, sha256_json
from leadline.core.errors import DataError, UsageError
from leadline.data.corpus import CorpusSource, Document, read_documents, stdlib_source
from leadline.data.manifest import SourceFacts, SplitName
from leadline.data.shards import DEFAULT_SHARD_TOKENS, choose_dtype
from leadline.data.split import assign_splits, parse_eval_fraction
from leadline.data.tokenizer import TokenizerSpec, parse_spec, spec_request

_MAX_SEED = 2**53 - 1  # the largest integer canonical JSON holds


@dataclass(frozen=True, kw_only=True, slots=True)
class PackProgress:
    """How far a pack is: the stage, and bytes of text done in it."""

    stage: str
    """`scan`, `train tokenizer` or `encode`."""
    done_bytes: int
    total_bytes: int | None
    """None while it is not known."""


OnProgress = Callable[[PackProgress], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackInputs:
    """Everything that decides the bytes of the shards, as the caller gave it."""

    source: Path | str
    """A folder, a .jsonl file, or the word `stdlib`."""
    tokenizer: str = "bpe"
    """`bpe`, `bytes` or the path of a tokenizer.json."""
    vocab_size: int | None = None
    """Ids of the BPE to train; None is 8,192."""
    end_of_text: str | None = None
    """Closing token of a given tokenizer; None is <|endoftext|>."""
    seed: int = 0
    """Decides which documents are held out."""
    eval_fraction: str = "0.02"
    """Share of distinct documents held out, as a decimal string."""
    shard_tokens: int = DEFAULT_SHARD_TOKENS
    """Most tokens in a shard; a longer document has a shard of its own."""
    max_bytes: int | None = None
    """Take whole documents up to this many bytes in all; None takes every one."""
    suffixes: tuple[str, ...] | None = None
    """File name endings to keep; None keeps every file (of the standard library, .py)."""
    dtype: str | None = None
    """`uint16` or `uint32`; None chooses by vocabulary."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= _MAX_SEED:
            raise UsageError(f"seed is {self.seed}; give 0 to 2**53 - 1")
        if self.shard_tokens < 1:
            raise UsageError(f"shard size is {self.shard_tokens} tokens; give at least 1")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise UsageError(f"max bytes is {self.max_bytes}; give at least 1, or leave it out")
        parse_eval_fraction(self.eval_fraction)
        choose_dtype(0, self.dtype)

    def corpus(self) -> CorpusSource:
        """The documents meant by `source`."""
        if self.source == "":
            raise UsageError("no text is named; give a folder of text, a .jsonl file or `stdlib`")
        if self.source == "stdlib":
            return stdlib_source(self.max_bytes)
        return CorpusSource(
            root=Path(self.source), suffixes=self.suffixes, max_bytes=self.max_bytes
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScannedDocument:
    """One document as the scan saw it."""

    path: str
    sha256: str
    size_bytes: int
    split: SplitName


@dataclass(frozen=True, kw_only=True, slots=True)
class PackJob:
    """A pack with its inputs checked and its text scanned."""

    inputs: PackInputs
    corpus: CorpusSource
    spec: TokenizerSpec
    documents: tuple[ScannedDocument, ...]
    facts: SourceFacts

    @property
    def eval_fraction(self) -> str:
        """The fraction in its shortest spelling, so that 0.02 and 0.020 are one input."""
        return parse_eval_fraction(self.inputs.eval_fraction)[1]

    @property
    def request(self) -> dict[str, int | str]:
        """The inputs that no other field of the manifest records."""
        request = {**spec_request(self.spec), "shard_tokens": self.inputs.shard_tokens}
        if self.inputs.max_bytes is not None:
            request["max_bytes"] = self.inputs.max_bytes
        if self.inputs.dtype is not None:
            request["dtype"] = self.inputs.dtype
        return request


def scan_corpus(inputs: PackInputs, report: OnProgress) -> PackJob:
    """Read the corpus once: hashes, sizes, skipped files, sides.

    Raises:
        UsageError: no such text or tokenizer, or a vocabulary size that cannot be.
        DataError: text that cannot be used, or too little to hold any out.
    """
    corpus = inputs.corpus()
    spec = parse_spec(inputs.tokenizer, inputs.vocab_size, inputs.end_of_text)
    skipped = Counter[str]()
    found: list[tuple[str, str, int]] = []
    done_bytes = 0
    for document in read_documents(corpus, skipped=skipped):
        size_bytes = len(document.utf8)
        found.append((document.path, sha256_bytes(document.utf8), size_bytes))
        done_bytes += size_bytes
        report(PackProgress(stage="scan", done_bytes=done_bytes, total_bytes=corpus.max_bytes))
    facts = SourceFacts(
        files=len(found),
        bytes=done_bytes,
        sha256=sha256_json([[path, sha256] for path, sha256, _ in found]),
        skipped=dict(sorted(skipped.items())),
    )
    fraction, _ = parse_eval_fraction(inputs.eval_fraction)
    splits = assign_splits(
        [sha256 for _, sha256, _ in found], seed=inputs.seed, eval_fraction=fraction
    )
    documents = tuple(
        ScannedDocument(path=path, sha256=sha256, size_bytes=size_bytes, split=split)
        for (path, sha256, size_bytes), split in zip(found, splits, strict=True)
    )
    return PackJob(inputs=inputs, corpus=corpus, spec=spec, documents=documents, facts=facts)


def reread(job: PackJob) -> Iterator[tuple[ScannedDocument, Document]]:
    """The scanned documents again, each held against its scan.

    Raises:
        DataError: a document is gone, moved or different.
    """
    again = read_documents(job.corpus)
    for scanned in job.documents:
        document = next(again, None)
        if (
            document is None
            or document.path != scanned.path
            or sha256_bytes(document.utf8) != scanned.sha256
        ):
            raise DataError(
                f"{scanned.path} in {job.corpus.root} changed while it was being packed; "
                "run the command again when nothing writes there"
            )
        yield scanned, document
