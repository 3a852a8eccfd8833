"""What a layout refuses, and forms of a checkpoint beside the one that a family saves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
)

from leadline.core.errors import IntegrityError, UsageError
from leadline.rig import published_names
from leadline.rig.checkpoint import Checkpoint
from leadline.rig.layout import ModelLayout, map_checkpoint

from .tiny_models import fill, load_reference, on_meta, same_bits, save_tiny, tiny_config

Tensors = dict[str, Tensor]
EXPERTS = "model.layers.0.mlp.experts"


def experts_config(**fields: Any) -> Any:
    return tiny_config("qwen3_moe", num_hidden_layers=1, **fields)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with four experts of one layer; read, never changed."""
    return save_tiny(experts_config(), tmp_path_factory.mktemp("saved"))


def edited(saved: Path, path: Path, edit: Callable[[Tensors], None]) -> Path:
    """Copy of *saved* with its tensors changed by *edit*."""
    tensors = load_file(saved / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_bytes((saved / "config.json").read_bytes())
    return path


def layout_of(path: Path, config: Any = None) -> ModelLayout:
    return map_checkpoint(on_meta(config or experts_config()), Checkpoint.open(path))


def rename(old: str, new: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[new] = tensors.pop(old)

    return edit


def test_t59_twelve_experts_keep_their_numbers(tmp_path: Path) -> None:
    config = experts_config(num_experts=12, num_local_experts=12)

    def number(tensors: Tensors) -> None:
        for name, value in tensors.items():
            if ".experts." in name:
                value.fill_(int(name.split(".experts.")[1].split(".")[0]))

    source = tmp_path / "source"
    path = edited(save_tiny(config, source), tmp_path, number)
    layout, checkpoint = layout_of(path, config), Checkpoint.open(path)
    for name in ("gate_up_proj", "down_proj"):
        experts = fill(layout, checkpoint, f"{EXPERTS}.{name}", torch.float32)
        assert experts.flatten(1).unique(dim=1).flatten().tolist() == list(range(12))


def test_pieces_of_an_expert_are_views_into_its_rows(saved: Path) -> None:
    known = layout_of(saved).parameters[f"{EXPERTS}.gate_up_proj"]
    assert known.conversion is None
    sources = {piece.source.name: piece for piece in known.pieces}
    parameter = torch.empty(known.shape)
    up = sources[f"{EXPERTS}.3.up_proj.weight"].view(parameter)
    assert up.shape == (32, 64)
    assert up.data_ptr() == parameter[3, 32:].data_ptr()


def test_t60_tied_head_has_no_bytes_of_its_own(tmp_path: Path) -> None:
    config = tiny_config("llama", tie_word_embeddings=True)
    layout = layout_of(save_tiny(config, tmp_path), config)
    assert layout.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in layout.parameters


def test_t60_tied_weight_published_under_the_heads_name_goes_to_the_embedding(
    tmp_path: Path,
) -> None:
    config = tiny_config("llama", tie_word_embeddings=True)
    source = save_tiny(config, tmp_path / "source")
    edit = rename("model.embed_tokens.weight", "lm_head.weight")
    layout = layout_of(edited(source, tmp_path, edit), config)
    (piece,) = layout.parameters["model.embed_tokens.weight"].pieces
    assert piece.source.name == "lm_head.weight"
    assert layout.tied == {"lm_head.weight": "model.embed_tokens.weight"}


def test_t60_tied_weights_that_are_both_published_keep_their_own_bytes(tmp_path: Path) -> None:
    config = tiny_config("llama", tie_word_embeddings=True)
    source = save_tiny(config, tmp_path / "source")

    def untie(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    path = edited(source, tmp_path, untie)
    layout, checkpoint = layout_of(path, config), Checkpoint.open(path)
    assert layout.tied == {}
    for name, value in load_reference(path).state_dict().items():
        assert same_bits(fill(layout, checkpoint, name, value.dtype), value)


def test_layers_that_share_weights_are_tied_to_the_first(tmp_path: Path) -> None:
    config = tiny_config("zamba")
    layout = layout_of(save_tiny(config, tmp_path), config)
    shared = {n: o for n, o in layout.tied.items() if "shared_transf" in n}
    assert shared
    assert all(name.replace("layers.3.", "layers.1.") == owner for name, owner in shared.items())


@pytest.mark.parametrize("expert", [0, 2, 3])
@pytest.mark.parametrize("projection", ["gate_proj", "up_proj", "down_proj"])
def test_t63_renamed_expert_tensor_is_refused(
    saved: Path, tmp_path: Path, expert: int, projection: str
) -> None:
    old = f"{EXPERTS}.{expert}.{projection}.weight"
    path = edited(saved, tmp_path, rename(old, old.replace("proj", "lora")))
    with pytest.raises((IntegrityError, UsageError), match=EXPERTS):
        layout_of(path)


def test_t63_refusal_counts_tensors_and_names_the_first_difference(
    saved: Path, tmp_path: Path
) -> None:
    old = f"{EXPERTS}.2.up_proj.weight"
    path = edited(saved, tmp_path, rename(old, "other.weight"))
    with pytest.raises(IntegrityError, match=r"expected 4 .* found 3") as caught:
        layout_of(path)
    assert f"first difference {old}" in str(caught.value)


def test_t63_expert_number_that_is_skipped_is_refused(saved: Path, tmp_path: Path) -> None:
    def skip(tensors: Tensors) -> None:
        for name in [n for n in tensors if f"{EXPERTS}.2." in n]:
            tensors[name.replace("experts.2.", "experts.7.")] = tensors.pop(name)

    with pytest.raises(IntegrityError, match=r"first difference .*experts\.2\."):
        layout_of(edited(saved, tmp_path, skip))


def test_t63_expert_under_another_container_is_refused(saved: Path, tmp_path: Path) -> None:
    old = f"{EXPERTS}.2.up_proj.weight"
    new = old.replace("layers.0.mlp", "layers.0.spare.mlp")
    with pytest.raises(IntegrityError, match="first difference"):
        layout_of(edited(saved, tmp_path, rename(old, new)))


def test_t63_last_expert_missing_altogether_is_refused(saved: Path, tmp_path: Path) -> None:
    def drop(tensors: Tensors) -> None:
        for name in [n for n in tensors if f"{EXPERTS}.3." in n]:
            del tensors[name]

    with pytest.raises(IntegrityError, match=r"shape \[4, .* comes to \[3, "):
        layout_of(edited(saved, tmp_path, drop))


def test_t63_missing_parameter_is_refused_with_counts(saved: Path, tmp_path: Path) -> None:
    edit = rename("model.norm.weight", "model.norm.scale")
    with pytest.raises(IntegrityError, match="fills 13 of the 14 parameters") as caught:
        layout_of(edited(saved, tmp_path, edit))
    assert "without a tensor: model.norm.weight;" in str(caught.value)
    assert "belong to none: model.norm.scale;" in str(caught.value)


def test_parameter_of_another_shape_is_refused(saved: Path, tmp_path: Path) -> None:
    def halve(tensors: Tensors) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:32].clone()

    with pytest.raises(IntegrityError, match=r"shape \[64\] .* comes to \[32\]"):
        layout_of(edited(saved, tmp_path, halve))


def test_expert_of_another_shape_is_refused(saved: Path, tmp_path: Path) -> None:
    def halve(tensors: Tensors) -> None:
        name = f"{EXPERTS}.1.down_proj.weight"
        tensors[name] = tensors[name][:32].clone()

    with pytest.raises(UsageError, match="down_proj"):
        layout_of(edited(saved, tmp_path, halve))


def test_two_forms_of_one_weight_are_refused(saved: Path, tmp_path: Path) -> None:
    def twice(tensors: Tensors) -> None:
        tensors[f"{EXPERTS}.down_proj"] = torch.zeros(4, 64, 32, dtype=torch.bfloat16)

    with pytest.raises(IntegrityError, match="both claim parameter"):
        layout_of(edited(saved, tmp_path, twice))


def test_published_fused_experts_are_one_piece(saved: Path, tmp_path: Path) -> None:
    state = load_reference(saved).state_dict()

    def fuse(tensors: Tensors) -> None:
        tensors.clear()
        tensors.update({name: value.clone() for name, value in state.items()})

    layout = layout_of(edited(saved, tmp_path, fuse))
    (piece,) = layout.parameters[f"{EXPERTS}.gate_up_proj"].pieces
    assert piece.source.shape == (4, 64, 64)


def test_base_model_checkpoint_gets_the_prefix(tmp_path: Path) -> None:
    config = tiny_config("llama", tie_word_embeddings=True)
    path = save_tiny(config, tmp_path, AutoModel)
    checkpoint = Checkpoint.open(path)
    assert "embed_tokens.weight" in checkpoint.tensors
    layout = layout_of(path, config)
    for name, value in load_reference(path).state_dict().items():
        if name not in layout.tied:
            assert same_bits(fill(layout, checkpoint, name, value.dtype), value)


def test_t64_prediction_head_is_unmapped_in_natural_order(saved: Path, tmp_path: Path) -> None:
    def predict(tensors: Tensors) -> None:
        for number in (10, 9):
            tensors[f"mtp.layers.{number}.weight"] = torch.zeros(4)

    layout = layout_of(edited(saved, tmp_path, predict))
    assert layout.unmapped == ("mtp.layers.9.weight", "mtp.layers.10.weight")


class Doubled(ConversionOps):
    """Computes with what it is given, as a dequantisation would."""

    def convert(self, input_dict: Any, **options: Any) -> Any:
        """Twice the sum of the first source's tensors, for each target."""
        value = sum(next(iter(input_dict.values())))
        return dict.fromkeys(options["target_patterns"], value * 2)

    @property
    def reverse_op(self) -> ConversionOps:
        return self


class Sequenced(Doubled):
    """Looks at values to decide."""

    def convert(self, input_dict: Any, **options: Any) -> Any:
        """Fail on tensors without memory."""
        (value,) = next(iter(input_dict.values()))
        return {options["target_patterns"][0]: value * value.max().item()}


@pytest.fixture
def convert_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put converters in place of the library's own."""

    def use(*converters: WeightConverter) -> None:
        monkeypatch.setattr(
            published_names, "get_model_conversion_mapping", lambda model: list(converters)
        )

    return use


class Toy(nn.Module):
    """Just parameters of given shapes, on meta."""

    base_model_prefix = ""
    config = None
    all_tied_weights_keys: dict[str, str] = {}  # noqa: RUF012 - as transformers has it

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.empty(shape, device="meta")))


def toy_checkpoint(path: Path, **shapes: tuple[int, ...]) -> tuple[Checkpoint, Tensors]:
    tensors = {name.replace("_at_", "."): torch.randn(shape) for name, shape in shapes.items()}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    return Checkpoint.open(path), tensors


HALVES = [MergeModulelist(dim=0), Concatenate(dim=1)]
LAYOUTS: dict[str, tuple[list[ConversionOps], tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "halves": (HALVES, (3, 8, 6), lambda x: x),
    "transposed": ([*HALVES, Transpose(1, 2)], (3, 6, 8), lambda x: x.transpose(1, 2)),
    "interleaved": (
        [*HALVES, Interleave(dim=1, inverse=True)],
        (3, 8, 6),
        lambda x: torch.stack(x.chunk(2, 1), 2).flatten(1, 2),
    ),
    "interleaved and transposed": (
        [*HALVES, Interleave(dim=1, inverse=True), Transpose(1, 2)],
        (3, 6, 8),
        lambda x: torch.stack(x.chunk(2, 1), 2).flatten(1, 2).transpose(1, 2),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_t58_gate_and_up_are_placed_in_every_layout(
    name: str, tmp_path: Path, convert_with: Callable[..., None]
) -> None:
    operations, shape, expected = LAYOUTS[name]
    convert_with(WeightConverter(["g.*.w", "u.*.w"], "fused", operations))
    sources = {f"{kind}_at_{e}_at_w": (4, 6) for kind in "gu" for e in range(3)}
    checkpoint, tensors = toy_checkpoint(tmp_path, **sources)
    layout = map_checkpoint(Toy(fused=shape), checkpoint)
    halves = [torch.stack([tensors[f"{kind}.{e}.w"] for e in range(3)]) for kind in "gu"]
    assert layout.parameters["fused"].conversion is None
    made = fill(layout, checkpoint, "fused", torch.float32)
    assert torch.equal(made, expected(torch.cat(halves, 1)))


def test_split_of_one_tensor_gives_each_parameter_its_bytes(
    tmp_path: Path, convert_with: Callable[..., None]
) -> None:
    convert_with(WeightConverter("qkv", ["q", "k", "v"], [Chunk(dim=0)]))
    checkpoint, tensors = toy_checkpoint(tmp_path, qkv=(12, 5))
    layout = map_checkpoint(Toy(q=(4, 5), k=(4, 5), v=(4, 5)), checkpoint)
    assert all(len(layout.parameters[name].pieces) == 1 for name in "qkv")
    made = [fill(layout, checkpoint, name, torch.float32) for name in "qkv"]
    assert torch.equal(torch.cat(made), tensors["qkv"])
    assert sum(p.source.num_bytes for n in "qkv" for p in layout.parameters[n].pieces) == 240


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (Doubled(), lambda x: [2 * x, 2 * x]),
        (Chunk(dim=1), lambda x: list(x.chunk(2, 1))),
    ],
)
def test_what_cannot_be_placed_is_converted_once_for_all_its_parameters(
    tmp_path: Path,
    convert_with: Callable[..., None],
    operation: ConversionOps,
    expected: Callable[[Tensor], list[Tensor]],
) -> None:
    convert_with(WeightConverter("both", ["left", "right"], [operation]))
    checkpoint, tensors = toy_checkpoint(tmp_path, both=(4, 6))
    wanted = expected(tensors["both"])
    shape = tuple(wanted[0].shape)
    layout = map_checkpoint(Toy(left=shape, right=shape), checkpoint)
    left, right = (layout.parameters[name] for name in ("left", "right"))
    assert left.conversion is right.conversion is not None
    assert left.conversion.targets == ("left", "right")
    made = left.conversion.apply(tensors)
    assert torch.equal(made["left"], wanted[0])
    assert torch.equal(made["right"], wanted[1])


def test_conversion_can_be_applied_again(tmp_path: Path, convert_with: Callable[..., None]) -> None:
    convert_with(WeightConverter("one", "sum", [Doubled()]))
    checkpoint, tensors = toy_checkpoint(tmp_path, one=(4,))
    conversion = map_checkpoint(Toy(sum=(4,)), checkpoint).parameters["sum"].conversion
    assert conversion is not None
    first, second = conversion.apply(tensors), conversion.apply(tensors)
    assert torch.equal(first["sum"], second["sum"])


def test_t58_conversion_that_needs_the_weights_is_refused(
    tmp_path: Path, convert_with: Callable[..., None]
) -> None:
    convert_with(WeightConverter("one", "scaled", [Sequenced()]))
    checkpoint, _ = toy_checkpoint(tmp_path, one=(4,))
    with pytest.raises(UsageError, match="cannot make scaled"):
        map_checkpoint(Toy(scaled=(4,)), checkpoint)


def test_two_conversions_into_one_parameter_are_refused(
    tmp_path: Path, convert_with: Callable[..., None]
) -> None:
    convert_with(
        WeightConverter("qk", ["q", "k"], [Chunk(dim=0)]),
        WeightConverter("kv", ["v", "k"], [Chunk(dim=0)]),
    )
    checkpoint, _ = toy_checkpoint(tmp_path, qk=(8, 5), kv=(8, 5))
    with pytest.raises(IntegrityError, match="made of"):
        map_checkpoint(Toy(q=(4, 5), k=(4, 5), v=(4, 5)), checkpoint)
