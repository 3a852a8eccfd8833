"""Optimiser settings are checked before anything runs, and locked in full."""

from decimal import Decimal

import pytest

from leadline.core.errors import UsageError
from leadline.train.settings import StepSettings, exact_settings, settings_from


def test_settings_from_nothing_are_the_defaults() -> None:
    assert settings_from({}) == StepSettings()


def test_settings_from_a_table_replace_only_what_it_names() -> None:
    settings = settings_from({"learning_rate": Decimal("0.001"), "warmup_steps": 20})
    assert settings == StepSettings(learning_rate=0.001, warmup_steps=20)


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"lr": 1}, "no key lr; it has learning_rate"),
        ({"learning_rate": "fast"}, "learning_rate is 'fast'"),
        ({"learning_rate": True}, "learning_rate is True"),
        ({"weight_decay": Decimal(-1)}, "at least 0"),
        ({"warmup_steps": Decimal("1.5")}, "whole number"),
        ({"beta2": 1}, "below 1"),
        ({"learning_rate": Decimal("NaN")}, "finite number"),
        ({"clip_norm": Decimal("1e400")}, "finite number"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(table: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        settings_from(table)


def test_exact_settings_hold_every_value_as_text() -> None:
    exact = exact_settings(StepSettings())
    assert exact["warmup_steps"] == "500"
    assert all(isinstance(value, str) for value in exact.values())
    assert float(exact["learning_rate"]) == StepSettings().learning_rate
