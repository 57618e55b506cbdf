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
from diffserve.experiments.summary import CellSummary
from diffserve.experiments.svg import (
    COLORS,
    UPON,
    Scale,
    apart,
    figure,
    linear_scale,
    linear_ticks,
    log_scale,
    log_ticks,
)
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
    assert "(lower is better)" in figure([chart])


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


def places(svg: ElementTree.Element, color: str) -> list[tuple[float, float]]:
    dots = [path for path in svg.iter("path") if path.get("class") == "dot" and path.get("fill") == color]
    matches = [re.match(r"translate\(([\d.]+),([\d.]+)\)", dot.get("transform") or "") for dot in dots]
    return [(float(place[1]), float(place[2])) for place in matches if place is not None]


def test_every_cell_is_a_dot_on_a_logarithmic_axis_and_better_is_higher() -> None:
    exact, psnr = svgs(figure(over_steps(SWEEP, MEASURES, NAMES)))
    (a, b, c), worse = places(psnr, COLORS[0]), places(psnr, COLORS[1])
    assert (b[0] - a[0]) / (c[0] - a[0]) == pytest.approx(math.log(2) / math.log(10), abs=0.01)
    assert a[1] > b[1] > c[1], "y grows downwards"
    assert all(dot[1] > better[1] for dot, better in zip(worse, (a, b, c), strict=True))
    assert len(places(exact, COLORS[0])) == 3
    assert [line.get("class") for line in exact.iter("line")].count("level") == 1, "where the converged pictures stand"
    assert [text.text for text in psnr.iter("text")][-4:] == ["5", "10", "50", "steps"]


def test_seconds_have_a_front_and_its_knee_is_named() -> None:
    charts = over_seconds(SWEEP, MEASURES, NAMES)
    assert [(dot.x, dot.value.value) for dot in charts[1].front] == [(0.05, 20.0), (0.1, 28.0), (0.5, 30.0)]
    assert charts[1].knee == charts[1].front[1]
    assert "its knee: DDIM with 10 steps" in knee_sentence(charts, NAMES)
    (_, psnr) = svgs(figure(charts))
    assert len(list(psnr.iter("circle"))) == 1
    assert not list(psnr.iter("polyline")), "dots that are not an order of anything are not joined"


def test_equal_curves_and_dots_are_seen_below_each_other() -> None:
    over = over_steps(SWEEP, MEASURES, NAMES)  # all have the same share of exact pictures, and no two one distance
    exact, psnr = svgs(figure(over))
    first, second = ([path for path in exact.iter("path") if path.get("stroke") == color] for color in COLORS[:2])
    assert [path.get("style") for path in first] == ["stroke-width:6"] * 2, "both stretches of the curve below"
    assert second == []
    dots = [path.get("transform") or "" for path in exact.iter("path") if path.get("class") == "dot"]
    assert ["scale" in dot for dot in dots] == [True] * 3 + [False] * 3
    assert "scale" not in ElementTree.tostring(psnr, "unicode")
    assert UPON in figure(over)
    assert UPON not in figure(over[1:])
    (seconds, _) = svgs(figure(over_seconds(SWEEP, MEASURES, NAMES)))
    assert ElementTree.tostring(seconds, "unicode").count("scale(1.8)") == 3


def test_labels_of_dots_do_not_overlap() -> None:
    crowd = tuple(summary("ddim", 5 + number, 20.0, seconds=1 + number / 1000) for number in range(8))
    (exact, _) = svgs(figure(over_seconds(crowd, MEASURES, NAMES)))
    plain = [text for text in exact.iter("text") if text.get("dy") is None and text.get("text-anchor") == "start"]
    assert len(plain) < 8


def test_what_comes_from_outside_stays_text() -> None:
    cells = (summary(BAD, 5, 20.0), summary(BAD, 10, 22.0))
    for charts in (over_steps(cells, MEASURES), over_seconds(cells, MEASURES)):
        html = figure(charts)
        assert "<b" not in html
        assert any(BAD in (title.text or "") for svg in svgs(html) for title in svg.iter("title"))


def test_one_cell_and_equal_values_make_a_chart_too() -> None:
    for cells in ((summary("ddim", 5, 20.0),), (summary("ddim", 5, 20.0), summary("ddim", 10, 20.0))):
        for charts in (over_steps(cells, MEASURES, NAMES), over_seconds(cells, MEASURES, NAMES)):
            html = figure(charts)
            assert "nan" not in html
            assert len(svgs(html)) == 2


def test_nothing_measured_is_no_chart() -> None:
    assert over_steps((), MEASURES) == ()
    assert figure(()) == ""


def test_ticks_are_round_and_within_the_scale() -> None:
    scale = linear_scale([12.3, 41.7], 228, 22)
    assert linear_ticks(scale) == (10.0, 20.0, 30.0, 40.0, 50.0)
    assert (scale.place(10.0), scale.place(50.0)) == (228, 22)
    assert log_ticks(Scale(0.4, 25.0, 0, 100, is_log=True)) == (0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
    assert log_ticks(Scale(0.6, 1.3, 0, 100, is_log=True)) == pytest.approx((0.6, 0.8, 1.0, 1.2))
    assert log_ticks(Scale(0.001, 900.0, 0, 100, is_log=True)) == (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)


def test_numbers_that_would_overlap_at_an_axis_are_left_out() -> None:
    steps = tuple(float(n) for n in range(1, 101))
    selected = apart(steps, log_scale(steps, 0, 350), 22.0)
    assert selected[0] == 1.0
    assert 5 < len(selected) < 20
