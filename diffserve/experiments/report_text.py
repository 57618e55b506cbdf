"""The report as Markdown: short, with one picture beside it, so that it can be kept with a project's sources."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diffserve.experiments.charts import common_measures
from diffserve.experiments.estimates import Measure
from diffserve.experiments.findings import Finding
from diffserve.experiments.summary import CellSummary

COLUMNS = (
    Measure.EXACT,
    Measure.FRECHET,
    Measure.FRECHET_CONVERGED,
    Measure.LATENT_RMSE,
    Measure.PSNR_DB,
    Measure.SSIM,
)
MOST_COLUMNS = 5
SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$&])")


def write_markdown(
    title: str,
    facts: Mapping[str, Any],
    findings: Sequence[Finding],
    picture: str,
    summaries: Sequence[CellSummary],
    notes: Sequence[str],
) -> str:
    """The text; ``picture`` is the name of a file beside it. Text from users is escaped, links and all."""
    parts = [
        f"# {_plain(title)}",
        *_list([f"**{_plain(name)}:** {_plain(str(value))}" for name, value in facts.items()]),
        f"![quality over steps, and one seed with growing steps]({picture})",
        "## What a step buys",
        *(part for finding in findings for part in _finding(finding)),
        "## Every cell",
        "In brackets 95 % intervals. Times are of one image alone; images a second are of the full engine.",
        "\n".join(_table(summaries)),
        "## How it was measured",
        *_list([_plain(note) for note in notes]),
    ]
    return "\n\n".join(parts) + "\n"


def _finding(finding: Finding) -> Iterator[str]:
    yield f"### {_plain(finding.claim)}: {finding.verdict}"
    yield from _list([_plain(line) for line in finding.evidence])


def _table(summaries: Sequence[CellSummary]) -> Iterator[str]:
    measures = [measure for measure in COLUMNS if measure in common_measures(summaries)][:MOST_COLUMNS]
    heads = ["cell", *(measure.short_title for measure in measures), "ms a step", "s an image", "images/s"]
    yield _line(heads)
    yield _line(["---", *["---:"] * (len(heads) - 1)])
    several = len({one.cell.guidance_scale for one in summaries}) > 1
    for one in summaries:
        label = f"{one.cell.label}, guidance {one.cell.guidance_scale:g}" if several else one.cell.label
        values = [_value(one, measure) for measure in measures]
        yield _line(
            [_plain(label), *values, f"{one.step_ms.value:.1f}", f"{one.alone_s:.2f}", f"{one.images_per_s:.2f}"]
        )


def _value(one: CellSummary, measure: Measure) -> str:
    found = one.value(measure)
    if found is None:
        return ""
    if found.low is None or found.high is None:
        return measure.write(found.value)
    return f"{measure.write(found.value)} ({measure.write_range(found.low, found.high)})"


def _line(fields: Sequence[str]) -> str:
    return f"| {' | '.join(fields)} |"


def _list(lines: Sequence[str]) -> list[str]:
    return ["\n".join(f"- {line}" for line in lines)] if lines else []


def _plain(text: str) -> str:
    """``text`` as it is, on one line, whatever Markdown would make of it."""
    return SPECIAL.sub(r"\\\1", " ".join(text.split())).replace("://", ":\u200b//")
