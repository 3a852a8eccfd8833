"""The reference itself: the rules that its sums must keep, and one layer by hand."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from .conftest import Checkpoints
from .families import NUM_EXPERTS, TEN_FAMILIES, TOP_K, random_documents
from .reference import down_inputs, is_experts, load_whole, reference_grams, relative_error

DOCUMENTS = random_documents((1, 30, 7, 90))
TOKENS = 128


@pytest.mark.parametrize("family", [*TEN_FAMILIES, "qwen2_moe"])
def test_reference_any_family_counts_every_routed_row_once(
    checkpoints: Checkpoints, family: str
) -> None:
    found = reference_grams(checkpoints(family), DOCUMENTS)
    assert found.tokens == TOKENS
    assert bool(found.experts) == (family != "llama")
    for sums in found.experts.values():
        assert sums.tokens == TOKENS
        assert sums.top_k == TOP_K
        assert sums.rows.shape == (NUM_EXPERTS,)
        assert sums.rows.sum() == TOKENS * TOP_K
        assert sums.rows.min() > 0, "the router leaves an expert without a token"
    assert all(sums.rows == TOKENS for sums in found.linears.values())


@pytest.mark.parametrize("family", [*TEN_FAMILIES, "qwen2_moe"])
def test_reference_any_family_sums_are_symmetric_and_consistent(
    checkpoints: Checkpoints, family: str
) -> None:
    found = reference_grams(checkpoints(family), DOCUMENTS)
    for sums in found.experts.values():
        # Every token is in the Grams of the k experts it goes to.
        assert relative_error(sums.gate_up_of.sum(axis=0), TOP_K * sums.gate_up) < 1e-12
        for gram in (sums.gate_up, *sums.gate_up_of, *sums.down):
            assert np.array_equal(gram, gram.T)
            assert gram.trace() > 0
    for linear in found.linears.values():
        assert np.array_equal(linear.gram, linear.gram.T)
        assert linear.gram.trace() > 0


@pytest.mark.parametrize("family", [*TEN_FAMILIES, "qwen2_moe"])
def test_down_inputs_any_family_lead_to_the_output_of_the_experts(
    checkpoints: Checkpoints, family: str
) -> None:
    model = load_whole(checkpoints(family), torch.float32)
    torch.manual_seed(0)
    for module in filter(is_experts, model.modules()):
        hidden = torch.randn(12, 64)
        chosen = torch.stack([torch.randperm(NUM_EXPERTS)[:TOP_K] for _ in range(12)])
        weights = torch.rand(12, TOP_K)
        wanted = torch.zeros(12, 64)
        for expert in range(NUM_EXPERTS):
            weight = module.down_proj[expert].T
            out = down_inputs(module, hidden, expert)
            out = out @ (weight.T if module.is_transposed else weight)
            out = out + (module.down_proj_bias[expert] if module.has_bias else 0)
            wanted += ((chosen == expert) * weights).sum(dim=-1, keepdim=True) * out
        torch.testing.assert_close(module(hidden, chosen, weights), wanted)


def test_reference_qwen3_moe_agrees_with_layer_written_by_hand(checkpoints: Checkpoints) -> None:
    name = "model.layers.2.mlp"
    path = checkpoints("qwen3_moe")
    found = reference_grams(path, DOCUMENTS).experts[f"{name}.experts"]
    gate_up, down, rows = _qwen3_moe_by_hand(path, name)
    assert np.array_equal(found.rows, rows)
    assert relative_error(found.gate_up, gate_up) < 1e-6
    for expert in range(NUM_EXPERTS):
        assert relative_error(found.down[expert], down[expert]) < 1e-6


def _qwen3_moe_by_hand(path: Path, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token by token, from published tensors: softmax router, top two, silu(gate) * up."""
    from safetensors.torch import load_file

    published = {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}
    weights = {k: v.float() for k, v in published.items() if k.startswith(name)}
    inputs: list[torch.Tensor] = []
    model = load_whole(path, torch.float32)
    model.get_submodule(name).register_forward_pre_hook(lambda _, args: inputs.append(args[0][0]))
    with torch.no_grad():
        for ids in DOCUMENTS:
            model(input_ids=torch.tensor([ids]))
    gate_up, down = np.zeros((64, 64)), np.zeros((NUM_EXPERTS, 32, 32))
    rows = np.zeros(NUM_EXPERTS, dtype=np.int64)
    for token in torch.cat(inputs):
        gate_up += np.outer(token.double(), token.double())
        scores = torch.softmax(weights[f"{name}.gate.weight"] @ token, dim=0)
        for expert in scores.argsort(descending=True)[:TOP_K].tolist():
            gate, up = (weights[f"{name}.experts.{expert}.{w}_proj.weight"] for w in ("gate", "up"))
            inner = (F.silu(gate @ token) * (up @ token)).double()
            down[expert] += np.outer(inner, inner)
            rows[expert] += 1
    return gate_up, down, rows


def test_relative_error_planted_error_is_measured() -> None:
    gram = np.eye(4) * 3
    assert relative_error(gram, gram) == 0
    assert relative_error(gram * (1 + 1e-4), gram) == pytest.approx(1e-4, rel=1e-6)
    assert relative_error(gram, np.zeros((4, 4))) == float("inf")
    assert relative_error(np.zeros((4, 4)), np.zeros((4, 4))) == 0
