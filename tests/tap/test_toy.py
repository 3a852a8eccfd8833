"""What the edits of TOY really do to the files, judged by loading them with `transformers`."""

from pathlib import Path

import pytest
import torch

from .conftest import Checkpoints
from .families import EXPERT_WIDTH, HIDDEN, NUM_EXPERTS, VOCAB, random_documents
from .reference import load_whole, reference_grams
from .toy import (
    TOY_FAMILY,
    add_tensor,
    build_toy,
    copy_checkpoint,
    delete_shard,
    edit_tensor,
    expert_name,
    move_tensor,
    number_experts,
    poison,
    read_tensor,
    rename_tensor,
    scale,
    shard_of,
    shards,
    starve,
    tensor_names,
    truncate_shard,
)


@pytest.fixture
def toy(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    """A TOY of this test's own."""
    return copy_checkpoint(checkpoints(TOY_FAMILY), tmp_path / "toy")


def test_toy_is_what_the_list_of_faults_says(toy: Path) -> None:
    assert len(shards(toy)) == 3
    assert read_tensor(toy, "model.embed_tokens.weight").shape == (VOCAB, HIDDEN)
    assert "lm_head.weight" in tensor_names(toy)
    assert "model.layers.1.mlp.shared_expert_gate.weight" in tensor_names(toy)
    shape = read_tensor(toy, expert_name(1, NUM_EXPERTS - 1, "down")).shape
    assert shape == (HIDDEN, EXPERT_WIDTH)


def test_edit_tensor_other_tensors_keep_their_bytes(toy: Path) -> None:
    name, names = expert_name(0, 3, "up"), tensor_names(toy)
    before = {other: read_tensor(toy, other) for other in names}
    edit_tensor(toy, name, lambda weight: weight + 1)
    changed = [other for other in names if not torch.equal(read_tensor(toy, other), before[other])]
    assert changed == [name]


def test_starve_two_experts_reaches_them_with_no_token(toy: Path) -> None:
    starve(toy, 0)
    found = reference_grams(toy, random_documents((200,))).experts
    rows = found["model.layers.0.mlp.experts"].rows
    assert rows[6:].tolist() == [0, 0]
    assert rows[:6].min() > 0
    assert found["model.layers.1.mlp.experts"].rows.min() > 0


def test_poison_one_value_is_nan(toy: Path) -> None:
    name = expert_name(0, 5, "down")
    poison(toy, name)
    assert int(read_tensor(toy, name).isnan().sum()) == 1


def test_scale_zero_gives_down_inputs_of_zero(toy: Path) -> None:
    scale(toy, expert_name(0, 2, "up"), 0)
    sums = reference_grams(toy, random_documents((100,))).experts["model.layers.0.mlp.experts"]
    assert sums.rows[2] > 0
    assert not sums.down[2].any()


def test_number_experts_twelve_are_in_the_order_of_numbers(tmp_path: Path) -> None:
    toy = build_toy(tmp_path / "toy", num_experts=12)
    number_experts(toy, 0, 12)
    module = load_whole(toy, torch.float32).model.layers[0].mlp.experts
    assert module.down_proj[:, 0, 0].tolist() == list(range(1, 13))


def test_rename_tensor_old_name_is_gone_everywhere(toy: Path) -> None:
    name = expert_name(0, 1, "gate")
    rename_tensor(toy, name, name + "_x")
    assert name not in tensor_names(toy)
    assert f'"{name}":' not in (toy / "model.safetensors.index.json").read_text()


def test_move_tensor_model_loads_the_same(toy: Path) -> None:
    name = expert_name(0, 4, "down")
    before = read_tensor(toy, name)
    home = shards(toy).index(shard_of(toy, name)) + 1
    move_tensor(toy, name, home % 3 + 1)
    assert shard_of(toy, name) == shards(toy)[home % 3]
    experts = load_whole(toy, torch.bfloat16).model.layers[0].mlp.experts
    assert torch.equal(experts.down_proj[4], before)


def test_add_tensor_new_name_is_read_back(toy: Path) -> None:
    add_tensor(toy, "mtp.layers.0.weight", torch.ones(3))
    assert read_tensor(toy, "mtp.layers.0.weight").tolist() == [1, 1, 1]


def test_shards_deleted_and_truncated_are_short(toy: Path) -> None:
    sizes = [shard.stat().st_size for shard in shards(toy)]
    cut = truncate_shard(toy, 2)
    assert cut.stat().st_size == sizes[1] - 1024
    assert not delete_shard(toy, 3).exists()
    assert len(shards(toy)) == 2


def test_random_documents_lengths_are_kept() -> None:
    documents = random_documents((1, 5, 9))
    assert [len(ids) for ids in documents] == [1, 5, 9]
    assert all(0 <= token < VOCAB for ids in documents for token in ids)
