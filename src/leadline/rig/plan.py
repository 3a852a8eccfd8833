"""The memory plan of a tap: what goes where under two budgets, before a weight is read.

Every figure is a sum that can be checked by hand; `Refusal` carries the sum that does
not fit and the flag that would make it fit. Bytes throughout.

A wave keeps the residual stream of all its tokens between layers: first in device
memory, then in the host pool. What is left over reads ahead: a second slot on the
device, or a longer ring in the pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from leadline.core.errors import UsageError
from leadline.core.units import format_bytes
from leadline.rig.batching import MicroBatch, micro_batches, waves
from leadline.rig.direct_file import PAGE_BYTES, page_ceil
from leadline.rig.sizes import ModelSizes

SLAB_BYTES = 16 * 2**20
MICRO_BATCH_TOKENS = (64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384)
COPIES_IN_FLIGHT = 8
"""Residuals of micro-batches on their way to or from the pool, and of layers' ends."""
COPIES_IN_GROUPS = 4
"""Tensors of one token's width that a micro-batch paused between groups of experts holds."""
EFFICIENT_TOKENS = 4_096
"""Wider micro-batches compute little faster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budgets:
    """What the person gives."""

    device_bytes: int
    pool_bytes: int
    workspace_bytes: int = 0
    """Of the device budget, what matrix libraries keep for themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TapSizes:
    """What the tap itself needs; the widest layer decides."""

    gram_bytes: int
    """Accumulators of one layer that do not depend on the number of experts."""
    gram_bytes_per_expert: int
    packed_bytes: int
    """One layer's Grams on their way to disk, in the pool."""
    store_bytes: int
    """All layers' files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WavePlan:
    """A wave schedule that fits."""

    micro_batches: tuple[MicroBatch, ...]
    waves: tuple[tuple[int, ...], ...]
    """Micro-batches of each wave by index."""
    on_host: frozenset[int]
    """Micro-batches whose residuals are parked in the pool."""
    experts_per_group: int
    """0: layers come whole."""
    num_slots: int
    main_slot_bytes: int
    rest_slot_bytes: int
    """Of a layer without its experts; 0 where layers come whole."""
    ring_bytes: int
    packed_bytes: int
    """Of the pool, for one layer's Grams on their way to disk."""
    slab_bytes: int
    device_bytes: int
    """Peak."""
    pool_bytes: int
    bytes_to_read: int


def plan_wave(
    sizes: ModelSizes,
    tap: TapSizes,
    lengths: Sequence[int],
    budgets: Budgets,
    *,
    micro_batch_tokens: int | None = None,
    tables_in_pool: bool = False,
) -> WavePlan:
    """Place one tap of documents of *lengths* tokens.

    Raises:
        UsageError: no way to fit, with the sum and the flag.
    """
    if micro_batch_tokens is None:
        return _best_plan(sizes, tap, lengths, budgets, tables_in_pool=tables_in_pool)
    batches = micro_batches(lengths, max_tokens=micro_batch_tokens)
    widest = max(batch.tokens for batch in batches)
    in_flight = sizes.activation_bytes + COPIES_IN_FLIGHT * sizes.residual_bytes
    work = widest * in_flight + budgets.workspace_bytes
    group, main, rest, grams = _layer_in_memory(sizes, tap, budgets, work, widest)
    slot = main + rest
    copies = COPIES_IN_GROUPS if group else 1
    residual = sizes.residual_bytes * copies
    # The embedding is there before the first Gram and gone before the first layer computes.
    busy = max(grams + work, sizes.entry_bytes)
    device_room = budgets.device_bytes - slot - busy
    slab = slab_bytes(sizes, budgets)
    ring = 2 * slab
    tables = sum(sizes.table_bytes.values()) if tables_in_pool else 0
    host_fixed = page_ceil(tap.packed_bytes) + ring + page_ceil(tables) + PAGE_BYTES
    host_room = budgets.pool_bytes - host_fixed
    if host_room < 0:
        ram = f", gather tables of {format_bytes(tables)}" if tables else ""
        out = " or --ngram-placement disk" if tables else ""
        raise UsageError(
            f"the host pool of {format_bytes(budgets.pool_bytes)} does not hold two read slabs of "
            f"{format_bytes(slab)}{ram} and one layer's packed Grams of "
            f"{format_bytes(tap.packed_bytes)}; give --host-pool-mib "
            f"{-(-host_fixed // 2**20)} or more{out}"
        )
    parked_room = 0 if group else host_room
    capacity = max(device_room, 0) // residual + parked_room // sizes.residual_bytes
    if capacity < widest:
        needed = slot + busy + widest * residual
        raise UsageError(
            f"a device budget of {format_bytes(budgets.device_bytes)} does not hold a layer slot "
            f"of {format_bytes(slot)}, Grams of {format_bytes(grams)}, {format_bytes(work)} of "
            f"working memory and the residuals of one micro-batch of {widest:,} tokens "
            f"({format_bytes(widest * residual)}); give --vram-mib {-(-needed // 2**20)} or more, "
            "or a smaller --micro-batch-tokens"
        )
    chosen = waves(batches, capacity)
    numbers = _numbered(chosen)
    on_host, device_used, host_used = _park(batches, numbers, device_room, sizes, residual, group)
    spare = device_room - device_used
    num_slots = 2 if spare >= main else 1
    largest = sizes.largest_layer.num_bytes
    ring += max(0, min(largest, host_room - host_used)) // slab * slab
    return WavePlan(
        micro_batches=tuple(batches),
        waves=tuple(numbers),
        on_host=frozenset(on_host),
        experts_per_group=group,
        num_slots=num_slots,
        main_slot_bytes=main,
        rest_slot_bytes=rest,
        ring_bytes=ring,
        packed_bytes=tap.packed_bytes,
        slab_bytes=slab,
        device_bytes=num_slots * main + rest + busy + device_used,
        pool_bytes=sum(map(page_ceil, (ring, tap.packed_bytes, tables, host_used))),
        bytes_to_read=len(chosen)
        * (sizes.entry_bytes_to_read + sum(layer.bytes_to_read for layer in sizes.layers)),
    )


def _best_plan(
    sizes: ModelSizes,
    tap: TapSizes,
    lengths: Sequence[int],
    budgets: Budgets,
    *,
    tables_in_pool: bool,
) -> WavePlan:
    """Try micro-batches from wide to narrow: fewest waves, then enough read ahead, then width.

    A wide micro-batch computes best and costs working memory, which narrower ones leave
    to residuals and to reading ahead.
    """
    longest, total = max(lengths), sum(lengths)
    tried: list[tuple[int, int, int, WavePlan]] = []
    refusal: UsageError | None = None
    limit = max(2 * total, MICRO_BATCH_TOKENS[0])
    for width in sorted({max(n, longest) for n in MICRO_BATCH_TOKENS if n <= limit}):
        try:
            plan = plan_wave(
                sizes,
                tap,
                lengths,
                budgets,
                micro_batch_tokens=width,
                tables_in_pool=tables_in_pool,
            )
        except UsageError as error:
            refusal = refusal or error
            continue
        ahead = plan.ring_bytes + (plan.num_slots - 1) * plan.main_slot_bytes
        need = sizes.largest_layer.num_bytes * 9 // 10
        usable = min(width, EFFICIENT_TOKENS)
        tried.append((-len(plan.waves), min(usable * need, usable * ahead), width, plan))
    if not tried:
        assert refusal is not None
        raise refusal
    return max(tried, key=lambda item: item[:3])[3]


def slab_bytes(sizes: ModelSizes, budgets: Budgets) -> int:
    """A slab is at most a sixteenth of the pool, and no larger than a layer needs."""
    limit = min(SLAB_BYTES, budgets.pool_bytes // 16, sizes.largest_layer.num_bytes)
    return max(64 * 1024, limit // 4096 * 4096)


def _layer_in_memory(
    sizes: ModelSizes, tap: TapSizes, budgets: Budgets, work: int, widest: int
) -> tuple[int, int, int, int]:
    """Experts a group (0: whole layers), bytes of the main and rest slots and of the Grams."""
    largest = sizes.largest_layer
    experts = max(layer.num_experts for layer in sizes.layers)
    grams = tap.gram_bytes + experts * tap.gram_bytes_per_expert
    whole = max(layer.num_bytes for layer in sizes.layers)
    need = whole + grams + work + widest * sizes.residual_bytes
    if need <= budgets.device_bytes or not experts:
        return 0, whole, 0, grams
    rest = max(layer.rest_bytes for layer in sizes.layers)
    dense = max((x.num_bytes for x in sizes.layers if not x.num_experts), default=0)
    paused = COPIES_IN_GROUPS * widest * sizes.residual_bytes
    fixed = rest + tap.gram_bytes + work + paused
    each = largest.expert_bytes + tap.gram_bytes_per_expert
    group = min(experts, (budgets.device_bytes - fixed) // each)
    if group < 1 or fixed + max(dense, each) > budgets.device_bytes:
        raise UsageError(
            f"a device budget of {format_bytes(budgets.device_bytes)} does not hold a layer "
            f"without its experts and its working memory ({format_bytes(fixed)}) and one expert "
            f"with its Gram ({format_bytes(each)}); give --vram-mib "
            f"{-(-(fixed + max(dense, each)) // 2**20)} or more"
        )
    main = max(group * largest.expert_bytes, dense)
    return group, main, rest, tap.gram_bytes + group * tap.gram_bytes_per_expert


def _numbered(chosen: Sequence[Sequence[MicroBatch]]) -> list[tuple[int, ...]]:
    numbers, count = [], 0
    for wave in chosen:
        numbers.append(tuple(range(count, count + len(wave))))
        count += len(wave)
    return numbers


def _park(
    batches: Sequence[MicroBatch],
    numbers: Sequence[Sequence[int]],
    device_room: int,
    sizes: ModelSizes,
    residual: int,
    group: int,
) -> tuple[set[int], int, int]:
    """Which micro-batches are parked on the host; peak bytes on device and host."""
    on_host: set[int] = set()
    most_device = most_host = 0
    for wave in numbers:
        device = host = 0
        for index in wave:
            need = batches[index].tokens * residual
            if group or device + need <= device_room:
                device += need
            else:
                on_host.add(index)
                host += batches[index].tokens * sizes.residual_bytes
        most_device, most_host = max(most_device, device), max(most_host, host)
    return on_host, most_device, most_host
