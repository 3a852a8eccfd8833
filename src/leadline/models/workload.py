"""What a probe can train: the protocol, and the two sizes of a built model.

A workload knows how to build one model in fp32, how to compute its loss on a batch
and how it likes to be compiled. It knows nothing of optimisers, precision, data
files or timing; those belong to the probe, so that every model is judged alike.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class Workload(Protocol):
    """A model under probe. `examples/own_model.py` is a complete one in thirty lines."""

    @property
    def name(self) -> str:
        """Shown in reports."""

    @property
    def vocab_size(self) -> int:
        """Ids in a batch are below this; the data's vocabulary is checked against it."""

    def build(self) -> nn.Module:
        """Return a freshly initialised fp32 model on torch's default device.

        Randomness comes from torch's global generator, which the caller seeds, so
        that two calls under one seed give equal weights.
        """

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of *targets* given *inputs*, both int64 [B, L]; fp32, 0-d."""

    def compile(self, model: nn.Module) -> None:
        """Compile *model* in place for CUDA; shapes are static within one process."""


def num_parameters(model: nn.Module) -> int:
    """Trainable parameters; a tensor shared by two modules counts once."""
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of the trainable parameters at the dtype they are held in."""
    return sum(
        weight.numel() * weight.element_size()
        for weight in model.parameters()
        if weight.requires_grad
    )


def compile_whole(model: nn.Module) -> None:
    """Compile the model's forward as one graph with static shapes."""
    torch.compiler.reset()
    model.compile(dynamic=False)
