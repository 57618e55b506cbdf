"""Curves as SVG: where dots stand, what is named, and that texts stay texts."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import msgspec
import pytest

from diffserve.experiments.charts import over_seconds, over_steps
from diffserve.experiments.estimates import Estimate, Measure
from diffserve.experiments.plan import Cell
from diffserve.experiments.plots import COLORS, UPON, figure_html
from diffserve.experiments.summary import CellSummary
from ui.experiment.view import knee_sentence

MEASURES = (Measure.EXACT, Measure.PSNR_DB)
NAMES = {"ddim": "DDIM", "ddpm": "DDPM"}
BAD = "<b onclick=alert(1)>\"'&"


def summary(
    sampler: str, steps: int, psnr: float, *, seconds: float | None = None, is_reference: bool = False
) -> CellSummary:
    measures = {} if is_reference else {Measure.PSNR_DB.value: Estimate(psnr, psnr - 1, psnr + 1)}
    return CellSummary(
        cell=Cell(sampler, steps, 3.0, is_reference),
        num_images=4,
        measures=measures | {Measure.EXACT.value: Estimate(0.75)},
        parts={},
        spacing="trailing",
        evaluations=2.0 * steps,
        step_ms=Estimate(10.0),
        alone_s=steps / 100 if seconds is None else seconds,
        engine_s=0.0,
    )


SWEEP = (
    summary("ddim", 5, 20.0), summary("ddpm", 5, 12.0), summary("ddim", 10, 28.0), summary("ddpm", 10, 13.0),
    summary("ddim", 50, 30.0), summary("ddpm", 50, 14.0), summary("ddim", 200, 0.0, is_reference=True),
)  # fmt: skip


def test_a_measure_of_which_less_is_better_has_its_front_below() -> None:
    cells = [
        msgspec.structs.replace(summary, measures={Measure.FRECHET.value: Estimate(100 / summary.cell.num_steps)})
        for summary in SWEEP
        if not summary.cell.is_reference
    ]
    (chart,) = over_seconds(cells, [Measure.FRECHET])
    assert [dot.value.value for dot in chart.front] == [20.0, 10.0, 2.0]
    assert "(lower is better)" in figure_html([chart])


def test_several_guidance_scales_are_several_lines() -> None:
    other = [
        msgspec.structs.replace(summary, cell=msgspec.structs.replace(summary.cell, guidance_scale=1.0))
        for summary in SWEEP
    ]
    (chart,) = over_steps((*SWEEP, *other), [Measure.PSNR_DB], NAMES)
    assert [line.name for line in chart.lines] == [
        "DDIM, guidance 3", "DDPM, guidance 3", "DDIM, guidance 1", "DDPM, guidance 1"
    ]  # fmt: skip


def svgs(html: str) -> list[ElementTree.Element]:
    """Return the charts of a figure, without its legend."""
    tree = ElementTree.fromstring(f"<all>{html}</all>")
    return tree.findall(".//figure/svg")


def hints(svg: ElementTree.Element) -> list[str]:
    """Return the tooltips of the dots of a chart."""
    return [dot.findtext("title") or "" for dot in svg.iter("g") if dot.get("class") == "dot"]


def places(svg: ElementTree.Element, name: str) -> list[tuple[float, float]]:
    """Return where the dots of a line stand."""
    dots = [dot for dot in svg.iter("g") if (dot.findtext("title") or "").startswith(f"{name}, ")]
    markers = [marker for dot in dots for marker in dot.iter("use")]
    return [(float(marker.get("x", "")), float(marker.get("y", ""))) for marker in markers]


def test_every_cell_is_a_dot_on_a_logarithmic_axis_and_better_is_higher() -> None:
    exact, psnr = svgs(figure_html(over_steps(SWEEP, MEASURES, NAMES)))
    (a, b, c), worse = places(psnr, "DDIM"), places(psnr, "DDPM")
    assert (b[0] - a[0]) / (c[0] - a[0]) == pytest.approx(math.log(2) / math.log(10), abs=0.01)
    assert a[1] > b[1] > c[1], "y grows downwards"
    assert all(dot[1] > better[1] for dot, better in zip(worse, (a, b, c), strict=True))
    assert len(places(exact, "DDIM")) == 3
    assert [text.text for text in psnr.iter("text")][:4] == ["5", "10", "50", "steps"]
    assert hints(psnr)[0] == "DDIM, 5 steps: 20.0 dB (95 % interval 19.0 to 21.0 dB), 0.05 s"


def test_text_takes_its_color_from_the_page_and_the_page_keeps_its_own_styles() -> None:
    html = figure_html(over_steps(SWEEP, MEASURES, NAMES))
    assert "fill: var(--body-text-color)" in html
    assert "<style" not in html
    assert not re.search(r'<g id=|href="(?!#)', html)


def test_seconds_have_a_front_and_its_knee_is_named() -> None:
    charts = over_seconds(SWEEP, MEASURES, NAMES)
    assert [(dot.x, dot.value.value) for dot in charts[1].front] == [(0.05, 20.0), (0.1, 28.0), (0.5, 30.0)]
    assert charts[1].knee == charts[1].front[1]
    assert "its knee: DDIM with 10 steps" in knee_sentence(charts, NAMES)
    for svg in svgs(figure_html(charts)):
        texts = [text.text for text in svg.iter("text")]
        assert "seconds per image (numbers: steps)" in texts


def test_equal_curves_and_dots_are_visible_below_each_other() -> None:
    over = over_steps(SWEEP, MEASURES, NAMES)  # all have the same share of exact images, and no two one distance
    exact, psnr = (ElementTree.tostring(svg, "unicode") for svg in svgs(figure_html(over)))
    wide = f"stroke: {COLORS[0]}; stroke-width: 4.4"
    assert exact.count(wide) == 2, "both stretches of the curve below"
    assert "stroke-width: 4.4" not in psnr
    assert UPON in figure_html(over)
    assert UPON not in figure_html(over[1:])


def test_what_comes_from_outside_stays_text() -> None:
    cells = (summary(BAD, 5, 20.0), summary(BAD, 10, 22.0))
    for charts in (over_steps(cells, MEASURES), over_seconds(cells, MEASURES)):
        html = figure_html(charts)
        assert "<b" not in html
        assert all(BAD in hint for svg in svgs(html) for hint in hints(svg))


def test_one_cell_and_equal_values_make_a_chart_too() -> None:
    for cells in ((summary("ddim", 5, 20.0),), (summary("ddim", 5, 20.0), summary("ddim", 10, 20.0))):
        for charts in (over_steps(cells, MEASURES, NAMES), over_seconds(cells, MEASURES, NAMES)):
            html = figure_html(charts)
            assert "nan" not in html
            assert len(svgs(html)) == 2


def test_nothing_measured_is_no_chart() -> None:
    assert over_steps((), MEASURES) == ()
    assert figure_html(()) == ""


def test_numbers_that_would_overlap_at_an_axis_are_left_out() -> None:
    (_, psnr) = svgs(figure_html(over_steps([summary("ddim", n, 20.0) for n in range(1, 101)], MEASURES)))
    texts = [text.text for text in psnr.iter("text")]
    labels = texts[: texts.index("steps")]
    assert labels[0] == "1"
    assert 5 < len(labels) < 20
