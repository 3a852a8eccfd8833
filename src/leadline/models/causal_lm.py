"""Any causal LM that transformers can build from a configuration, dense or MoE.

transformers supplies attention, norms, routers and rotary code; weights are random,
in fp32. A configuration is an inline table or a config.json as published.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leadline.core.errors import UsageError
from leadline.models.workload import compile_whole


@dataclass(frozen=True, kw_only=True, slots=True)
class CausalLMWorkload:
    """A transformers configuration as a workload."""

    model_type: str
    config: Mapping[str, Any]
    name: str
    vocab_size: int

    @classmethod
    def from_spec(
        cls,
        base_dir: Path,
        model_type: str | None = None,
        config: str | Mapping[str, Any] | None = None,
    ) -> Self:
        """Open `config` (a table, or the path of a config.json) of architecture `model_type`.

        Raises:
            UsageError: the file is missing or no JSON, or the architecture is unknown.
        """
        table = _read_config(base_dir, config)
        named = table.pop("model_type", None)
        architecture = model_type or named
        if architecture is None:
            raise UsageError("[workload] kind 'transformers' needs model_type, e.g. 'llama'")
        built = _build_config(architecture, table)
        vocab_size = built.get_text_config().vocab_size
        return cls(
            model_type=architecture,
            config=table,
            name=f"transformers {architecture}",
            vocab_size=vocab_size,
        )

    def build(self) -> nn.Module:
        """Build the model with random fp32 weights and SDPA attention."""
        from transformers import AutoModelForCausalLM

        model: nn.Module = AutoModelForCausalLM.from_config(
            _build_config(self.model_type, self.config),
            attn_implementation="sdpa",
            dtype=torch.float32,
        )
        return model

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of the model's logits in fp32."""
        logits = model(input_ids=inputs, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def compile(self, model: nn.Module) -> None:
        """Compile the whole forward."""
        compile_whole(model)


def _read_config(base_dir: Path, config: str | Mapping[str, Any] | None) -> dict[str, Any]:
    if config is None or isinstance(config, Mapping):
        return dict(config or {})
    path = base_dir / config
    try:
        table = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"[workload] config {path} cannot be read: {error}; give a config.json"
        ) from error
    if not isinstance(table, dict):
        raise UsageError(f"[workload] config {path} is not a JSON object")
    return table


def _build_config(model_type: str, table: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        known = ", ".join(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
        raise UsageError(f"model_type {model_type!r} is no causal LM here; supported: {known}")
    return AutoConfig.for_model(model_type, **table)
