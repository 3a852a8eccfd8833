"""Bytes and counts as people read them; the only place KiB and GiB appear.

Text for messages and tables. Nothing is parsed back and nothing hashed holds it.
"""

_STEPS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(num_bytes: int) -> str:
    """Binary units with one decimal from KiB on: `512 B`, `1.5 GiB`."""
    if abs(num_bytes) < 1024:
        return f"{num_bytes} B"
    value = float(num_bytes)
    for unit in _STEPS:
        value /= 1024
        # 1023.95 would print as 1024.0, which belongs to the next unit.
        if abs(value) < 1023.95 or unit == _STEPS[-1]:
            return f"{value:.1f} {unit}"
    raise AssertionError("unreachable: the last unit always returns")


def format_count(count: int) -> str:
    """Whole number with thousands separators: `2,662,200,000`."""
    return f"{count:,}"
