"""Judge the figures of bench/tap_throughput.py: ratios, each with its target."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

MIB = 2**20
GIB = 2**30

Results = Mapping[str, Any]
Row = tuple[str, float | None, str, float]
"""Name, value, sense and target of a ratio."""


def ratios(results: Results) -> dict[str, dict[str, Any]]:
    """Every ratio whose parts are there: value, target and whether it is met."""
    found = {}
    for name, value, sense, target in _judged(results):
        if value is not None:
            met = value <= target if sense == "<=" else value >= target
            found[name] = {"value": round(value, 4), "target": f"{sense} {target}", "met": met}
    return found


def table(results: Results) -> str:
    """The figures and the ratios, one a line."""
    lines = [*_figures(results), ""]
    for name, row in results["ratios"].items():
        mark = "met   " if row["met"] else "missed"
        lines.append(f"{mark}  {name:44} {row['value']:>12,.3f}   (target {row['target']})")
    lines.append(f"whole bench: {results['bench_seconds']:.0f} s")
    return "\n".join(lines)


def _judged(results: Results) -> Iterator[Row]:
    on, off = _longest(results, grams=True), _longest(results, grams=False)
    if on is not None:
        yield from _own(results, on)
        yield from _against(results, on)
    if on is not None and off is not None:
        yield "grams on / off", _seconds(on) / _seconds(off), "<=", 1.10
        yield "grams on / off, process", on["wall_seconds"] / off["wall_seconds"], "<=", 1.10


def _own(results: Results, tap: Mapping[str, Any]) -> Iterator[Row]:
    result, size = tap["result"], results["checkpoint"]["bytes"]
    pool, vram = (results["budgets"][f"{name}_mib"] * MIB for name in ("pool", "vram"))
    outside = tap["disk_read_bytes"]
    own = result.get("bytes_read")
    yield "bytes read / model bytes", own and own / size, "<=", 1.02
    yield "the same, by the kernel", outside and outside / size, "<=", 1.02
    for name, value in (
        ("host peak beyond the pool, GiB", result.get("peak_host_bytes")),
        ("the same, resident by the kernel", tap["peak_resident_bytes"]),
        ("the same, without mapped files", tap["peak_anonymous_bytes"]),
    ):
        yield name, value and (value - pool) / GIB, "<=", 2.0
    peak = result.get("peak_vram_bytes")
    yield "VRAM peak / budget", peak and peak / vram, "<=", 1.0
    device = tap["peak_device_bytes"]
    yield "the same, whole device by the driver", device and device / vram, "<=", 1.0


def _against(results: Results, tap: Mapping[str, Any]) -> Iterator[Row]:
    tokens = tap["result"]["tokens"]
    disk, compute = disk_seconds(results), compute_seconds(results, tokens)
    floor = None if disk is None or compute is None else max(disk, compute)
    yield "wall / max(disk, compute)", floor and _seconds(tap) / floor, "<=", 1.15
    yield "the same, process", floor and tap["wall_seconds"] / floor, "<=", 1.15
    rate = tokens / _seconds(tap)
    widths = sorted({row["documents_a_step"] for row in results["accelerate"] if "from" in row})
    for documents in widths:
        target = 400.0 if documents == 1 else 15.0
        theirs = accelerate_rate(results, documents)
        name = f"tap / accelerate, documents a step: {documents}"
        yield name, theirs and rate / theirs, ">=", target


def disk_seconds(results: Results) -> float | None:
    """The faster of the raw reads."""
    return _best(results["raw"], "seconds", min)


def compute_seconds(results: Results, tokens: int) -> float | None:
    """Resident compute of *tokens* at the fastest batch."""
    rate = _best(results["resident"], "tok_s", max)
    return rate and tokens / rate


def accelerate_rate(results: Results, documents: int) -> float | None:
    """The faster of the measured steps whose weights came from the disk."""
    rows = [
        row
        for row in results["accelerate"]
        if row.get("documents_a_step") == documents and row["from"] == "disk"
    ]
    return _best(rows, "tok_s", max)


def _best(
    rows: list[Mapping[str, Any]], key: str, choose: Callable[[list[float]], float]
) -> float | None:
    values = [float(row[key]) for row in rows if key in row]
    return choose(values) if values else None


def _longest(results: Results, *, grams: bool) -> Mapping[str, Any] | None:
    taken = [tap for tap in results["taps"] if tap["grams"] is grams and "result" in tap]
    return max(taken, key=lambda tap: tap["asked_tokens"], default=None)


def _seconds(tap: Mapping[str, Any]) -> float:
    return float(tap["result"]["seconds"])


def _figures(results: Results) -> Iterator[str]:
    disk = disk_seconds(results)
    if disk is not None:
        rate = results["checkpoint"]["bytes"] / disk / 1e9
        yield f"raw disk read of the model      {disk:9.2f} s   {rate:.2f} GB/s"
    compute = _best(results["resident"], "tok_s", max)
    if compute is not None:
        yield f"resident compute             {compute:12,.0f} tok/s"
    for tap in results["taps"]:
        what = f"tap of {tap['asked_tokens']:,}, grams {'on' if tap['grams'] else 'off'}"
        if "result" not in tap:
            yield f"{what:28} failed: {tap['log'].strip().splitlines()[-1:]}"
            continue
        rate = tap["result"]["tokens"] / _seconds(tap)
        yield (
            f"{what:28} {rate:12,.0f} tok/s   {_seconds(tap):.2f} s, "
            f"process {tap['wall_seconds']:.2f} s"
        )
    for row in results["accelerate"]:
        if row.get("from") in ("disk", "page cache"):
            what = f"accelerate, {row['documents_a_step']} a step, {row['from']}"
            yield f"{what:28} {row['tok_s']:12,.0f} tok/s"
    failed = [
        (name, row)
        for name in ("raw", "resident", "accelerate")
        for row in results[name]
        if "failed" in row or "missing" in row
    ]
    for name, row in failed:
        yield f"{name}: {row.get('missing') or row['log']}"
