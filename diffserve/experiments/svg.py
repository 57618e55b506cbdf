"""Renders charts as inline SVG that follows the page's light or dark colors and needs no script.

The page must include ``STYLE`` and define the CSS variables that it uses. All external text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from typing import Final, NamedTuple

from diffserve.experiments.charts import Chart, ChartDot, ChartLine
from diffserve.experiments.estimates import Measure

WIDTH, HEIGHT = 420, 270
LEFT, RIGHT, TOP, BOTTOM = 50, 406, 22, 228
COLORS: Final = ("#3a86c8", "#e0662a", "#1b9e77", "#c2579a", "#d09a00", "#7d67c9", "#4bb3c7", "#8a8a8a")
"""Colors that are distinguishable with color blindness on white and black; each line also has its own marker."""

MARKERS: Final = (
    "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0", "M-3.6,-3.6h7.2v7.2h-7.2z", "M0,-4.6L4.4,3.4L-4.4,3.4z",
    "M0,-4.9L4.9,0L0,4.9L-4.9,0z", "M0,4.6L4.4,-3.4L-4.4,-3.4z", "M-1.5,-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",
)  # fmt: skip
LABEL_PX: Final = (22.0, 12.0)
"""Maximum width and height of the number at a dot or an axis."""

STYLE: Final = """
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 0 0 4px; padding: 0; list-style: none;
  font-size: var(--text-sm); }
.legend li { display: flex; align-items: center; gap: 6px; margin: 0; }
.legend svg { width: 12px; height: 12px; }
.charts { display: flex; flex-wrap: wrap; gap: 12px 24px; }
.charts figure { flex: 1 1 300px; max-width: 460px; min-width: 0; margin: 0; }
.charts figcaption { font-size: var(--text-sm); font-weight: 500; margin-bottom: 2px; }
.charts figcaption small { font-weight: 400; color: var(--body-text-color-subdued); }
.charts figure svg { display: block; width: 100%; height: auto; overflow: visible; }
.grid { stroke: var(--border-color-primary); stroke-width: 1; opacity: 0.6; }
.tick, .axis { fill: var(--body-text-color-subdued); font-size: 12px; }
@media (max-width: 600px) { .tick, .axis { font-size: 15px; } }
.level { stroke: var(--body-text-color-subdued); stroke-width: 1.2; stroke-dasharray: 2 4; }
.front { fill: none; stroke: var(--body-text-color-subdued); stroke-width: 1.2; stroke-dasharray: 6 4; }
.knee { fill: none; stroke: var(--body-text-color); stroke-width: 1.4; }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
.reach { fill: none; stroke-width: 2; opacity: 0.45; }
.dot { stroke: var(--body-background-fill); stroke-width: 1; }
"""

UPON: Final = "Equal ones lie upon each other, the wider below."
WIDER_PX: Final = 4.0
LARGER: Final = 0.8
"""Added scale of a dot for each dot that covers it; ``WIDER_PX`` is the added width of a covered line segment."""

NICE: Final = (1.0, 2.0, 5.0, 10.0)


def figure(charts: Sequence[Chart]) -> str:
    """Render all charts under one legend, next to each other if there is space."""
    if not charts:
        return ""
    names = dict(sorted((line.number, line.name) for chart in charts for line in chart.lines))
    legend = "".join(
        f'<li><svg viewBox="-6 -6 12 12" aria-hidden="true"><path d="{marker}" fill="{color}"/></svg>'
        f"{escape(name)}</li>"
        for (marker, color), name in ((_look(number), name) for number, name in names.items())
    )
    if any(chart.num_upon(line, dot) for chart in charts for line in chart.lines for dot in line.dots):
        legend += f"<li>{UPON}</li>"
    return f'<ul class="legend">{legend}</ul><div class="charts">{"".join(map(_svg, charts))}</div>'


def _svg(chart: Chart) -> str:
    x, y = log_scale([dot.x for dot in chart.dots], LEFT, RIGHT), _y_scale(chart)
    title = f"{chart.measure.title[0].upper()}{chart.measure.title[1:]}"
    parts = [*_axes(chart, x, y), *_background(chart, x, y)]
    for line in chart.lines:
        parts += _draw(line, chart, x, y)
    parts += _labels(chart, x, y)
    better = "higher" if chart.measure.more_is_better else "lower"
    return (
        f"<figure><figcaption>{escape(title)} <small>({better} is better)</small></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)} over {escape(chart.x_title)}">'
        f"{''.join(parts)}</svg></figure>"
    )


def _y_scale(chart: Chart) -> Scale:
    if chart.measure is Measure.EXACT:
        return Scale(0.0, 1.0, BOTTOM, TOP)
    values = [value for dot in chart.dots for value in (dot.value.low, dot.value.value, dot.value.high)]
    return linear_scale([value for value in [*values, chart.level] if value is not None], BOTTOM, TOP)


def _axes(chart: Chart, x: Scale, y: Scale) -> Iterator[str]:
    for value in linear_ticks(y):
        at = f"{y.place(value):.1f}"
        yield f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{at}" y2="{at}"/>'
        number = f"{100 * value:.0f} %" if chart.measure is Measure.EXACT else f"{value:g}"
        yield f'<text class="tick" x="{LEFT - 6}" y="{at}" dy="0.35em" text-anchor="end">{number}</text>'
    ticks = sorted({dot.x for dot in chart.dots}) if chart.is_joined else log_ticks(x)
    for value in apart(ticks, x, LABEL_PX[0]):
        at = f"{x.place(value):.1f}"
        yield f'<line class="grid" x1="{at}" x2="{at}" y1="{TOP}" y2="{BOTTOM}"/>'
        yield f'<text class="tick" x="{at}" y="{BOTTOM + 16}" text-anchor="middle">{value:g}</text>'
    middle = (LEFT + RIGHT) / 2
    yield f'<text class="axis" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(chart.x_title)}</text>'


def _background(chart: Chart, x: Scale, y: Scale) -> Iterator[str]:
    """Yield the elements of the converged level, the Pareto front and its knee."""
    if chart.level is not None:
        at = f"{y.place(chart.level):.1f}"
        yield f'<line class="level" x1="{LEFT}" x2="{RIGHT}" y1="{at}" y2="{at}"><title>converged</title></line>'
    stair = ""
    for index, dot in enumerate(chart.front):
        at_x, at_y = f"{x.place(dot.x):.1f}", f"{y.place(dot.value.value):.1f}"
        stair += f"M{at_x},{at_y}" if index == 0 else f"H{at_x}V{at_y}"
    if stair:
        yield f'<path class="front" d="{stair}"><title>Pareto front</title></path>'
    if chart.knee is not None:
        knee_x, knee_y = x.place(chart.knee.x), y.place(chart.knee.value.value)
        yield f'<circle class="knee" cx="{knee_x:.1f}" cy="{knee_y:.1f}" r="10"/>'


def _draw(line: ChartLine, chart: Chart, x: Scale, y: Scale) -> Iterator[str]:
    marker, color = _look(line.number)
    for dot in line.dots:
        if dot.value.low is not None and dot.value.high is not None:
            at, low, high = x.place(dot.x), y.place(dot.value.low), y.place(dot.value.high)
            yield f'<path class="reach" d="M{at:.1f},{low:.1f}V{high:.1f}" stroke="{color}"/>'
    places = [f"{x.place(dot.x):.1f},{y.place(dot.value.value):.1f}" for dot in line.dots]
    upon = [chart.num_upon(line, dot) for dot in line.dots]
    if chart.is_joined:
        for (start, end), num_upon in zip(pairwise(places), map(min, pairwise(upon)), strict=True):
            if num_upon:
                width = f'style="stroke-width:{2 + WIDER_PX * num_upon:g}"'
                yield f'<path class="curve" d="M{start}L{end}" stroke="{color}" {width}/>'
        yield f'<polyline class="curve" points="{" ".join(places)}" stroke="{color}"/>'
    for dot, place, num_upon in zip(line.dots, places, upon, strict=True):
        larger = f" scale({1 + LARGER * num_upon:g})" if num_upon else ""
        yield f'<path class="dot" d="{marker}" transform="translate({place}){larger}" fill="{color}">'
        yield f"<title>{escape(_hint(line.name, dot, chart.measure))}</title></path>"


def _hint(name: str, dot: ChartDot, measure: Measure) -> str:
    """Return the tooltip of a dot."""
    interval, value = "", dot.value
    if value.low is not None and value.high is not None:
        interval = f" (95 % interval {measure.write_range(value.low, value.high)})"
    steps, seconds = dot.summary.cell.num_steps, dot.summary.alone_s
    return f"{name}, {steps} steps: {measure.write(value.value)}{interval}, {seconds:.2g} s"


def _labels(chart: Chart, x: Scale, y: Scale) -> Iterator[str]:
    """Yield step counts as labels of dots over seconds: the front first, then all labels that do not overlap."""
    dots = [] if chart.is_joined else sorted(chart.dots, key=lambda dot: dot not in chart.front)
    taken: list[tuple[float, float]] = []
    for dot in dots:
        at_x, at_y = x.place(dot.x), y.place(dot.value.value)
        if all(abs(at_x - left) >= LABEL_PX[0] or abs(at_y - top) >= LABEL_PX[1] for left, top in taken):
            taken.append((at_x, at_y))
            anchor, shift = ("start", 6) if at_x < RIGHT - LABEL_PX[0] else ("end", -6)
            place = f'x="{at_x + shift:.1f}" y="{at_y - 6:.1f}" text-anchor="{anchor}"'
            yield f'<text class="tick" {place}>{dot.summary.cell.num_steps}</text>'


def _look(number: int) -> tuple[str, str]:
    """Return the marker and the color of a line."""
    return MARKERS[number % len(MARKERS)], COLORS[number % len(COLORS)]


class Scale(NamedTuple):
    """Linear or logarithmic mapping from ``low``..``high`` to ``start``..``end``."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """Map ``value`` to its coordinate."""
        low, high, at = self.low, self.high, value
        if self.is_log:
            low, high, at = math.log(low), math.log(high), math.log(value)
        return self.start + (at - low) / (high - low) * (self.end - self.start)


def log_scale(values: Sequence[float], start: float, end: float) -> Scale:
    """Build a logarithmic scale for ``values`` above zero, with a margin at both ends."""
    low, high = min(values), max(values)
    room = (high / low) ** 0.06 if high > low else 2.0
    return Scale(low / room, high * room, start, end, is_log=True)


def linear_scale(values: Sequence[float], start: float, end: float) -> Scale:
    """Build a linear scale for ``values`` whose ends are ticks."""
    low, high = min(values), max(values)
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = low - 1, high + 1
    step = nice_step(high - low)
    return Scale(math.floor(low / step) * step, math.ceil(high / step) * step, start, end)


def nice_step(width: float) -> float:
    """Return a tick distance of 1, 2 or 5 times a power of ten that divides ``width`` into about five parts."""
    power = 10.0 ** math.floor(math.log10(width / 5))
    return next(nice * power for nice in NICE if nice * power >= width / 5 * 0.999)


def linear_ticks(scale: Scale) -> tuple[float, ...]:
    """Return round tick values between the ends of ``scale``."""
    step = nice_step(scale.high - scale.low)
    first, last = math.ceil(scale.low / step - 1e-6), math.floor(scale.high / step + 1e-6)
    return tuple(index * step for index in range(first, last + 1))


def log_ticks(scale: Scale) -> tuple[float, ...]:
    """Return ticks of a logarithmic scale.

    The ticks are 1, 2 and 5 times powers of ten, only powers of ten on a wide scale, and linear ticks if fewer than
    three of them fit.
    """
    first, last = math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high))
    marks = NICE[:3] if last - first <= 4 else NICE[:1]
    values = (mark * 10.0**power for power in range(first, last + 1) for mark in marks)
    ticks = tuple(value for value in values if scale.low <= value <= scale.high)
    return ticks if len(ticks) > 2 else linear_ticks(scale)


def apart(values: Sequence[float], scale: Scale, min_distance: float) -> tuple[float, ...]:
    """Select those of the ascending ``values`` whose labels are at least ``min_distance`` pixels apart."""
    selected: list[float] = []
    for value in values:
        if not selected or abs(scale.place(value) - scale.place(selected[-1])) >= min_distance:
            selected.append(value)
    return tuple(selected)
