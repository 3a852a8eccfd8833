"""The checkpoint and corpus of a tap, opened and measured; no weight is read."""

from dataclasses import dataclass
from typing import Any

import psutil
import torch

from leadline.core.errors import UsageError
from leadline.rig.checkpoint import Checkpoint
from leadline.rig.layout import ModelLayout, map_checkpoint
from leadline.rig.plan import Budgets, TapSizes, WavePlan, plan_wave
from leadline.rig.sizes import ModelSizes, measure_sizes
from leadline.rig.skeleton import Skeleton, build_skeleton
from leadline.tap.corpus import Corpus, open_corpus
from leadline.tap.gram_blocks import gram_bytes, grouped_gram_bytes, needs_carry
from leadline.tap.gram_tap import Targets
from leadline.tap.options import RecordOptions
from leadline.tap.published import planned_grams
from leadline.tap.store import TapStore, planned_layer_bytes
from leadline.tap.triangle import packed_length

CUDA_WORKSPACE_BYTES = 96 * 2**20
"""cuBLAS and cuDNN workspaces, and the sum of small tensors."""
DEFAULT_SHARE = 4
"""Without a flag the host pool takes one part in so many of the free memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A checkpoint as the rig sees it."""

    checkpoint: Checkpoint
    skeleton: Skeleton
    layout: ModelLayout
    sizes: ModelSizes
    tables: frozenset[str]
    """Full names of gather tables, placed apart from their layers."""
    device: torch.device


def open_model(options: RecordOptions) -> Model:
    """Open and map the checkpoint.

    Raises:
        UsageError: an architecture or device that cannot be; DataError, IntegrityError:
            a checkpoint that is not whole.
    """
    device = choose_device(options.device)
    checkpoint = Checkpoint.open(options.checkpoint)
    skeleton = build_skeleton(
        options.checkpoint, dtype=getattr(torch, options.dtype), device=device
    )
    layout = map_checkpoint(skeleton.model, checkpoint)
    tables = frozenset(
        f"{skeleton.layer_name(layer)}.{name}.weight"
        for layer in range(skeleton.num_layers)
        for name in skeleton.gather_tables(layer)
    )
    return Model(
        checkpoint=checkpoint,
        skeleton=skeleton,
        layout=layout,
        sizes=measure_sizes(skeleton, layout, checkpoint.total_bytes, tables),
        tables=tables,
        device=device,
    )


def choose_device(name: str) -> torch.device:
    """`auto` is the first CUDA device, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"--device {name}: no CUDA device is visible; use --device cpu")
    device = torch.device(name)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def budgets_of(options: RecordOptions, device: torch.device) -> Budgets:
    """Budgets as given; else nine tenths of the free device and a quarter of the free memory."""
    free = psutil.virtual_memory().available
    if options.vram_mib is not None:
        device_bytes = options.vram_mib * 2**20
    elif device.type == "cuda":
        device_bytes = torch.cuda.mem_get_info(device)[0] * 9 // 10
    else:
        device_bytes = free // DEFAULT_SHARE
    pool = options.host_pool_mib
    return Budgets(
        device_bytes=device_bytes,
        pool_bytes=free // DEFAULT_SHARE if pool is None else pool * 2**20,
        workspace_bytes=CUDA_WORKSPACE_BYTES if device.type == "cuda" else 0,
    )


def keep_device_budget(budgets: Budgets, device: torch.device) -> None:
    """Hold torch's allocator to the budget: past it, it frees what it caches, then fails."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budgets.device_bytes / total), device)


def targets_of(options: RecordOptions, skeleton: Skeleton) -> Targets:
    """What is tapped.

    Raises:
        UsageError: experts of a dense model.
    """
    targets = Targets.from_names(options.targets, options.gate_up)
    has_experts = any(skeleton.experts(layer) for layer in range(skeleton.num_layers))
    if options.targets == "experts" and not has_experts:
        raise UsageError(
            f"{skeleton.config.model_type} has no routed experts; use --targets linear"
        )
    return targets


GramPlans = dict[int, dict[str, tuple[int, int | None]]]
"""Features and experts (None: a single Gram) of each Gram, by layer."""


def layer_plan(skeleton: Skeleton, targets: Targets) -> GramPlans:
    """Features and experts of each Gram, by layer; layers with nothing to tap are left out."""
    plans = {
        layer: planned_grams(
            skeleton,
            layer,
            experts=targets.experts,
            linears=targets.linears,
            gate_up_per_expert=targets.gate_up_per_expert,
        )
        for layer in range(skeleton.num_layers)
    }
    return {layer: plan for layer, plan in plans.items() if plan}


def tap_sizes(plans: GramPlans, device: torch.device, *, carry: bool) -> TapSizes:
    """Memory and files of the Grams."""
    cuda = device.type == "cuda"
    single = grouped = packed = store = 0
    for plan in plans.values():
        widths = [k for k, experts in plan.values() if experts is None]
        alone = sum(gram_bytes(k, on_cuda=cuda, carry=carry) for k in widths)
        widths = [k for k, experts in plan.values() if experts is not None]
        each = sum(grouped_gram_bytes(1, k, on_cuda=cuda, carry=carry) for k in widths)
        single, grouped = max(single, alone), max(grouped, each)
        numbers = sum(packed_length(k) * (experts or 1) for k, experts in plan.values())
        packed = max(packed, 4 * numbers)
        store += planned_layer_bytes(plan)
    return TapSizes(
        gram_bytes=single,
        gram_bytes_per_expert=grouped,
        packed_bytes=packed,
        store_bytes=store,
    )


def planned_wave(
    options: RecordOptions, model: Model, plans: GramPlans, lengths: list[int]
) -> tuple[WavePlan, bool]:
    """The wave plan, and whether its Grams need a carry: many additions to each do.

    Raises:
        UsageError: what does not fit.
    """
    budgets = budgets_of(options, model.device)
    for carry in (False, True):
        plan = plan_wave(
            model.sizes,
            tap_sizes(plans, model.device, carry=carry),
            lengths,
            budgets,
            micro_batch_tokens=options.micro_batch_tokens,
            tables_in_pool=options.ngram_placement == "ram",
        )
        if not needs_carry(max(len(wave) for wave in plan.waves)):
            return plan, carry
    return plan, True


def corpus_of(options: RecordOptions, model: Model) -> Corpus:
    """The corpus in the model's tokens."""
    config = model.skeleton.config
    return open_corpus(
        options.corpus,
        options.checkpoint,
        vocab_size=config.vocab_size,
        max_document_tokens=options.max_document_tokens,
        max_positions=getattr(config, "max_position_embeddings", None),
        text_field=options.text_field,
    )


def kept_result(store: TapStore) -> dict[str, Any]:
    """Result of a tap that was complete before; decimal strings are numbers again."""
    result: dict[str, Any] = dict(store.manifest.result)
    for name in ("seconds", "tok_s", "waited_for_weights_s"):
        result[name] = float(result[name])
    return result
