"""`leadline rig plan`: what a tap would need and take, with no weight loaded."""

from pathlib import Path
from typing import Any

from leadline.core.errors import UsageError
from leadline.rig.plan import WavePlan
from leadline.rig.step_plan import StepPlan, plan_steps
from leadline.tap.forecast import step_seconds, wave_seconds
from leadline.tap.gram_tap import Targets
from leadline.tap.options import RecordOptions
from leadline.tap.rate_probe import measure_rates
from leadline.tap.store import planned_layer_bytes
from leadline.tap.subject import (
    Model,
    budgets_of,
    corpus_of,
    layer_plan,
    open_model,
    planned_wave,
    tap_sizes,
    targets_of,
)


def plan_tap(options: RecordOptions, lengths: list[int] | None, *, probe: bool) -> dict[str, Any]:
    """Plan of a tap of documents of *lengths* tokens, else of the corpus, as `--json` prints it.

    What does not fit is a result with `fits` false and the reason, not an error.

    Raises:
        UsageError, DataError: a checkpoint that cannot be tapped at all.
    """
    model = open_model(options)
    if lengths is None:
        lengths = [len(document) for document in corpus_of(options, model).documents]
    targets = targets_of(options, model.skeleton)
    plans = layer_plan(model.skeleton, targets)
    sizes = tap_sizes(plans, model.device, carry=True)
    budgets = budgets_of(options, model.device)
    facts: dict[str, Any] = {
        "model_type": model.skeleton.config.model_type,
        "schedule": options.schedule,
        "tokens": sum(lengths),
        "documents": len(lengths),
        "checkpoint_bytes": model.checkpoint.total_bytes,
        "vram_budget_bytes": budgets.device_bytes,
        "host_pool_budget_bytes": budgets.pool_bytes,
        "tap_bytes": sizes.store_bytes,
        "layers": _layers(model),
        "gather_tables": dict(model.sizes.table_bytes),
        "gather_tables_on": options.ngram_placement,
        "not_in_model": list(model.layout.unmapped),
        "vram_bytes": None,
        "host_bytes": None,
        "bytes_to_read": None,
        "predicted_seconds": None,
    }
    try:
        plan: WavePlan | StepPlan
        if options.schedule == "step":
            plan = plan_steps(
                model.sizes,
                sizes,
                lengths,
                budgets,
                max_num_batched_tokens=options.max_num_batched_tokens,
                max_num_seqs=options.max_num_seqs,
                kv_tokens=options.kv_tokens,
                tables_in_pool=options.ngram_placement == "ram",
            )
            facts |= _step_facts(plan)
        else:
            plan, _ = planned_wave(options, model, plans, lengths)
            facts |= _wave_facts(plan, model)
    except UsageError as error:
        return {**facts, "fits": False, "refused_because": str(error)}
    facts |= {
        "fits": True,
        "refused_because": None,
        "vram_bytes": plan.device_bytes,
        "host_bytes": plan.pool_bytes,
        "bytes_to_read": plan.bytes_to_read,
    }
    if probe:
        facts |= _predicted(options, model, targets, plan, lengths)
    return facts


def _layers(model: Model) -> dict[str, int]:
    sizes = model.sizes
    return {
        "count": len(sizes.layers),
        "with_experts": sum(1 for layer in sizes.layers if layer.num_experts),
        "experts": max(layer.num_experts for layer in sizes.layers),
        "largest_bytes": sizes.largest_layer.num_bytes,
        "entry_bytes": sizes.entry_bytes,
        "residual_bytes_per_token": sizes.residual_bytes,
        "kv_bytes_per_token": sizes.kv_bytes,
    }


def _wave_facts(plan: WavePlan, model: Model) -> dict[str, Any]:
    tokens = [batch.tokens for batch in plan.micro_batches]
    parked = sum(tokens[index] for index in plan.on_host)
    return {
        "waves": len(plan.waves),
        "micro_batches": len(plan.micro_batches),
        "micro_batch_tokens": max(tokens),
        "residual_bytes_on_host": parked * model.sizes.residual_bytes,
        "experts_per_group": plan.experts_per_group,
        "slots": plan.num_slots,
        "slot_bytes": plan.main_slot_bytes + plan.rest_slot_bytes,
        "ring_bytes": plan.ring_bytes,
    }


def _step_facts(plan: StepPlan) -> dict[str, Any]:
    return {
        "steps": plan.num_steps,
        "kv_tokens_total": plan.kv_tokens,
        "longest_document": plan.longest_document,
        "layers_on_device": len(plan.layers_on_device),
        "layers_in_pool": len(plan.layers_in_pool),
        "slots": plan.num_slots,
        "slot_bytes": plan.slot_bytes,
        "ring_bytes": plan.ring_bytes,
    }


def _predicted(
    options: RecordOptions,
    model: Model,
    targets: Targets,
    plan: WavePlan | StepPlan,
    lengths: list[int],
) -> dict[str, Any]:
    if isinstance(plan, WavePlan):
        widest = max(plan.micro_batches, key=lambda batch: batch.tokens)
        shape = (len(widest.documents), widest.length)
    else:
        longest = min(plan.longest_document, plan.max_num_batched_tokens)
        shape = (1, longest)
    rates = measure_rates(
        model,
        targets,
        batch_documents=shape[0],
        document_tokens=shape[1],
        slab_bytes=plan.slab_bytes,
        threads=options.threads,
        out=Path(options.out),
    )
    layers = [layer.bytes_to_read for layer in model.sizes.layers]
    plans = layer_plan(model.skeleton, targets)
    packed = [planned_layer_bytes(plans.get(n, {})) for n in range(len(layers))]
    if isinstance(plan, WavePlan):
        seconds = wave_seconds(
            rates,
            layer_bytes=layers,
            entry_bytes=model.sizes.entry_bytes_to_read,
            packed_bytes=packed,
            wave_tokens=[
                sum(plan.micro_batches[index].tokens for index in wave) for wave in plan.waves
            ],
            ahead_bytes=plan.ring_bytes + (plan.num_slots - 1) * plan.main_slot_bytes,
        )
    else:
        seconds = step_seconds(
            rates,
            layer_bytes=layers,
            kept_layers=plan.layers_on_device | plan.layers_in_pool,
            entry_bytes=model.sizes.entry_bytes_to_read,
            tokens=plan.tokens_to_compute,
            num_steps=plan.num_steps,
            store_bytes=sum(packed),
        )
    return {
        "predicted_seconds": round(seconds, 2),
        "predicted_tok_s": round(sum(lengths) / seconds, 1),
        "disk_bytes_s": round(rates.disk_bytes_s),
        "compute_tok_s": round(1 / sum(rates.layer_s_per_token), 1),
        "seal_bytes_s": round(rates.seal_bytes_s),
    }
