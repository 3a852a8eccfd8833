"""Every family: what the layout makes of a file's bytes is what `from_pretrained` loads."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForMultimodalLM

from leadline.rig.checkpoint import Checkpoint
from leadline.rig.families import dense_model_types, expert_model_types
from leadline.rig.layout import ModelLayout, map_checkpoint

from .tiny_models import (
    CannotBuildError,
    fill,
    load_reference,
    on_meta,
    same_bits,
    save_tiny,
    tiny_config,
)

REQUIRED = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v4",
    "dots1",
    "ernie4_5_moe",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "hunyuan_v1_moe",
    "jamba",
    "llama",
    "llama4_text",
    "minimax",
    "mixtral",
    "nemotron_h",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "qwen4_exp_text",
)
"""These must build; a family beyond them that does not is skipped with the reason."""

OTHERS = tuple(
    name
    for name in (*expert_model_types(), *dense_model_types(), "jetmoe", "doge", "longcat_flash")
    if name not in REQUIRED
)
MULTIMODAL = ("qwen4_exp", "qwen3_5_moe", "llama4")
"""Published with a vision tower; their language model is a causal one of its own."""


def assert_layout_is_what_loads(path: Path) -> ModelLayout:
    reference = load_reference(path)
    reference.save_pretrained(path)  # a family may fix a value when it loads (zaya)
    state = load_reference(path).state_dict()
    checkpoint = Checkpoint.open(path)
    layout = map_checkpoint(on_meta(AutoConfig.from_pretrained(path)), checkpoint)
    assert set(state) == {*layout.parameters, *layout.tied}
    wrong = [
        name
        for name in layout.parameters
        if not same_bits(fill(layout, checkpoint, name, state[name].dtype), state[name])
    ]
    assert wrong == []
    for name, owner in layout.tied.items():
        assert state[name].data_ptr() == state[owner].data_ptr()
    return layout


@pytest.mark.parametrize("model_type", REQUIRED)
def test_layout_of_family_fills_bit_equal_parameters(model_type: str, tmp_path: Path) -> None:
    save_tiny(tiny_config(model_type), tmp_path)
    assert_layout_is_what_loads(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", OTHERS)
def test_layout_of_other_family_fills_bit_equal_parameters(model_type: str, tmp_path: Path) -> None:
    try:
        save_tiny(_config_or_skip(model_type), tmp_path)
    except CannotBuildError as error:
        pytest.skip(f"{model_type} cannot be built tiny: {error}")
    assert_layout_is_what_loads(tmp_path)


def _config_or_skip(model_type: str) -> Any:
    try:
        return tiny_config(model_type)
    except Exception as error:
        raise CannotBuildError(f"{type(error).__name__}: {str(error)[:200]}") from error


@pytest.mark.parametrize("model_type", MULTIMODAL)
def test_layout_of_multimodal_checkpoint_leaves_the_vision_tower_out(
    model_type: str, tmp_path: Path
) -> None:
    save_tiny(tiny_config(model_type), tmp_path, AutoModelForMultimodalLM)
    checkpoint = Checkpoint.open(tmp_path)
    layout = map_checkpoint(on_meta(AutoConfig.from_pretrained(tmp_path)), checkpoint)
    state = load_reference(tmp_path).state_dict()
    assert set(state) == {*layout.parameters, *layout.tied}
    assert all(
        same_bits(fill(layout, checkpoint, name, state[name].dtype), state[name])
        for name in layout.parameters
    )
    assert layout.unmapped
    assert all("vis" in name or "projector" in name for name in layout.unmapped)
