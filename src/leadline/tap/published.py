"""Layer Grams with the names of the weights that they serve, ready for the store."""

import re
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import nn

from leadline.rig.layout import ModelLayout
from leadline.rig.skeleton import Skeleton
from leadline.tap.facts import EXPERT_FIELD, GramUser
from leadline.tap.gram_tap import LayerGrams, expert_widths
from leadline.tap.store import SealedGram

_NUMBER = re.compile(r"\d+")


def sealed_grams(
    grams: LayerGrams, layer: int, skeleton: Skeleton, layout: ModelLayout
) -> tuple[dict[str, SealedGram], dict[str, NDArray[np.int64]]]:
    """Grams and row counts under the names of the store."""
    modules = skeleton.experts(layer)
    sealed: dict[str, SealedGram] = {}
    rows: dict[str, NDArray[np.int64]] = {}
    for name, packed in grams.packed.items():
        module_name, _, leaf = name.rpartition(".")
        module = modules.get(module_name)
        stored = name if module is None else _expert_name(module_name, leaf, modules)
        per_token = 1 if module is None or packed.dim() == 1 else top_k(skeleton)
        if module is None:
            parameters = [f"{user}.weight" for user in grams.users[name]]
        else:
            parameters = [f"{module_name}.{_parameter(module, leaf)}"]
        if module is None and is_shared_elsewhere(name):
            per_token = None
        sealed[stored] = SealedGram(
            packed=packed.numpy(),
            num_features=grams.widths[name],
            users=tuple(_user(f"{skeleton.layer_name(layer)}.{p}", layout) for p in parameters),
            rows_per_token=per_token,
            num_experts=packed.shape[0] if packed.dim() == 2 else None,
        )
        rows[stored] = grams.rows[name].numpy()
    return sealed, rows


def planned_grams(
    skeleton: Skeleton, layer: int, *, experts: bool, linears: bool, gate_up_per_expert: bool
) -> dict[str, tuple[int, int | None]]:
    """Features and experts of each Gram of a layer, by a name: an upper bound of what comes."""
    planned: dict[str, tuple[int, int | None]] = {}
    if experts:
        for name, module in skeleton.experts(layer).items():
            hidden, inner = expert_widths(module, skeleton.config.hidden_size)
            count = int(module.num_experts)
            planned[f"{name}.gate_up"] = (hidden, count if gate_up_per_expert else None)
            planned[f"{name}.down"] = (inner, count)
    if linears:
        for name, linear in skeleton.linears(layer).items():
            planned[name] = (linear.in_features, None)
    return planned


def top_k(skeleton: Skeleton) -> int | None:
    """Experts a token, as the configuration says; None where it does not say."""
    for field in ("num_experts_per_tok", "moe_k", "moe_top_k", "top_k_experts", "moe_topk"):
        value = getattr(skeleton.config, field, None)
        if isinstance(value, int):
            return value
    return None


def is_shared_elsewhere(name: str) -> bool:
    """Whether a linear may see other rows than the layer's tokens (an indexer, a patch)."""
    return "indexer" in name


def _expert_name(module_name: str, leaf: str, modules: Mapping[str, nn.Module]) -> str:
    return leaf if len(modules) == 1 else f"{module_name}/{leaf}"


def _parameter(module: nn.Module, leaf: str) -> str:
    if leaf == "down":
        return "down_proj"
    return "gate_up_proj" if module.has_gate else "up_proj"


def _user(parameter: str, layout: ModelLayout) -> GramUser:
    known = layout.parameters.get(parameter)
    if known is None:
        return GramUser(parameter=parameter, published=())
    sources = known.conversion.sources if known.conversion else [p.source for p in known.pieces]
    return GramUser(parameter=parameter, published=tuple(_templates([s.name for s in sources])))


def _templates(names: Sequence[str]) -> list[str]:
    """*names* with the number that varies replaced by `{expert}`, each once, in order."""
    shapes: dict[str, set[tuple[str, ...]]] = {}
    for name in names:
        shapes.setdefault(_NUMBER.sub("#", name), set()).add(tuple(_NUMBER.findall(name)))
    templates = []
    for shape, numbers in shapes.items():
        columns = list(zip(*numbers, strict=True)) if next(iter(numbers)) else []
        filled = [EXPERT_FIELD if len(set(column)) > 1 else column[0] for column in columns]
        parts = shape.split("#")
        templates.append(
            "".join(part + fill for part, fill in zip(parts, [*filled, ""], strict=True))
        )
    return templates
