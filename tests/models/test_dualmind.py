"""dual-mind: size by formula, causality, window, memory, debate, and the 139.7 M limit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.core.errors import UsageError
from leadline.models.dualmind import (
    PARAMETER_LIMIT,
    PRESETS,
    DebateGate,
    DualMind,
    DualMindConfig,
    DualMindWorkload,
)
from leadline.models.workload import num_parameters

TINY = DualMindConfig(
    vocab_size=64,
    width=32,
    num_layers=2,
    num_heads=4,
    head_width=8,
    ff_width=48,
    window=4,
    memory_slots=3,
    max_seq_len=32,
)


def hidden_of(model: DualMind, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens)


def seeded(config: DualMindConfig = TINY) -> DualMind:
    torch.manual_seed(0)
    model = DualMind(config)
    with torch.no_grad():
        # At their initial zeros the gates mix half and half whatever the paths say.
        for name, weight in model.named_parameters():
            if "debate" in name:
                weight.normal_()
    return model


@settings(deadline=None, max_examples=25)
@given(
    vocab_size=st.integers(1, 50),
    width=st.integers(1, 20),
    pairs=st.integers(1, 3),
    half_width=st.integers(1, 4),
    num_layers=st.integers(1, 3),
    ff_width=st.integers(1, 20),
    memory_slots=st.integers(1, 6),
)
def test_parameter_formula_equals_the_built_model(
    vocab_size: int,
    width: int,
    pairs: int,
    half_width: int,
    num_layers: int,
    ff_width: int,
    memory_slots: int,
) -> None:
    config = DualMindConfig(
        vocab_size=vocab_size,
        width=width,
        num_layers=num_layers,
        num_heads=2 * pairs,
        head_width=2 * half_width,
        ff_width=ff_width,
        window=2,
        memory_slots=memory_slots,
        max_seq_len=4,
    )
    assert num_parameters(DualMind(config)) == config.num_parameters


def test_preset_139_7m_rounds_to_139_7_million_and_stays_below() -> None:
    with torch.device("meta"):
        built = num_parameters(DualMind(PRESETS["139.7m"]))
    assert built == PRESETS["139.7m"].num_parameters == 139_677_744
    assert round(built / 1e6, 1) == 139.7
    assert built <= PARAMETER_LIMIT


def test_workload_above_139_7_million_is_refused_with_both_numbers() -> None:
    with pytest.raises(UsageError, match=r"139,\d{3},\d{3}.*139,700,000"):
        DualMindWorkload.from_spec("139.7m", memory_slots=66)


def test_workload_with_an_unknown_preset_lists_the_known() -> None:
    with pytest.raises(UsageError, match=r"139\.7m, tiny"):
        DualMindWorkload.from_spec("huge")


def test_an_odd_number_of_heads_is_refused() -> None:
    with pytest.raises(UsageError, match="even number of heads"):
        DualMindWorkload.from_spec("tiny", num_heads=5)


def test_a_later_token_changes_nothing_before_it() -> None:
    model = seeded()
    tokens = torch.randint(64, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 64
    before, after = hidden_of(model, tokens), hidden_of(model, changed)
    assert torch.equal(before[0, :10], after[0, :10])
    assert not torch.allclose(before[0, 10:], after[0, 10:])


def test_the_memory_reaches_every_token() -> None:
    model = seeded()
    tokens = torch.randint(64, (1, 8))
    before = hidden_of(model, tokens)
    with torch.no_grad():
        model.get_parameter("layers.0.attention.memory_values").add_(1.0)
    assert ((hidden_of(model, tokens) - before).abs().amax(-1) > 1e-4).all()


def test_every_parameter_gets_a_gradient() -> None:
    workload = DualMindWorkload(config=TINY)
    model = seeded()
    tokens = torch.randint(64, (2, 16))
    workload.loss(model, tokens, tokens).backward()
    silent = [name for name, w in model.named_parameters() if w.grad is None or not w.grad.any()]
    assert silent == []


def test_debate_gate_returns_either_opinion_when_it_is_sure() -> None:
    gate = DebateGate(1, 4)
    local, global_ = torch.randn(2, 1, 3, 4), torch.randn(2, 1, 3, 4)
    with torch.no_grad():
        gate.bias.fill_(50.0)
        torch.testing.assert_close(gate(local, global_), local)
        gate.bias.fill_(-50.0)
        torch.testing.assert_close(gate(local, global_), global_)


def test_debate_gate_is_driven_by_disagreement_per_token() -> None:
    gate = DebateGate(1, 2)
    with torch.no_grad():
        gate.strength.fill_(8.0)
        gate.bias.fill_(-4.0)
    agree, opposed = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    local = torch.stack((agree, opposed)).view(1, 1, 2, 2)
    global_ = torch.stack((agree, agree)).view(1, 1, 2, 2)
    mixed = gate(local, global_)[0, 0]
    torch.testing.assert_close(mixed[0], agree)
    assert mixed[1, 1] > 0.9  # orthogonal paths: share is 1 and the gate opens to the local one


def test_a_sequence_longer_than_the_rotary_table_is_refused() -> None:
    with pytest.raises(UsageError, match="33 tokens is longer"):
        seeded()(torch.zeros(1, 33, dtype=torch.int64))


def test_bf16_autocast_stays_near_fp32() -> None:
    workload = DualMindWorkload(config=TINY)
    model = seeded()
    tokens = torch.randint(64, (2, 32))
    exact = workload.loss(model, tokens, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        low = workload.loss(model, tokens, tokens)
    assert low.dtype == torch.float32
    assert abs(low.item() - exact.item()) < 0.02


@pytest.mark.parametrize(("autocast", "stream"), [(True, torch.bfloat16), (False, torch.float32)])
def test_the_residual_stream_is_bf16_under_autocast_only_and_norms_read_fp32(
    autocast: bool, stream: torch.dtype
) -> None:
    model = seeded()
    layers, norms = [], []
    for name, module in model.named_modules():
        if name.startswith("layers.") and name.count(".") == 1:
            module.register_forward_hook(lambda m, args, out: layers.append(out.dtype))
        elif name.endswith("norm"):
            module.register_forward_hook(lambda m, args, out: norms.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(torch.randint(64, (2, 32)))
    assert layers == [stream] * TINY.num_layers
    assert norms == [torch.float32] * (2 * TINY.num_layers + 1)


@pytest.mark.gpu
def test_compiled_bf16_on_the_device_is_near_eager_fp32() -> None:
    workload = DualMindWorkload.from_spec("tiny")
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = workload.build()
        tokens = torch.randint(2_048, (2, 256))
    exact = workload.loss(model, tokens, tokens).item()
    workload.compile(model)
    with torch.autocast("cuda", torch.bfloat16):
        low = workload.loss(model, tokens, tokens).item()
    assert abs(low - exact) < 0.02
