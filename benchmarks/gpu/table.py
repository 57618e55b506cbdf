"""The document of the GPU suite as a short table: the goals first, then every point on one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

MOST_CHARS: Final = 11_000
LINE_CHARS: Final = 190
MOST_ITEMS: Final = 14


class Goal(NamedTuple):
    """A figure that was set as a goal: ``at_least`` or at most ``target``; ``None`` where there is no result."""

    name: str
    target: float
    at_least: bool
    measured: float | None

    @property
    def is_met(self) -> bool:
        """Whether it was measured and met."""
        if self.measured is None:
            return False
        return self.measured >= self.target if self.at_least else self.measured <= self.target

    @property
    def verdict(self) -> str:
        """Whether the goal was met, in words."""
        return "not measured" if self.measured is None else "met" if self.is_met else "missed"


def figure(document: Mapping[str, Any], *path: str) -> float | None:
    """Return the number at ``path`` (row, point, then keys of the result); ``None`` where there is none."""
    row, point, *keys = path
    value: Any = document["rows"].get(row, {}).get("points", {}).get(point, {}).get("result")
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return float(value) if isinstance(value, (int, float)) else None


def _largest(*values: float | None) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _ratio(value: float | None, base: float | None) -> float | None:
    return round(value / base, 3) if value is not None and base else None


def goals(document: Mapping[str, Any]) -> list[Goal]:
    """Every goal with what was measured."""

    def rate(row: str, point: str) -> float | None:
        return figure(document, row, point, "images_per_s")

    served = (
        ("sdxl-images", "eager"),
        ("sdxl-images", "graphs"),
        ("sdxl-compiled", "images"),
    )
    sdxl = _largest(*(rate(row, point) for row, point in served))
    sd15 = _largest(rate("sd15", "eager"), rate("sd15", "graphs"), rate("sd15", "compiled"))
    latencies = [figure(document, row, "latency", "p99_s") for row in ("sdxl-compiled", "sdxl-images")]
    p99_s = next((each for each in latencies if each is not None), None)
    free, exact = (figure(document, "sdxl-images", point, "row_ms") for point in ("graphs", "deterministic"))
    return [
        Goal("SDXL bf16, images/s", 1.6, True, sdxl),
        Goal("SDXL over diffusers behind a lock", 2.0, True, _ratio(sdxl, rate("diffusers", "serial"))),
        Goal("SDXL over diffusers compiled, by 8", 1.0, True, _ratio(sdxl, rate("diffusers", "compiled-batch-8"))),
        Goal("SD 1.5 bf16, images/s", 12.0, True, sd15),
        Goal("deterministic mode, time over free", 1.15, False, _ratio(exact, free)),
        Goal("SDXL at 0.9 load, p99 s", 6.0, False, p99_s),
    ]


def table(document: Mapping[str, Any]) -> str:
    """Goals, rows with their states, and every point; at most ``MOST_CHARS`` characters."""
    lines = ["goal                                  target  measured"]
    for goal in goals(document):
        sign = ">=" if goal.at_least else "<="
        measured = "-" if goal.measured is None else f"{goal.measured:.3g}"
        lines.append(f"{goal.name:<36} {sign}{goal.target:>5g}  {measured:>8}  {goal.verdict}")
    for name, job in document["jobs"].items():
        line = f"job {name}: exit code {job.get('exit_code')} after {job.get('wall_s')} s: {job.get('says', '')}"
        lines.append(line[:LINE_CHARS])
    for name, row in document["rows"].items():
        lines.append(f"{name}: {row['state']} at {row['started_s']} s after {row.get('wall_s')} s")
        if row.get("error"):
            lines.append(f"  ERROR {_last_line(row['error'])}")
        lines += [f"  {point}: {_describe(result)}"[:LINE_CHARS] for point, result in row["points"].items()]
    text = "\n".join(lines)
    return text if len(text) <= MOST_CHARS else text[:MOST_CHARS] + "\n(cut; the document has the rest)"


def _describe(result: Mapping[str, Any]) -> str:
    if "error" in result:
        return f"ERROR {_last_line(result['error'])}"
    if "left_out" in result:
        return f"left out: {result['left_out']}"
    figures = result["result"]
    if not isinstance(figures, dict):
        return str(figures)
    problems = [f"PROBLEM {problem}" for problem in figures.get("problems", ())][:2]
    return ", ".join([*problems, *list(_scalars(figures))[:MOST_ITEMS]])


def _last_line(error: str) -> str:
    return error.strip().splitlines()[-1][:LINE_CHARS]


def _scalars(figures: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Numbers and words of ``figures``, nested ones by their last two keys; of a curve the time a row by rows."""
    for key, value in figures.items():
        if isinstance(value, dict):
            yield from _scalars(value, f"{key} ")
        elif isinstance(value, float):
            yield f"{prefix}{key} {value:.4g}"
        elif isinstance(value, (int, str)):
            yield f"{prefix}{key} {value}"
        elif key == "points":
            yield "ms/row " + " ".join(f"{point['rows']}:{point['ms_per_row']:g}" for point in value)
