"""What a checkpoint weighs, part by part: the input of the plan. Nothing is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass

from leadline.rig.layout import ModelLayout
from leadline.rig.skeleton import Skeleton
from leadline.rig.units import ALIGNMENT, Unit, build_unit

INDEX_BYTES = 64
"""Sorting a routed row by its expert: eight numbers of 64 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSizes:
    """One decoder layer."""

    layer: int
    num_bytes: int
    """Whole, as it lies in memory."""
    rest_bytes: int
    """Without its routed experts."""
    num_experts: int
    """0: dense."""
    expert_bytes: int
    """One routed expert."""
    bytes_to_read: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """The parts of a model that a plan places."""

    checkpoint_bytes: int
    entry_bytes: int
    """Embeddings and what else stands outside the layers."""
    entry_bytes_to_read: int
    layers: tuple[LayerSizes, ...]
    table_bytes: Mapping[str, int]
    """Gather tables by full name."""
    residual_bytes: int
    """Residual stream of one token between two layers."""
    activation_bytes: int
    """Working memory of one token inside a layer, without Grams: an upper estimate."""
    kv_bytes: int
    """Keys and values of one token over all layers."""

    @property
    def largest_layer(self) -> LayerSizes:
        """The layer that decides what fits."""
        return max(self.layers, key=lambda sizes: sizes.num_bytes)


def measure_sizes(
    skeleton: Skeleton, layout: ModelLayout, checkpoint_bytes: int, tables: frozenset[str]
) -> ModelSizes:
    """Sizes of *skeleton* at its dtype; *tables* (full names) are placed apart."""
    state = skeleton.model.state_dict()
    itemsize = skeleton.dtype.itemsize
    layers = []
    for index in range(skeleton.num_layers):
        names = [n for n in skeleton.layer_state(index) if n not in tables]
        whole = build_unit(layout, names, state, layer=index)
        experts = expert_state(skeleton, index)
        rest = build_unit(layout, [n for n in names if n not in experts], state, layer=index)
        modules = skeleton.experts(index)
        num_experts = max((m.num_experts for m in modules.values()), default=0)
        layers.append(
            LayerSizes(
                layer=index,
                num_bytes=whole.num_bytes,
                rest_bytes=rest.num_bytes,
                num_experts=num_experts,
                expert_bytes=_expert_bytes(whole, experts, num_experts),
                bytes_to_read=whole.bytes_to_read,
            )
        )
    entry = build_unit(layout, skeleton.entry_state(), state, layer=-1)
    return ModelSizes(
        checkpoint_bytes=checkpoint_bytes,
        entry_bytes=entry.num_bytes,
        entry_bytes_to_read=entry.bytes_to_read,
        layers=tuple(layers),
        table_bytes={name: state[name].numel() * itemsize for name in sorted(tables)},
        residual_bytes=skeleton.residual_width() * itemsize,
        activation_bytes=activation_bytes(skeleton),
        kv_bytes=kv_bytes(skeleton),
    )


def expert_state(skeleton: Skeleton, index: int) -> set[str]:
    """Full names of the parameters of the routed experts of layer *index*."""
    prefix = skeleton.layer_name(index)
    return {
        f"{prefix}.{name}.{leaf}"
        for name, module in skeleton.experts(index).items()
        for leaf, _ in module.named_parameters(recurse=False)
    }


def _expert_bytes(whole: Unit, experts: set[str], num_experts: int) -> int:
    if not num_experts:
        return 0
    total = sum(
        -(-tensor.num_bytes // num_experts) + ALIGNMENT
        for tensor in whole.tensors
        if tensor.name in experts
    )
    return -(-total // ALIGNMENT) * ALIGNMENT


def activation_bytes(skeleton: Skeleton) -> int:
    """Working memory of one token inside the layer that needs most.

    Routed experts keep two of these at a time for each of a token's k rows: sorted
    input, first projection, gated half, output; and some 64-bit indices. Dense
    projections keep their outputs, norms and additions six residual streams.
    """
    itemsize = skeleton.dtype.itemsize
    config = skeleton.config
    hidden = config.hidden_size
    most = 0
    for index in range(skeleton.num_layers):
        linears = skeleton.linears(index)
        dense = sum(m.out_features for m in linears.values()) * itemsize
        routed = 0
        for module in skeleton.experts(index).values():
            width = module.down_proj.numel() // module.num_experts // hidden
            first = (2 if module.has_gate else 1) * width
            top_k = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k", 1)
            routed += top_k * (itemsize * max(hidden + first, first + 2 * width) + INDEX_BYTES)
        most = max(most, dense + routed)
    return most + 6 * skeleton.residual_width() * itemsize


def kv_bytes(skeleton: Skeleton) -> int:
    """Keys and values of one token, all layers, as `transformers`' cache holds them."""
    config = skeleton.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_head = 2 * width
    if getattr(config, "qk_nope_head_dim", None) is not None and hasattr(config, "v_head_dim"):
        per_head = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    return int(skeleton.num_layers * heads * per_head * skeleton.dtype.itemsize)
