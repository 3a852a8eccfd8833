"""Text in, token shards out: the one function behind `leadline data pack`.

The text is read two or three times and never held whole: a scan that hashes
and divides it, a training pass when a BPE is trained, and an encoding pass that
refuses text that changed since the scan. A BPE learns from the training side
only, so the held-out side stays unseen by the tokenizer too.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from leadline.core.atomic import explained_os_errors
from leadline.core.canonical import sha256_bytes
from leadline.core.errors import DataError, UsageError
from leadline.data.corpus import Document
from leadline.data.manifest import (
    MANIFEST_NAME,
    TOKENIZER_NAME,
    ShardsManifest,
    Split,
    SplitName,
    TokenizerFacts,
    load_manifest,
)
from leadline.data.scan import (
    OnProgress,
    PackInputs,
    PackJob,
    PackProgress,
    ScannedDocument,
    reread,
    scan_corpus,
)
from leadline.data.shards import DEFAULT_SHARD_TOKENS, SplitWriter, choose_dtype
from leadline.data.split import content_rank
from leadline.data.staging import staged_folder
from leadline.data.tokenizer import Encoder, make_encoder
from leadline.data.verify import check_shards

_BATCH_BYTES = 4 << 20  # measured (2 cores, 12 MB of source): small batches leave a core idle
_BPE_TRAINING_BYTES = 8 << 20  # measured: 4 s to train; merges from more text differ little


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

    The inputs are those of `PackInputs`. Same inputs, same bytes: where *out* already holds them,
    they are checked, nothing is written and no `encode` stage is reported.

    Raises:
        UsageError: an input that cannot be, or an *out* that holds anything else.
        DataError: text that cannot be used, or shards that are there and damaged.
        DiskSpaceError: the disk is full.
        LeadlineError: *out* may not be written.
    """
    inputs = PackInputs(
        source=source,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        end_of_text=end_of_text,
        seed=seed,
        eval_fraction=eval_fraction,
        shard_tokens=shard_tokens,
        max_bytes=max_bytes,
        suffixes=suffixes,
        dtype=dtype,
    )
    return pack_inputs(inputs, Path(out), on_progress or _ignore_progress)


def pack_inputs(inputs: PackInputs, out: Path, report: OnProgress) -> ShardsManifest:
    """`pack_text` for inputs that are already one value."""
    occupied = _is_occupied(out)
    if occupied and not (out / MANIFEST_NAME).is_file():
        raise UsageError(f"{out} exists and holds no token shards; choose another folder")
    root = inputs.corpus().root
    if out.absolute().resolve().is_relative_to(root.resolve()):
        raise UsageError(f"{out} lies inside the text it is made from; choose a folder outside it")
    job = scan_corpus(inputs, report)
    if occupied:
        return _existing(out, job)
    with staged_folder(out) as folder:
        return _write(job, folder, report)


def _ignore_progress(progress: PackProgress) -> None:
    del progress


def _is_occupied(out: Path) -> bool:
    with explained_os_errors(out):
        return out.exists() and not (out.is_dir() and not any(out.iterdir()))


def _write(job: PackJob, folder: Path, report: OnProgress) -> ShardsManifest:
    encoder = make_encoder(job.spec, _training_texts(job, report))
    train, held_out = _encode(job, folder, encoder, report)
    tokenizer_json = encoder.tokenizer_json
    manifest = ShardsManifest(
        dtype=choose_dtype(encoder.vocab_size, job.inputs.dtype),
        tokenizer=TokenizerFacts(
            kind=job.spec.kind,
            sha256=sha256_bytes(tokenizer_json),
            vocab_size=encoder.vocab_size,
            end_of_text=encoder.end_of_text,
        ),
        train=train,
        eval=held_out,
        source=job.facts,
        seed=job.inputs.seed,
        eval_fraction=job.eval_fraction,
        request=job.request,
    )
    _write_synced(folder / TOKENIZER_NAME, tokenizer_json)
    _write_synced(folder / MANIFEST_NAME, manifest.to_bytes())
    return manifest


def _training_texts(job: PackJob, report: OnProgress) -> Iterator[str]:
    """A seeded sample of the training side, in path order."""
    train = {item.sha256: item.size_bytes for item in job.documents if item.split == "train"}
    chosen: set[str] = set()
    total_bytes = 0
    for sha256 in sorted(train, key=lambda sha256: content_rank(sha256, job.inputs.seed)):
        if chosen and total_bytes + train[sha256] > _BPE_TRAINING_BYTES:
            continue
        chosen.add(sha256)
        total_bytes += train[sha256]
    done_bytes = 0
    for scanned, document in reread(job):
        if scanned.sha256 in chosen:
            chosen.remove(scanned.sha256)  # a text that occurs twice teaches once
            yield document.text
            done_bytes += scanned.size_bytes
            report(_at("train tokenizer", done_bytes, total_bytes))


def _encode(
    job: PackJob, folder: Path, encoder: Encoder, report: OnProgress
) -> tuple[Split, Split]:
    dtype = choose_dtype(encoder.vocab_size, job.inputs.dtype)

    def writer(name: SplitName) -> SplitWriter:
        return SplitWriter(
            folder,
            name,
            dtype=dtype,
            vocab_size=encoder.vocab_size,
            end_of_text=encoder.end_of_text,
            shard_tokens=job.inputs.shard_tokens,
        )

    done_bytes = 0
    with writer("train") as train, writer("eval") as held_out:
        for batch in _batches(job):
            ids_of = encoder.encode([document for _, document in batch])
            for (scanned, _), ids in zip(batch, ids_of, strict=True):
                target = held_out if scanned.split == "eval" else train
                target.append(ids, scanned.path)
                done_bytes += scanned.size_bytes
            report(_at("encode", done_bytes, job.facts.bytes))
        return train.finish(), held_out.finish()


def _at(stage: str, done_bytes: int, total_bytes: int) -> PackProgress:
    return PackProgress(stage=stage, done_bytes=done_bytes, total_bytes=total_bytes)


def _batches(job: PackJob) -> Iterator[list[tuple[ScannedDocument, Document]]]:
    batch: list[tuple[ScannedDocument, Document]] = []
    size_bytes = 0
    for pair in reread(job):
        batch.append(pair)
        size_bytes += pair[0].size_bytes
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


def _existing(out: Path, job: PackJob) -> ShardsManifest:
    """The shards that are there, provided they are what this job would make."""
    manifest = load_manifest(out)
    pairs = {
        "text": (manifest.source.sha256[:12], job.facts.sha256[:12]),
        "seed": (manifest.seed, job.inputs.seed),
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
