"""The tap: what a pass tells, turned into Gram matrices of one layer at a time.

Rows arrive already freed of padding and of tokens that were counted before. Linear
projections that read the very same rows (query, key and value; gate and up) share one
Gram. Accumulators are kept from layer to layer and cleared.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from leadline.core.errors import DataError
from leadline.rig.experts import ExpertRows
from leadline.rig.skeleton import Skeleton
from leadline.tap.gram import GramSum, GroupedGramSum, packed_length

PACKED_AT_ONCE = 16
"""Experts whose triangles are packed on the device at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """What is tapped."""

    experts: bool
    linears: bool
    gate_up_per_expert: bool

    @classmethod
    def from_names(cls, targets: str, gate_up_gram: str) -> "Targets":
        """`experts`, `linear` or `all`; `pooled` or `expert`."""
        return cls(
            experts=targets in ("experts", "all"),
            linears=targets in ("linear", "all"),
            gate_up_per_expert=gate_up_gram == "expert",
        )


@dataclass(kw_only=True, slots=True)
class LayerGrams:
    """Grams of one layer on the host: raw sums, packed upper triangles."""

    packed: dict[str, Tensor]
    """float32 [K (K + 1) / 2], or [experts, K (K + 1) / 2]."""
    widths: dict[str, int]
    """K of each."""
    rows: dict[str, Tensor]
    """int64 [] or [experts]."""
    users: dict[str, list[str]]
    """Module names inside the layer that read each Gram's rows."""


@dataclass(kw_only=True, slots=True)
class _Experts:
    """Accumulators of one experts module; the grouped ones hold the present group."""

    pooled: GramSum | None
    gate_up: GroupedGramSum | None
    down: GroupedGramSum


class GramTap:
    """Accumulates one layer after another; `take_layer` gives it out and clears."""

    def __init__(
        self,
        skeleton: Skeleton,
        targets: Targets,
        *,
        device: torch.device,
        groups: Mapping[int, tuple[range, ...]],
        carry: bool,
        staging: Tensor | None = None,
    ) -> None:
        """*carry*: see `GramSum`. *staging*: float32 on the host, for one layer's packed Grams.

        What `take_layer` gives lies in *staging* until the next layer's first stage ends.
        """
        self._carry = carry
        self._staging = staging
        self._staged = 0
        self._skeleton = skeleton
        self._targets = targets
        self._device = device
        self._groups = groups
        self._singles: dict[tuple[str, int], GramSum] = {}
        self._grouped: dict[tuple[str, int, int], GroupedGramSum] = {}
        self._layer = -1
        self._experts: dict[str, _Experts] = {}
        self._linears: dict[str, GramSum] = {}
        self._leaders: dict[str, str] = {}
        self._latest: tuple[str, Tensor] | None = None
        self._stage = 0
        self._out = _empty()

    def begin(self, layer: int, stage: int) -> None:
        """Before the first chunk crosses a stage of *layer*."""
        self._layer, self._stage = layer, stage
        if stage == 0:
            self._linears, self._leaders, self._out = {}, {}, _empty()
            self._experts = {}
            self._staged = 0
        group = self._groups[layer][stage]
        if self._targets.experts:
            for name, module in self._skeleton.experts(layer).items():
                self._experts[name] = self._open(name, module, len(group), stage)

    def rows_of(self, module: str) -> ExpertRows | None:
        """Listener of an experts module of the present layer."""
        return _Listener(self._experts, module) if module in self._experts else None

    def linear(self, module: str, rows: Tensor, source: Tensor) -> None:
        """Input of a linear projection: [N, K], counted rows of *source*."""
        leader = self._leaders.get(module)
        if leader is None:
            leader = self._leaders[module] = self._leader(module, source)
        if leader != module:
            return
        # Held until the next one comes: a freed input's address may be another's soon.
        self._latest = (module, source)
        if module not in self._linears:
            self._linears[module] = self._single(module, rows.shape[-1])
        self._linears[module].add(rows)

    def _leader(self, module: str, source: Tensor) -> str:
        """Projection that has just read the same tensor, else *module* itself."""
        if self._latest is None:
            return module
        leader, latest = self._latest
        same = latest.data_ptr() == source.data_ptr() and latest.shape == source.shape
        return leader if same else module

    def end_chunk(self) -> None:
        """A chunk has left the layer; its tensors may go."""
        self._latest = None

    def end_stage(self) -> None:
        """Every chunk has crossed the stage: bring the group's Grams to the host."""
        for name, sums in self._experts.items():
            self._collect(f"{name}.down", sums.down)
            if sums.gate_up is not None:
                self._collect(f"{name}.gate_up", sums.gate_up)
            elif sums.pooled is not None and self._stage == 0:
                self._collect_single(f"{name}.gate_up", sums.pooled)

    def take_layer(self) -> LayerGrams:
        """Everything of the present layer, on the host; accumulators are cleared."""
        for name, single in self._linears.items():
            self._collect_single(name, single)
            self._out.users[name] = [m for m, leader in self._leaders.items() if leader == name]
        out, self._out = self._out, _empty()
        return out

    @property
    def num_bytes(self) -> int:
        """Memory of all accumulators."""
        single = sum(one.num_bytes for one in self._singles.values())
        return single + sum(one.num_bytes for one in self._grouped.values())

    def _open(self, name: str, module: torch.nn.Module, experts: int, stage: int) -> _Experts:
        hidden, inner = expert_widths(module, self._skeleton.config.hidden_size)
        pooled = None
        if not self._targets.gate_up_per_expert:
            kept = self._experts.get(name)
            pooled = kept.pooled if kept and stage else self._single(f"{name}.gate_up", hidden)
        return _Experts(
            pooled=pooled,
            gate_up=self._many(f"{name}.gate_up", experts, hidden)
            if self._targets.gate_up_per_expert
            else None,
            down=self._many(f"{name}.down", experts, inner),
        )

    def _single(self, name: str, width: int) -> GramSum:
        if (name, width) not in self._singles:
            self._singles[name, width] = GramSum(width, device=self._device, carry=self._carry)
        found = self._singles[name, width]
        found.clear()
        return found

    def _many(self, name: str, experts: int, width: int) -> GroupedGramSum:
        key = (name, experts, width)
        if key not in self._grouped:
            self._grouped[key] = GroupedGramSum(
                experts, width, device=self._device, carry=self._carry
            )
        found = self._grouped[key]
        found.clear()
        return found

    def _collect(self, name: str, sums: GroupedGramSum) -> None:
        """Copy the present group's Grams and counts into the layer's."""
        groups = self._groups[self._layer]
        present, total = groups[self._stage], groups[-1].stop
        if name not in self._out.packed:
            length = packed_length(sums.num_features)
            self._out.packed[name] = self._host(total * length).view(total, length)
            self._out.rows[name] = torch.zeros(total, dtype=torch.int64)
            self._out.widths[name] = sums.num_features
            self._out.users[name] = [name]
        packed, rows = self._out.packed[name], self._out.rows[name]
        for first in range(0, len(present), PACKED_AT_ONCE):
            some = range(first, min(first + PACKED_AT_ONCE, len(present)))
            target = packed[present.start + some.start : present.start + some.stop]
            target.copy_(sums.packed(groups=some))
        rows[present.start : present.stop] = sums.counts.cpu()

    def _collect_single(self, name: str, sums: GramSum) -> None:
        packed = self._host(packed_length(sums.num_features))
        self._out.packed[name] = packed.copy_(sums.packed())
        self._out.rows[name] = torch.tensor(int(sums.rows), dtype=torch.int64)
        self._out.widths[name] = sums.num_features
        self._out.users.setdefault(name, [name])

    def _host(self, numbers: int) -> Tensor:
        if self._staging is None:
            return torch.empty(numbers, dtype=torch.float32)
        begin, self._staged = self._staged, self._staged + numbers
        return self._staging[begin : self._staged]


class _Listener:
    """Hands rows of one experts module to the sums of the group that is present.

    A call that is paused between groups keeps its listener, so the sums are looked up
    anew at every call.
    """

    def __init__(self, experts: Mapping[str, _Experts], module: str) -> None:
        self._experts = experts
        self._module = module

    @property
    def _sums(self) -> _Experts:
        return self._experts[self._module]

    def experts_input(self, rows: Tensor) -> None:
        """Pool the input of all experts."""
        if self._sums.pooled is not None:
            self._sums.pooled.add(rows)

    def gate_up_rows(self, rows: Tensor, offsets: Tensor) -> None:
        """Each expert's own rows."""
        if self._sums.gate_up is not None:
            self._sums.gate_up.add(rows, offsets)

    def down_rows(self, rows: Tensor, offsets: Tensor) -> None:
        """Each expert's gated activations."""
        self._sums.down.add(rows, offsets)


def expert_widths(module: torch.nn.Module, hidden: int) -> tuple[int, int]:
    """Width of the input of the first and of the down projection of routed experts."""
    down = module.get_parameter("down_proj")
    if down.dim() != 3:
        raise DataError(f"down_proj of the experts has {down.dim()} axes, 3 wanted")
    inner = down.shape[1] if module.is_transposed else down.shape[2]
    return hidden, int(inner)


def _empty() -> LayerGrams:
    return LayerGrams(packed={}, widths={}, rows={}, users={})
