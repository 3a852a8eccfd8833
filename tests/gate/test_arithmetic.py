"""From the measured point to checkpoint and token budget, through the whole gate."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from leadline.core.budget import OVERHEAD_LIMIT_NS
from leadline.data import load_manifest, pack_text
from leadline.gate.lock import lock_problems

from .double import GateDouble, out_of_memory


@pytest.fixture(scope="module")
def wide_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough of both splits for one batch of 64x512."""
    root = tmp_path_factory.mktemp("wide")
    for number in range(40):
        path = root / "text" / f"{number:02d}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{number:02d} by the mark, " * 200, encoding="utf-8")
    pack_text(root / "text", root / "shards", tokenizer="bytes", eval_fraction="0.4")
    return root / "shards"


def test_worked_example_gives_the_procedures_budget(gate: GateDouble, wide_shards: Path) -> None:
    gate.tables["data"] = {"shards": str(wide_shards), "epochs": 100_000}
    gate.tables["budget"] = {"window_hours": 8}
    gate.tables["sweep"] |= {
        "points": [
            {"name": "P1", "micro_batch": 16, "seq_len": 512},
            {"name": "P2", "micro_batch": 64, "seq_len": 512},
            {"name": "P3", "micro_batch": 32, "seq_len": 1024},
        ]
    }
    gate.probes.rates = {"P1": 90_000, "P2": 120_000, "P3": 110_000}
    assert gate.run().status.green
    lock = gate.lock()
    assert lock["locked_budget_tokens"] == 2_662_200_000
    assert (lock["total_steps"], lock["best_cfg"], lock["tok_s"]) == (81_243, "P2", 120_000)
    assert lock["limited_by"] == "window"
    assert lock["tokens_in_steps"] == 81_243 * 64 * 512
    assert lock_problems(gate.out) == []


def test_budget_is_never_more_than_the_corpus_holds(gate: GateDouble) -> None:
    gate.tables["data"]["epochs"] = 1
    assert gate.run().status.green
    lock = gate.lock()
    windows = (lock["train_tokens"] - 1) // 64
    assert lock["limited_by"] == "data"
    assert lock["locked_budget_tokens"] == windows * 64 < 60_000 * 765
    assert lock["total_steps"] == windows * 64 // (8 * 64)


def test_window_that_lacks_the_token_after_its_last_is_not_counted(
    gate: GateDouble, tiny_shards: Path
) -> None:
    tokens = load_manifest(tiny_shards).train.tokens
    seq_len = next(number for number in range(2, tokens + 1) if tokens % number == 0)
    gate.tables["data"]["epochs"] = 1
    for point in gate.tables["sweep"]["points"]:
        point |= {"micro_batch": 1, "seq_len": seq_len}
    assert gate.run().status.green
    assert gate.lock()["locked_budget_tokens"] == tokens - seq_len


def test_epochs_multiply_what_the_corpus_holds(gate: GateDouble) -> None:
    gate.tables["data"]["epochs"] = 3
    gate.run()
    lock = gate.lock()
    assert lock["locked_budget_tokens"] == 3 * ((lock["train_tokens"] - 1) // 64) * 64
    assert lock["budget"]["epochs"] == 3


def test_window_too_short_for_one_step_is_red(gate: GateDouble) -> None:
    gate.tables["budget"] = {"window_hours": "0.750001"}
    outcome = gate.run()
    assert (outcome.status.red, outcome.lock_path) == (("budget",), None)
    assert "less than one step of 8x64" in gate.store.read()["budget"].reason


def test_warm_up_that_does_not_end_within_the_budget_is_red(gate: GateDouble) -> None:
    gate.run()
    steps = gate.lock()["total_steps"]
    gate.out.rename(gate.folder / "first")
    gate.tables["optimizer"]["warmup_steps"] = steps
    outcome = gate.run()
    assert (outcome.status.red, outcome.lock_path) == (("budget",), None)
    reason = gate.store.read()["budget"].reason
    assert f"warm-up of {steps:,} steps does not end within the {steps:,} steps" in reason
    gate.tables["optimizer"]["warmup_steps"] = steps - 1
    assert gate.run().status.green


def test_rate_is_never_rounded_up(gate: GateDouble) -> None:
    gate.probes.rates["P2"] = 59_999
    gate.tables["budget"] = {"window_hours": "0.7501"}  # 0.306 s of training
    gate.run()
    assert gate.lock()["locked_budget_tokens"] == 18_359  # 18,359.694 exactly


class Usage(NamedTuple):
    """As `shutil.disk_usage` gives it."""

    total: int
    used: int
    free: int


@pytest.mark.parametrize(("free_bytes", "green"), [(6 * 14_000, True), (6 * 14_000 - 1, False)])
def test_free_disk_must_hold_six_checkpoints(
    gate: GateDouble, monkeypatch: pytest.MonkeyPatch, free_bytes: int, green: bool
) -> None:
    monkeypatch.setattr("leadline.gate.arithmetic.disk_free_bytes", lambda _: free_bytes)
    outcome = gate.run()
    assert outcome.status.green is green
    evidence = gate.store.read()["checkpoint"]
    assert evidence.data["needed_bytes"] == 84_000
    if not green:
        assert "are needed for six checkpoints" in evidence.reason


def test_estimate_counts_where_it_is_above_the_measured_checkpoint(gate: GateDouble) -> None:
    gate.probes.points["P2"] = {"checkpoint": {"bytes": 10, "seconds": 0.01}}
    gate.run()
    assert gate.store.read()["checkpoint"].data["needed_bytes"] == 6 * 14_000  # 4000 x 3.5 x 6


def test_disk_is_that_of_the_checkpoint_folder(
    gate: GateDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def usage(folder: Path) -> Usage:
        asked.append(folder)
        return Usage(1 << 40, 0, 1 << 40)

    monkeypatch.setattr("leadline.pack.space.shutil.disk_usage", usage)
    gate.tables["checkpoint"] = {"dir": "elsewhere"}
    assert gate.run().status.green
    assert asked[-1] == gate.folder / "elsewhere"


@pytest.mark.parametrize(
    ("seconds", "green"),
    [(0.4, True), (60.0, False)],
)
def test_checkpoints_and_evals_must_cost_less_than_90_s_of_10_min(
    gate: GateDouble, seconds: float, green: bool
) -> None:
    gate.probes.points["P2"] = {"checkpoint": {"bytes": 14_000, "seconds": seconds}}
    assert gate.run().status.green is green
    evidence = gate.store.read()["checkpoint"]
    overhead_ns = evidence.data["overhead_seconds_per_10min"] * 1e9
    assert (overhead_ns < OVERHEAD_LIMIT_NS) is green
    if not green:
        assert "of every 10 min" in evidence.reason


def test_slow_eval_costs_as_much_as_a_slow_checkpoint(gate: GateDouble) -> None:
    slow: dict[str, Any] = {"batch": 8, "batches": 3, "seconds": 9.0, "status": "ok"}
    gate.probes.points["P2"] = {"eval": slow}
    outcome = gate.run()
    assert outcome.status.red == ("checkpoint",)


def test_oom_at_one_point_is_recorded_and_another_is_chosen(gate: GateDouble) -> None:
    gate.probes.points["P2"] = out_of_memory("train")
    assert gate.run().status.green
    lock = gate.lock()
    assert (lock["best_cfg"], lock["probes"]["P2"]["status"]) == ("P3", "oom")
    assert lock["probes"]["P2"]["tok_s"] is None


def test_oom_at_every_point_is_red_with_every_reason(gate: GateDouble) -> None:
    gate.probes.points = {name: out_of_memory("train") for name in ("P1", "P2", "P3")}
    outcome = gate.run()
    assert "best_cfg" in outcome.status.red
    assert gate.store.read()["choice"].reason.count("the train phase does not fit") == 3


def test_g11_eval_oom_rejects_the_point_and_leaves_the_training_batch(gate: GateDouble) -> None:
    gate.probes.points = {name: out_of_memory("eval") for name in ("P1", "P2", "P3")}
    outcome = gate.run()
    assert outcome.lock_path is None
    choice = gate.store.read()["choice"]
    assert choice.reason.count("eval does not fit") == 3
    assert gate.store.read()["probe.P2"].data["micro_batch"] == 8
    assert not (gate.out / "config.lock.json").exists()


def test_unsteady_point_is_not_chosen(gate: GateDouble) -> None:
    why = "the halves differ by 9.0 % (60000 and 54600 tok/s), above 3 %: not steady"
    gate.probes.points["P2"] = {"status": "rejected", "why": why}
    assert gate.run().status.green
    assert gate.lock()["best_cfg"] == "P3"
    assert "not steady" in gate.store.read()["choice"].data["reasons"]["P2"]


def test_eval_batch_wider_than_the_micro_batch_is_what_is_locked(gate: GateDouble) -> None:
    gate.tables["sweep"]["points"][1]["eval_batch"] = 16
    gate.run()
    assert gate.lock()["eval_batch"] == 16
