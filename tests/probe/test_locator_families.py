"""Published model families, and our own, are clean: sequences long enough for every rule."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from leadline.models.dualmind import DualMindWorkload
from leadline.probe.locator import locate_divergence

LENGTH = 320
VOCAB = 512
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_GROUPED),
    "qwen3": lambda: transformers.Qwen3Config(**_GROUPED, head_dim=16),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **_GROUPED, head_dim=16, moe_intermediate_size=32, num_experts=16, num_experts_per_tok=4
    ),
    "mixtral": lambda: transformers.MixtralConfig(**_GROUPED, num_local_experts=4),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**_SIZES),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=512,
        n_embd=64,
        n_layer=1,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    ),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def causal_lm(config: Any, attention: str) -> nn.Module:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attention
    )
    return model.train()


def language_loss() -> Callable[[nn.Module], Tensor]:
    tokens = torch.randint(0, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    return lambda model: model(input_ids=tokens, labels=tokens, use_cache=False).loss


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_locator_transformers_family_accuses_nobody(family: str, attention: str) -> None:
    model = causal_lm(FAMILIES[family](), attention)
    report = locate_divergence(model, language_loss(), device_type="cpu")
    assert report.accused == ()
    assert report.modules_checked >= 15


def test_locator_amplified_router_accuses_nobody() -> None:
    model = causal_lm(FAMILIES["qwen3-moe"](), "sdpa")
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(10)
    assert locate_divergence(model, language_loss(), device_type="cpu").accused == ()


class BFloat16Norm(nn.Module):
    """A root-mean-square norm whose mean is taken after a cast by hand."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        size = x.bfloat16().square().mean(-1, keepdim=True)
        return self.norm.weight * (x * torch.rsqrt(size + 1e-6)).to(x.dtype)


def test_locator_fault_inside_a_transformers_model_is_named() -> None:
    model = causal_lm(FAMILIES["llama"](), "sdpa")
    layer = model.get_submodule("model.layers.0")
    layer.post_attention_layernorm = BFloat16Norm(layer.post_attention_layernorm)
    report = locate_divergence(model, language_loss(), device_type="cpu")
    assert [a.module for a in report.accused] == ["model.layers.0.post_attention_layernorm"]


def dual_mind() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    workload = DualMindWorkload.from_spec("tiny", vocab_size=VOCAB, num_layers=1)
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCAB, (1, LENGTH + 1))
    return workload.build(), lambda m: workload.loss(m, tokens[:, :-1], tokens[:, 1:])


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_locator_dual_mind_accuses_nobody(scale: float) -> None:
    model, forward = dual_mind()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(scale)
    assert locate_divergence(model, forward, device_type="cpu").accused == ()


def test_locator_dual_mind_debate_in_bf16_is_named() -> None:
    model, forward = dual_mind()
    gate = model.get_submodule("layers.0.attention.debate")
    clean = gate.forward
    gate.forward = lambda local, global_: clean(local.half(), global_.half())
    report = locate_divergence(model, forward, device_type="cpu")
    assert report.accused[0].module == "layers.0.attention.debate"
