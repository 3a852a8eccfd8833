"""A small transformer-like stack, clean or with one numerical fault planted in one block.

Each fault is one line that people write: it is right in fp32, or looks right, and loses
what matters in bf16. The faulty part is always `blocks.N.FAULT.part`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 32
HEADS = 2
VOCAB = 61
"""Small and prime, so that no axis but the tokens' is long."""


class Attention(nn.Module):
    """Causal attention over the sequence and over a long memory, without faults."""

    def __init__(self, memory_slots: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.memory = nn.Parameter(torch.randn(2, HEADS, memory_slots, WIDTH // HEADS))
        self.read = MemoryRead()
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*qkv, is_causal=True)
        recalled = self.read(qkv[0], *self.memory)
        return self.out((seen + recalled).transpose(1, 2).reshape(x.shape))


class MemoryRead(nn.Module):
    """softmax(q k) v over all memory slots; the place of the attention faults."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        return self.weights(scores) @ v

    def weights(self, scores: Tensor) -> Tensor:
        return torch.softmax(scores, dim=-1, dtype=torch.float32)


class PlainSoftmax(MemoryRead):
    """Softmax in the dtype that comes, over 4096 keys."""

    def weights(self, scores: Tensor) -> Tensor:
        return torch.softmax(scores, dim=-1)


class OnlineSoftmax(MemoryRead):
    """Online softmax by key blocks, its running denominator in the dtype that comes."""

    block = 16

    def weights(self, scores: Tensor) -> Tensor:
        peak = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - peak)
        denominator = torch.zeros_like(peak)
        for part in weights.split(self.block, dim=-1):
            denominator = denominator + part.sum(-1, keepdim=True)
        return weights / denominator


class Norm(nn.Module):
    """Layer norm over features that carry an offset, with the upcast that it needs."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        mean = wide.mean(-1, keepdim=True)
        variance = (wide - mean).square().mean(-1, keepdim=True)
        return (wide - mean) * torch.rsqrt(variance + 1e-5) * self.weight


class NarrowVariance(Norm):
    """E[x^2] - E[x]^2 in the dtype that comes: the offset cancels all digits."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) * torch.rsqrt(variance.clamp_min(0) + 1e-5) * self.weight


class Pool(nn.Module):
    """Mean over all tokens so far, given back as a gate; the place of the mean's faults."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        counts = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return (wide.cumsum(1) / counts).to(x.dtype)


class RunningMean(Pool):
    """A running sum over tokens in the dtype that comes."""

    def forward(self, x: Tensor) -> Tensor:
        total, means = torch.zeros_like(x[:, 0]), []
        for position in range(x.shape[1]):
            total = total + x[:, position]
            means.append(total / (position + 1))
        return torch.stack(means, dim=1)


class NarrowMean(Pool):
    """One mean over all tokens, taken in the dtype that comes."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True).expand_as(x)


class HalfPool(Pool):
    """`.half()` written in; these values fit it, so both lanes agree on the loss of digits."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.half()).to(x.dtype)


class OverflowingHalfPool(Pool):
    """`.half()` on values beyond 65504."""

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward((x * 1e5).half()) / 1e5).to(x.dtype)


class BFloat16Pool(Pool):
    """`.bfloat16()` written in."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16()).to(x.dtype)


class UnguardedPool(Pool):
    """Autocast switched off around a reduction that is then cast by hand."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            total = x.to(torch.bfloat16).sum(1, keepdim=True)
            return (total.float() / x.shape[1]).to(x.dtype).expand_as(x)


class Gain(nn.Module):
    """A positive factor through an exponential, its largest exponent taken out first."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return torch.exp(wide - wide.amax(-1, keepdim=True)).to(x.dtype)


class OverflowingGain(Gain):
    """exp without taking the maximum out: 29.57 x 3 is 88.7 in fp32 and 89 in bf16."""

    def forward(self, x: Tensor) -> Tensor:
        exponent = (29.57 + 0.001 * torch.tanh(x)) * 3
        return torch.exp(exponent) * 1e-38


class Block(nn.Module):
    """Attention, a gated mean over the past, and a feed-forward, each behind its norm."""

    def __init__(self, memory_slots: int) -> None:
        super().__init__()
        self.attention_norm = Norm()
        self.attention = Attention(memory_slots)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.inner_norm = Norm()
        self.pool = Pool()
        self.gain = Gain()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        nn.init.constant_(self.inner.bias, 30.0)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        inner = self.inner(x)
        x = x + self.inner_norm(inner) * self.gain(inner) + self.pool(inner - 29)
        return x + self.mlp(x)


class Stack(nn.Module):
    """Embedding, blocks, norm and vocabulary head."""

    def __init__(self, *, blocks: int = 3, memory_slots: int = 300) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(memory_slots) for _ in range(blocks))
        self.norm = Norm()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


FAULTS: dict[str, tuple[str, Callable[[], nn.Module], int, int]] = {
    "online-softmax": ("attention.read", OnlineSoftmax, 4096, 8),
    "plain-softmax": ("attention.read", PlainSoftmax, 4096, 8),
    "running-mean": ("pool", RunningMean, 300, 512),
    "narrow-mean": ("pool", NarrowMean, 300, 512),
    "narrow-variance": ("inner_norm", NarrowVariance, 300, 300),
    "overflowing-exponent": ("gain", OverflowingGain, 300, 300),
    "half": ("pool", HalfPool, 300, 300),
    "half-out-of-range": ("pool", OverflowingHalfPool, 300, 300),
    "bfloat16": ("pool", BFloat16Pool, 300, 300),
    "unguarded-reduction": ("pool", UnguardedPool, 300, 300),
}
"""Fault: its place in a block, its module, memory slots and tokens at which it shows."""
