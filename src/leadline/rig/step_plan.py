"""The memory plan of a step schedule: KV pool, resident layers, bytes every step reads.

Device memory holds, in this order: a slot for the layer at work, one layer's Grams, a
step's working memory, the embedding, the KV pool, and then whole layers that are not
read again; the host pool holds the ring, the summed Grams of all layers, and then
layers. What is left streams from disk in every step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from leadline.core.errors import UsageError
from leadline.core.units import format_bytes
from leadline.rig.direct_file import page_ceil
from leadline.rig.plan import Budgets, TapSizes, slab_bytes
from leadline.rig.scheduler import predicted_steps
from leadline.rig.sizes import ModelSizes


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """A step schedule that fits."""

    max_num_batched_tokens: int
    max_num_seqs: int
    kv_tokens: int
    longest_document: int
    num_steps: int
    tokens_to_compute: int
    """With what preempted documents compute again."""
    layers_on_device: frozenset[int]
    layers_in_pool: frozenset[int]
    num_slots: int
    slot_bytes: int
    ring_bytes: int
    slab_bytes: int
    device_bytes: int
    pool_bytes: int
    bytes_to_read: int


def plan_steps(
    sizes: ModelSizes,
    tap: TapSizes,
    lengths: Sequence[int],
    budgets: Budgets,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    kv_tokens: int | None,
    tables_in_pool: bool = False,
) -> StepPlan:
    """Place a tap by steps.

    Raises:
        UsageError: what does not fit, with the sum and the flag; a document longer than
            the KV pool.
    """
    experts = max(layer.num_experts for layer in sizes.layers)
    slot = sizes.largest_layer.num_bytes
    grams = tap.gram_bytes + experts * tap.gram_bytes_per_expert
    width = min(max_num_batched_tokens, sum(lengths))
    work = width * (sizes.activation_bytes + 2 * sizes.residual_bytes) + budgets.workspace_bytes
    kv = kv_tokens if kv_tokens is not None else _kv_tokens(lengths, max_num_seqs)
    fixed = slot + grams + work + sizes.entry_bytes + kv * sizes.kv_bytes
    if fixed > budgets.device_bytes:
        raise UsageError(
            f"a device budget of {format_bytes(budgets.device_bytes)} does not hold a layer slot "
            f"of {format_bytes(slot)}, Grams of {format_bytes(grams)}, {format_bytes(work)} of "
            f"working memory for {width:,} tokens, the embedding of "
            f"{format_bytes(sizes.entry_bytes)} and {kv:,} tokens of keys and values "
            f"({format_bytes(kv * sizes.kv_bytes)}); give --vram-mib {-(-fixed // 2**20)} or more, "
            "or smaller --max-num-batched-tokens or --kv-tokens"
        )
    slab = slab_bytes(sizes, budgets)
    tables = sum(sizes.table_bytes.values()) if tables_in_pool else 0
    host_fixed = 2 * slab + tap.store_bytes + tables
    if host_fixed > budgets.pool_bytes:
        raise UsageError(
            f"the host pool of {format_bytes(budgets.pool_bytes)} does not hold two read slabs of "
            f"{format_bytes(slab)} and the summed Grams of all layers "
            f"({format_bytes(tap.store_bytes)}), which a step schedule needs; give "
            f"--host-pool-mib {-(-host_fixed // 2**20)} or more, or --schedule wave"
        )
    forecast = predicted_steps(
        lengths,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        kv_tokens_total=kv,
    )
    on_device, device_used = _fill(sizes, set(), budgets.device_bytes - fixed)
    in_pool, pool_used = _fill(sizes, on_device, budgets.pool_bytes - host_fixed)
    num_slots = 2 if budgets.device_bytes - fixed - device_used >= slot else 1
    kept = on_device | in_pool
    streamed = sum(x.bytes_to_read for x in sizes.layers if x.layer not in kept)
    once = sum(x.bytes_to_read for x in sizes.layers if x.layer in kept)
    return StepPlan(
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        kv_tokens=kv,
        longest_document=max(lengths),
        num_steps=forecast.steps,
        tokens_to_compute=sum(lengths) + forecast.recomputed_tokens,
        layers_on_device=frozenset(on_device),
        layers_in_pool=frozenset(in_pool),
        num_slots=num_slots,
        slot_bytes=slot,
        ring_bytes=2 * slab,
        slab_bytes=slab,
        device_bytes=fixed + device_used + (num_slots - 1) * slot,
        pool_bytes=2 * slab + page_ceil(tables) + pool_used,
        bytes_to_read=sizes.entry_bytes_to_read + once + forecast.steps * streamed,
    )


def _kv_tokens(lengths: Sequence[int], max_num_seqs: int) -> int:
    """Room for the longest documents that may run at once."""
    return sum(sorted(lengths, reverse=True)[:max_num_seqs])


def _fill(sizes: ModelSizes, taken: set[int], room: int) -> tuple[set[int], int]:
    """Layers from the last one backwards that fit into *room*, besides those *taken*."""
    chosen: set[int] = set()
    used = 0
    for layer in reversed(sizes.layers):
        if layer.layer not in taken and used + page_ceil(layer.num_bytes) <= room:
            chosen.add(layer.layer)
            used += page_ceil(layer.num_bytes)
    return chosen, used
