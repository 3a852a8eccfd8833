"""The step schedule: documents cross the layers in steps of bounded width, with a KV pool.

It is what a server does, without one: continuous batching of prefills, chunks of a
document with its keys and values kept between them, queueing and preemption. Every step
streams the layers that are not resident again, so a wave reads far less; a step needs
no room for the residuals of a whole corpus.

Every step crosses every layer, so the Grams of all layers are summed on the host until
the end and sealed then: a tap broken off starts anew.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from leadline.core.errors import UsageError
from leadline.core.notes import Note
from leadline.rig.host_pool import HostPool
from leadline.rig.layer_pass import Chunk, LayerPass
from leadline.rig.layer_weights import MAIN_POOL, StreamedWeights, Tiers, UnitBook
from leadline.rig.residuals import ResidualStore
from leadline.rig.scheduler import Chunk as PlannedChunk
from leadline.rig.scheduler import Scheduler
from leadline.rig.step_plan import StepPlan, plan_steps
from leadline.rig.tables import placed_tables
from leadline.rig.weights import StreamCounters, StreamShape
from leadline.tap.corpus import Corpus
from leadline.tap.footprint import Footprint
from leadline.tap.gram_tap import GramTap, LayerGrams
from leadline.tap.key import TapKey
from leadline.tap.options import RecordOptions
from leadline.tap.progress import Report, TapProgress
from leadline.tap.published import sealed_grams
from leadline.tap.store import StorePlan, TapStore, planned_layer_bytes
from leadline.tap.subject import (
    Model,
    budgets_of,
    corpus_of,
    kept_result,
    layer_plan,
    open_model,
    tap_sizes,
    targets_of,
)
from leadline.tap.wave import TapListener, WeightScan, refuse_bad_numbers


def record_steps(options: RecordOptions, report: Report) -> dict[str, Any]:
    """Run a tap step by step; the result as `--json` prints it.

    Raises:
        UsageError: a document longer than the KV pool, or budgets that do not fit.
    """
    started = time.perf_counter()
    model = open_model(options)
    corpus = corpus_of(options, model)
    targets = targets_of(options, model.skeleton)
    plans = layer_plan(model.skeleton, targets)
    plan = plan_steps(
        model.sizes,
        tap_sizes(plans, model.device, carry=True),
        [len(document) for document in corpus.documents],
        budgets_of(options, model.device),
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        kv_tokens=options.kv_tokens,
        tables_in_pool=options.ngram_placement == "ram",
    )
    refuse_cut_recurrence(model, plan)
    store_plan = StorePlan(
        layer_bytes={layer: planned_layer_bytes(grams) for layer, grams in plans.items()},
        notes=tuple(corpus.notes),
    )
    key = step_key(options, model, corpus, plan)
    with TapStore.open(options.out, key, store_plan) as store:
        if store.complete:
            return kept_result(store)
        groups = {x.layer: (range(x.num_experts),) for x in model.sizes.layers}
        tap = GramTap(model.skeleton, targets, device=model.device, groups=groups, carry=True)
        return _Steps(options, model, corpus, plan, store, tap, report, started).run()


def refuse_cut_recurrence(model: Model, plan: StepPlan) -> None:
    """Refuse to cut documents of a model with layers that were not seen to continue them.

    Attention, gated linear attention included, goes on from what a chunk left behind;
    state-space and convolution layers of some families do so for single tokens only.

    Raises:
        UsageError: names the width that leaves documents whole.
    """
    kinds = set(getattr(model.skeleton.config, "layer_types", None) or ())
    recurrent = sorted(kind for kind in kinds if "attention" not in kind)
    if recurrent and plan.longest_document > plan.max_num_batched_tokens:
        raise UsageError(
            f"{model.skeleton.config.model_type} has {recurrent[0]} layers, whose documents cannot "
            f"be cut into steps; give --max-num-batched-tokens {plan.longest_document} or more, or "
            "--schedule wave"
        )


def step_key(options: RecordOptions, model: Model, corpus: Corpus, plan: StepPlan) -> TapKey:
    """What decides the bits of a tap by steps."""
    return TapKey(
        model_type=model.skeleton.config.model_type,
        model_digest=model.checkpoint.digest,
        tokenizer_digest=corpus.tokenizer_digest,
        max_document_tokens=options.max_document_tokens,
        documents=len(corpus.documents),
        tokens=corpus.num_tokens,
        corpus_digest=corpus.digest,
        dtype=options.dtype,
        targets=options.targets,
        gate_up=options.gate_up,
        first_layer=0,
        end_layer=model.skeleton.num_layers,
        schedule="step",
        micro_batch_tokens=plan.max_num_batched_tokens,
        step_tokens=plan.max_num_batched_tokens,
        max_num_seqs=plan.max_num_seqs,
        kv_tokens=plan.kv_tokens,
    )


class _Steps:
    """All steps of one tap."""

    def __init__(
        self,
        options: RecordOptions,
        model: Model,
        corpus: Corpus,
        plan: StepPlan,
        store: TapStore,
        tap: GramTap,
        report: Report,
        started: float,
    ) -> None:
        self._options = options
        self._model = model
        self._corpus = corpus
        self._plan = plan
        self._store = store
        self._tap = tap
        self._report = report
        self._started = started
        self._counters = StreamCounters()
        self._scan = WeightScan()
        self._footprint = Footprint(model.device)
        self._caches: dict[int, DynamicCache] = {}
        self._sums: dict[int, LayerGrams] = {}
        self._notes: dict[int, list[Note]] = {}
        self._tokens: list[int] = []
        self._crossed = 0
        self._step = 0

    def run(self) -> dict[str, Any]:
        """Every step, then all seals and the result."""
        model, plan = self._model, self._plan
        lengths = [len(document) for document in self._corpus.documents]
        scheduler = Scheduler(
            lengths,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            max_num_seqs=plan.max_num_seqs,
            kv_tokens_total=plan.kv_tokens,
        )
        with HostPool(plan.pool_bytes, pinned=model.device.type == "cuda") as pool:
            ring = pool.take(plan.ring_bytes)
            slots = [
                torch.empty(plan.slot_bytes, dtype=torch.uint8, device=model.device)
                for _ in range(plan.num_slots)
            ]
            book = UnitBook(
                model.skeleton, model.layout, experts_per_group=0, placed_apart=model.tables
            )
            tiers = Tiers(on_device=plan.layers_on_device, in_pool=plan.layers_in_pool)
            with placed_tables(
                model.skeleton,
                model.layout,
                model.checkpoint.shards,
                model.tables,
                in_ram=self._options.ngram_placement == "ram",
                pool=pool,
                counters=self._counters,
            ):
                while chunks := scheduler.next_step():
                    for document in scheduler.preempted:
                        self._caches.pop(document, None)
                    self._cross(chunks, book, tiers, pool, ring, slots)
                    self._step += 1
        for layer, grams in sorted(self._sums.items()):
            sealed, rows = sealed_grams(grams, layer, model.skeleton, model.layout)
            self._store.seal(layer, sealed, rows, self._notes.get(layer, ()))
        result = self._result(scheduler)
        self._store.finish(result)
        return result

    def _cross(
        self,
        planned: Sequence[PlannedChunk],
        book: UnitBook,
        tiers: Tiers,
        pool: HostPool,
        ring: Tensor,
        slots: list[Tensor],
    ) -> None:
        """Take one step across all layers."""
        model = self._model
        chunks = [self._chunk(chunk) for chunk in planned]
        self._tokens = [chunk.end - chunk.begin for chunk in planned]
        weights = StreamedWeights(
            book,
            model.skeleton,
            first_layer=0,
            with_entry=True,
            shards=model.checkpoint.shards,
            ring=ring,
            pools={MAIN_POOL: slots},
            shape=StreamShape(slab_bytes=self._plan.slab_bytes, threads=self._options.threads),
            device=model.device,
            counters=self._counters,
            inspect=self._scan.look,
            tiers=tiers,
            pool=pool,
        )
        listener = TapListener(
            self._tap,
            first_layer=0,
            wants_linears=self._options.targets in ("linear", "all"),
            layer_done=self._layer_done,
            chunk_done=self._chunk_done,
        )
        residuals = ResidualStore(
            [None] * len(chunks), device=model.device, dtype=model.skeleton.dtype
        )
        try:
            run = LayerPass(model.skeleton, weights, device=model.device, listener=listener)
            run.run(chunks, residuals)
        finally:
            weights.close()
        for chunk in planned:
            if chunk.end == len(self._corpus.documents[chunk.document]):
                self._caches.pop(chunk.document, None)

    def _chunk(self, chunk: PlannedChunk) -> Chunk:
        document = self._corpus.documents[chunk.document]
        whole = chunk.begin == 0 and chunk.end == len(document)
        cache = None
        if not whole:
            if chunk.begin == 0:
                self._caches[chunk.document] = DynamicCache(config=self._model.skeleton.config)
            cache = self._caches[chunk.document]
        tokens = torch.as_tensor(document[chunk.begin : chunk.end], dtype=torch.int64)[None]
        counted = None
        if chunk.recomputed_until > chunk.begin:
            counted = torch.arange(
                min(chunk.recomputed_until, chunk.end) - chunk.begin, chunk.end - chunk.begin
            )
        return Chunk(tokens=tokens, counted=counted, cache=cache, label=str(chunk.document))

    def _layer_done(self, layer: int, finite: bool, residuals: Iterator[Tensor]) -> None:
        del residuals
        fresh = self._tap.take_layer()
        notes = refuse_bad_numbers(layer, self._scan, fresh, residual_is_finite=finite)
        kept_notes = self._notes.setdefault(layer, [])
        kept_notes += [note for note in notes if note not in kept_notes]
        if layer not in self._store.manifest.planned_layers:
            return
        kept = self._sums.get(layer)
        if kept is None:
            self._sums[layer] = fresh
            return
        for name, packed in fresh.packed.items():
            kept.packed[name] += packed
            kept.rows[name] += fresh.rows[name]

    def _chunk_done(self, layer: int, index: int) -> None:
        self._crossed += self._tokens[index]
        layers = self._model.skeleton.num_layers
        self._report(
            TapProgress(
                wave=self._step,
                num_waves=self._plan.num_steps,
                layer=layer,
                num_layers=layers,
                token_layers=self._crossed,
                tokens=self._plan.tokens_to_compute,
                bytes_read=self._counters.bytes_wanted,
                bytes_to_read=self._plan.bytes_to_read,
                seconds=time.perf_counter() - self._started,
            )
        )

    def _result(self, scheduler: Scheduler) -> dict[str, Any]:
        seconds = time.perf_counter() - self._started
        model, plan = self._model, self._plan
        return {
            "tokens": self._corpus.num_tokens,
            "documents": len(self._corpus.documents),
            "layers": model.skeleton.num_layers,
            "seconds": round(seconds, 3),
            "tok_s": round(self._corpus.num_tokens / seconds, 1),
            "checkpoint_bytes": model.checkpoint.total_bytes,
            "tensors_not_in_model": len(model.layout.unmapped),
            "bytes_read": self._counters.bytes_wanted + self._counters.table_bytes,
            "bytes_from_disk": self._counters.bytes_from_disk
            + self._counters.table_bytes_from_disk,
            "direct_io": self._counters.direct,
            "planned_bytes": plan.bytes_to_read,
            "waited_for_weights_s": round(self._counters.waited_s, 3),
            "peak_vram_bytes": self._footprint.peak_vram_bytes(),
            "peak_host_bytes": self._footprint.peak_host_bytes(),
            "vram_budget_bytes": plan.device_bytes,
            "host_pool_bytes": plan.pool_bytes,
            "schedule": "step",
            "steps": self._step,
            "preemptions": scheduler.preemptions,
            "recomputed_tokens": scheduler.recomputed_tokens,
            "kv_tokens_total": plan.kv_tokens,
            "layers_on_device": len(plan.layers_on_device),
            "layers_in_pool": len(plan.layers_in_pool),
            "notes": [item.note.document for item in self._store.manifest.notes],
            "tap_dir": str(Path(self._options.out).resolve()),
        }
