"""From published tensors to the parameters that `transformers` holds, byte by byte.

The library's own conversion mapping decides; its converters are run once on tensors
without memory that remember where each element came from (`leadline.rig.traced_tensor`).
What only moves elements becomes pieces that a reader can put straight into place; what
computes with them is left to the converter itself (`Conversion`).
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import dot_natural_key

from leadline.core.errors import IntegrityError, UsageError
from leadline.rig.checkpoint import Checkpoint, TensorEntry
from leadline.rig.fragments import NotRegularError
from leadline.rig.placement import Piece, place, whole_piece
from leadline.rig.published_names import SourceGroup, group_sources
from leadline.rig.traced_tensor import TracedTensor, traced

__all__ = ["Conversion", "ModelLayout", "ParameterLayout", "Piece", "map_checkpoint"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Conversion:
    """Parameters that `transformers` computes from published tensors."""

    sources: tuple[TensorEntry, ...]
    targets: tuple[str, ...]
    """Parameters it makes."""
    _group: SourceGroup = field(repr=False)
    _model: Any = field(repr=False)
    _dtype: torch.dtype

    def apply(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the library's converter on *tensors* by published name; parameters by name."""
        return _convert(
            self._group,
            self._model,
            {source.name: tensors[source.name].to(self._dtype) for source in self.sources},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterLayout:
    """Where the bytes of one parameter or persistent buffer come from."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    """Every element once; none with a conversion."""
    conversion: Conversion | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLayout:
    """A model's parameters and buffers in the order of its state."""

    parameters: Mapping[str, ParameterLayout]
    """Those that have bytes of their own."""
    tied: Mapping[str, str]
    """Names without bytes of their own, and the parameter they share."""
    unmapped: tuple[str, ...]
    """Published tensors that no parameter owns, such as a prediction head's."""


def map_checkpoint(model: nn.Module, checkpoint: Checkpoint) -> ModelLayout:
    """Find the bytes of every parameter and persistent buffer of *model*, built on meta.

    Raises:
        IntegrityError: a parameter has no tensor, two, or tensors of another shape.
        UsageError: `transformers` converts the family in a way that needs the weights.
    """
    state = model.state_dict()
    groups, unmapped = group_sources(model, checkpoint.tensors, state)
    found: dict[str, ParameterLayout] = {}
    for group in groups:
        for parameter in _layouts(group, model, state):
            known = found.setdefault(parameter.name, parameter)
            if known is not parameter:
                raise IntegrityError(
                    f"parameter {parameter.name} is made of {group.entries[0].name} and of another "
                    "tensor, wanted one source; save the model again with save_pretrained"
                )
    tied = _untie(model, found)
    missing = [name for name in state if name not in found and name not in tied]
    if missing:
        raise _missing(checkpoint, missing, len(state) - len(tied), unmapped)
    return ModelLayout(
        parameters=MappingProxyType({name: found[name] for name in state if name in found}),
        tied=MappingProxyType(tied),
        unmapped=tuple(sorted(unmapped, key=dot_natural_key)),
    )


def _layouts(group: SourceGroup, model: Any, state: Mapping[str, Tensor]) -> list[ParameterLayout]:
    """Parameters that *group* becomes."""
    if group.converter is None:
        (entry,) = group.entries
        if entry.shape != tuple(state[group.target].shape):
            raise _wrong_shape(group, group.target, state[group.target].shape, entry.shape)
        return [
            ParameterLayout(
                name=group.target, shape=entry.shape, pieces=(whole_piece(entry),), conversion=None
            )
        ]
    try:
        return _traced_layouts(group, model, state)
    except NotRegularError:
        return _converted_layouts(group, model, state)


def _traced_layouts(
    group: SourceGroup, model: Any, state: Mapping[str, Tensor]
) -> list[ParameterLayout]:
    entries = group.entries
    dtype = state[group.target].dtype
    stand_ins = {e.name: traced(index, e.shape, dtype) for index, e in enumerate(entries)}
    made = _converted(group, model, stand_ins)
    layouts = []
    for name, value in made.items():
        if name not in state:
            continue
        shape = tuple(state[name].shape)
        if tuple(value.shape) != shape:
            raise _wrong_shape(group, name, shape, value.shape)
        if not isinstance(value, TracedTensor):
            raise NotRegularError
        pieces = tuple(place(entries[f.source], f) for f in value.fragments)
        if sum(prod(piece.source.shape) for piece in pieces) != prod(shape):
            raise NotRegularError
        layouts.append(ParameterLayout(name=name, shape=shape, pieces=pieces, conversion=None))
    return layouts


def _converted_layouts(
    group: SourceGroup, model: Any, state: Mapping[str, Tensor]
) -> list[ParameterLayout]:
    """Ask the converter for names and shapes on meta; the work is done when weights come."""
    dtype = state[group.target].dtype
    metas = {e.name: torch.empty(e.shape, dtype=dtype, device="meta") for e in group.entries}
    made = _converted(group, model, metas)
    shapes = {name: tuple(value.shape) for name, value in made.items() if name in state}
    conversion = Conversion(
        sources=group.entries, targets=tuple(shapes), _group=group, _model=model, _dtype=dtype
    )
    for name, shape in shapes.items():
        if shape != tuple(state[name].shape):
            raise _wrong_shape(group, name, state[name].shape, shape)
    return [
        ParameterLayout(name=name, shape=shape, pieces=(), conversion=conversion)
        for name, shape in shapes.items()
    ]


def _converted(group: SourceGroup, model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Run the converter to plan with."""
    try:
        return _convert(group, model, tensors)
    except NotRegularError:
        raise
    except (RuntimeError, ValueError, AttributeError, NotImplementedError, KeyError) as error:
        names = [entry.name for entry in group.entries]
        shapes = sorted({str(list(entry.shape)) for entry in group.entries})
        raise UsageError(
            f"transformers cannot make {group.target} of its {len(names)} tensors in the "
            f"checkpoint ({names[0]} to {names[-1]}, shapes {', '.join(shapes)}): {error}; check "
            "that config.json belongs to these weights"
        ) from error


def _convert(group: SourceGroup, model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    converter = deepcopy(group.converter)
    for pattern, entries in group.sources.items():
        for entry in entries:
            converter.add_tensor(group.target, entry.name, pattern, tensors[entry.name])
    made = converter.convert(group.target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _untie(model: Any, found: dict[str, ParameterLayout]) -> dict[str, str]:
    """Names that share another's bytes, by the name that keeps them.

    The library ties both ways: when only the tied name is in the checkpoint, its bytes
    become the source's.
    """
    tied: dict[str, str] = {}
    for target, source in model.all_tied_weights_keys.items():
        if source not in found and target in found:
            known = found.pop(target)
            found[source] = ParameterLayout(
                name=source, shape=known.shape, pieces=known.pieces, conversion=known.conversion
            )
    for target, source in model.all_tied_weights_keys.items():
        if target not in found and source in found:
            tied[target] = source
    return tied


def _wrong_shape(
    group: SourceGroup, name: str, wanted: Sequence[int], found: Sequence[int]
) -> IntegrityError:
    entries = group.entries
    made_of = (
        f"tensor {entries[0].name}"
        if len(entries) == 1
        else f"{len(entries)} tensors, {entries[0].name} to {entries[-1].name},"
    )
    return IntegrityError(
        f"parameter {name} has shape {list(wanted)} by config.json, but {made_of} in the "
        f"checkpoint comes to {list(found)}; fetch config.json and weights of the same revision"
    )


def _missing(
    checkpoint: Checkpoint, missing: Sequence[str], expected: int, unmapped: Sequence[str]
) -> IntegrityError:
    spare = f"; tensors that belong to none: {_first_of(unmapped)}" if unmapped else ""
    return IntegrityError(
        f"{checkpoint.path} fills {expected - len(missing)} of the {expected} parameters that the "
        f"model expects; without a tensor: {_first_of(missing)}{spare}; fetch the whole "
        "checkpoint, or one whose config.json names its own architecture"
    )


def _first_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
