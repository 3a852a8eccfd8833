"""Text in, token shards out: the one function behind `leadline data pack`.

The text is read twice or three times and never held whole: a scan that hashes
and divides it, a training pass when a BPE is trained, and an encoding pass that
refuses text that changed since the scan. A BPE learns from the training side
only, so the held-out side stays unseen by the tokenizer too.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from leadline.core.atomic import explained_os_errors
from leadline.core.canonical import sha256_bytes, sha256_json
from leadline.core.errors import DataError, UsageError
from leadline.data.corpus import CorpusSource, Document, read_documents, stdlib_source
from leadline.data.manifest import (
    MANIFEST_NAME,
    TOKENIZER_NAME,
    ShardsManifest,
    SourceFacts,
    Split,
    SplitName,
    TokenizerFacts,
    load_manifest,
)
from leadline.data.shards import DEFAULT_SHARD_TOKENS, SplitWriter, choose_dtype
from leadline.data.split import assign_splits, content_rank, parse_eval_fraction
from leadline.data.staging import staged_folder
from leadline.data.tokenizer import Encoder, TokenizerSpec, make_encoder, parse_spec, spec_request
from leadline.data.verify import check_shards

_BATCH_BYTES = 4 << 20  # measured (2 cores, 12 MB of source): small batches leave a core idle
_BPE_TRAINING_BYTES = 8 << 20  # measured: 4 s to train; merges from more text differ little
_MAX_SEED = 2**53 - 1


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
class _Scanned:
    path: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """A pack with its inputs checked and its text scanned."""

    source: CorpusSource
    spec: TokenizerSpec
    documents: tuple[_Scanned, ...]
    splits: tuple[SplitName, ...]
    facts: SourceFacts
    seed: int
    eval_fraction: str
    shard_tokens: int
    dtype: str | None
    request: dict[str, int | str]


def pack_text(
    source: Path | str,
    out: Path,
    *,
    tokenizer: str = "bpe",
    vocab_size: int | None = None,
    end_of_text: str | None = None,
    seed: int = 0,
    eval_fraction: str = "0.02",
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    max_bytes: int | None = None,
    suffixes: tuple[str, ...] | None = None,
    dtype: str | None = None,
    on_progress: OnProgress | None = None,
) -> ShardsManifest:
    """Turn text into token shards under *out*, whole or not at all.

    *source* is a folder, a .jsonl file, or the word `stdlib`; *tokenizer* is `bpe`, `bytes` or the
    path of a tokenizer.json. Same inputs, same bytes: where *out* already holds them, they are
    checked and nothing is written.

    Raises:
        UsageError: an input that cannot be, or an *out* that holds anything else.
        DataError: text that cannot be used, or shards that are there and damaged.
        DiskSpaceError: the disk is full.
        LeadlineError: *out* may not be written.
    """
    out = Path(out)
    report = on_progress or _ignore_progress
    _refuse_foreign(out)
    corpus = _corpus(source, max_bytes, suffixes)
    spec = parse_spec(tokenizer, vocab_size, end_of_text)
    job = _scan(corpus, spec, seed, eval_fraction, shard_tokens, dtype, report)
    if _holds_something(out):
        return _existing(out, job)
    with staged_folder(out) as folder:
        return _write(job, folder, report)


def _ignore_progress(progress: PackProgress) -> None:
    del progress


def _corpus(
    source: Path | str, max_bytes: int | None, suffixes: tuple[str, ...] | None
) -> CorpusSource:
    if max_bytes is not None and max_bytes < 1:
        raise UsageError(f"max bytes is {max_bytes}; give at least 1, or leave it out")
    if source == "stdlib":
        return stdlib_source(max_bytes)
    return CorpusSource(root=Path(source), suffixes=suffixes, max_bytes=max_bytes)


def _scan(
    source: CorpusSource,
    spec: TokenizerSpec,
    seed: int,
    eval_fraction: str,
    shard_tokens: int,
    dtype: str | None,
    report: OnProgress,
) -> _Job:
    """Read the corpus once: hashes, sizes, skipped files, sides."""
    if not 0 <= seed <= _MAX_SEED:
        raise UsageError(f"seed is {seed}; give 0 to 2**53 - 1")
    if shard_tokens < 1:
        raise UsageError(f"shard size is {shard_tokens} tokens; give at least 1")
    choose_dtype(0, dtype)
    fraction, fraction_text = parse_eval_fraction(eval_fraction)
    skipped, documents, done_bytes = Counter[str](), [], 0
    for document in read_documents(source, skipped=skipped):
        digest = sha256_bytes(document.utf8)
        size_bytes = len(document.utf8)
        documents.append(_Scanned(path=document.path, sha256=digest, size_bytes=size_bytes))
        done_bytes += size_bytes
        report(PackProgress(stage="scan", done_bytes=done_bytes, total_bytes=source.max_bytes))
    hashes = [item.sha256 for item in documents]
    return _Job(
        source=source,
        spec=spec,
        documents=tuple(documents),
        splits=tuple(assign_splits(hashes, seed=seed, eval_fraction=fraction)),
        facts=SourceFacts(
            files=len(documents),
            bytes=done_bytes,
            sha256=sha256_json([[item.path, item.sha256] for item in documents]),
            skipped=dict(sorted(skipped.items())),
        ),
        seed=seed,
        eval_fraction=fraction_text,
        shard_tokens=shard_tokens,
        dtype=dtype,
        request=_request(source, spec, shard_tokens, dtype),
    )


def _request(
    source: CorpusSource, spec: TokenizerSpec, shard_tokens: int, dtype: str | None
) -> dict[str, int | str]:
    request = {**spec_request(spec), "shard_tokens": shard_tokens}
    if source.max_bytes is not None:
        request["max_bytes"] = source.max_bytes
    if dtype is not None:
        request["dtype"] = dtype
    return request


def _reread(job: _Job) -> Iterator[tuple[int, Document]]:
    """The scanned documents again, each held against its scan."""
    again = read_documents(job.source)
    for number, scanned in enumerate(job.documents):
        document = next(again, None)
        if (
            document is None
            or document.path != scanned.path
            or sha256_bytes(document.utf8) != scanned.sha256
        ):
            raise DataError(
                f"{scanned.path} in {job.source.root} changed while it was being packed; "
                "run the command again when nothing writes there"
            )
        yield number, document


def _write(job: _Job, folder: Path, report: OnProgress) -> ShardsManifest:
    encoder = make_encoder(job.spec, _training_texts(job, report))
    train, held_out = _encode(job, folder, encoder, report)
    tokenizer_json = encoder.tokenizer_json
    manifest = ShardsManifest(
        dtype=choose_dtype(encoder.vocab_size, job.dtype),
        tokenizer=TokenizerFacts(
            kind=job.spec.kind,
            sha256=sha256_bytes(tokenizer_json),
            vocab_size=encoder.vocab_size,
            end_of_text=encoder.end_of_text,
        ),
        train=train,
        eval=held_out,
        source=job.facts,
        seed=job.seed,
        eval_fraction=job.eval_fraction,
        request=job.request,
    )
    _write_synced(folder / TOKENIZER_NAME, tokenizer_json)
    _write_synced(folder / MANIFEST_NAME, manifest.to_bytes())
    return manifest


def _training_texts(job: _Job, report: OnProgress) -> Iterator[str]:
    """A seeded sample of the training side, in path order."""
    order = sorted(
        (number for number, split in enumerate(job.splits) if split == "train"),
        key=lambda number: (content_rank(job.documents[number].sha256, job.seed), number),
    )
    chosen: set[int] = set()
    total_bytes = 0
    for number in order:
        if chosen and total_bytes + job.documents[number].size_bytes > _BPE_TRAINING_BYTES:
            continue
        chosen.add(number)
        total_bytes += job.documents[number].size_bytes
    done_bytes = 0
    for number, document in _reread(job):
        if number in chosen:
            yield document.text
            done_bytes += len(document.utf8)
            report(
                PackProgress(
                    stage="train tokenizer", done_bytes=done_bytes, total_bytes=total_bytes
                )
            )


def _encode(job: _Job, folder: Path, encoder: Encoder, report: OnProgress) -> tuple[Split, Split]:
    dtype = choose_dtype(encoder.vocab_size, job.dtype)

    def writer(name: SplitName) -> SplitWriter:
        return SplitWriter(
            folder,
            name,
            dtype=dtype,
            vocab_size=encoder.vocab_size,
            end_of_text=encoder.end_of_text,
            shard_tokens=job.shard_tokens,
        )

    done_bytes = 0
    with writer("train") as train, writer("eval") as held_out:
        for batch in _batches(job):
            ids_of = encoder.encode([document for _, document in batch])
            for (number, document), ids in zip(batch, ids_of, strict=True):
                target = held_out if job.splits[number] == "eval" else train
                target.append(ids, document.path)
                done_bytes += len(document.utf8)
            report(PackProgress(stage="encode", done_bytes=done_bytes, total_bytes=job.facts.bytes))
        return train.finish(), held_out.finish()


def _batches(job: _Job) -> Iterator[list[tuple[int, Document]]]:
    batch: list[tuple[int, Document]] = []
    size_bytes = 0
    for number, document in _reread(job):
        batch.append((number, document))
        size_bytes += len(document.utf8)
        if size_bytes >= _BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _write_synced(path: Path, data: bytes) -> None:
    with explained_os_errors(path), path.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _holds_something(out: Path) -> bool:
    return out.exists() and not (out.is_dir() and not any(out.iterdir()))


def _refuse_foreign(out: Path) -> None:
    if _holds_something(out) and not (out / MANIFEST_NAME).is_file():
        raise UsageError(f"{out} exists and holds no token shards; choose another folder")


def _existing(out: Path, job: _Job) -> ShardsManifest:
    """The shards that are there, provided they are what this job would make."""
    manifest = load_manifest(out)
    pairs = {
        "text": (manifest.source.sha256[:12], job.facts.sha256[:12]),
        "seed": (manifest.seed, job.seed),
        "eval fraction": (manifest.eval_fraction, job.eval_fraction),
    }
    for key in sorted({*manifest.request, *job.request}):
        pairs[key] = (manifest.request.get(key, "unset"), job.request.get(key, "unset"))
    differences = [
        f"{key} {had} there, {now} asked" for key, (had, now) in pairs.items() if had != now
    ]
    if differences:
        raise UsageError(
            f"{out} holds shards made from other inputs ({'; '.join(differences)}); "
            "choose another folder or remove it"
        )
    problems = check_shards(out)
    if problems:
        raise DataError(
            f"{out} was made from these inputs but is damaged ({problems[0]}); "
            "remove it and pack again"
        )
    return manifest
