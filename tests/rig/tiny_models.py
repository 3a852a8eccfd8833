"""Tiny random models of any family, saved under their published names, and their reference.

Sizes are put in place of those fields that a family's configuration has; where it says
something for each layer, layers are chosen so that every kind is there.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from leadline.rig.checkpoint import Checkpoint, TensorEntry
from leadline.rig.layout import ModelLayout

MOST_PARAMETERS = 50_000_000
NUM_LAYERS = 3
MOST_LAYERS = 6

SIZES = MappingProxyType(
    {
        "vocab_size": 256,
        "unpadded_vocab_size": 200,
        "hidden_size": 64,
        "intermediate_size": 48,
        "intermediate_size_mlp": 48,
        "ffn_hidden_size": 48,
        "ffn_dim": 48,
        "moe_intermediate_size": 32,
        "expert_ffn_hidden_size": 32,
        "shared_expert_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
        "shared_intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 16,
        "num_global_key_value_heads": 2,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "o_lora_rank": 16,
        "o_groups": 2,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "qk_head_dim": 24,
        "v_head_dim": 16,
        "max_position_embeddings": 128,
        "sliding_window": 8,
        "num_experts": 4,
        "num_local_experts": 4,
        "n_routed_experts": 4,
        "moe_num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_topk": 2,
        "moe_k": 2,
        "top_k_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "num_shared_experts": 1,
        "moe_num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "mamba_d_state": 8,
        "mamba_n_heads": 4,
        "mamba_num_heads": 4,
        "mamba_d_head": 32,
        "mamba_head_dim": 32,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
        "mamba_dt_rank": 4,
        "mamba_d_conv": 4,
        "ssm_state_size": 8,
        "chunk_size": 8,
        "n_groups": 1,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 8,
        "hc_count": 2,
        "hc_mult": 2,
        "hc_lowrank": 12,
    }
)

_NGRAMS = {
    "ple_layer_ids": [1, 2],
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
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}

_GEMMA4 = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}

OVERRIDES: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
        "dots3_note": {"num_key_value_heads": 4},
        "dots3_note_text": {"num_key_value_heads": 4},
        "falcon_h1": {"mamba_d_ssm": 128},
        "gemma3n_text": {"num_kv_shared_layers": 0},
        "gemma4": _GEMMA4,
        "gemma4_text": _GEMMA4,
        "hunyuan_v1_dense": {"head_dim": 16},
        "hunyuan_v1_moe": {"head_dim": 16},
        "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
        "ministral": {"head_dim": 16},
        "nemotron": {"num_key_value_heads": 2},
        "qwen4_exp": _NGRAMS,
        "qwen4_exp_text": _NGRAMS,
        "zamba": {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "attention_hidden_size": 128,
            "attention_head_dim": 32,
        },
        "zaya": {"num_experts_per_tok": 1},
    }
)

VISION_SIZES = MappingProxyType(
    {
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 16,
        "out_hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_layers": 1,
        "patch_size": 4,
        "image_size": 16,
        "vision_output_dim": 64,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
        "num_position_embeddings": 16,
        "spatial_merge_size": 2,
        "deepstack_visual_indexes": [0],
        "hidden_dim": 32,
    }
)

DTYPES = MappingProxyType(
    {
        "BF16": torch.bfloat16,
        "F16": torch.float16,
        "F32": torch.float32,
        "I64": torch.int64,
        "I32": torch.int32,
        "BOOL": torch.bool,
    }
)


class CannotBuildError(Exception):
    """The family does not come in a tiny size by these rules; says why."""


def tiny_config(model_type: str, **fields: Any) -> Any:
    """Configuration of *model_type* with tiny sizes; *fields* go into its text part."""
    base = AutoConfig.for_model(model_type)
    text = base.get_text_config()
    fields = {**OVERRIDES.get(model_type, {}), **fields}
    if text is base:
        return AutoConfig.for_model(model_type, **_tiny_fields(base, fields))
    parts: dict[str, Any] = {}
    for name in base.sub_configs:
        part = getattr(base, name, None)
        if part is None:
            continue
        known = part.to_dict()
        sizes = {k: v for k, v in VISION_SIZES.items() if known.get(k) is not None}
        tiny = _tiny_fields(part, fields) if part is text else sizes
        parts[name] = {**tiny, "model_type": known["model_type"]} if "model_type" in known else tiny
    return AutoConfig.for_model(model_type, **parts)


def _tiny_fields(config: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    known = config.to_dict()
    tiny: dict[str, Any] = {k: v for k, v in SIZES.items() if known.get(k) is not None}
    for name, token in (("pad_token_id", 0), ("bos_token_id", 1), ("eos_token_id", 2)):
        if name in known:
            tiny[name] = token
    count = getattr(config, "num_hidden_layers", None)
    if count:
        by_layer = {k: v for k, v in known.items() if isinstance(v, list) and len(v) == count}
        chosen = _chosen_layers(count, by_layer)
        tiny.update({k: [v[index] for index in chosen] for k, v in by_layer.items()})
        tiny["num_hidden_layers"] = len(chosen)
    return {**tiny, **fields}


def _chosen_layers(count: int, by_layer: Mapping[str, Sequence[Any]]) -> list[int]:
    """Layers of every kind, and as many as make `NUM_LAYERS`."""
    kinds: dict[str, int] = {}
    for index in range(count):
        kinds.setdefault(str([values[index] for values in by_layer.values()]), index)
    first = sorted(kinds.values())[:MOST_LAYERS]
    rest = [index for index in range(count) if index not in first]
    return sorted([*first, *rest[: max(0, NUM_LAYERS - len(first))]])


def on_meta(config: Any) -> nn.Module:
    """Causal language model of *config* without memory."""
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model


def save_tiny(config: Any, path: Path, auto: Any = AutoModelForCausalLM) -> Path:
    """Save a random model of *config* at *path*.

    Raises:
        CannotBuildError: it cannot be built or saved.
    """
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _build_and_save(config, path, auto)
            on_meta(AutoConfig.from_pretrained(path))
    except Exception as error:
        raise CannotBuildError(f"{type(error).__name__}: {str(error)[:200]}") from error
    return path


def _build_and_save(config: Any, path: Path, auto: Any) -> None:
    with torch.device("meta"):
        sketch = auto.from_config(config, dtype=torch.bfloat16)
    count = sum(parameter.numel() for parameter in sketch.parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count:,} parameters are not tiny")
    model = auto.from_config(config, dtype=torch.bfloat16)
    randomise(model)
    model.save_pretrained(path)


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> None:
    """Give every parameter and persistent buffer other values than any other has."""
    generator = torch.Generator().manual_seed(seed)
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.copy_(torch.randn(value.shape, generator=generator))


def load_reference(path: Path) -> nn.Module:
    """What `from_pretrained` makes of *path*."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    return model


def read_entry(checkpoint: Checkpoint, entry: TensorEntry) -> Tensor:
    """Elements of *entry* from its shard's bytes."""
    with checkpoint.shards[entry.shard].open("rb") as file:
        file.seek(entry.begin)
        data = bytearray(file.read(entry.num_bytes))
    dtype = DTYPES[entry.dtype]
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.view(entry.shape)


def fill(layout: ModelLayout, checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Tensor:
    """Parameter *name* made of the file's bytes as *layout* says."""
    known = layout.parameters[name]
    if known.conversion is not None:
        sources = {s.name: read_entry(checkpoint, s) for s in known.conversion.sources}
        return known.conversion.apply(sources)[name].to(dtype)
    parameter = torch.zeros(known.shape, dtype=dtype)
    for piece in known.pieces:
        view = piece.view(parameter)
        view.copy_(read_entry(checkpoint, piece.source).view(view.shape))
    return parameter


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether dtype, shape and every bit agree."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    raw = [x.contiguous().reshape(-1).view(torch.uint8) for x in (one, other)]
    return torch.equal(*raw)
