"""The numerics twin as the report shows it: figures, problems, accused modules, curves."""

from dataclasses import dataclass

from markupsafe import Markup

from leadline.report import numerals
from leadline.report.facts import Facts
from leadline.report.twin_chart import TwinCurves, draw_twin

_WIDE, _NARROW = 980.0, 400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Accused:
    """A module in which the lanes part, as the locator named it."""

    module: str
    module_class: str
    rule: str
    error: str
    band: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TwinView:
    """Everything the template prints about the twin."""

    wide_chart: Markup
    narrow_chart: Markup
    figures: tuple[tuple[str, str, str], ...]
    """Label, value, and the limit or remark beside it."""
    problems: tuple[str, ...]
    accused: tuple[Accused, ...]


def twin_view(data: Facts) -> TwinView:
    """Read the evidence `twin`."""
    curves = TwinCurves(
        fp32_losses=tuple(data.series("fp32", "losses")),
        bf16_losses=tuple(data.series("bf16", "losses")),
        fp32_norms=tuple(data.series("fp32", "grad_norms")),
        bf16_norms=tuple(data.series("bf16", "grad_norms")),
        tolerance=data.number("tolerance"),
        settle_steps=data.integer("settle_steps") or 0,
        worst_step=data.integer("worst_step"),
        worst_delta=data.number("worst_delta"),
    )
    drawn = any(value is not None for value in (*curves.fp32_losses, *curves.bf16_losses))
    return TwinView(
        wide_chart=draw_twin(curves, _WIDE, "twin-wide", "wide") if drawn else Markup(),
        narrow_chart=draw_twin(curves, _NARROW, "twin-narrow", "narrow") if drawn else Markup(),
        figures=_figures(data),
        problems=tuple(item.text() for item in data.items("problems") if item.text()),
        accused=tuple(_accused(item) for item in data.items("accused")),
    )


def _figures(data: Facts) -> tuple[tuple[str, str, str], ...]:
    tolerance = numerals.decimal(data.number("tolerance"), 2)
    step = data.text("worst_step")
    worst = f"limit {tolerance}" + (f", at step {step}" if step else "")
    shape = f"{numerals.count(data.number('micro_batch'))} {numerals.TIMES} "
    shape += numerals.count(data.number("seq_len"))
    figures = [
        ("Worst |delta|", numerals.decimal(data.number("worst_delta")), worst),
        ("Final |delta|", numerals.decimal(data.number("final_delta")), f"limit {tolerance}"),
        (
            "fp32 product error",
            numerals.scientific(data.number("matmul_error")),
            f"limit {numerals.scientific(data.number('matmul_limit'))}, against float64",
        ),
        ("Steps", numerals.count(data.number("steps")), f"batch {shape}"),
        (
            "Time",
            numerals.seconds(data.number("bf16", "seconds")),
            f"bf16; fp32 {numerals.seconds(data.number('fp32', 'seconds'))}",
        ),
    ]
    rate = data.number("learning_rate")
    if rate is not None:
        figures.append(("Learning rate", numerals.scientific(rate), "both lanes"))
    return tuple(figures)


def _accused(item: Facts) -> Accused:
    return Accused(
        module=item.text("module") or numerals.DASH,
        module_class=item.text("module_class"),
        rule=item.text("rule") or numerals.DASH,
        error=numerals.scientific(item.number("error")),
        band=numerals.scientific(item.number("band")),
        detail=item.text("detail"),
    )
