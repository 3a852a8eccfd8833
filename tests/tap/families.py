"""Tiny random checkpoints of each family the tap is held to, saved as they are published.

Hidden size 64, two to four layers, eight experts with two a token, expert width 32,
vocabulary 256. Where a family has them: dense first layers, shared experts, linear
attention, sliding windows, low-rank projections, an n-gram table, biased and interleaved
experts. Weights are scaled so that activations keep their size and every expert gets
tokens; nothing is left at a neutral initial value (norms, biases, convolutions).
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

HIDDEN = 64
NUM_EXPERTS = 8
TOP_K = 2
EXPERT_WIDTH = 32
VOCAB = 256
END_OF_TEXT = 255

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_experts_per_tok": TOP_K,
    "bos_token_id": None,
    "eos_token_id": END_OF_TEXT,
    "pad_token_id": None,
}
_LINEAR_ATTENTION = {
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": EXPERT_WIDTH,
    "shared_expert_intermediate_size": 24,
    "num_experts": NUM_EXPERTS,
}

FAMILIES = MappingProxyType(
    {
        "qwen3_moe": {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "intermediate_size": 48,
            "mlp_only_layers": [1],
            "moe_intermediate_size": EXPERT_WIDTH,
            "num_experts": NUM_EXPERTS,
            "norm_topk_prob": True,
        },
        "mixtral": {
            "num_hidden_layers": 2,
            "intermediate_size": EXPERT_WIDTH,
            "num_local_experts": NUM_EXPERTS,
        },
        "deepseek_v3": {
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "intermediate_size": 48,
            "moe_intermediate_size": EXPERT_WIDTH,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "n_routed_experts": NUM_EXPERTS,
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
        },
        "gpt_oss": {
            "num_hidden_layers": 2,
            "head_dim": 16,
            "intermediate_size": EXPERT_WIDTH,
            "num_local_experts": NUM_EXPERTS,
            "sliding_window": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
        "qwen4_exp": {
            "num_hidden_layers": 4,
            "layer_types": [
                "linear_attention",
                "full_attention",
                "linear_attention",
                "full_attention",
            ],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
            "hc_count": 2,
            "hc_lowrank": 12,
            "ple_layer_ids": [1, 3],
            "ple_embed_dim": 24,
            "heads_per_ngram": 2,
            "ngram_size": 3,
            "ngram_vocab_size_base": 250,
            "make_ngram_vocab_size_divisible_by": 16,
            "split_ngram_parts": 4,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
            **_LINEAR_ATTENTION,
        },
        "qwen3_next": {
            "num_hidden_layers": 4,
            "layer_types": [
                "linear_attention",
                "full_attention",
                "linear_attention",
                "full_attention",
            ],
            "intermediate_size": 48,
            "mlp_only_layers": [0],
            **_LINEAR_ATTENTION,
        },
        "glm4_moe": {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "intermediate_size": 48,
            "moe_intermediate_size": EXPERT_WIDTH,
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
            "n_routed_experts": NUM_EXPERTS,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
        "olmoe": {
            "num_hidden_layers": 2,
            "intermediate_size": EXPERT_WIDTH,
            "num_experts": NUM_EXPERTS,
            "clip_qkv": 2.0,
        },
        "granitemoe": {
            "num_hidden_layers": 2,
            "intermediate_size": EXPERT_WIDTH,
            "num_local_experts": NUM_EXPERTS,
            "embedding_multiplier": 1.5,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.3,
        },
        "llama": {"num_hidden_layers": 2, "intermediate_size": 96},
        "qwen2_moe": {
            "num_hidden_layers": 2,
            "intermediate_size": 48,
            "moe_intermediate_size": EXPERT_WIDTH,
            "shared_expert_intermediate_size": EXPERT_WIDTH,
            "num_experts": NUM_EXPERTS,
        },
    }
)
"""Fields of each family's configuration beside the common shape."""

TEN_FAMILIES = tuple(name for name in FAMILIES if name != "qwen2_moe")
"""Those that the Grams of a tap are held to the reference for; `qwen2_moe` is the toy."""

_MODEL_TYPES = {"qwen4_exp": "qwen4_exp_text"}


def build_checkpoint(
    family: str,
    path: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    shards: int = 3,
    tied: bool = False,
    **config: Any,
) -> Path:
    """Save a random model of *family* in *shards* files at *path*, with `config.json`.

    *config* overrides fields of the family's configuration. Word "t17" of the tokenizer
    saved beside it is token 17.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    fields = {**_SHAPE, **FAMILIES[family], "tie_word_embeddings": tied, **config}
    settings = AutoConfig.for_model(_MODEL_TYPES.get(family, family), **fields)
    model = AutoModelForCausalLM.from_config(settings, dtype=dtype).eval()
    enliven(model, seed=seed)
    save_in_shards(model, path, shards)
    write_tokenizer(path, settings.vocab_size)
    return path


def save_in_shards(model: Any, path: Path, shards: int) -> None:
    """Save *model* at *path* in exactly *shards* files."""
    num_bytes = sum(value.nbytes for value in model.state_dict().values())
    for percent in (100, 105, 110, 120, 130, 150, 90, 80):
        for stale in path.glob("model*.safetensors*"):
            stale.unlink()
        limit = num_bytes + 1 if shards == 1 else num_bytes * percent // (100 * shards)
        model.save_pretrained(path, max_shard_size=limit)
        if len(list(path.glob("*.safetensors"))) == shards:
            return
    raise AssertionError(f"no shard size cuts {num_bytes} bytes into {shards} files")


@torch.no_grad()
def enliven(model: nn.Module, *, seed: int) -> None:
    """Give every parameter and learned buffer a random value that keeps activations lively."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            spread, centre = _spread(module, name, parameter)
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * spread + centre)
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("bias"):  # what a router adds before it chooses
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.02)


def _spread(module: nn.Module, name: str, parameter: Tensor) -> tuple[float, Tensor | float]:
    """Standard deviation and mean of a parameter's random value."""
    kind = type(module).__name__
    if isinstance(module, nn.Embedding):
        return 1.0, 0.0
    if name.endswith("bias") or name == "sinks":
        return (0.1, parameter.float()) if name == "dt_bias" else (0.1, 0.0)
    if name == "A_log":  # drawn at random by the family itself
        return 0.1, torch.linspace(0.5, 8.0, parameter.numel()).log()
    if parameter.ndim == 1:
        return 0.1, parameter.float()
    if parameter.ndim == 3 and getattr(module, "is_transposed", False):
        return 1 / math.sqrt(parameter.shape[1]), 0.0
    if "Router" in kind:
        return 2 / math.sqrt(parameter.shape[1]), 0.0
    fan_in = parameter.shape[2] if hasattr(module, "is_transposed") else parameter[0].numel()
    return 1 / math.sqrt(fan_in), 0.0


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """Put a tokenizer beside the weights: word "t17" is token 17, nothing is added."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"t{token}": token for token in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def write_corpus(path: Path, documents: Sequence[Sequence[int]]) -> Path:
    """Write token *documents* of any lengths as a JSONL corpus of `write_tokenizer` words."""
    lines = [json.dumps({"text": " ".join(f"t{token}" for token in ids)}) for ids in documents]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def random_documents(lengths: Sequence[int], *, seed: int = 0) -> list[list[int]]:
    """Documents of *lengths* random tokens, some with an end-of-text token inside."""
    chooser = np.random.default_rng(seed)
    documents = [chooser.integers(0, VOCAB, length).tolist() for length in lengths]
    for ids in documents[::2]:
        ids[len(ids) // 2] = END_OF_TEXT
    return documents
