"""Charts as SVG within HTML: they follow the page's colours, light and dark, and need no script.

Everything that comes from outside is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from diffserve.experiments.estimates import Measure
from ui.experiment.curves import Chart, Dot, Line
from ui.experiment.scales import Scale, apart, linear_scale, linear_ticks, log_scale, log_ticks

WIDTH, HEIGHT = 420, 270
LEFT, RIGHT, TOP, BOTTOM = 50, 406, 22, 228
COLORS: Final = ("#3a86c8", "#e0662a", "#1b9e77", "#c2579a", "#d09a00", "#7d67c9", "#4bb3c7", "#8a8a8a")
"""Told apart by the colour-blind too, on white and on black; every line has its own marker as well."""

MARKERS: Final = (
    "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0", "M-3.6,-3.6h7.2v7.2h-7.2z", "M0,-4.6L4.4,3.4L-4.4,3.4z",
    "M0,-4.9L4.9,0L0,4.9L-4.9,0z", "M0,4.6L4.4,-3.4L-4.4,-3.4z", "M-1.5,-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",
)  # fmt: skip
LABEL_PX: Final = (22.0, 12.0)
"""Width and height that the number beside a dot, or at an axis, takes at most."""


def figure(charts: Sequence[Chart], names: Sequence[str]) -> str:
    """All charts side by side where there is room, under one legend; ``names`` of the lines by their numbers."""
    if not charts:
        return ""
    legend = "".join(
        f'<li><svg viewBox="-6 -6 12 12" aria-hidden="true"><path d="{_marker(number)}" fill="{_color(number)}"/></svg>'
        f"{escape(name)}</li>"
        for number, name in enumerate(names)
    )
    return f'<ul class="legend">{legend}</ul><div class="charts">{"".join(map(_svg, charts))}</div>'


def _svg(chart: Chart) -> str:
    dots = [dot for line in chart.lines for dot in line.dots]
    x = log_scale([dot.x for dot in dots], LEFT, RIGHT)
    y = _y_scale(chart, dots)
    what = f"{chart.measure.title[0].upper()}{chart.measure.title[1:]}"
    parts = [*_axes(chart, x, y), *_behind(chart, x, y)]
    for line in chart.lines:
        parts += _drawn(line, x, y, is_joined=chart.is_joined)
    parts += _labels(chart, x, y)
    return (
        f"<figure><figcaption>{escape(what)} <small>(higher is better)</small></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(what)} over {escape(chart.x_title)}">'
        f"{''.join(parts)}</svg></figure>"
    )


def _y_scale(chart: Chart, dots: Sequence[Dot]) -> Scale:
    if chart.measure is Measure.EXACT:
        return Scale(0.0, 1.0, BOTTOM, TOP)
    values = [value for dot in dots for value in (dot.value.low, dot.value.value, dot.value.high) if value is not None]
    return linear_scale(values, BOTTOM, TOP)


def _axes(chart: Chart, x: Scale, y: Scale) -> Iterator[str]:
    for value in linear_ticks(y):
        at = f"{y.place(value):.1f}"
        yield f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{at}" y2="{at}"/>'
        number = _written(chart.measure, value)
        yield f'<text class="tick" x="{LEFT - 6}" y="{at}" dy="0.35em" text-anchor="end">{number}</text>'
    for value in apart(chart.x_ticks or log_ticks(x), x, LABEL_PX[0]):
        at = f"{x.place(value):.1f}"
        yield f'<line class="grid" x1="{at}" x2="{at}" y1="{TOP}" y2="{BOTTOM}"/>'
        yield f'<text class="tick" x="{at}" y="{BOTTOM + 16}" text-anchor="middle">{value:g}</text>'
    middle = (LEFT + RIGHT) / 2
    yield f'<text class="axis" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(chart.x_title)}</text>'


def _written(measure: Measure, value: float) -> str:
    """A value at an axis."""
    return f"{100 * value:.0f} %" if measure is Measure.EXACT else f"{value:g}"


def _behind(chart: Chart, x: Scale, y: Scale) -> Iterator[str]:
    """The level of converged pictures, the front and its knee."""
    if chart.level is not None:
        at = f"{y.place(chart.level):.1f}"
        yield f'<line class="level" x1="{LEFT}" x2="{RIGHT}" y1="{at}" y2="{at}"><title>converged</title></line>'
    stair = ""
    for index, (seconds, quality) in enumerate(chart.front):
        at_x, at_y = f"{x.place(seconds):.1f}", f"{y.place(quality):.1f}"
        stair += f"M{at_x},{at_y}" if index == 0 else f"H{at_x}V{at_y}"
    if stair:
        yield f'<path class="front" d="{stair}"><title>Pareto front</title></path>'
    if chart.knee is not None:
        yield f'<circle class="knee" cx="{x.place(chart.knee[0]):.1f}" cy="{y.place(chart.knee[1]):.1f}" r="10"/>'


def _drawn(line: Line, x: Scale, y: Scale, *, is_joined: bool) -> Iterator[str]:
    color, marker = _color(line.number), _marker(line.number)
    for dot in line.dots:
        if dot.value.low is not None and dot.value.high is not None:
            at, low, high = x.place(dot.x), y.place(dot.value.low), y.place(dot.value.high)
            yield f'<path class="reach" d="M{at:.1f},{low:.1f}V{high:.1f}" stroke="{color}"/>'
    if is_joined:
        places = " ".join(f"{x.place(dot.x):.1f},{y.place(dot.value.value):.1f}" for dot in line.dots)
        yield f'<polyline class="curve" points="{places}" stroke="{color}"/>'
    for dot in line.dots:
        at_x, at_y = x.place(dot.x), y.place(dot.value.value)
        yield f'<path class="dot" d="{marker}" transform="translate({at_x:.1f},{at_y:.1f})" fill="{color}">'
        yield f"<title>{escape(dot.hint)}</title></path>"


def _labels(chart: Chart, x: Scale, y: Scale) -> Iterator[str]:
    """The numbers beside dots: those of the front first, and then every one that runs into no other."""
    front = set(chart.front)
    dots = [dot for line in chart.lines for dot in line.dots if dot.label]
    placed: list[tuple[float, float]] = []
    for dot in sorted(dots, key=lambda dot: (dot.x, dot.value.value) not in front):
        at_x, at_y = x.place(dot.x), y.place(dot.value.value)
        if all(abs(at_x - left) >= LABEL_PX[0] or abs(at_y - top) >= LABEL_PX[1] for left, top in placed):
            placed.append((at_x, at_y))
            anchor, shift = ("start", 6) if at_x < RIGHT - LABEL_PX[0] else ("end", -6)
            place = f'x="{at_x + shift:.1f}" y="{at_y - 6:.1f}" text-anchor="{anchor}"'
            yield f'<text class="tick" {place}>{escape(dot.label)}</text>'


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def _marker(number: int) -> str:
    return MARKERS[number % len(MARKERS)]
