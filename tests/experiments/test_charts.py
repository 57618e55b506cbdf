"""Curves as SVG: positions of dots, labels, merged and gray lines, and that texts are escaped."""

from __future__ import annotations

import math
import re
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

import ui
from diffserve.experiments.chart_drawing import COLORS
from diffserve.experiments.charts import (
    MAX_COLORED,
    STYLE,
    color_numbers,
    headline,
    over_evaluations,
    over_seconds,
    over_steps,
)
from diffserve.experiments.estimates import Estimate, Measure
from diffserve.experiments.plan import Cell
from diffserve.experiments.plots import figure_html
from diffserve.experiments.report_page import CSS
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


def test_several_guidance_scales_are_several_names() -> None:
    other = [
        msgspec.structs.replace(summary, cell=msgspec.structs.replace(summary.cell, guidance_scale=1.0))
        for summary in SWEEP
    ]
    (chart,) = over_steps((*SWEEP, *other), [Measure.PSNR_DB], NAMES)
    assert [line.name for line in chart.lines] == [
        "DDIM, guidance 3; DDIM, guidance 1", "DDPM, guidance 3; DDPM, guidance 1"
    ]  # fmt: skip
    (chart,) = over_seconds((*SWEEP, *other), [Measure.PSNR_DB], NAMES)
    assert "DDIM, guidance 3: 5 steps" in " ".join(svgs(figure_html([chart]))[0].itertext())


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
    assert [text.text for text in psnr.iter("text")][-2:] == ["DDIM", "DDPM"], "labels at the ends of the lines"
    assert "steps (dotted: converged images)" in [text.text for text in exact.iter("text")]
    assert "DDIM, 5 steps: 20.0 dB (95 % interval 19.0 to 21.0 dB), 0.05 s" in hints(psnr)


def test_text_takes_its_color_from_the_page_and_the_page_keeps_its_own_styles() -> None:
    html = figure_html(over_steps(SWEEP, MEASURES, NAMES))
    assert "fill: var(--body-text-color)" in html
    assert "<style" not in html
    assert not re.search(r'<g id=|href="(?!#)', html)


def test_seconds_have_a_front_and_its_knee_is_named() -> None:
    charts = over_seconds(SWEEP, MEASURES, NAMES)
    assert [(dot.x, dot.value.value) for dot in charts[1].front] == [(0.05, 20.0), (0.1, 28.0), (0.5, 30.0)]
    assert charts[1].knee == charts[1].front[1]
    assert "its knee: DDIM with 10 steps" in knee_sentence(charts)
    for svg in svgs(figure_html(charts)):
        texts = [text.text for text in svg.iter("text")]
        assert any("(dashed: Pareto front" in (text or "") for text in texts)
        assert "DDIM 5" in texts, "points of the front have sampler and steps"


def test_lines_that_coincide_are_one_line_with_both_names() -> None:
    exact, psnr = over_steps(SWEEP, MEASURES, NAMES)  # equal shares of exact images, and different distances
    assert [line.name for line in exact.lines] == ["DDIM, DDPM"]
    assert [line.name for line in psnr.lines] == ["DDIM", "DDPM"]
    exact_svg, _ = svgs(figure_html((exact, psnr)))
    assert hints(exact_svg)[0] == "DDIM, 5 steps: 75.0 %, 0.05 s; DDPM, 5 steps: 75.0 %, 0.05 s"


def test_lines_within_noise_that_a_reader_can_tell_apart_are_not_merged() -> None:
    cells = [summary(name, n, value + n / 10) for name, value in (("a", 20.0), ("b", 20.5)) for n in (5, 50)]
    (chart,) = over_steps(cells, [Measure.PSNR_DB])
    assert len(chart.lines) == 2, "0.5 dB of a chart that shows 5 dB, though the intervals are 2 dB wide"
    cells += [summary("c", 5, 60.0)]
    (chart,) = over_steps(cells, [Measure.PSNR_DB])
    assert [line.name for line in chart.lines] == ["c", "a, b"]


MANY = tuple(
    summary(f"sampler{number}", steps, 10.0 + 1.5 * number + steps / 4, seconds=steps * (1 if number else 0.9))
    for steps in (4, 8, 16)
    for number in range(21)
)


def test_the_best_lines_have_different_colors_and_the_others_are_gray() -> None:
    (chart,) = over_steps(MANY, [Measure.PSNR_DB])
    colored = {line.name: line.color for line in chart.lines if line.color is not None}
    assert len(set(colored.values())) == len(colored) == MAX_COLORED
    assert {"sampler20", "sampler0"} <= set(colored), "the best, and the fastest, which is on the front"
    (svg,) = svgs(figure_html([chart]))
    texts = [text.text for text in svg.iter("text")]
    assert {line.name for line in chart.lines} <= set(texts), "all 21 lines have labels"
    assert len(hints(svg)) == len(MANY)


def test_labels_at_the_ends_of_21_lines_do_not_overlap() -> None:
    (svg,) = svgs(figure_html(over_steps(MANY, [Measure.PSNR_DB])))
    labels = {text.text: text for text in svg.iter("text") if (text.text or "").startswith("sampler")}
    heights = sorted(float((text.get("y") or "").strip()) for text in labels.values())
    assert len(heights) == 21
    assert min(b - a for a, b in pairwise(heights)) > 7


LEARNED = tuple(summary(f"learned:toy-{steps}", steps, 9.0 + steps) for steps in (4, 5, 8))


def test_learned_samplers_of_a_family_are_one_colored_line() -> None:
    cells = (*MANY, *LEARNED)
    (chart,) = over_steps(cells, [Measure.PSNR_DB])
    learned = next(line for line in chart.lines if line.name == "learned")
    assert [dot.x for dot in learned.dots] == [4, 5, 8]
    assert [dot.name for dot in learned.dots] == ["learned:toy-4", "learned:toy-5", "learned:toy-8"]
    assert color_numbers(cells)["learned:toy", 3.0, ()] == learned.color == 0, "colored although it is the worst"
    (alone,) = over_steps(cells[:-2], [Measure.PSNR_DB])
    assert "learned:toy-4" in [line.name for line in alone.lines], "the full name of a single one"


def test_evaluations_make_samplers_with_two_per_step_comparable() -> None:
    heun = [msgspec.structs.replace(summary("heun", n, 20.0 + n), evaluations=4.0 * n) for n in (5, 10, 50)]
    (chart,) = over_evaluations((*SWEEP, *heun, *LEARNED), [Measure.PSNR_DB], {"heun": "Heun"})
    assert chart.title == "PSNR to the converged image (dB) over network evaluations"
    assert chart.x_title == "network evaluations per image\n(two per step: Heun)"
    ends = {line.name: [dot.x for dot in line.dots] for line in chart.lines}
    assert ends == {"ddim": [5, 10, 50], "ddpm": [5, 10, 50], "Heun": [10, 20], "learned": [4, 5, 8]}
    (single,) = over_evaluations((SWEEP[0], heun[0]), [Measure.PSNR_DB])
    assert sorted(dot.x for dot in single.dots) == [5, 10], "each sampler has a dot"


def test_the_headline_has_closeness_over_evaluations_and_a_front_over_seconds() -> None:
    closeness, quality = headline(SWEEP)
    assert (closeness.measure, closeness.axis) == (Measure.PSNR_DB, "network evaluations")
    assert (quality.measure, quality.axis) == (Measure.PSNR_DB, "seconds per image"), "exact match is equal everywhere"
    better = [
        msgspec.structs.replace(each, measures={**each.measures, "exact": Estimate(1 - 1 / each.cell.num_steps)})
        for each in SWEEP
    ]
    assert [chart.measure for chart in headline(better)] == [Measure.PSNR_DB, Measure.EXACT]
    assert headline(()) == ()


PAGE_CSS = Path(ui.__file__).with_name("page.css")
LIGHT, DARK = "#ffffff", "#16181c"
VISIONS = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
"""Matrices for linear RGB by Machado, Oliveira and Fernandes 2009."""


def linear(color: str) -> NDArray[np.float64]:
    """Return the linear RGB values of a color such as "#16181c"."""
    parts = np.array([int(color[index : index + 2], 16) for index in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the CIELAB values of linear RGB."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(rgb, 0, 1) / (0.95047, 1, 1.08883)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("ground", [LIGHT, DARK])
def test_colors_of_lines_are_apart_for_color_blind_readers_too(ground: str) -> None:
    def contrast(color: str) -> float:
        low, high = sorted(float(linear(each) @ (0.2126, 0.7152, 0.0722)) for each in (color, ground))
        return (high + 0.05) / (low + 0.05)

    light, dark, page_dark = (re.findall(r"--chart-\d: (#\w+)", file.read_text()) for file in (STYLE, CSS, PAGE_CSS))
    assert light == list(COLORS[:-1])
    assert dark == page_dark, "the same in a report and in the Experiment tab"
    colors = [*light, COLORS[-1]] if ground == LIGHT else [*dark, "#e4e6ea"]
    assert min(map(contrast, colors)) >= 3
    for matrix in VISIONS.values():
        perceived = [lab(np.array(matrix) @ linear(color)) for color in colors]
        assert min(float(np.linalg.norm(a - b)) for a, b in combinations(perceived, 2)) > 20


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
    assert 5 < len(labels) < 15
