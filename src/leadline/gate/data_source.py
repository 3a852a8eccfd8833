"""Which bytes the data will be: a hash of content, whatever path it is reached by.

- `text`: the documents and the tokenizer, by `data/scan.py`, as a pack of it records them.
- `pack`: the manifest beside the tarball, which names the tarball's hash and every file's.
- `shards` are read anew on every start, so the phase's own evidence holds what they are.
"""

from pathlib import Path

from leadline.core.atomic import explained_os_errors
from leadline.core.canonical import sha256_file, sha256_json
from leadline.core.errors import DataError, UsageError
from leadline.data import load_manifest
from leadline.data.scan import PackInputs, PackProgress, scan_corpus
from leadline.gate.config import DataTable
from leadline.gate.context import GateContext
from leadline.pack.build import manifest_path_of
from leadline.probe.progress import Progress


def hash_gate_inputs(ctx: GateContext) -> str:
    """Hash of what decides which bytes the shards are; read once a gate.

    Raises:
        UsageError: no such text, tokenizer or pack.
        DataError: text that cannot be used.
    """
    if "data" not in ctx.read_once:
        ctx.read_once["data"] = sha256_json(_content(ctx, ctx.config.data))
    return ctx.read_once["data"]


def text_inputs(ctx: GateContext, text: str) -> PackInputs:
    """The `[data]` table of a gate over text, as packing takes it."""
    table = ctx.config.data
    given = table.tokenizer not in ("bpe", "bytes")
    return PackInputs(
        source=text if text == "stdlib" else ctx.base_dir / text,
        tokenizer=str(ctx.base_dir / table.tokenizer) if given else table.tokenizer,
        vocab_size=table.vocab_size,
        seed=ctx.config.seed,
        eval_fraction=str(table.eval_fraction),
        max_bytes=table.max_bytes,
    )


def known_vocab_size(ctx: GateContext) -> int | None:
    """Ids the data will use, where the configuration or the shards say so before any reading."""
    table = ctx.config.data
    if table.shards is None:
        return table.vocab_size
    try:
        return load_manifest(shards_folder((ctx.base_dir / table.shards).resolve())).vocab_size
    except (DataError, UsageError):
        return None  # told in full by the hash gate


def shards_folder(root: Path) -> Path:
    """The folder of token shards at *root* or, in a pack of code and data, the one below it."""
    if (root / "manifest.json").is_file() or not root.is_dir():
        return root
    found = sorted(path.parent for path in root.glob("*/manifest.json"))
    if len(found) != 1:
        raise UsageError(
            f"{root} holds {len(found)} folders of token shards, 1 wanted; "
            "pack the folder made by `leadline data pack`"
        )
    return found[0]


def show_packing(ctx: GateContext, progress: PackProgress) -> None:
    """Pass on how far reading or packing text is."""
    ctx.on_progress(
        Progress(phase=progress.stage, done=progress.done_bytes, total=progress.total_bytes)
    )


def _content(ctx: GateContext, table: DataTable) -> dict[str, object]:
    if table.text is not None:
        job = scan_corpus(text_inputs(ctx, table.text), lambda item: show_packing(ctx, item))
        return {
            "text": job.facts.sha256,
            "request": job.request,
            "vocab_size": table.vocab_size,
            "seed": job.inputs.seed,
            "eval_fraction": job.eval_fraction,
        }
    if table.pack is None:
        return {"shards": True}
    tarball = ctx.base_dir / table.pack
    if not tarball.is_file():
        raise UsageError(f"there is no pack at {tarball}; check [data] pack")
    manifest = manifest_path_of(tarball)
    if not manifest.is_file():
        return {"pack": None}  # told when the pack is verified
    with explained_os_errors(manifest, "read"):
        return {"pack": sha256_file(manifest)}
