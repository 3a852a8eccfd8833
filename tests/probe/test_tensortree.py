from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from leadline.probe.tensortree import map_tensors, tensors_in

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Frozen:
    value: Tensor
    name: str = "x"
    derived: int = field(default=3, init=False)


def one() -> Tensor:
    return torch.ones(2)


TREES: list[Any] = [
    [one(), 1],
    (one(), None),
    Pair(one(), "a"),
    {"a": one(), 2: [one()]},
    OrderedDict(a=one()),
    Frozen(one()),
    BaseModelOutput(last_hidden_state=one(), hidden_states=(one(), one())),
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: type(tree).__name__)
def test_map_tensors_changes_every_tensor_and_keeps_the_type(tree: Any) -> None:
    doubled = map_tensors(tree, lambda tensor: tensor * 2)
    assert type(doubled) is type(tree)
    assert all(torch.equal(tensor, one() * 2) for tensor in tensors_in(doubled))
    assert len(tensors_in(doubled)) == len(tensors_in(tree)) > 0


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: type(tree).__name__)
def test_map_tensors_leaves_the_original_alone(tree: Any) -> None:
    map_tensors(tree, lambda tensor: tensor * 2)
    assert all(torch.equal(tensor, one()) for tensor in tensors_in(tree))


def test_map_tensors_model_output_keeps_attributes_in_step() -> None:
    output = map_tensors(BaseModelOutput(last_hidden_state=one()), lambda tensor: tensor * 2)
    assert output.last_hidden_state is output["last_hidden_state"]


def test_map_tensors_without_tensors_gives_the_same_object() -> None:
    tree = {"a": [1, (2, "b")], "c": object()}
    assert map_tensors(tree, torch.neg) is tree


def test_map_tensors_value_that_contains_itself_ends() -> None:
    loop: list[Any] = [one()]
    loop.append(loop)
    assert len(tensors_in(loop)) > 0
