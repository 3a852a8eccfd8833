"""Gather tables apart from their layers: rows from the file, or the whole table in memory.

An n-gram table holds far more rows than a corpus uses. On `disk` only the rows used are
read; in `ram` the table is read once and stays in the host pool.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from leadline.core.errors import UsageError
from leadline.rig.checkpoint import TensorEntry
from leadline.rig.host_pool import HostPool
from leadline.rig.layer_pass import replaced
from leadline.rig.layout import ModelLayout
from leadline.rig.row_reader import RowPart, RowReader
from leadline.rig.skeleton import Skeleton
from leadline.rig.units import SAFETENSORS_DTYPES
from leadline.rig.weights import StreamCounters

READ_BYTES = 16 * 2**20
"""A table is read into the pool in pieces of this size."""


@contextmanager
def placed_tables(
    skeleton: Skeleton,
    layout: ModelLayout,
    shards: Mapping[str, Path],
    names: frozenset[str],
    *,
    in_ram: bool,
    pool: HostPool,
    counters: StreamCounters,
) -> Iterator[None]:
    """Let the embeddings that hold *names* (full names) look their rows up elsewhere.

    Raises:
        UsageError: the table is stored so that its rows cannot be read one by one.
    """
    with ExitStack() as stack:
        for name in sorted(names):
            module = skeleton.model.get_submodule(name.rpartition(".")[0])
            parts, row_bytes, dtype = _parts(name, layout, shards)
            reader = stack.enter_context(RowReader(parts, row_bytes=row_bytes))
            if in_ram:
                lookup = _in_ram(reader, dtype, pool, counters)
            else:
                lookup = _on_disk(reader, dtype, counters)
            stack.enter_context(replaced(module, "forward", _Table(lookup, skeleton.dtype)))
        yield


class _Table:
    """Forward of an embedding whose rows lie elsewhere."""

    def __init__(self, lookup: Callable[[np.ndarray], Tensor], dtype: torch.dtype) -> None:
        self._lookup = lookup
        self._dtype = dtype

    def __call__(self, ids: Tensor) -> Tensor:
        rows = self._lookup(ids.flatten().cpu().numpy())
        return rows.to(ids.device, self._dtype).view(*ids.shape, -1)


def _on_disk(
    reader: RowReader, dtype: torch.dtype, counters: StreamCounters
) -> Callable[[np.ndarray], Tensor]:
    def lookup(ids: np.ndarray) -> Tensor:
        before = reader.stats
        rows = torch.from_numpy(reader.gather(ids)).view(dtype)
        counters.table_bytes += reader.stats.bytes_read - before.bytes_read
        counters.table_bytes_from_disk += reader.stats.bytes_from_disk - before.bytes_from_disk
        return rows

    return lookup


def _in_ram(
    reader: RowReader, dtype: torch.dtype, pool: HostPool, counters: StreamCounters
) -> Callable[[np.ndarray], Tensor]:
    memory = pool.take(reader.num_rows * reader.row_bytes).view(reader.num_rows, reader.row_bytes)
    step = max(1, READ_BYTES // reader.row_bytes)
    for begin in range(0, reader.num_rows, step):
        end = min(begin + step, reader.num_rows)
        memory[begin:end] = torch.from_numpy(reader.gather(np.arange(begin, end)))
    counters.table_bytes += reader.stats.bytes_read
    counters.table_bytes_from_disk += reader.stats.bytes_from_disk
    table = memory.view(dtype)
    return lambda ids: table[torch.from_numpy(ids)]


def _parts(
    name: str, layout: ModelLayout, shards: Mapping[str, Path]
) -> tuple[list[RowPart], int, torch.dtype]:
    known = layout.parameters[name]
    meta = torch.empty(known.shape, device="meta")
    placed: list[tuple[int, TensorEntry]] = []
    for piece in known.pieces:
        view = piece.view(meta)
        if view.dim() != 2 or view.shape[1] != known.shape[1] or view.stride() != meta.stride():
            placed = []
            break
        placed.append((int(view.storage_offset()) // known.shape[1], piece.source))
    if known.conversion is not None or not placed:
        raise UsageError(
            f"{name} is a gather table whose rows are not stored one behind the other; "
            "it can be read neither in part nor apart from its layer"
        )
    placed.sort(key=lambda item: item[0])
    sources = [source for _, source in placed]
    dtype = SAFETENSORS_DTYPES[sources[0].dtype]
    row_bytes = known.shape[1] * dtype.itemsize
    parts = [
        RowPart(
            path=shards[source.shard],
            begin=source.begin,
            num_rows=source.num_bytes // row_bytes,
        )
        for source in sources
    ]
    return parts, row_bytes, dtype
