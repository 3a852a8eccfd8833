"""Utilisation is told only where the peak is known."""

import pytest

from leadline.core.peaks import utilisation


def test_g07_unknown_device_has_no_utilisation_and_a_reason() -> None:
    found = utilisation("NVIDIA Unknown X1", 120_000, 139_700_000)
    assert found.percent is None
    assert "NVIDIA Unknown X1" in found.why


@pytest.mark.parametrize("name", ["H200", "nvidia h200", "NVIDIA H200 NVL", "NVIDIA H100"])
def test_g07_a_similar_name_is_not_the_known_device(name: str) -> None:
    assert utilisation(name, 1, 1).percent is None


def test_known_device_gives_six_flop_a_parameter_and_token() -> None:
    found = utilisation("NVIDIA H200", 478_000, 139_700_000)
    assert found.percent == pytest.approx(100 * 6 * 478_000 * 139_700_000 / 989.5e12)
