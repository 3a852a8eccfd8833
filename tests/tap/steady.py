"""Documents whose routing rounding cannot flip, so that bf16 row counts can be compared exactly.

Two right bf16 forwards differ in their last bits, and a token whose second and third
expert score nearly alike then goes one way in one and the other way in the other. The
documents made here hold no such token: random ones are replaced until several runs with
noise on every layer's input, larger than that of bf16, choose the same experts (and, in
sparse attention, the same blocks) as the clean run.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .families import random_documents
from .reference import is_experts, load_whole

NOISE = 0.03
"""Relative, on each element at the input of every layer; bf16 rounds to 0.002."""
DRAWS = 4
ROUNDS = 80


def steady_documents(checkpoint: Path, lengths: Sequence[int], *, seed: int = 0) -> list[list[int]]:
    """Documents of *lengths* random tokens without a choice that is nearly a tie."""
    documents = [torch.tensor(ids) for ids in random_documents(lengths, seed=seed)]
    model = load_whole(checkpoint, torch.float32)
    chooser = torch.Generator().manual_seed(seed)
    vocabulary = model.get_input_embeddings().num_embeddings
    moving = list(range(len(documents)))
    for _ in range(ROUNDS):
        padded = nn.utils.rnn.pad_sequence([documents[i] for i in moving], batch_first=True)
        doubtful = [
            row[: len(documents[i])]
            for i, row in zip(moving, _doubtful(model, padded), strict=True)
        ]
        moving = [i for i, row in zip(moving, doubtful, strict=True) if row.any()]
        if not moving:
            return [ids.tolist() for ids in documents]
        for i, row in zip(moving, filter(torch.any, doubtful), strict=True):
            documents[i][row] = torch.randint(vocabulary, (int(row.sum()),), generator=chooser)
    raise AssertionError(f"documents {moving} still have tokens on the fence after {ROUNDS} rounds")


def _doubtful(model: Any, ids: Tensor) -> Tensor:
    """Tokens bool [B, T] with a choice that some noisy run makes otherwise."""
    clean = _choices(model, ids, noise=0.0, seed=0)
    doubtful = torch.zeros_like(ids, dtype=torch.bool)
    for draw in range(DRAWS):
        noisy = _choices(model, ids, noise=NOISE, seed=draw)
        for ours, theirs in zip(clean, noisy, strict=True):
            doubtful |= (ours != theirs).any(dim=-1)
    return doubtful


@torch.no_grad()
def _choices(model: Any, ids: Tensor, *, noise: float, seed: int) -> list[Tensor]:
    """Every discrete choice of a forward, as [B, T, ...] of equal meaning at equal index."""
    found: list[Tensor] = []
    generator = torch.Generator().manual_seed(seed)

    def jostle(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        moved = hidden * (1 + noise * torch.randn(hidden.shape, generator=generator))
        return ((moved, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": moved})

    def experts(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        chosen = (*args, *kwargs.values())[1]
        found.append(chosen.sort(dim=-1).values.view(*ids.shape, -1))

    def blocks(module: nn.Module, args: Any, output: Tensor) -> None:
        found.append(output.view(*ids.shape, -1))

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
