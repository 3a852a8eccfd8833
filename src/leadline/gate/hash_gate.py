"""The hash gate: no probe reads a byte that was not verified first.

- `text` is packed into shards, the shards into a tarball (secrets scan included), the
  tarball verified and unpacked into the run directory: the road a rented machine's data
  takes, walked here too.
- `pack` is verified and unpacked; `shards` are verified where they lie.
- Every start of a gate hashes the shards again and plants the negative control again,
  because a resumed gate has to know what it reads.
"""

import shutil
from pathlib import Path

from leadline.core.atomic import explained_os_errors
from leadline.core.errors import DataError, IntegrityError, UsageError
from leadline.data import load_manifest
from leadline.data.prepare import pack_inputs
from leadline.gate.context import Finding, GateContext
from leadline.gate.data_source import (
    hash_gate_inputs,
    shards_folder,
    show_packing,
    text_inputs,
)
from leadline.pack.build import build_pack
from leadline.pack.progress import OnProgress
from leadline.pack.report import PackReport
from leadline.pack.tree import verify_folder
from leadline.pack.verify import verify_pack
from leadline.probe.progress import Progress

DATA_FOLDER = "data"
_BUILD_FOLDER = "build"
_PACK_FOLDER = "pack"


def run_hash_gate(ctx: GateContext) -> Finding:
    """Bring the shards where they belong, verify them, and see the checker fail once."""
    table = ctx.config.data
    tarball_sha256 = None
    if table.shards is not None:
        root = (ctx.base_dir / table.shards).resolve()
    else:
        tarball_sha256 = _bring_in(ctx)
        root = ctx.run_dir / DATA_FOLDER
    report = verify_folder(shards_folder(root), on_progress=_told_to(ctx))
    return _finding(ctx, report, tarball_sha256)


def _bring_in(ctx: GateContext) -> str:
    """Unpack the data into the run directory unless it lies there from an equal request."""
    target = ctx.run_dir / DATA_FOLDER
    there = ctx.store.reusable("pack", hash_gate_inputs(ctx))
    if there is not None and _manifest_sha256(target) == there.data["manifest_sha256"]:
        return str(there.data["tarball_sha256"])
    for leftover in (target, ctx.run_dir / _BUILD_FOLDER, ctx.run_dir / _PACK_FOLDER):
        if leftover.is_symlink():
            raise UsageError(
                f"{leftover} is a link, and the gate replaces that folder; remove the link, or "
                "give an --out on the disk that it leads to"
            )
        if leftover.exists():  # of an attempt that was cut off or asked for other data
            with explained_os_errors(leftover):
                shutil.rmtree(leftover)
    table = ctx.config.data
    if table.text is not None:
        tarball = _pack_text(ctx, table.text)
    else:
        assert table.pack is not None, "the configuration holds one of text, shards and pack"
        tarball = ctx.base_dir / table.pack
    report = verify_pack(tarball, unpack_to=target, on_progress=_told_to(ctx))
    if not report.ok:
        raise IntegrityError(f"the pack {tarball} is not whole: {'; '.join(report.problems)}")
    return str(report.tarball_sha256)


def _manifest_sha256(target: Path) -> str | None:
    """Of the shards that lie at *target*: shards swapped with their manifest have another."""
    try:
        return load_manifest(shards_folder(target)).sha256
    except (DataError, UsageError):
        return None


def _pack_text(ctx: GateContext, text: str) -> Path:
    shards = ctx.run_dir / _BUILD_FOLDER / "shards"
    with explained_os_errors(shards):
        shards.parent.mkdir(parents=True, exist_ok=True)
    pack_inputs(text_inputs(ctx, text), shards, lambda item: show_packing(ctx, item))
    result = build_pack(shards, ctx.run_dir / _PACK_FOLDER, DATA_FOLDER, on_progress=_told_to(ctx))
    shutil.rmtree(shards.parent)
    return result.tarball


def _finding(ctx: GateContext, report: PackReport, tarball_sha256: str | None) -> Finding:
    document = report.document
    root = report.source
    inside = root.is_relative_to(ctx.run_dir)
    facts = report.tokens[0] if report.tokens else None
    problems = list(report.problems)
    if facts is None and not problems:
        problems.append(f"{root} holds no token shards; make them with `leadline data pack`")
    if facts is not None:
        problems += _too_few_windows(ctx, report)
    control = document["negative_control"]
    if control is None and not problems:
        problems.append("the negative control was not run")
    return Finding(
        green=not problems,
        reason="; ".join(problems),
        data={
            "tarball_sha256": tarball_sha256,
            "manifest_sha256": report.manifest_sha256,
            "shards_dir": str(root.relative_to(ctx.run_dir) if inside else root),
            "files": report.files,
            "bytes": report.bytes,
            "train_tokens": report.train_tokens,
            "eval_tokens": report.eval_tokens,
            "vocab_size": None if facts is None else facts.vocab_size,
            "dtype": None if facts is None else facts.dtype,
            "skipped": {} if facts is None else dict(load_manifest(root).source.skipped),
            "negative_control": control,
            # Packing refuses a secret, so a pack made here holds none; others are not scanned.
            "secrets_found": None if ctx.config.data.text is None else 0,
            "free_bytes": report.free_bytes,
            "needed_bytes": report.needed_bytes,
        },
    )


def _too_few_windows(ctx: GateContext, report: PackReport) -> list[str]:
    """Name every batch the loader could not fill once, before a probe is paid for."""
    twin = ctx.config.twin
    wanted = {("train", twin.micro_batch, twin.seq_len)}
    for point in ctx.config.sweep.points:
        wanted.add(("train", point.micro_batch, point.seq_len))
        wanted.add(("eval", point.eval_batch or point.micro_batch, point.seq_len))
    tokens = {"train": report.train_tokens, "eval": report.eval_tokens}
    problems = []
    for split, batch, seq_len in sorted(wanted):
        # A window needs the token after its last.
        windows = max(0, tokens[split] - 1) // seq_len
        if windows < batch:
            problems.append(
                f"the {split} split has {tokens[split]} tokens, {windows} windows of {seq_len}, "
                f"fewer than one batch of {batch}; add text or make the batch smaller"
            )
    return problems


def _told_to(ctx: GateContext) -> OnProgress:
    return lambda stage, done, total: ctx.on_progress(Progress(phase=stage, done=done, total=total))
