import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadline.core.units import format_bytes, format_count


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (80 * 2**30, "80.0 GiB"),
        (-2048, "-2.0 KiB"),
        (5000 * 2**50, "5000.0 PiB"),
    ],
)
def test_format_bytes_uses_binary_units(num_bytes, text):
    assert format_bytes(num_bytes) == text


@given(st.integers(1024, 2**58))
def test_format_bytes_of_any_size_is_within_half_a_tenth_of_the_unit(num_bytes):
    value, unit = format_bytes(num_bytes).split()
    scale = 1024 ** (1 + ("KiB", "MiB", "GiB", "TiB", "PiB").index(unit))
    assert abs(float(value) * scale - num_bytes) <= 0.0501 * scale
    assert float(value) < 1024


def test_format_count_groups_thousands():
    assert format_count(2662200000) == "2,662,200,000"
