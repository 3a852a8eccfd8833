"""Which published tensors make which parameter, as `transformers` itself would have it.

The mapping is replayed with the library's own patterns (its conversion mapping, 5.17 and
later): each published name is renamed, and names that meet at one parameter are collected
in natural order, so that expert 10 follows expert 9.
"""

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from leadline.core.errors import IntegrityError
from leadline.rig.checkpoint import TensorEntry

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SourceGroup:
    """Published tensors that `transformers` turns into one or more parameters together."""

    target: str
    """First parameter they become."""
    converter: Any
    """Its own copy of the library's converter; None: the tensor is the parameter."""
    sources: dict[str, list[TensorEntry]] = field(default_factory=dict)
    """By source pattern of the converter."""

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """All sources in order."""
        return tuple(entry for entries in self.sources.values() for entry in entries)


def group_sources(
    model: Any, tensors: Mapping[str, TensorEntry], state: Mapping[str, Tensor]
) -> tuple[list[SourceGroup], list[str]]:
    """Groups by parameter, and the names that no parameter of *state* owns.

    Raises:
        IntegrityError: two published tensors claim one parameter, or numbered ones skip.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    prefix = model.base_model_prefix
    groups: dict[str, SourceGroup] = {}
    unmapped: list[str] = []
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(
                name, [], [], base_model_prefix=prefix, meta_state_dict=state
            )
        if target not in state:
            unmapped.append(name)
            continue
        group = groups.get(target)
        if group is None:
            converter = None if pattern is None else deepcopy(by_pattern[pattern])
            group = groups[target] = SourceGroup(target=target, converter=converter)
        elif pattern is None or group.converter is None:
            raise IntegrityError(
                f"tensors {group.entries[0].name} and {name} both claim parameter {target}, "
                "wanted one of them; the checkpoint holds two forms of the same weight: save it "
                "again with save_pretrained"
            )
        group.sources.setdefault(pattern or name, []).append(tensors[name])
    for group in groups.values():
        _refuse_skipped_numbers(group)
    return list(groups.values()), unmapped


def _refuse_skipped_numbers(group: SourceGroup) -> None:
    """Experts of one parameter must be numbered 0, 1, 2 and so on, alike for each pattern."""
    counts = {pattern: len(entries) for pattern, entries in group.sources.items()}
    expected = max(counts.values())
    if expected == 1:
        return
    for entries in group.sources.values():
        names = [entry.name for entry in entries]
        first = _first_difference(names, expected)
        if first is not None:
            raise IntegrityError(
                f"parameter {group.target} is made of numbered tensors: expected {expected} like "
                f"{names[0]}, found {len(names)}, first difference {first}; the checkpoint lacks "
                "a tensor or has it under another name"
            )


def _first_difference(names: Sequence[str], expected: int) -> str | None:
    """The first of *expected* numbered names that is not as it should be; None when all are."""
    shape = _NUMBER.split(names[0])
    numbers = []
    for name in names:
        if _NUMBER.split(name) != shape:
            return name
        numbers.append(_NUMBER.findall(name))
    columns = list(zip(*numbers, strict=True))
    varying = [column for column, found in enumerate(columns) if len(set(found)) > 1]
    if len(varying) > 1:
        return names[-1]
    if not varying:  # one name where another pattern has several
        return f"a second tensor like {names[0]}"
    column = varying[0]
    found = {int(row[column]) for row in numbers}
    missing = next((number for number in range(expected) if number not in found), None)
    if missing is None:
        return None
    filled = [*numbers[0]]
    filled[column] = str(missing)
    return "".join(a + b for a, b in zip(shape, [*filled, ""], strict=True))
