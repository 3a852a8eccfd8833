"""Drawings: escaped, broken where data is missing, and described in words."""

import re
from xml.etree import ElementTree

from leadline.report.step_strip import draw_strip
from leadline.report.svg import Scale, chart, element, label, polyline
from leadline.report.sweep_chart import Bar, MemoryBar, draw_memory, draw_throughput
from leadline.report.twin_chart import TwinCurves, draw_twin

HOSTILE = "</text><script>alert(1)</script>&\"'"


def _curves(**changes: object) -> TwinCurves:
    values = {
        "fp32_losses": (3.0, 2.0, 1.5, 1.2),
        "bf16_losses": (3.0, 2.01, None, 1.3),
        "fp32_norms": (1.0, 1.0, 1.0, 1.0),
        "bf16_norms": (1.0, 1.0, None, 1.0),
        "tolerance": 0.05,
        "settle_steps": 1,
        "worst_step": 4,
        "worst_delta": 0.1,
    }
    return TwinCurves(**(values | changes))


def test_element_escapes_text_and_attributes() -> None:
    drawn = element("text", text=HOSTILE, cls=HOSTILE)
    root = ElementTree.fromstring(drawn)
    assert root.text == HOSTILE
    assert root.attrib == {"class": HOSTILE}


def test_chart_names_itself_for_those_who_hear_it() -> None:
    drawn = chart([label(1, 2, "x")], key="k", title="T", description="D", width=10, height=5)
    root = ElementTree.fromstring(drawn)
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-labelledby"] == "k-t k-d"
    assert [root.find("title").text, root.find("desc").text] == ["T", "D"]


def test_polyline_breaks_at_a_missing_value() -> None:
    points = [(0.0, 1.0), (1.0, 2.0), (2.0, None), (3.0, 1.0), (4.0, 2.0)]
    drawn = polyline(points, Scale(0, 4, 0, 40), Scale(0, 2, 20, 0), "line")
    assert drawn.count("M") == 2


def test_scale_clamps_to_its_pixels() -> None:
    scale = Scale(0, 10, 100, 200)
    assert [scale(-5), scale(5), scale(50)] == [100, 150, 200]


def test_twin_drawing_marks_a_step_without_a_finite_loss() -> None:
    drawn = draw_twin(_curves(), 900, "t", "wide")
    assert "bf16 loss at step 3 is not finite" in drawn
    assert "fp32 loss at step 3 is not finite" not in drawn


def test_twin_drawing_marks_the_worst_step_red_only_beyond_the_limit() -> None:
    assert "worst 0.1000 at step 4" in draw_twin(_curves(), 900, "t", "wide")
    assert 'class="worst bad"' in draw_twin(_curves(), 900, "t", "wide")
    assert 'class="worst bad"' not in draw_twin(_curves(worst_delta=0.04), 900, "t", "wide")


def test_twin_drawing_of_lanes_of_unequal_length_shows_the_longer() -> None:
    drawn = draw_twin(_curves(bf16_losses=(3.0,), worst_step=None), 900, "t", "wide")
    assert "step 4: fp32 1.2000, bf16 -, |delta| -" in drawn


def test_step_strip_of_many_steps_keeps_the_slowest() -> None:
    drawn = draw_strip([1e6] * 5_000 + [9e6] + [1e6] * 5_000, "s", "P1")
    assert "from 1\N{NO-BREAK SPACE}ms to 9\N{NO-BREAK SPACE}ms" in drawn
    assert re.search(r"steps \d+ to \d+: median 1.ms, 1.ms to 9.ms", drawn)
    assert len(drawn) < 80_000


def test_step_strip_without_steps_is_empty() -> None:
    assert draw_strip([], "s", "P1") == ""


def test_throughput_bars_say_why_a_point_has_none() -> None:
    bar = Bar(
        name="P3", shape="", value=None, low=None, high=None, chosen=False, status="out of memory"
    )
    assert "out of memory" in draw_throughput([bar])


def test_memory_bar_over_the_limit_is_drawn_refused() -> None:
    def bar(percent: float) -> MemoryBar:
        return MemoryBar(
            name="P1",
            percent=percent,
            allocator_bytes=None,
            device_bytes=None,
            total_bytes=None,
            out_of_memory=False,
        )

    assert 'class="bar refused"' in draw_memory([bar(80.0)], 80.0)
    assert 'class="bar refused"' not in draw_memory([bar(79.9)], 80.0)
