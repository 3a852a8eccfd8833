"""Which model families a layer pass can take, found in `transformers` itself.

There is no list here: a family is supported when the source of its causal language model
sends its experts through the experts interface, or when it has no experts and is a plain
decoder (attention through the attention interface, no cross-attention). Sources are read
as text, so that nothing is imported to answer.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from leadline.core.errors import UsageError

_INTERFACE = re.compile(r"^@use_experts_implementation\b", re.MULTILINE)
_EXPERTS = re.compile(r"\b(?:\w*num_experts|num_local_experts|n_routed_experts|ffn_config)\b")
_DECODER = re.compile(r"^class \w*DecoderLayer\(", re.MULTILINE)
_ATTENTION = re.compile(r"\bALL_ATTENTION_FUNCTIONS\b")
_CROSS = re.compile(r"encoder_hidden_states|cross_?attention|cross_?attn|encoder_attn", re.I)

_DECORATED = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every module of *model* that dispatches through the experts interface, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if all(hasattr(module, field) for field in _DECORATED)
        and hasattr(getattr(module, "config", None), "_experts_implementation")
    }


def supported_model_types() -> list[str]:
    """Families with experts behind the interface, then dense ones; each in order."""
    return [*expert_model_types(), *dense_model_types()]


@cache
def expert_model_types() -> tuple[str, ...]:
    """Causal families whose experts go through the experts interface."""
    return tuple(name for name in _causal_types() if _INTERFACE.search(_source(name)))


@cache
def dense_model_types() -> tuple[str, ...]:
    """Causal families of plain decoder layers without experts."""
    return tuple(
        name
        for name in _causal_types()
        if name not in expert_model_types() and not _has_experts(name) and _is_plain(name)
    )


def refuse_unsupported(config: Any) -> None:
    """Let a configuration of a supported family pass.

    Raises:
        UsageError: any other family, with the list of supported ones.
    """
    model_type = config.model_type
    if model_type in expert_model_types() or model_type in dense_model_types():
        return
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        why = "is no causal language model of transformers"
    elif _has_experts(model_type):
        why = "has experts that do not go through transformers' experts interface"
    else:
        why = "does not consist of plain decoder layers"
    raise UsageError(
        f"model type {model_type} {why}; take a checkpoint of a supported one: with experts "
        f"{', '.join(expert_model_types())}; dense {', '.join(dense_model_types())}"
    )


def _causal_types() -> list[str]:
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _is_plain(model_type: str) -> bool:
    source = _source(model_type)
    wanted = _DECODER.search(source) and _ATTENTION.search(source)
    return wanted is not None and _CROSS.search(source) is None


def _has_experts(model_type: str) -> bool:
    """Whether the configuration has a field for their number."""
    path = _source_path(model_type)
    if path is None:
        return False
    files = path.parent.glob("configuration_*.py")
    return any(_EXPERTS.search(file.read_text(encoding="utf-8")) for file in files)


def _source(model_type: str) -> str:
    path = _source_path(model_type)
    return path.read_text(encoding="utf-8") if path is not None else ""


def _source_path(model_type: str) -> Path | None:
    """File that defines the causal language model of *model_type*."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    name = names if isinstance(names, str) else names[0]
    module = transformers._class_to_module.get(name)
    if module is None:
        return None
    package = Path(transformers.__file__).parent
    return package.joinpath(*module.split(".")).with_suffix(".py")
