"""Routed experts: grouped matrix products over rows sorted by expert.

Registered in `transformers`' experts interface as "leadline", so that every family
behind `use_experts_implementation` runs through it with its own router, gate and
activation. A layer's experts may be present in part (`ExpertsPart`): a layer larger
than its memory budget is taken in groups of experts, and each group adds its share.

Shapes: N tokens, k experts a token, E experts, R = N * k rows, H hidden, I expert width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

EXPERTS_IMPLEMENTATION = "leadline"
WIDE_TOKENS = 1024
"""Tokens whose rows are weighted in fp32 at once."""


class ExpertRows(Protocol):
    """What is told about the rows that reach the experts of one module."""

    def experts_input(self, rows: Tensor) -> None:
        """Every token that counts, once: [N, H]."""

    def gate_up_rows(self, rows: Tensor, offsets: Tensor) -> None:
        """Input of the first projection, sorted by expert: [R, H]; offsets int32 [E + 1]."""

    def down_rows(self, rows: Tensor, offsets: Tensor) -> None:
        """Input of the down projection, sorted by expert: [R, I]; offsets int32 [E + 1]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsCall:
    """One call of an experts module, and whom to tell."""

    rows: Tensor | None
    """Indices int64 of the tokens that are no padding; None: all are tokens."""
    counted: Tensor | None
    """Indices int64, among those tokens, that count for the tap; None: all do."""
    listener: ExpertRows | None
    groups: tuple[range, ...]
    """Experts present one after another; one group means all."""
    next_group: Callable[[int], None]
    """Called before group i > 0: returns when its weights are in place."""


def leadline_experts(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Forward of an experts module: [N, H] and routing [N, k] to [N, H].

    Padding rows come back as zeros and are never multiplied.
    """
    call: ExpertsCall = self._leadline_call()  # type: ignore[operator]
    rows = call.rows
    x, ids, weights = hidden_states, top_k_index, top_k_weights
    if rows is not None:
        x, ids, weights = x[rows], ids[rows], weights[rows]
    out: Tensor | None = None
    for number, group in enumerate(call.groups):
        if number:
            call.next_group(number)
        part = _group(self, call, x, ids, weights, group)
        out = part if out is None else out + part
    assert out is not None
    out = out.to(hidden_states.dtype)
    if rows is None:
        return out
    return torch.zeros_like(hidden_states).index_copy_(0, rows, out)


def _group(
    experts: Any, call: ExpertsCall, x: Tensor, ids: Tensor, weights: Tensor, group: range
) -> Tensor:
    """Share of the experts in *group* of the output: [N, H]."""
    whole = len(call.groups) == 1
    order = sort_by_expert(ids, group)
    if call.listener is not None:
        _tell_input(call, call.listener, x, first=group.start == 0)
    sorted_x = x[order.tokens]
    counted = _counted(order, call, ids.shape[0])
    if call.listener is not None:
        call.listener.gate_up_rows(*counted(sorted_x))
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    inner = _grouped_linear(experts, first, sorted_x, order)
    del sorted_x
    inner = _activate(experts, inner)
    if call.listener is not None:
        call.listener.down_rows(*counted(inner))
    out = _grouped_linear(experts, "down_proj", inner, order)
    del inner
    if getattr(experts, "has_post_expert_norm", False):
        out = experts.post_expert_norm(out)
    if not whole:  # rows of absent experts were left unwritten by the grouped product
        out = out.masked_fill_((order.sorted_ids == len(group)).unsqueeze(-1), 0.0)
    back = torch.empty_like(order.slots)
    back[order.slots] = torch.arange(order.slots.numel(), device=out.device)
    return combine(out, back.view(ids.shape), weights)


def combine(out: Tensor, back: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over each token's k rows: *out* [R, H] at *back* [N, k] to [N, H].

    Products and sums are fp32 whatever the dtype of *out*.
    """
    if out.is_cuda and out.dtype != torch.float32:
        from leadline.rig.fused import weighted_sum

        return weighted_sum(out, back, weights)
    # In pieces: all rows in fp32 at once would double the working memory.
    parts = [
        (out[rows].float() * share.unsqueeze(-1).float()).sum(dim=1)
        for rows, share in zip(back.split(WIDE_TOKENS), weights.split(WIDE_TOKENS), strict=True)
    ]
    return torch.cat(parts).to(out.dtype)


def _activate(experts: Any, inner: Tensor) -> Tensor:
    """Gate or activation of the family, between the two projections."""
    if not experts.has_gate:
        return experts.act_fn(inner)
    if inner.is_cuda and inner.dtype != torch.float32 and _is_plain_swiglu(experts):
        from leadline.rig.fused import silu_mul

        return silu_mul(inner)
    return experts._apply_gate(inner)


def _is_plain_swiglu(experts: Any) -> bool:
    """Whether the gate is the library's default one with SiLU."""
    plain = type(experts)._apply_gate is _default_apply_gate
    return plain and type(experts.act_fn).__name__ in ("SiLUActivation", "SiLU")


def _tell_input(call: ExpertsCall, listener: ExpertRows, x: Tensor, *, first: bool) -> None:
    if first:
        listener.experts_input(x if call.counted is None else x[call.counted])


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertOrder:
    """Rows (token, choice) in the order of their experts."""

    slots: Tensor
    """int64 [R]: flat index into [N, k]."""
    tokens: Tensor
    """int64 [R]: token of each row."""
    sorted_ids: Tensor
    """int64 [R]: expert of each row inside the group; absent experts last, as len(group)."""
    offsets: Tensor
    """int32 [G + 1]: first row of each expert, then the end of the last."""


def sort_by_expert(ids: Tensor, group: range) -> ExpertOrder:
    """Sort rows by expert; stable, so that the order within an expert is the tokens'."""
    local = ids.reshape(-1) - group.start
    local = torch.where((local >= 0) & (local < len(group)), local, len(group))
    sorted_ids, slots = torch.sort(local, stable=True)
    bounds = torch.arange(len(group) + 1, device=ids.device)
    offsets = torch.searchsorted(sorted_ids, bounds).to(torch.int32)
    return ExpertOrder(
        slots=slots,
        tokens=slots // ids.shape[-1],
        sorted_ids=sorted_ids,
        offsets=offsets,
    )


def _counted(
    order: ExpertOrder, call: ExpertsCall, num_tokens: int
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Keep of sorted rows those whose token counts, with the offsets that go with them."""
    if call.counted is None:
        return lambda rows: (rows, order.offsets)
    counts = torch.zeros(num_tokens, dtype=torch.bool, device=order.tokens.device)
    counts[call.counted] = True
    kept = counts[order.tokens]
    before = torch.cat((kept.new_zeros(1, dtype=torch.int64), kept.cumsum(0)))
    offsets = before[order.offsets.long()].to(torch.int32)
    return lambda rows: (rows[kept], offsets)


def _grouped_linear(experts: Any, name: str, rows: Tensor, order: ExpertOrder) -> Tensor:
    """Rows [R, K] through each one's expert; bias added where the family has one."""
    weight: Tensor = getattr(experts, name)
    out = grouped_product(
        rows.to(weight.dtype),
        weight if experts.is_transposed else weight.transpose(-2, -1),
        order.offsets,
    )
    if experts.has_bias:
        bias: Tensor = getattr(experts, f"{name}_bias")
        out = out + bias[order.sorted_ids.clamp(max=bias.shape[0] - 1)]
    return out


def grouped_product(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Product of rows [R, K] sorted by group with weight [G, K, M]; offsets int32 [G + 1].

    Rows behind the last offset hold whatever was in memory.
    """
    if rows.is_cuda and rows.dtype == torch.bfloat16 and _aligned(rows) and _aligned(weight):
        return F.grouped_mm(rows, weight, offs=offsets[1:])
    out = rows.new_zeros(rows.shape[0], weight.shape[-1])
    bounds = offsets.tolist()
    for group, (begin, end) in enumerate(pairwise(bounds)):
        if end > begin:
            torch.mm(rows[begin:end], weight[group], out=out[begin:end])
    return out


def _aligned(x: Tensor) -> bool:
    """The grouped kernel wants 16-byte rows, in whichever of the last two axes is dense."""
    dense = 16 // x.element_size()
    strides = [step for step in x.stride()[-2:] if step != 1]
    return x.data_ptr() % 16 == 0 and all(step % dense == 0 for step in strides)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, leadline_experts)
