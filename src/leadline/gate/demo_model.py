"""The second half of the demo: the model that was locked, trained briefly, published, tapped.

- `RUN/model/` is a Hugging Face checkpoint, `RUN/tap/` its Grams, `RUN/training.json` what the
  training took; the last is written when the model is whole, and a demo run again keeps both.
- The tap goes through the function of `leadline tap record`, from disk, under budgets that a
  phone would have.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from leadline.core.atomic import write_json
from leadline.gate.locked_training import (
    locked_device,
    locked_shards,
    locked_short_run,
)
from leadline.tap import GramReader
from leadline.tap.options import RecordOptions
from leadline.tap.progress import Report
from leadline.tap.record import record
from leadline.train.published_model import publish_model
from leadline.train.short_run import ShortRun, ShortRunProgress, train_briefly

MODEL_FOLDER = "model"
TAP_FOLDER = "tap"
TRAINING_FILE = "training.json"
DOCUMENT_TOKENS = 512
"""Of each training document this many tokens are tapped: enough rows, in seconds."""
VRAM_MIB = 256
HOST_POOL_MIB = 64


def train_locked_model(
    run_dir: Path,
    base_dir: Path,
    *,
    seconds: float,
    on_step: Callable[[ShortRunProgress], None],
) -> dict[str, Any]:
    """Train what *run_dir* locked for *seconds* and publish it there; returns training.json.

    Raises:
        LeadlineError: see `train_briefly` and `publish_model`.
    """
    model, facts = run_dir / MODEL_FOLDER, run_dir / TRAINING_FILE
    if facts.exists() and model.exists():
        kept: dict[str, Any] = json.loads(facts.read_bytes())
        return kept
    # Without its facts a model is of a demo that was killed here; its Grams go with it.
    for folder in (model, run_dir / TAP_FOLDER):
        shutil.rmtree(folder, ignore_errors=True)
    run = locked_short_run(run_dir, base_dir, seconds)
    found = _trained(run, model, on_step)
    torch.cuda.empty_cache()  # the tap's budget begins with an empty device
    write_json(facts, found)
    return found


def _trained(
    run: ShortRun, model: Path, on_step: Callable[[ShortRunProgress], None]
) -> dict[str, Any]:
    trained = train_briefly(run, on_step)
    return {
        "steps": trained.steps,
        "tokens": trained.tokens,
        "seconds": round(trained.seconds, 3),
        "tok_s": round(trained.tokens / trained.seconds),
        "first_loss": round(trained.first_loss, 4),
        "last_loss": round(trained.last_loss, 4),
        "eval_loss": round(trained.eval_loss, 4),
        "model_bytes": publish_model(trained.model, run.shards, model),
    }


def tap_locked_model(run_dir: Path, on_tap: Report) -> dict[str, Any]:
    """Tap the published model of *run_dir* on its training text, from disk.

    The result is that of `leadline tap record`, with `experts` and `experts_reached` over all
    layers.

    Raises:
        LeadlineError: see `record`.
    """
    tap = run_dir / TAP_FOLDER
    result = record(
        RecordOptions(
            checkpoint=run_dir / MODEL_FOLDER,
            corpus=locked_shards(run_dir),
            out=tap,
            device=locked_device(run_dir),
            vram_mib=VRAM_MIB,
            host_pool_mib=HOST_POOL_MIB,
            max_document_tokens=DOCUMENT_TOKENS,
        ),
        on_tap,
    )
    reached, experts = experts_reached(tap)
    return {**result, "experts": experts, "experts_reached": reached}


def experts_reached(tap: Path) -> tuple[int, int]:
    """Experts that at least one row reached, and all of them, over the layers of *tap*."""
    with GramReader(tap) as reader:
        rows = [reader.rows(layer) for layer in reader.layers]
    return sum(int((counts > 0).sum()) for counts in rows), sum(counts.size for counts in rows)
