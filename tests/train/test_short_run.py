"""Training for a given time, on the tiny workloads."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from leadline.core.errors import DataError, NonFiniteStateError, UsageError
from leadline.models.custom import load_workload
from leadline.train import short_run
from leadline.train.settings import StepSettings
from leadline.train.short_run import ShortRun, ShortRunProgress, train_briefly


@pytest.fixture
def run(workloads_dir: Path, tiny_shards: Path) -> ShortRun:
    return ShortRun(
        workload=load_workload(workloads_dir, "tiny.py:clean"),
        shards=tiny_shards,
        device=torch.device("cpu"),
        settings=StepSettings(learning_rate=1e-2, warmup_steps=5),
        seed=0,
        micro_batch=4,
        seq_len=32,
        seconds=10.0,
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes at every look at the clock."""
    ticks = itertools.count()
    monkeypatch.setattr(short_run.time, "monotonic", lambda: float(next(ticks)))


def test_training_ends_at_its_time(run: ShortRun, clock: None) -> None:
    seen: list[ShortRunProgress] = []
    trained = train_briefly(run, seen.append)
    # Ten seconds; the start is looked up once, then two looks a step.
    assert [at.step for at in seen] == [1, 2, 3, 4, 5]
    assert (trained.steps, trained.tokens) == (5, 5 * 4 * 32)


def test_training_shorter_than_a_step_takes_one(run: ShortRun, clock: None) -> None:
    assert train_briefly(replace(run, seconds=0.5), lambda _: None).steps == 1


def test_training_lowers_the_held_out_loss(run: ShortRun, clock: None) -> None:
    one = train_briefly(replace(run, seconds=0.5), lambda _: None)
    many = train_briefly(replace(run, seconds=100.0), lambda _: None)
    assert many.first_loss == one.first_loss
    assert many.eval_loss < one.eval_loss - 0.5


def test_training_twice_gives_equal_weights(run: ShortRun, clock: None) -> None:
    first, second = (train_briefly(run, lambda _: None).model for _ in range(2))
    for left, right in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(left, right)


def test_trained_model_is_left_in_eval_mode(run: ShortRun, clock: None) -> None:
    assert not train_briefly(run, lambda _: None).model.training


def test_loss_that_is_not_finite_stops_training_by_step(
    run: ShortRun, clock: None, workloads_dir: Path
) -> None:
    bad = replace(run, workload=load_workload(workloads_dir, "tiny.py:nan_loss"))
    with pytest.raises(NonFiniteStateError, match="after step 3 is nan"):
        train_briefly(bad, lambda _: None)


def test_batch_larger_than_the_held_out_text_is_refused_before_training(
    run: ShortRun, clock: None
) -> None:
    seen: list[ShortRunProgress] = []
    with pytest.raises(DataError, match="eval split"):
        train_briefly(replace(run, micro_batch=2_000), seen.append)
    assert seen == []


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_time_that_cannot_be_is_refused(run: ShortRun, seconds: float) -> None:
    with pytest.raises(UsageError, match="training for"):
        train_briefly(replace(run, seconds=seconds), lambda _: None)
