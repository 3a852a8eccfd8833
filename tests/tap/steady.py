"""Documents whose routing rounding cannot flip, so that bf16 row counts can be compared exactly.

Two right bf16 forwards differ in their last bits, and a token whose second and third
expert score nearly alike then goes one way in one and the other way in the other. The
documents kept here hold no such token: random ones were replaced until several runs with
noise on every layer's input, larger than that of bf16, and a plain bf16 run chose the
same experts (and, in sparse attention, the same blocks) as the clean one.

Finding them takes minutes, so they are kept in `steady_documents.json`; when a family's
checkpoint changes, `python -m tests.tap.steady` (from the repository) finds new ones.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from .families import TEN_FAMILIES, build_checkpoint, random_documents
from .reference import is_experts, load_whole

NOISE = 0.03
"""Of the root mean square of a token, on each element at the input of every layer."""
DRAWS = (4, 16)
"""Noisy runs: few while most documents are unsteady, many at the end."""
ROUNDS = 200
LENGTHS = (1, 30, 7, 24, 30, 29, 30, 16, 30, 28, 32, 33, 31, 12)
SHORT_LENGTHS = (1, 20, 7, 20, 19) * 4
"""For sparse attention: few blocks, so that the choice among them is seldom close."""

SHALLOW: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen3_next": {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_only_layers": [],
        },
        "qwen4_exp": {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "ple_layer_ids": [1],
        },
    }
)
"""Four layers leave too few tokens that stand clear in all of them: two there."""

_KEPT = Path(__file__).with_name("steady_documents.json")


def steady_documents(family: str) -> list[list[int]]:
    """The documents kept for the checkpoint of *family* with its `SHALLOW` settings."""
    documents: list[list[int]] = json.loads(_KEPT.read_text(encoding="utf-8"))[family]
    return documents


def find_steady_documents(checkpoint: Path, lengths: Sequence[int]) -> list[list[int]]:
    """Documents of *lengths* random tokens without a choice that is nearly a tie."""
    documents = [torch.tensor(ids) for ids in random_documents(lengths)]
    exact, narrow = (load_whole(checkpoint, dtype) for dtype in (torch.float32, torch.bfloat16))
    chooser = torch.Generator().manual_seed(0)
    for draws in DRAWS:
        _settle(exact, narrow, documents, draws, chooser)
    return [ids.tolist() for ids in documents]


def _settle(
    exact: Any, narrow: Any, documents: list[Tensor], draws: int, chooser: torch.Generator
) -> None:
    """Replace tokens of *documents* until none is doubtful; those that settle first rest."""
    vocabulary = exact.get_input_embeddings().num_embeddings
    moving = list(range(len(documents)))
    for _ in range(ROUNDS):
        doubtful = doubtful_tokens(exact, narrow, [documents[i] for i in moving], range(draws))
        for i, at in zip(moving, doubtful, strict=True):
            documents[i][at] = torch.randint(vocabulary, (int(at.sum()),), generator=chooser)
        moving = [i for i, at in zip(moving, doubtful, strict=True) if at.any()]
        if not moving:
            return
    raise AssertionError(f"documents {moving} still have tokens on the fence after {ROUNDS} rounds")


def doubtful_tokens(
    exact: Any, narrow: Any, documents: Sequence[Tensor], draws: range, *, noise: float = NOISE
) -> list[Tensor]:
    """Tokens, bool [T] a document, with a choice that a noisy run or *narrow* makes otherwise."""
    ids = nn.utils.rnn.pad_sequence(list(documents), batch_first=True)
    clean = _choices(exact, ids)
    doubtful = torch.zeros_like(ids, dtype=torch.bool)
    runs = [_choices(exact, ids, noisy=_Noise(documents, draw, noise)) for draw in draws]
    for other in (*runs, _choices(narrow, ids)):
        for ours, theirs in zip(clean, other, strict=True):
            doubtful |= (ours != theirs).any(dim=-1)
    return [row[: len(document)] for row, document in zip(doubtful, documents, strict=True)]


class _Noise:
    """Noise that depends on the draw and a document's place in it, not on who is beside it."""

    def __init__(self, documents: Sequence[Tensor], draw: int, size: float) -> None:
        self._size = size
        self._lengths = [len(document) for document in documents]
        self._generators = [torch.Generator().manual_seed(draw) for _ in documents]

    def like(self, hidden: Tensor) -> Tensor:
        """Numbers in the shape [B, T, C] of *hidden*, to be added to it."""
        width = hidden.shape[-1]
        rows = [
            torch.randn(length, width, generator=generator)
            for length, generator in zip(self._lengths, self._generators, strict=True)
        ]
        scale = hidden.square().mean(dim=-1, keepdim=True).sqrt() * self._size
        return nn.utils.rnn.pad_sequence(rows, batch_first=True) * scale


@torch.no_grad()
def _choices(model: Any, ids: Tensor, *, noisy: _Noise | None = None) -> list[Tensor]:
    """Every discrete choice of a forward, as [B, T, ...] of equal meaning at equal index."""
    found: list[Tensor] = []

    def jostle(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if noisy is None:
            return None
        hidden = args[0] if args else kwargs["hidden_states"]
        moved = hidden + noisy.like(hidden)
        return ((moved, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": moved})

    def experts(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        chosen = (*args, *kwargs.values())[1]
        found.append(chosen.sort(dim=-1).values.view(*ids.shape, -1))

    def blocks(module: nn.Module, args: Any, output: Tensor) -> None:
        # Older transformers give what is added to the scores: nothing where a block is seen.
        seen = output if output.dtype == torch.bool else output == 0
        found.append(seen.view(*ids.shape, -1))

    with _hooks(model, jostle, experts, blocks):
        model(input_ids=ids, use_cache=False)
    return found


@contextmanager
def _hooks(model: Any, jostle: Any, experts: Any, blocks: Any) -> Iterator[None]:
    handles = []
    for name, module in model.named_modules():
        if name.rpartition(".")[0].endswith("layers"):
            handles.append(module.register_forward_pre_hook(jostle, with_kwargs=True))
        elif is_experts(module):
            handles.append(module.register_forward_pre_hook(experts, with_kwargs=True))
        elif type(module).__name__.endswith("Indexer"):
            handles.append(module.register_forward_hook(blocks))
    yield
    for handle in handles:
        handle.remove()


def _keep() -> None:
    kept = {}
    for family in TEN_FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = build_checkpoint(family, Path(folder), **SHALLOW.get(family, {}))
            lengths = SHORT_LENGTHS if family == "qwen4_exp" else LENGTHS
            kept[family] = find_steady_documents(checkpoint, lengths)
        print(family, file=sys.stderr)
    families = ",\n".join(f'"{name}": {json.dumps(ids)}' for name, ids in kept.items())
    _KEPT.write_text(f"{{\n{families}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    _keep()
