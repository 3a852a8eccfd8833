"""A trained model on disk, as `transformers` and other programs open it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from leadline.core.errors import LeadlineError, UsageError
from leadline.data import pack_text
from leadline.data.corpus import Document
from leadline.data.tokenizer import TokenizerSpec, make_encoder
from leadline.train import published_model
from leadline.train.published_model import publish_model

TEXT = "The lead is cast; by the mark seven -- \u00e9\u4e16\n"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards with a BPE of their own."""
    root = tmp_path_factory.mktemp("bpe")
    (root / "text").mkdir()
    for number in range(8):
        text = "the lead line sounds the deep water by the mark " * (20 + number)
        (root / "text" / f"{number}.txt").write_text(text, encoding="utf-8")
    pack_text(root / "text", root / "shards", vocab_size=300, eval_fraction="0.3")
    return root / "shards"


@pytest.fixture
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=320,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        intermediate_size=16,
        max_position_embeddings=64,
    )
    return Qwen3MoeForCausalLM(config)


def test_published_weights_are_the_models_in_bf16(
    model: PreTrainedModel, shards: Path, tmp_path: Path
) -> None:
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    publish_model(model, shards, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    after = loaded.state_dict()
    assert loaded.dtype == torch.bfloat16
    assert after.keys() == before.keys()
    for name, weight in before.items():
        assert torch.equal(after[name], weight.to(torch.bfloat16)), name


def test_published_experts_have_one_tensor_each(
    model: PreTrainedModel, shards: Path, tmp_path: Path
) -> None:
    publish_model(model, shards, tmp_path / "model")
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        names = set(file.keys())
    wanted = {
        f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight"
        for expert in range(4)
        for part in ("gate", "up", "down")
    }
    assert wanted <= names


def test_published_tokenizer_gives_the_ids_of_the_shards(
    model: PreTrainedModel, shards: Path, tmp_path: Path
) -> None:
    publish_model(model, shards, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    spec = TokenizerSpec(kind="given", path=shards / "tokenizer.json")
    encoder = make_encoder(spec, [])
    wanted = encoder.encode([Document(path="a", utf8=TEXT.encode("utf-8"))])[0].tolist()
    assert tokenizer(TEXT)["input_ids"] == wanted
    assert tokenizer.eos_token_id == encoder.end_of_text


def test_published_tokenizer_file_is_that_of_the_shards(
    model: PreTrainedModel, shards: Path, tmp_path: Path
) -> None:
    publish_model(model, shards, tmp_path / "model")
    name = "tokenizer.json"
    assert (tmp_path / "model" / name).read_bytes() == (shards / name).read_bytes()


def test_published_configuration_names_its_end_of_text(
    model: PreTrainedModel, shards: Path, tmp_path: Path
) -> None:
    publish_model(model, shards, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_bytes())
    manifest = json.loads((shards / "manifest.json").read_bytes())
    assert config["eos_token_id"] == manifest["tokenizer"]["end_of_text"]
    assert config["dtype"] == "bfloat16"


def test_published_size_is_that_of_the_files(
    model: PreTrainedModel, shards: Path, tmp_path: Path
) -> None:
    size = publish_model(model, shards, tmp_path / "model")
    assert size == sum(path.stat().st_size for path in (tmp_path / "model").iterdir())


def test_publishing_over_a_checkpoint_is_refused(
    model: PreTrainedModel, shards: Path, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(LeadlineError, match="never replaced"):
        publish_model(model, shards, tmp_path / "model")


def test_model_that_is_none_of_transformers_is_refused(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a Linear cannot be saved"):
        publish_model(nn.Linear(1, 1), shards, tmp_path / "model")


def test_publishing_that_fails_leaves_nothing_behind(
    model: PreTrainedModel, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(published_model, "write_bytes", refused)
    with pytest.raises(LeadlineError, match="model"):
        publish_model(model, shards, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
