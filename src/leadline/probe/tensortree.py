"""Tensors inside whatever a module takes or returns.

Lists, tuples, named tuples, dicts with their subclasses (a transformers ModelOutput
among them) and dataclasses are entered; any other object is a leaf and is passed by
reference. A container that holds no tensor comes back as the very object it was.
"""

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

_MAX_DEPTH = 16
"""Deeper values are leaves, so that a dataclass that contains itself ends."""


def map_tensors(value: Any, change: Callable[[Tensor], Tensor], depth: int = 0) -> Any:
    """Copy *value* with every tensor replaced by `change(tensor)`."""
    if isinstance(value, Tensor):
        return change(value)
    parts = _parts(value) if depth < _MAX_DEPTH else []
    changed = [(key, part, map_tensors(part, change, depth + 1)) for key, part in parts]
    if all(new is old for _, old, new in changed):
        return value
    if isinstance(value, tuple):
        items = [new for _, _, new in changed]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    copied = copy.copy(value)
    for key, _, new in changed:
        if isinstance(copied, (list, dict)):
            copied[key] = new
        else:
            object.__setattr__(copied, key, new)
    return copied


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor of *value*, in the order `map_tensors` meets them."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found


def _parts(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return [
            (field.name, getattr(value, field.name))
            for field in fields(value)
            if hasattr(value, field.name)
        ]
    return []
