"""How long a tap will take, from measured rates: a pipeline of disk, compute and files.

The disk reads layers in order as far ahead as the ring and the spare slot hold; a layer
computes when it has landed and the one before is done; sealing runs beside them and the
next seal waits for it. Pure arithmetic, so that a plan can be checked without a device.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What a short probe measured on this machine."""

    disk_bytes_s: float
    layer_s_per_token: Sequence[float]
    """Computing one token in each layer, Grams included."""
    seal_bytes_s: float
    """Hashing and writing a layer's Grams."""
    start_s: float
    """Process start, skeleton and first kernels: paid once."""


def wave_seconds(
    rates: Rates,
    *,
    layer_bytes: Sequence[int],
    entry_bytes: int,
    packed_bytes: Sequence[int],
    wave_tokens: Sequence[int],
    ahead_bytes: int,
) -> float:
    """Wall time of all waves; *ahead_bytes*: what can be read before a slot is free."""
    total = rates.start_s
    for tokens in wave_tokens:
        total += _one_wave(
            rates, layer_bytes, entry_bytes, packed_bytes, tokens=tokens, ahead=ahead_bytes
        )
    return total


def _one_wave(
    rates: Rates,
    layer_bytes: Sequence[int],
    entry_bytes: int,
    packed_bytes: Sequence[int],
    *,
    tokens: int,
    ahead: int,
) -> float:
    """Follow one wave layer by layer.

    `disk` is when the disk has read up to the present layer, `computed` when the layer
    before was done, `sealed` when its files were. At most *ahead* bytes of a layer are
    read before the one before it is done and gives its slot up.
    """
    disk = entry_bytes / rates.disk_bytes_s
    computed = sealed = disk
    for layer, size in enumerate(layer_bytes):
        early = min(size, ahead)
        disk += early / rates.disk_bytes_s
        # The rest waits for the slot.
        if size > early:
            disk = max(disk, computed) + (size - early) / rates.disk_bytes_s
        begin = max(disk, computed)
        computed = begin + tokens * rates.layer_s_per_token[layer]
        computed = max(computed, sealed)
        sealed = computed + packed_bytes[layer] / rates.seal_bytes_s
    return sealed


def step_seconds(
    rates: Rates,
    *,
    layer_bytes: Sequence[int],
    kept_layers: frozenset[int],
    entry_bytes: int,
    tokens: int,
    num_steps: int,
    store_bytes: int,
) -> float:
    """Wall time of a step schedule: in each step disk and compute overlap layer by layer."""
    per_step = tokens / max(num_steps, 1)
    streamed = [0 if n in kept_layers else size for n, size in enumerate(layer_bytes)]
    step = sum(
        max(size / rates.disk_bytes_s, per_step * rates.layer_s_per_token[layer])
        for layer, size in enumerate(streamed)
    )
    once = entry_bytes + sum(size for n, size in enumerate(layer_bytes) if n in kept_layers)
    return (
        rates.start_s
        + once / rates.disk_bytes_s
        + num_steps * step
        + store_bytes / rates.seal_bytes_s
    )
