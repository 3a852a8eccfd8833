"""transformers configurations as workloads, dense and mixture of experts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from leadline.core.errors import UsageError
from leadline.models.opening import open_workload
from leadline.models.workload import Workload, num_parameters

DENSE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
MOE = {
    **DENSE,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
}


def opened(model_type: str, config: dict[str, Any]) -> Workload:
    spec = {"kind": "transformers", "model_type": model_type, "config": config}
    return open_workload(spec, Path())


@pytest.mark.parametrize(("model_type", "config"), [("llama", DENSE), ("qwen3_moe", MOE)])
def test_workload_learns_the_batch_it_is_shown(model_type: str, config: dict[str, Any]) -> None:
    workload = opened(model_type, config)
    torch.manual_seed(0)
    model = workload.build()
    tokens = torch.randint(64, (2, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = workload.loss(model, tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    assert all(weight.dtype == torch.float32 for weight in model.parameters())


def test_loss_equals_transformers_own_on_shifted_labels() -> None:
    workload = opened("llama", DENSE)
    torch.manual_seed(0)
    model = workload.build()
    ids = torch.randint(64, (2, 17))
    ours = workload.loss(model, ids[:, :-1], ids[:, 1:])
    theirs = model(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(ours, theirs)


def test_config_file_gives_the_same_model_as_the_table(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **DENSE}))
    from_file = open_workload({"kind": "transformers", "config": "config.json"}, tmp_path)
    assert from_file == opened("llama", DENSE)
    assert num_parameters(from_file.build()) == num_parameters(opened("llama", DENSE).build())


def test_unknown_architecture_is_refused_with_the_supported_ones() -> None:
    with pytest.raises(UsageError, match=r"'no-such-model' is no causal LM.*llama.*qwen3_moe"):
        opened("no-such-model", {})


@pytest.mark.parametrize("content", ["", "[1]", "{"])
def test_unreadable_config_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=r"config\.json"):
        open_workload({"kind": "transformers", "config": "config.json"}, tmp_path)


def test_unknown_kind_lists_the_known() -> None:
    with pytest.raises(UsageError, match="dual-mind, transformers, python"):
        open_workload({"kind": "tensorflow"}, Path())


def test_unknown_key_is_refused() -> None:
    with pytest.raises(UsageError, match="does not take these keys"):
        open_workload({"kind": "dual-mind", "presett": "tiny"}, Path())
