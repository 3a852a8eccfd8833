"""`leadline tap record`: checkpoint and corpus in, sealed Grams out; no server.

Plan, open the store, then wave by wave (or step by step): stream the layers, tap, seal.
A tap that was broken off goes on at the first layer that is not sealed: from the newest
residual checkpoint, or by reading the layers before it once more.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leadline.core.canonical import sha256_json
from leadline.core.notes import Note
from leadline.rig.batching import MicroBatch
from leadline.rig.host_pool import HostPool
from leadline.rig.layer_weights import MAIN_POOL, REST_POOL, UnitBook
from leadline.rig.plan import WavePlan
from leadline.rig.tables import placed_tables
from leadline.rig.weights import StreamCounters, StreamShape
from leadline.tap.corpus import Corpus
from leadline.tap.footprint import Footprint
from leadline.tap.gram_tap import GramTap, LayerGrams, Targets
from leadline.tap.key import TapKey
from leadline.tap.options import RecordOptions
from leadline.tap.progress import Report, TapProgress
from leadline.tap.published import sealed_grams
from leadline.tap.residual_checkpoint import ResidualCheckpoints, SavedResiduals
from leadline.tap.sealer import Sealer
from leadline.tap.store import StorePlan, TapStore, planned_layer_bytes
from leadline.tap.subject import (
    Model,
    budgets_of,
    corpus_of,
    keep_device_budget,
    kept_result,
    layer_plan,
    open_model,
    planned_wave,
    targets_of,
)
from leadline.tap.wave import (
    TapListener,
    WaveParts,
    WeightScan,
    refuse_bad_numbers,
    run_wave,
    wave_chunks,
)

RESIDUAL_FOLDER = "work"


def record(options: RecordOptions, report: Report) -> dict[str, Any]:
    """Run a tap to its end; the result as `--json` prints it.

    Raises:
        LeadlineError: see the store, the plan and the checkpoint; layers sealed before a
            fault stay sealed.
    """
    if options.schedule == "step":
        from leadline.tap.step import record_steps

        return record_steps(options, report)
    started = time.perf_counter()
    model = open_model(options)
    corpus = corpus_of(options, model)
    targets = targets_of(options, model.skeleton)
    plans = layer_plan(model.skeleton, targets)
    lengths = [len(document) for document in corpus.documents]
    plan, carry = planned_wave(options, model, plans, lengths)
    key = tap_key(options, model, corpus, plan)
    store_plan = StorePlan(
        layer_bytes={layer: planned_layer_bytes(grams) for layer, grams in plans.items()},
        notes=tuple(corpus.notes),
    )
    keep_device_budget(budgets_of(options, model.device), model.device)
    footprint = Footprint(model.device)
    with TapStore.open(options.out, key, store_plan) as store:
        if store.complete:
            return kept_result(store)
        waves = _Waves(options, model, corpus, targets, plan, store, footprint, report, started)
        return waves.run(carry=carry)


def tap_key(options: RecordOptions, model: Model, corpus: Corpus, plan: WavePlan) -> TapKey:
    """What decides the bits of this tap."""
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
        schedule="wave",
        num_waves=len(plan.waves),
        micro_batch_tokens=max(batch.tokens for batch in plan.micro_batches),
        experts_per_group=plan.experts_per_group,
        batches_digest=sha256_json(
            [[list(plan.micro_batches[i].documents) for i in wave] for wave in plan.waves]
        ),
    )


class _Waves:
    """One run of a tap, from its first unsealed layer to its result."""

    def __init__(
        self,
        options: RecordOptions,
        model: Model,
        corpus: Corpus,
        targets: Targets,
        plan: WavePlan,
        store: TapStore,
        footprint: Footprint,
        report: Report,
        started: float,
    ) -> None:
        self._options = options
        self._model = model
        self._corpus = corpus
        self._targets = targets
        self._plan = plan
        self._store = store
        self._footprint = footprint
        self._report = report
        self._started = started
        self._counters = StreamCounters()
        self._scan = WeightScan()
        self._sealer = Sealer()
        self._checkpoints = ResidualCheckpoints(
            store.folder / RESIDUAL_FOLDER, store.manifest.key.digest
        )
        self._wave = 0
        self._chunk_tokens: list[int] = []
        self._crossed = 0

    def run(self, *, carry: bool) -> dict[str, Any]:
        """Waves that are not sealed yet, then the result."""
        model, plan = self._model, self._plan
        pinned = model.device.type == "cuda"
        with HostPool(plan.pool_bytes, pinned=pinned) as pool:
            book = UnitBook(
                model.skeleton,
                model.layout,
                experts_per_group=plan.experts_per_group,
                placed_apart=model.tables,
            )
            tap = GramTap(
                model.skeleton,
                self._targets,
                device=model.device,
                groups=book.all_groups,
                carry=carry,
                staging=pool.take(plan.packed_bytes).view(torch.float32),
            )
            parts = self._parts(book, pool)
            parking = self._parking(pool)
            with placed_tables(
                model.skeleton,
                model.layout,
                model.checkpoint.shards,
                model.tables,
                in_ram=self._options.ngram_placement == "ram",
                pool=pool,
                counters=self._counters,
            ):
                try:
                    for wave in range(len(plan.waves)):
                        self._run_wave(wave, parts, tap, parking)
                    self._sealer.wait()
                finally:
                    self._sealer.close()
        result = self._result()
        # Before the tap is complete: nobody looks for residuals afterwards.
        self._checkpoints.clear()
        self._store.finish(result)
        return result

    def _parts(self, book: UnitBook, pool: HostPool) -> WaveParts:
        plan, device = self._plan, self._model.device
        pools = {
            MAIN_POOL: [
                torch.empty(plan.main_slot_bytes, dtype=torch.uint8, device=device)
                for _ in range(plan.num_slots)
            ]
        }
        if plan.experts_per_group:
            pools[REST_POOL] = [torch.empty(plan.rest_slot_bytes, dtype=torch.uint8, device=device)]
        return WaveParts(
            skeleton=self._model.skeleton,
            layout=self._model.layout,
            book=book,
            shards=self._model.checkpoint.shards,
            ring=pool.take(plan.ring_bytes),
            pools=pools,
            shape=StreamShape(slab_bytes=plan.slab_bytes, threads=self._options.threads),
            device=device,
            counters=self._counters,
            scan=self._scan,
        )

    def _parking(self, pool: HostPool) -> list[Tensor]:
        """Pinned memory of the largest parked micro-batches, shared by all waves."""
        plan = self._plan
        most = [
            sum(plan.micro_batches[i].tokens for i in wave if i in plan.on_host)
            for wave in plan.waves
        ]
        total = max(most, default=0) * self._model.sizes.residual_bytes
        return [pool.take(total)] if total else []

    def _run_wave(self, wave: int, parts: WaveParts, tap: GramTap, parking: list[Tensor]) -> None:
        layers = range(self._model.skeleton.num_layers)
        unsealed = [
            layer
            for layer in layers
            if layer in self._store.manifest.planned_layers
            and self._store.waves_sealed(layer) <= wave
        ]
        if not unsealed and self._store.manifest.planned_layers:
            return
        saved = self._saved(wave, unsealed[0] if unsealed else 0)
        self._wave = wave
        batches = [self._plan.micro_batches[i] for i in self._plan.waves[wave]]
        self._chunk_tokens = [sum(batch.lengths) for batch in batches]
        listener = TapListener(
            tap,
            first_layer=unsealed[0] if unsealed else layers.stop,
            wants_linears=self._targets.linears,
            layer_done=self._layer_done(tap, unsealed[0] if unsealed else layers.stop),
            chunk_done=self._chunk_done,
            before_collect=self._sealer.wait,
        )
        run_wave(
            parts,
            wave_chunks(self._corpus.documents, batches),
            self._parked(wave, batches, parking),
            listener,
            saved=saved,
        )

    def _saved(self, wave: int, first: int) -> SavedResiduals | None:
        """The residual checkpoint that saves most without skipping a layer to be sealed."""
        saved = self._checkpoints.find()
        if saved is None or saved.wave != wave or saved.layer >= first:
            return None
        return saved

    def _parked(
        self, wave: int, batches: list[MicroBatch], parking: list[Tensor]
    ) -> list[Tensor | None]:
        places: list[Tensor | None] = []
        offset = 0
        for index, batch in zip(self._plan.waves[wave], batches, strict=True):
            size = batch.tokens * self._model.sizes.residual_bytes
            if index in self._plan.on_host:
                places.append(parking[0][offset : offset + size])
                offset += size
            else:
                places.append(None)
        return places

    def _layer_done(
        self, tap: GramTap, first: int
    ) -> Callable[[int, bool, Iterator[Tensor]], None]:
        def done(layer: int, finite: bool, residuals: Iterator[Tensor]) -> None:
            grams = tap.take_layer() if layer >= first else None
            notes = refuse_bad_numbers(layer, self._scan, grams, residual_is_finite=finite)
            if grams is not None and layer in self._store.manifest.planned_layers:
                self._seal(layer, grams, notes)
            self._save_residuals(layer, residuals)
            self._footprint.sample()

        return done

    def _seal(self, layer: int, grams: LayerGrams, notes: list[Note]) -> None:
        sealed, rows = sealed_grams(grams, layer, self._model.skeleton, self._model.layout)
        wave = self._wave

        def seal() -> None:
            self._store.seal(layer, sealed, rows, notes, wave=wave)

        self._sealer.submit(seal)

    def _save_residuals(self, layer: int, residuals: Iterator[Tensor]) -> None:
        last = layer == self._model.skeleton.num_layers - 1
        heavy = sum(self._chunk_tokens) * self._model.sizes.residual_bytes
        weighs = self._model.sizes.layers[layer].bytes_to_read
        if last or not self._checkpoints.is_worth_it(weighs, heavy):
            return
        self._sealer.wait()
        # It only saves time: on a disk that the Grams will fill, there is none.
        if self._store.bytes_to_spare >= heavy:
            self._checkpoints.write(self._wave, layer, residuals)

    def _chunk_done(self, layer: int, index: int) -> None:
        self._crossed += self._chunk_tokens[index]
        layers = self._model.skeleton.num_layers
        self._report(
            TapProgress(
                wave=self._wave,
                num_waves=len(self._plan.waves),
                layer=layer,
                num_layers=layers,
                token_layers=self._crossed,
                tokens=self._corpus.num_tokens,
                bytes_read=self._counters.bytes_wanted,
                bytes_to_read=self._plan.bytes_to_read,
                seconds=time.perf_counter() - self._started,
            )
        )

    def _result(self) -> dict[str, Any]:
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
            "schedule": "wave",
            "steps": len(plan.waves),
            "waves": len(plan.waves),
            "micro_batches": len(plan.micro_batches),
            "experts_per_group": plan.experts_per_group,
            "notes": [item.note.document for item in self._store.manifest.notes],
            "tap_dir": str(Path(self._options.out).resolve()),
        }
