"""An independent reference for Grams: the whole model in memory, one document at a time.

`transformers` loads and runs the checkpoint as anybody would (eager experts, eager
attention, no cache, no padding); plain hooks see what goes into the experts and into
every linear projection. Sums are float64. Nothing here comes from leadline.

E experts, k experts a token, H hidden, I expert width, N tokens of one document.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn


@dataclass(kw_only=True, slots=True)
class LinearGram:
    """Sum of x x^T over the input rows of one linear projection."""

    gram: NDArray[np.float64]
    rows: int = 0


@dataclass(kw_only=True, slots=True)
class ExpertGrams:
    """Sums over the rows that reach the routed experts of one module."""

    top_k: int = 0
    tokens: int = 0
    gate_up: NDArray[np.float64]
    """[H, H]: every token once."""
    gate_up_of: NDArray[np.float64]
    """[E, H, H]: the tokens routed to each expert."""
    down: NDArray[np.float64]
    """[E, I, I]: the gated activations of those tokens, without the routing weight."""
    rows: NDArray[np.int64]
    """[E]: tokens routed to each expert."""


@dataclass(kw_only=True, slots=True)
class ReferenceGrams:
    """Everything that a tap of all targets is to find; keys are full module names."""

    tokens: int = 0
    num_layers: int = 0
    experts: dict[str, ExpertGrams] = field(default_factory=dict)
    linears: dict[str, LinearGram] = field(default_factory=dict)


def load_whole(checkpoint: Path, dtype: torch.dtype) -> Any:
    """Load the model of *checkpoint* as `transformers` does it, all of it in memory."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()


def reference_grams(
    checkpoint: Path,
    documents: Sequence[Sequence[int]],
    *,
    dtype: torch.dtype = torch.float32,
) -> ReferenceGrams:
    """Forward *documents* one by one and sum what goes into experts and linear projections."""
    model = load_whole(checkpoint, dtype)
    found = ReferenceGrams(num_layers=model.config.get_text_config().num_hidden_layers)
    with listening(model, found), torch.no_grad():
        for ids in documents:
            model(input_ids=torch.tensor([list(ids)]), use_cache=False)
            found.tokens += len(ids)
    return found


@contextmanager
def listening(model: nn.Module, found: ReferenceGrams) -> Iterator[None]:
    """Hooks that add to *found* what goes through the decoder layers of *model*."""
    handles = []
    for name, module in inside_layers(model):
        if is_experts(module):
            hook: Callable[..., None] = _experts_hook(name, found)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        elif isinstance(module, nn.Linear):
            hook = _linear_hook(name, found)
            handles.append(module.register_forward_pre_hook(hook))
    yield
    for handle in handles:
        handle.remove()


def inside_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules inside the decoder layers, by full name."""
    for name, module in model.named_modules():
        if ".layers." in name:
            yield name, module


def is_experts(module: nn.Module) -> bool:
    """Whether *module* holds the stacked weights of routed experts."""
    down = module._parameters.get("down_proj")
    return down is not None and down.ndim == 3


def down_inputs(module: Any, hidden: Tensor, expert: int) -> Tensor:
    """Rows [n, H] through the first half of *expert*, in the module's own layout: [n, I]."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    weight = getattr(module, first)[expert]
    out = hidden @ weight if module.is_transposed else F.linear(hidden, weight)
    if module.has_bias:
        out = out + getattr(module, f"{first}_bias")[expert]
    return module._apply_gate(out) if module.has_gate else module.act_fn(out)


def _experts_hook(name: str, found: ReferenceGrams) -> Callable[..., None]:
    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden, chosen = (*args, *kwargs.values())[:2]
        hidden = hidden.reshape(-1, hidden.shape[-1])
        sums = found.experts.get(name)
        if sums is None:
            sums = found.experts[name] = _no_rows(module, hidden.shape[-1], chosen.shape[-1])
        sums.tokens += hidden.shape[0]
        sums.gate_up += _square(hidden)
        for expert in range(len(sums.rows)):
            mine = hidden[(chosen == expert).any(dim=-1)]
            sums.rows[expert] += mine.shape[0]
            sums.gate_up_of[expert] += _square(mine)
            sums.down[expert] += _square(down_inputs(module, mine, expert))

    return hook


def _linear_hook(name: str, found: ReferenceGrams) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        del module
        rows = args[0].reshape(-1, args[0].shape[-1])
        width = rows.shape[-1]
        sums = found.linears.setdefault(name, LinearGram(gram=np.zeros((width, width))))
        sums.gram += _square(rows)
        sums.rows += rows.shape[0]

    return hook


def _no_rows(module: Any, hidden: int, top_k: int) -> ExpertGrams:
    experts, *axes = module.down_proj.shape
    inner = axes[0] if module.is_transposed else axes[1]
    return ExpertGrams(
        top_k=top_k,
        gate_up=np.zeros((hidden, hidden)),
        gate_up_of=np.zeros((experts, hidden, hidden)),
        down=np.zeros((experts, inner, inner)),
        rows=np.zeros(experts, dtype=np.int64),
    )


def _square(rows: Tensor) -> NDArray[np.float64]:
    """Sum of x x^T over rows [n, K]: float64 [K, K]."""
    exact = rows.double().numpy()
    square: NDArray[np.float64] = exact.T @ exact
    return square


def relative_error(found: NDArray[Any], wanted: NDArray[np.float64]) -> float:
    """Frobenius norm of the difference over that of *wanted*; 0 where both are zero."""
    size = float(np.linalg.norm(wanted))
    off = float(np.linalg.norm(np.asarray(found, dtype=np.float64) - wanted))
    return off / size if size else (0.0 if off == 0.0 else float("inf"))
