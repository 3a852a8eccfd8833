"""Which families are let through, found from transformers and not from a list of ours."""

from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from leadline.core.errors import UsageError
from leadline.rig.families import (
    dense_model_types,
    expert_model_types,
    experts_modules,
    refuse_unsupported,
    supported_model_types,
)

from .tiny_models import on_meta, tiny_config


def test_families_that_the_tap_is_held_to_are_supported() -> None:
    with_experts = {
        "deepseek_v3",
        "glm4_moe",
        "gpt_oss",
        "granitemoe",
        "mixtral",
        "olmoe",
        "qwen3_moe",
        "qwen3_next",
        "qwen4_exp",
        "qwen4_exp_text",
    }
    assert with_experts <= set(expert_model_types())
    assert "llama" in dense_model_types()


def test_every_supported_family_is_a_causal_one_named_once() -> None:
    names = supported_model_types()
    assert len(names) == len(set(names))
    assert set(names) <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_no_source_with_the_decorator_is_left_out() -> None:
    """Every causal family's module that imports the decorator must be among those with experts."""
    root = Path(transformers.__file__).parent
    using = {
        name
        for name, classes in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        for cls in ([classes] if isinstance(classes, str) else classes)
        if (module := transformers._class_to_module.get(cls))
        and "@use_experts_implementation" in (root / f"{module.replace('.', '/')}.py").read_text()
    }
    assert using == set(expert_model_types())


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "llama", "qwen4_exp"])
def test_supported_family_passes(model_type: str) -> None:
    refuse_unsupported(AutoConfig.for_model(model_type))


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("llama4_text", "do not go through transformers' experts interface"),
        ("jetmoe", "do not go through transformers' experts interface"),
        ("bert", "does not consist of plain decoder layers"),
        ("bart", "does not consist of plain decoder layers"),
        ("clip", "is no causal language model"),
        ("t5", "is no causal language model"),
    ],
)
def test_t51_other_family_is_refused_with_the_list(model_type: str, why: str) -> None:
    with pytest.raises(UsageError, match=model_type) as caught:
        refuse_unsupported(AutoConfig.for_model(model_type))
    assert why in str(caught.value)
    assert all(name in str(caught.value) for name in supported_model_types())


def test_model_type_nobody_knows_is_refused() -> None:
    config = AutoConfig.for_model("llama")
    config.model_type = "lama"
    with pytest.raises(UsageError, match="lama is no causal language model"):
        refuse_unsupported(config)


@pytest.mark.parametrize(
    ("model_type", "dense"), [("qwen3_moe", 0), ("deepseek_v3", 1), ("gpt_oss", 0), ("jamba", None)]
)
def test_experts_modules_are_those_of_sparse_layers(model_type: str, dense: int | None) -> None:
    model = on_meta(tiny_config(model_type))
    found = experts_modules(model)
    assert found
    if dense is not None:
        assert len(found) == model.config.num_hidden_layers - dense
    for name, module in found.items():
        assert model.get_submodule(name) is module
        assert isinstance(module.down_proj, torch.Tensor)


def test_dense_model_has_no_experts_modules() -> None:
    assert experts_modules(on_meta(tiny_config("llama"))) == {}


def test_module_with_some_of_the_fields_is_no_experts_module() -> None:
    module = nn.Linear(2, 2)
    module.has_bias = True
    assert experts_modules(nn.Sequential(module)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", expert_model_types())
def test_family_with_experts_has_experts_modules(model_type: str) -> None:
    try:
        model = on_meta(tiny_config(model_type))
    except Exception as error:
        pytest.skip(f"{model_type} cannot be built tiny: {str(error)[:200]}")
    assert experts_modules(model)
