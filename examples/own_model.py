"""Bring your own model: everything a workload needs, for a small GRU language model.

    leadline gate run examples/own-model.toml --out runs/own-model

The object named in the configuration (`object = "own_model.py:make"`) is called with the
keys of `[workload.args]` and returns a workload: name, vocab_size, build, loss
and compile. Build in fp32; leadline brings precision, optimiser, data and timing.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SmallGRU(nn.Module):
    """Token ids [B, T] to logits [B, T, vocabulary]."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.recurrence = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at every position."""
        states, _ = self.recurrence(self.embedding(tokens))
        logits: Tensor = self.head(states)
        return logits


@dataclass(frozen=True, kw_only=True)
class GRUWorkload:
    """The model with its loss."""

    vocab_size: int
    width: int
    name: str = "small GRU"

    def build(self) -> nn.Module:
        """A fresh model on torch's default device, random from torch's global generator."""
        return SmallGRU(self.vocab_size, self.width)

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in fp32; the logits may come in bf16."""
        logits = model(inputs)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def compile(self, model: nn.Module) -> None:
        """Called on CUDA only; leave it empty to run eagerly."""
        torch.compiler.reset()
        model.compile(dynamic=False)


def make(vocab_size: int, width: int) -> GRUWorkload:
    """Entry point named in the configuration."""
    return GRUWorkload(vocab_size=vocab_size, width=width)
