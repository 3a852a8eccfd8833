"""The fastest point that may be used, with a reason for every point."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.core.evidence import Evidence
from leadline.gate.choice import choose

from .double import measured, memory, out_of_memory


def point(name: str, rate: int = 1000, *, green: bool = True, **data: Any) -> Evidence:
    content = {**measured(name, 4, 64, rate), **data}
    return Evidence(
        name=f"probe.{name}",
        green=green,
        reason="" if green else "it crashed",
        inputs="",
        time="",
        sha256="",
        data=content if green else {},
    )


def test_fastest_point_is_chosen() -> None:
    finding = choose([point("P1", 10), point("P2", 30), point("P3", 20)])
    assert (finding.green, finding.data["best_cfg"], finding.data["tok_s"]) == (True, "P2", 30)


def test_every_point_has_its_reason() -> None:
    points = [point("P1", 10), point("P2", 30), point("P3", **out_of_memory("train"))]
    reasons = choose(points).data["reasons"]
    assert reasons["P1"] == "fits, 10 tok/s"
    assert reasons["P2"].startswith("chosen: fastest of 2 that fit")
    assert reasons["P3"].startswith("oom: the train phase does not fit")


def test_faster_point_that_was_rejected_is_not_chosen() -> None:
    fast = point("P2", 99, status="rejected", why="peak is 84.00 % of the device, limit 80 %")
    finding = choose([point("P1", 10), fast, point("P3", 20)])
    assert finding.data["best_cfg"] == "P3"
    assert "84.00 %" in finding.data["reasons"]["P2"]


def test_points_faster_than_the_chosen_one_are_named_with_their_reason() -> None:
    fast = point("P2", 99, status="rejected", why="the halves differ by 7.0 %")
    finding = choose([point("P1", 10), fast, point("P3", **out_of_memory("train"))])
    assert finding.data["faster"] == {"P2": "rejected: the halves differ by 7.0 %"}
    assert choose([point("P1", 10), point("P2", 30), point("P3", 5)]).data["faster"] == {}


def test_equal_rates_go_to_the_smaller_peak() -> None:
    finding = choose([point("P1", 30, memory=memory(60)), point("P2", 30), point("P3", 20)])
    assert finding.data["best_cfg"] == "P2"


def test_unmeasured_point_is_red_and_named() -> None:
    finding = choose([point("P1"), point("P2", green=False), point("P3")])
    assert not finding.green
    assert finding.reason == "not every point was measured: P2 (it crashed)"


def test_no_usable_point_is_red_with_every_reason() -> None:
    points = [point(name, **out_of_memory("train")) for name in ("P1", "P2", "P3")]
    finding = choose(points)
    assert not finding.green
    assert all(f"{name}: oom" in finding.reason for name in ("P1", "P2", "P3"))


@given(st.permutations([("P1", 10), ("P2", 30), ("P3", 20), ("P4", 5)]))
@settings(max_examples=24, deadline=None)
def test_h08_choice_pairs_figures_by_name_whatever_the_order(order: list[tuple[str, int]]) -> None:
    finding = choose([point(name, rate) for name, rate in order])
    assert (finding.data["best_cfg"], finding.data["tok_s"]) == ("P2", 30)
