"""Bytes and counts as people read them; the only place KiB and GiB appear.

Text for messages and tables. Nothing is parsed back and nothing hashed holds it.
"""

_UNITS = ("KiB", "MiB", "GiB", "TiB")


def format_bytes(num_bytes: int) -> str:
    """Binary units with one decimal from KiB on: `512 B`, `1.5 GiB`."""
    if abs(num_bytes) < 1024:
        return f"{num_bytes} B"
    value = float(num_bytes)
    for unit in _UNITS:
        value /= 1024
        # 1023.95 would print as 1024.0, which belongs to the next unit.
        if abs(value) < 1023.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} PiB"


def format_count(count: int) -> str:
    """Whole number with thousands separators: `2,662,200,000`."""
    return f"{count:,}"
