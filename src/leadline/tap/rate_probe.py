"""A short probe of this machine: disk rate, seconds a token in each kind of layer, seal rate.

Layers are built with random weights of the right shapes, so that a plan costs no read
of the model; only the disk's rate is taken from the checkpoint's own bytes.
"""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from leadline.core.atomic import write_bytes
from leadline.rig.disk_stream import DiskStream, Extent, coalesce
from leadline.rig.host_pool import HostPool
from leadline.rig.landing import tensor_in
from leadline.rig.layer_pass import Chunk, LayerPass
from leadline.rig.layer_weights import UnitBook
from leadline.rig.residuals import ResidualStore
from leadline.rig.weights import install, uninstall
from leadline.tap.forecast import Rates
from leadline.tap.gram_tap import GramTap, Targets
from leadline.tap.subject import Model
from leadline.tap.wave import TapListener

DISK_PROBE_BYTES = 512 * 2**20
SEAL_PROBE_BYTES = 64 * 2**20
BATCHES = 4
"""Timed micro-batches of each kind of layer, after one that warms up."""


def measure_rates(
    model: Model,
    targets: Targets,
    *,
    batch_documents: int,
    document_tokens: int,
    slab_bytes: int,
    threads: int,
    out: Path,
) -> Rates:
    """Measure disk, compute and sealing; *out* is where Grams would be written."""
    started = time.perf_counter()
    book = UnitBook(model.skeleton, model.layout, experts_per_group=0, placed_apart=model.tables)
    by_kind: dict[object, float] = {}
    seconds = []
    for layer in range(model.skeleton.num_layers):
        kind = _kind(model, layer)
        if kind not in by_kind:
            by_kind[kind] = _layer_seconds(
                model, targets, book, layer, batch_documents, document_tokens
            )
        seconds.append(by_kind[kind])
    warm = time.perf_counter() - started
    return Rates(
        disk_bytes_s=disk_rate(model, slab_bytes, threads),
        layer_s_per_token=seconds,
        seal_bytes_s=seal_rate(out),
        start_s=min(warm, 5.0),
    )


def disk_rate(model: Model, slab_bytes: int, threads: int) -> float:
    """Bytes per second of reading the checkpoint as the tap will, its largest shard first."""
    path = max(model.checkpoint.shards.values(), key=lambda p: p.stat().st_size)
    size = min(path.stat().st_size, DISK_PROBE_BYTES)
    whole = [Extent(path=path, begin=0, end=size)]
    extents = coalesce(whole, max_gap=0, max_bytes=slab_bytes)
    with HostPool(8 * (slab_bytes + 8192), pinned=False) as pool:
        ring = pool.take(pool.num_bytes)
        start = time.perf_counter()
        with DiskStream(extents, ring=ring, slab_bytes=slab_bytes, threads=threads) as stream:
            for slab in stream:
                slab.release()
        return size / max(time.perf_counter() - start, 1e-9)


def seal_rate(out: Path) -> float:
    """Bytes per second of hashing and durably writing a file beside *out*."""
    import hashlib

    parent = next(folder for folder in (out, *out.absolute().parents) if folder.is_dir())
    data = np.random.default_rng(0).bytes(SEAL_PROBE_BYTES)
    with tempfile.TemporaryDirectory(dir=parent, prefix=".leadline-probe-") as folder:
        start = time.perf_counter()
        hashlib.sha256(data)
        write_bytes(Path(folder) / "probe", data)
        return len(data) / max(time.perf_counter() - start, 1e-9)


def _kind(model: Model, layer: int) -> object:
    """What makes one layer as fast as another: attention type, experts, bytes."""
    types = getattr(model.skeleton.config, "layer_types", None)
    sizes = model.sizes.layers[layer]
    return (types[layer] if types else None, sizes.num_experts, sizes.num_bytes)


class _Enough(Exception):  # noqa: N818 - not a fault
    """The probed layer is done."""


class _RandomWeights:
    """One layer's weights, drawn instead of read."""

    def __init__(self, model: Model, book: UnitBook, layer: int) -> None:
        self._model = model.skeleton.model
        self._book = book
        unit = book.units(layer)[0]
        buffer = torch.empty(unit.num_bytes, dtype=torch.uint8, device=model.device)
        self.tensors = {tensor.name: tensor_in(buffer, tensor) for tensor in unit.tensors}
        for tensor in self.tensors.values():
            if tensor.is_floating_point():
                scale = tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 1.0
                tensor.normal_(0.0, scale)
            else:
                tensor.zero_()

    def acquire_entry(self) -> None:
        """Nothing: the probe starts behind the embedding."""

    def release_entry(self) -> None:
        """Nothing."""

    def acquire(self, layer: int, stage: int) -> None:
        """Put the drawn weights in."""
        del layer, stage
        install(self._model, self.tensors)

    def release(self, layer: int, stage: int) -> None:
        """Take them out."""
        del layer, stage
        names = list(self.tensors)
        uninstall(self._model, names, self._book.memoryless(names))

    def groups(self, layer: int) -> tuple[range, ...]:
        """Whole layers."""
        return self._book.groups(layer)


@torch.inference_mode()
def _layer_seconds(
    model: Model,
    targets: Targets,
    book: UnitBook,
    layer: int,
    batch_documents: int,
    document_tokens: int,
) -> float:
    """Seconds a token takes in *layer*, Grams included."""
    weights = _RandomWeights(model, book, layer)
    tap = GramTap(model.skeleton, targets, device=model.device, groups=book.all_groups, carry=False)
    times: list[float] = []

    def chunk_done(at: int, index: int) -> None:
        del at, index
        _synchronize(model.device)
        times.append(time.perf_counter())

    def layer_done(at: int, finite: bool, residuals: Iterator[Tensor]) -> None:
        del at, finite, residuals
        raise _Enough

    listener = TapListener(
        tap,
        first_layer=layer,
        wants_linears=targets.linears,
        layer_done=layer_done,
        chunk_done=chunk_done,
    )
    tokens = torch.zeros(batch_documents, document_tokens, dtype=torch.int64)
    chunks = [Chunk(tokens=tokens) for _ in range(BATCHES + 1)]
    width = model.sizes.residual_bytes // model.skeleton.dtype.itemsize
    residuals = ResidualStore([None] * len(chunks), device=model.device, dtype=model.skeleton.dtype)
    hidden = torch.randn(batch_documents, document_tokens, width, dtype=model.skeleton.dtype)
    # Each its own: a pass gives the memory of what has entered the first layer back.
    residuals.restore(hidden.clone() for _ in chunks)
    run = LayerPass(model.skeleton, weights, device=model.device, listener=listener)
    try:
        run.run(chunks, residuals, start=layer)
    except _Enough:
        weights.release(layer, 0)
    return (times[-1] - times[0]) / BATCHES / tokens.numel()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
