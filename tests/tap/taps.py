"""Toy taps made without a model: random rows, routed at random, summed in plain numpy."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leadline.core.notes import Note
from leadline.tap.facts import GramUser
from leadline.tap.key import TapKey
from leadline.tap.store import SealedGram, StorePlan, TapStore, planned_layer_bytes
from leadline.tap.triangle import pack

HIDDEN, INNER, EXPERTS, TOP_K = 6, 4, 8, 2
EXPERT_NAME = "model.layers.{layer}.mlp.experts"


def toy_key(**changes: Any) -> TapKey:
    fields: dict[str, Any] = {
        "model_type": "toy",
        "model_digest": "m" * 64,
        "tokenizer_digest": "",
        "max_document_tokens": None,
        "documents": 3,
        "tokens": 40,
        "corpus_digest": "c" * 64,
        "dtype": "float32",
        "targets": "experts",
        "gate_up": "pooled",
        "first_layer": 0,
        "end_layer": 3,
        "schedule": "wave",
        "micro_batch_tokens": 16,
    }
    return TapKey(**{**fields, **changes})


@dataclass(kw_only=True)
class ToyRows:
    """What crosses the layers: rows of *tokens* tokens, each routed to two experts."""

    tokens: int = 40
    layers: int = 3
    seed: int = 0
    experts: range = field(default_factory=lambda: range(EXPERTS))
    """The experts whose Grams are taken."""
    linear: bool = False

    def rows(self, layer: int, part: slice) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Inputs [n, H], chosen experts [n, k] and inner rows [n, k, I] of some tokens."""
        maker = np.random.default_rng([self.seed, layer])
        inputs = maker.standard_normal((self.tokens, HIDDEN)).astype(np.float32)
        chosen = np.argsort(maker.random((self.tokens, EXPERTS)), axis=1)[:, :TOP_K]
        inner = maker.standard_normal((self.tokens, TOP_K, INNER)).astype(np.float32)
        return inputs[part], chosen[part], inner[part]

    def grams(
        self, layer: int, part: slice = slice(None)
    ) -> tuple[dict[str, SealedGram], dict[str, NDArray[np.int64]]]:
        """Sums and counts over some tokens, as the store takes them."""
        inputs, chosen, inner = self.rows(layer, part)
        mine = [inner[chosen == expert] for expert in self.experts]
        name = EXPERT_NAME.format(layer=layer)
        grams = {
            "gate_up": SealedGram(
                packed=pack(inputs.T @ inputs),
                num_features=HIDDEN,
                users=(
                    GramUser(
                        parameter=f"{name}.gate_up_proj",
                        published=tuple(
                            f"{name}.{{expert}}.{half}_proj.weight" for half in ("gate", "up")
                        ),
                    ),
                ),
                rows_per_token=1,
            ),
            "down": SealedGram(
                packed=np.stack([pack(rows.T @ rows) for rows in mine]),
                num_features=INNER,
                users=(
                    GramUser(
                        parameter=f"{name}.down_proj",
                        published=(f"{name}.{{expert}}.down_proj.weight",),
                    ),
                ),
                rows_per_token=TOP_K,
                num_experts=EXPERTS,
                first_expert=self.experts.start,
            ),
        }
        counts = {
            "gate_up": np.asarray(len(inputs), np.int64),
            "down": np.array([len(rows) for rows in mine], np.int64),
        }
        if self.linear:
            grams["self_attn.q_proj"] = grams["gate_up"]
            counts["self_attn.q_proj"] = counts["gate_up"]
        return grams, counts

    @property
    def plan(self) -> StorePlan:
        experts = len(self.experts)
        grams = {"gate_up": (HIDDEN, None), "down": (INNER, experts), "q": (HIDDEN, None)}
        return StorePlan(
            layer_bytes={layer: planned_layer_bytes(grams) for layer in range(self.layers)}
        )


def write_tap(
    path: Path,
    rows: ToyRows | None = None,
    *,
    part: slice = slice(None),
    stop_after: int | None = None,
    notes: tuple[Note, ...] = (),
    **key: Any,
) -> Path:
    """Record a toy tap to its end, or until *stop_after* layers are sealed."""
    rows = ToyRows() if rows is None else rows
    taken = len(range(*part.indices(rows.tokens)))
    changes = {"tokens": taken, "end_layer": rows.layers, **key}
    with TapStore.open(path, toy_key(**changes), rows.plan) as store:
        for layer in range(rows.layers if stop_after is None else stop_after):
            if layer not in store.sealed:
                store.seal(layer, *rows.grams(layer, part), notes)
        if stop_after is None:
            store.finish({"tokens": taken})
    return path


def layer_files(folder: Path) -> dict[str, bytes]:
    """Name and bytes of every file that a reader looks at."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name[0] != "."}


def flip_byte(path: Path, offset: int) -> None:
    """Change one byte; a negative offset counts from the end."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF
    path.write_bytes(data)
