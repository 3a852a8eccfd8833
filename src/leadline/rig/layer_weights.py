"""Weights by layer and stage for one pass over the layers, as `LayerPass` asks for them."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from leadline.rig.host_pool import HostPool
from leadline.rig.layout import ModelLayout
from leadline.rig.sizes import expert_state
from leadline.rig.skeleton import Skeleton
from leadline.rig.units import Unit, build_unit
from leadline.rig.weights import (
    StreamCounters,
    StreamShape,
    Turn,
    WeightStream,
    install,
    uninstall,
)

MAIN_POOL = "main"
REST_POOL = "rest"
"""Slots of layers without their experts, where layers are cut."""


class UnitBook:
    """Units of every layer, built once: whole, or without experts and then by groups."""

    def __init__(
        self,
        skeleton: Skeleton,
        layout: ModelLayout,
        *,
        experts_per_group: int,
        placed_apart: frozenset[str],
    ) -> None:
        """*placed_apart*: full names of tables that do not come with their layer."""
        self._state = dict(skeleton.model.state_dict())
        self._skeleton = skeleton
        self._layout = layout
        self._apart = placed_apart
        table = embedding_name(skeleton)
        others = [name for name in skeleton.entry_state() if name != table]
        self.embedding = build_unit(layout, [table], self._state, layer=-1)
        """Goes once every token is embedded."""
        self.entry = build_unit(layout, others, self._state, layer=-1)
        """Small things outside the layers: they stay."""
        self._units: dict[int, list[Unit]] = {}
        self._groups: dict[int, tuple[range, ...]] = {}
        for layer in range(skeleton.num_layers):
            self._units[layer], self._groups[layer] = self._cut(layer, experts_per_group)

    def units(self, layer: int) -> Sequence[Unit]:
        """Units of *layer* in the order in which they are needed."""
        return self._units[layer]

    def groups(self, layer: int) -> tuple[range, ...]:
        """Experts of each stage of *layer*."""
        return self._groups[layer]

    @property
    def all_groups(self) -> Mapping[int, tuple[range, ...]]:
        """Experts of each stage, by layer."""
        return self._groups

    def memoryless(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The tensors on meta that stand where no weight is."""
        return {name: self._state[name] for name in names}

    def _cut(self, layer: int, per_group: int) -> tuple[list[Unit], tuple[range, ...]]:
        names = [n for n in self._skeleton.layer_state(layer) if n not in self._apart]
        modules = self._skeleton.experts(layer).values()
        count = max((int(module.num_experts) for module in modules), default=0)
        build = self._build
        if not count:
            return [build(layer, names, None)], (range(0),)
        if not per_group or per_group >= count:
            return [build(layer, names, None)], (range(count),)
        experts = expert_state(self._skeleton, layer)
        rest = build(layer, [n for n in names if n not in experts], None)
        routed = [n for n in names if n in experts]
        groups = tuple(range(a, min(a + per_group, count)) for a in range(0, count, per_group))
        return [rest, *(build(layer, routed, group) for group in groups)], groups

    def _build(self, layer: int, names: Sequence[str], experts: range | None) -> Unit:
        return build_unit(self._layout, names, self._state, layer=layer, experts=experts)


def embedding_name(skeleton: Skeleton) -> str:
    """Full name of the token embedding."""
    table = skeleton.body.get_input_embeddings()  # type: ignore[operator]
    found = next(name for name, module in skeleton.body.named_modules() if module is table)
    return ".".join(part for part in (skeleton.body_name, found, "weight") if part)


@dataclass(kw_only=True, slots=True)
class Tiers:
    """Layers that later passes do not read again; units by (layer, place)."""

    on_device: frozenset[int] = frozenset()
    in_pool: frozenset[int] = frozenset()
    kept: dict[tuple[int, int], Mapping[str, Tensor]] = field(default_factory=dict)
    """Units that an earlier pass left on the device."""
    images: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Bytes of units that an earlier pass left in the pool."""


class StreamedWeights:
    """One pass's weights, streamed in the order of *first_layer* and on."""

    def __init__(
        self,
        book: UnitBook,
        skeleton: Skeleton,
        *,
        first_layer: int,
        with_entry: bool,
        shards: Mapping[str, Path],
        ring: Tensor,
        pools: Mapping[str, Sequence[Tensor]],
        shape: StreamShape,
        device: torch.device,
        counters: StreamCounters,
        inspect: Callable[[Unit, Mapping[str, Tensor]], None] | None,
        tiers: Tiers | None = None,
        pool: HostPool | None = None,
    ) -> None:
        """*tiers* and the *pool* their images come from: only where passes follow each other."""
        self._tiers = tiers or Tiers()
        self._host_pool = pool
        self._keys: dict[int, tuple[int, int]] = {}
        self._book = book
        self._model = skeleton.model
        self._counters = counters
        self._entered = False
        self._numbers: dict[tuple[int, int], list[int]] = {}
        turns: list[Turn] = []
        fixed = [((-1, 0), book.entry)]
        if with_entry:
            fixed.append(((-1, 1), book.embedding))
        for key, unit in fixed:
            self._keys[len(turns)] = key
            turns.append(Turn(unit=unit, pool=None))
        for layer in range(first_layer, skeleton.num_layers):
            for place, unit in enumerate(book.units(layer)):
                # A layer cut by experts comes as rest and first group, then group by group.
                self._numbers.setdefault((layer, max(0, place - 1)), []).append(len(turns))
                self._keys[len(turns)] = (layer, place)
                turns.append(self._turn(unit, (layer, place)))
        self._units = [turn.unit for turn in turns]
        # What an earlier pass has left on the device takes no turn.
        streamed = [n for n in range(len(turns)) if self._keys[n] not in self._tiers.kept]
        self._place = {number: place for place, number in enumerate(streamed)}
        self._stream = WeightStream(
            [turns[number] for number in streamed],
            shards=shards,
            ring=ring,
            pools=pools,
            shape=shape,
            device=device,
            counters=counters,
            inspect=inspect,
        )

    def acquire_entry(self) -> None:
        """Wait for the embedding."""
        self._take(1)

    def release_entry(self) -> None:
        """The embedding goes; it is not needed again in this pass."""
        self._give(1)

    def acquire(self, layer: int, stage: int) -> None:
        """Wait for the weights of a stage and put them into the model."""
        if not self._entered:
            self._take(0)
            self._entered = True
        for number in self._numbers[layer, stage]:
            self._take(number)

    def release(self, layer: int, stage: int) -> None:
        """Take the weights of a stage out of the model; the rest of a layer stays to its end."""
        numbers = self._numbers[layer, stage]
        last = stage == len(self._book.groups(layer)) - 1
        if len(self._book.groups(layer)) > 1:
            numbers = [n for n in numbers if self._units[n].experts is not None]
            if last:
                numbers = [self._numbers[layer, 0][0], *numbers]
        for number in numbers:
            self._give(number)

    def groups(self, layer: int) -> tuple[range, ...]:
        """Experts of each stage of *layer*."""
        return self._book.groups(layer)

    def close(self) -> None:
        """Stop reading."""
        self._stream.close()

    def _turn(self, unit: Unit, key: tuple[int, int]) -> Turn:
        layer = key[0]
        if layer in self._tiers.on_device:
            return Turn(unit=unit, pool=None)
        apart = unit.experts is None and len(self._book.groups(layer)) > 1
        return Turn(
            unit=unit,
            pool=REST_POOL if apart else MAIN_POOL,
            image=self._tiers.images.get(key),
        )

    def _take(self, number: int) -> None:
        start = time.perf_counter()
        key = self._keys[number]
        if key in self._tiers.kept:
            install(self._model, self._tiers.kept[key])
            return
        tensors = self._stream.acquire(self._place[number])
        install(self._model, tensors)
        if self._stays(key):
            self._tiers.kept[key] = tensors
        elif key[0] in self._tiers.in_pool and key not in self._tiers.images:
            self._keep_image(key, self._place[number])
        self._counters.waited_s += time.perf_counter() - start

    def _stays(self, key: tuple[int, int]) -> bool:
        """Whether later passes find the unit on the device."""
        return self._host_pool is not None and (key[0] == -1 or key[0] in self._tiers.on_device)

    def _keep_image(self, key: tuple[int, int], place: int) -> None:
        assert self._host_pool is not None
        buffer = self._stream.buffer(place)
        image = self._host_pool.take(buffer.numel())
        image.copy_(buffer)
        self._tiers.images[key] = image

    def _give(self, number: int) -> None:
        names = [tensor.name for tensor in self._units[number].tensors]
        uninstall(self._model, names, self._book.memoryless(names))
        key = self._keys[number]
        if key not in self._tiers.kept:
            self._stream.release(self._place[number])
