"""The yardstick of `train_throughput.py`: a plain Llama-shaped decoder, written to be fast.

Pre-norm, fused QKV, rotary, causal SDPA (torch picks the kernel), SwiGLU, tied head,
cross-entropy in fp32, the whole model and loss compiled as one graph. Same depth, width
and number of parameters (to 0.01 %) as dual-mind's 139.7 M preset, with as many heads
as its width holds.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leadline.models.dualmind import rotary_table, rotate


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainConfig:
    """Sizes; the default matches dual-mind 139.7 M."""

    vocab_size: int = 32_960
    width: int = 1_024
    num_layers: int = 8
    num_heads: int = 8
    ff_width: int = 2_944
    max_seq_len: int = 2_048


class PlainLayer(nn.Module):
    """Attention and SwiGLU, pre-norm."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.ff_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.gate = nn.Linear(config.width, config.ff_width, bias=False)
        self.up = nn.Linear(config.width, config.ff_width, bias=False)
        self.down = nn.Linear(config.ff_width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, C] to [B, T, C]."""
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x))
        q, k, v = qkv.view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(batch, length, width))
        hidden = self.ff_norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return out


class PlainLlama(nn.Module):
    """Ids and targets to the mean loss."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(PlainLayer(config) for _ in range(config.num_layers))
        self.final_norm = nn.RMSNorm(config.width, eps=1e-6)
        cos, sin = rotary_table(config.max_seq_len, config.width // config.num_heads, 10_000)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy, fp32."""
        length = inputs.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embedding(inputs)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = F.linear(self.final_norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainWorkload:
    """The yardstick as a workload."""

    config: PlainConfig = PlainConfig()
    name: str = "plain Llama shape"

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.config.vocab_size

    def build(self) -> nn.Module:
        """Build it."""
        return PlainLlama(self.config)

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """The model's own loss."""
        loss: Tensor = model(inputs, targets)
        return loss

    def compile(self, model: nn.Module) -> None:
        """One graph, static shapes."""
        torch.compiler.reset()
        model.compile(dynamic=False, fullgraph=True)


def workload() -> PlainWorkload:
    """Entry point for `object = "plain_llama.py:workload"`."""
    return PlainWorkload()
