"""dual-mind: the reference workload, a decoder with two attention paths and a memory.

Each layer looks at the sequence twice in one attention call: half the heads through a
sliding window (the local path), half over the whole past (the global path). Local
head i and global head i then *debate*: a gate computed from how far they disagree
mixes them per token, so that the pair leaves one head's width. Every head also reads
learned key-value slots (the memory). docs/dual-mind.md explains it on one page.

Shapes: B batch, T tokens, C model width, H heads, D head width, A = H * D attention
width, M memory slots, F feed-forward width, V vocabulary, N layers.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from leadline.core.errors import UsageError
from leadline.models.attention import attend, block_mask, dense_mask, dual_path_mask
from leadline.models.cross_entropy import linear_cross_entropy

PARAMETER_LIMIT = 139_700_000
"""The seed's size for this architecture; a larger model is an error, not a warning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DualMindConfig:
    """Sizes of a dual-mind; two models with equal configurations have equal shapes."""

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    """Both paths together; even."""
    head_width: int
    """Width of one head, even; the heads together may be narrower than the model."""
    ff_width: int
    window: int
    """Tokens a local head sees, its own included."""
    memory_slots: int
    max_seq_len: int
    rope_theta: int = 10_000

    def __post_init__(self) -> None:
        """Refuse shapes that cannot be built."""
        if self.num_heads % 2 or self.head_width % 2:
            raise UsageError(
                f"dual-mind needs an even number of heads of even width, and num_heads "
                f"{self.num_heads} with head_width {self.head_width} is not; change them"
            )
        for name, value in asdict(self).items():
            if value < 1:
                raise UsageError(f"dual-mind {name} is {value}; it must be at least 1")

    @property
    def attention_width(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.head_width

    @property
    def num_parameters(self) -> int:
        """Closed form of the trainable parameters (docs/dual-mind.md derives it).

        V*C + C + N * (3*C*A + C*A/2 + 3*C*F + 2*C + 2*M*A + (H/2)*(D + 2))
        """
        c, a, f = self.width, self.attention_width, self.ff_width
        pairs = self.num_heads // 2
        attention = 3 * c * a + c * a // 2 + 2 * self.memory_slots * a
        debate = pairs * (self.head_width + 2)
        return self.vocab_size * c + c + self.num_layers * (attention + debate + 3 * c * f + 2 * c)


PRESETS: Mapping[str, DualMindConfig] = {
    "139.7m": DualMindConfig(
        vocab_size=34_240,
        width=1_024,
        num_layers=8,
        num_heads=6,
        head_width=128,
        ff_width=3_328,
        window=256,
        memory_slots=64,
        max_seq_len=2_048,
    ),
    "tiny": DualMindConfig(
        vocab_size=2_048,
        width=128,
        num_layers=2,
        num_heads=4,
        head_width=32,
        ff_width=320,
        window=32,
        memory_slots=8,
        max_seq_len=1_024,
    ),
}


class DualMind(nn.Module):
    """Token ids [B, T] to final hidden states [B, T, C]; the head is the embedding, tied."""

    def __init__(self, config: DualMindConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.final_norm = nn.RMSNorm(config.width, eps=1e-6)
        cos, sin = rotary_table(config.max_seq_len, config.head_width, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._masks: dict[tuple[int, bool], BlockMask | Tensor] = {}
        self._reset_parameters()

    def forward(self, tokens: Tensor) -> Tensor:
        """Final hidden states of *tokens*, before the head."""
        length = tokens.shape[1]
        if length > self.config.max_seq_len:
            raise UsageError(
                f"a sequence of {length} tokens is longer than dual-mind's max_seq_len of "
                f"{self.config.max_seq_len}; shorten the point's seq_len or raise max_seq_len"
            )
        mask = self._mask(length)
        cos, sin = self.get_buffer("cos")[:length], self.get_buffer("sin")[:length]
        x = in_autocast_dtype(self.embedding(tokens))
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        hidden: Tensor = self.final_norm(x.float())
        return hidden

    def _mask(self, length: int) -> BlockMask | Tensor:
        device = self.embedding.weight.device
        # FlexAttention is worth having compiled and in bf16 only: eager it is unfused, and in
        # true fp32 its products run outside the tensor cores. The twin's fp32 lane thereby
        # checks the kernel against another implementation.
        flex = (
            device.type == "cuda"
            and _is_compiled(self.layers[0])
            and torch.is_autocast_enabled(device.type)
        )
        key = (length, flex)
        if key not in self._masks:
            config = self.config
            rule = dual_path_mask(config.num_heads, config.memory_slots, config.window)
            make = block_mask if flex else dense_mask
            with torch.device(device):
                self._masks[key] = make(
                    rule, config.num_heads, length, config.memory_slots + length
                )
        return self._masks[key]

    def _reset_parameters(self) -> None:
        nn.init.normal_(self.embedding.weight, std=0.02)
        residual_std = 0.02 / (2 * self.config.num_layers) ** 0.5
        for layer in self.layers:
            assert isinstance(layer, Layer)
            nn.init.normal_(layer.attention.out.weight, std=residual_std)
            nn.init.normal_(layer.feed_forward.down.weight, std=residual_std)


class Layer(nn.Module):
    """Pre-norm residual layer: dual-path attention, then a gated feed-forward; norms in fp32."""

    def __init__(self, config: DualMindConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.attention = DualPathAttention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask | Tensor) -> Tensor:
        """Map the residual stream [B, T, C] to the next."""
        x = x + self.attention(self.attention_norm(x.float()), cos, sin, mask)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x.float()))
        return out


class DualPathAttention(nn.Module):
    """Both paths from one fused projection, one attention call, then the debate."""

    def __init__(self, config: DualMindConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.head_width = config.head_width
        self.qkv = nn.Linear(config.width, 3 * config.attention_width, bias=False)
        shape = (config.num_heads, config.memory_slots, config.head_width)
        self.memory_keys = nn.Parameter(torch.empty(shape))
        self.memory_values = nn.Parameter(torch.empty(shape))
        self.debate = DebateGate(config.num_heads // 2, config.head_width)
        self.out = nn.Linear(config.attention_width // 2, config.width, bias=False)
        nn.init.normal_(self.qkv.weight, std=0.02)
        nn.init.normal_(self.memory_keys, std=0.02)
        nn.init.normal_(self.memory_values, std=0.02)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask | Tensor) -> Tensor:
        """Attend and debate; [B, T, C] to [B, T, C]."""
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, self.head_width)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k = torch.cat((self._slots(self.memory_keys, k), k), dim=2)
        v = torch.cat((self._slots(self.memory_values, v), v), dim=2)
        heads = attend(q, k, v, mask)
        local, global_ = heads.chunk(2, dim=1)
        mixed = self.debate(local, global_)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out

    @staticmethod
    def _slots(memory: Tensor, like: Tensor) -> Tensor:
        return memory.to(like.dtype).expand(like.shape[0], -1, -1, -1)


class DebateGate(nn.Module):
    """Mix two opinions per token by how they disagree.

    gate = sigmoid(<direction, local - global> + strength * share + bias), where share is
    |local - global|^2 / (|local|^2 + |global|^2), 0 when the paths agree and 1 when they
    are orthogonal. The reductions run in fp32: they are sums of squares, which bf16
    would cancel.
    """

    def __init__(self, num_pairs: int, head_width: int) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.zeros(num_pairs, head_width))
        self.strength = nn.Parameter(torch.zeros(num_pairs))
        self.bias = nn.Parameter(torch.zeros(num_pairs))

    def forward(self, local: Tensor, global_: Tensor) -> Tensor:
        """Mix local and global, both [B, H/2, T, D], into one of the same shape and dtype."""
        local_f32, global_f32 = local.float(), global_.float()
        difference = local_f32 - global_f32
        size = local_f32.square().sum(-1) + global_f32.square().sum(-1)
        share = difference.square().sum(-1) / (size + 1e-6)
        leaning = (difference * self.direction[:, None, :]).sum(-1)
        logit = leaning + self.strength[:, None] * share + self.bias[:, None]
        gate = torch.sigmoid(logit)[..., None]
        return (global_f32 + gate * difference).to(local.dtype)


class FeedForward(nn.Module):
    """SwiGLU.

    Gate and up are two projections: fused, their backward has to write one concatenated
    gradient of [B, T, 2F], which cost 8 % of a step on an H200.
    """

    def __init__(self, config: DualMindConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.ff_width, bias=False)
        self.up = nn.Linear(config.width, config.ff_width, bias=False)
        self.down = nn.Linear(config.ff_width, config.width, bias=False)
        nn.init.normal_(self.gate.weight, std=0.02)
        nn.init.normal_(self.up.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] to [B, T, C]."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


def rotary_table(max_seq_len: int, head_width: int, theta: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine [max_seq_len, head_width / 2] of rotary embeddings, fp32."""
    frequencies = theta ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [B, H, T, D], halves paired, computed in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def in_autocast_dtype(x: Tensor) -> Tensor:
    """*x* in autocast's dtype where autocast is on, else as it is.

    Autocast alone would leave the residual stream in fp32, twice the bytes in every norm
    and residual addition: 4 % of a step on an H200.
    """
    if torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class DualMindWorkload:
    """dual-mind as a workload."""

    config: DualMindConfig
    name: str = "dual-mind"

    @classmethod
    def from_spec(cls, preset: str = "139.7m", **sizes: int) -> Self:
        """Open a preset, with single sizes changed; the 139.7 M limit holds for all.

        Raises:
            UsageError: unknown preset or size, or more than 139.7 M parameters.
        """
        if preset not in PRESETS:
            raise UsageError(f"dual-mind preset {preset!r} is unknown; known: {', '.join(PRESETS)}")
        config = replace(PRESETS[preset], **sizes)
        if config.num_parameters > PARAMETER_LIMIT:
            raise UsageError(
                f"this dual-mind has {config.num_parameters:,} parameters, over the limit of "
                f"{PARAMETER_LIMIT:,}; make ff_width, width, num_layers or vocab_size smaller"
            )
        return cls(config=config, name=f"dual-mind {config.num_parameters / 1e6:.1f}M")

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.config.vocab_size

    @property
    def max_seq_len(self) -> int:
        """Length of the rotary table."""
        return self.config.max_seq_len

    def build(self) -> nn.Module:
        """Build the model."""
        return DualMind(self.config)

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy through the tied head, in chunks."""
        hidden = in_autocast_dtype(model(inputs).flatten(0, 1))
        embedding = model.get_submodule("embedding")
        return _head_loss(hidden, embedding.weight, targets.flatten())

    def compile(self, model: nn.Module) -> None:
        """Compile one layer for all layers: they share shapes, so compile time is one layer's."""
        torch.compiler.reset()
        for layer in model.get_submodule("layers").children():
            layer.compile(dynamic=False, fullgraph=True)


def _head_loss(hidden: Tensor, head: Any, targets: Tensor) -> Tensor:
    if hidden.is_cuda and not torch.compiler.is_compiling():
        return _compiled_head_loss(hidden, head, targets)
    return linear_cross_entropy(hidden, head, targets)


_compiled_head_loss = torch.compile(linear_cross_entropy, dynamic=False, fullgraph=True)
