"""Choosing the configuration: the fastest point that fits, with a reason for every point."""

from collections.abc import Mapping, Sequence
from typing import Any

from leadline.core.evidence import Evidence
from leadline.gate.context import Finding


def choose(points: Sequence[Evidence]) -> Finding:
    """Pick the largest tok/s among the points whose measurement may be used.

    Every point has to be there and measured; one that ran out of memory or broke a rule
    is on the record and out of the choice. Equal rates go to the smaller memory peak.
    """
    unmeasured = [point for point in points if not point.green]
    if unmeasured:
        names = ", ".join(f"{_name(point)} ({point.reason})" for point in unmeasured)
        return Finding(green=False, reason=f"not every point was measured: {names}", data={})
    usable = [point.data for point in points if point.data["status"] == "ok"]
    reasons = {point.data["name"]: _reason(point.data) for point in points}
    if not usable:
        told = "; ".join(f"{name}: {why}" for name, why in reasons.items())
        return Finding(
            green=False,
            reason=f"no point may be used ({told}); make micro_batch or seq_len smaller, "
            "or free the device and run the gate again",
            data={"reasons": reasons},
        )
    best = max(usable, key=lambda data: (data["tok_s"], -data["memory"]["device_peak_bytes"]))
    reasons[best["name"]] = f"chosen: fastest of {len(usable)} that fit"
    return Finding(
        green=True,
        reason="",
        data={
            "best_cfg": best["name"],
            "tok_s": best["tok_s"],
            "micro_batch": best["micro_batch"],
            "seq_len": best["seq_len"],
            "memory": best["memory"],
            "eval": best["eval"],
            "reasons": reasons,
            "faster": {
                point.data["name"]: reasons[point.data["name"]]
                for point in points
                if (point.data.get("tok_s") or 0) > best["tok_s"]
            },
        },
    )


def _name(point: Evidence) -> str:
    return point.name.partition(".")[2]


def _reason(data: Mapping[str, Any]) -> str:
    if data["status"] != "ok":
        return f"{data['status']}: {data['why']}"
    return f"fits, {data['tok_s']:,} tok/s"
