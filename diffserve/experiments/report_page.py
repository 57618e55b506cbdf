"""Renders a report as a self-contained HTML page and as short Markdown.

The HTML page embeds all images and charts and loads nothing. The Markdown refers to one image file and is meant to be
committed. All text is escaped.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Final, NamedTuple

from diffserve.experiments.charts import STYLE, Chart, StripGrid, common_measures
from diffserve.experiments.estimates import MODEL_MEASURES, CheckerError, Measure
from diffserve.experiments.findings import AS_EXPECTED, IN_PART, OTHERWISE, Finding
from diffserve.experiments.plan import cell_names
from diffserve.experiments.summary import CellSummary
from diffserve.experiments.verdicts import Comparison, comparison_table

COLUMNS = (
    Measure.EXACT,
    *MODEL_MEASURES,
    Measure.FRECHET,
    Measure.FRECHET_CONVERGED,
    Measure.LATENT_RMSE,
    Measure.PSNR_DB,
    Measure.SSIM,
)
MOST_COLUMNS = 5
SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$&])")

UNIT = re.compile(r"(?<=\d) (?=%|dB\b|points\b)")
LOOKS = {AS_EXPECTED: "yes", IN_PART: "part", OTHERWISE: "no"}
COMPARISONS_NOTE: Final = (
    "Difference: the first cell minus the second, paired by prompt and seed, with its 95 % interval. Wins and losses: "
    "pairs in which the image of the first cell is better or worse."
)
UNANSWERED: Final = (
    "These cells answer none of the usual questions; sweep ddim, ddpm and dpmpp_2m with 10 to 100 steps."
)


@dataclass(frozen=True)
class Tables:
    """Tables of a report: the cells, their comparisons, and the checker's own error if prompts can be checked."""

    summaries: Sequence[CellSummary]
    comparisons: Sequence[Comparison] = ()
    checker: CheckerError | None = None

    def head(self, measure: Measure) -> str:
        """Return the title of a measure's column, for the share of matches with the checker's own error."""
        if measure is Measure.EXACT and self.checker is not None:
            return f"{measure.short_title} ({self.checker})"
        return measure.short_title


def write_markdown(
    title: str,
    facts: Mapping[str, Any],
    findings: Sequence[Finding],
    picture: str,
    tables: Tables,
    notes: Sequence[str],
) -> str:
    """Render the report as Markdown with all user text escaped.

    Args:
        title: Heading of the report.
        facts: Names and values of the summary list.
        findings: Evaluated claims.
        picture: Name of the image file in the same folder.
        tables: The cells and their comparisons.
        notes: Notes on the method.
    """
    parts = [
        f"# {_plain(title)}",
        *_list([f"**{_plain(name)}:** {_plain(str(value))}" for name, value in facts.items()]),
        f"![quality over network evaluations and over seconds per image]({picture})",
        "## Quality versus steps",
        *([part for finding in findings for part in _finding(finding)] or [UNANSWERED]),
        "## All cells",
        "95 % intervals in parentheses. Times are for one image alone; images per second are for the full engine.",
        "\n".join(_markdown_table(tables)),
        *_markdown_comparisons(tables.comparisons),
        "## How it was measured",
        *_list([_plain(note) for note in notes]),
    ]
    return "\n\n".join(parts) + "\n"


def _finding(finding: Finding) -> Iterator[str]:
    yield f"### {_plain(finding.claim)}: {finding.verdict}"
    yield from _list([_plain(line) for line in finding.evidence])


def _markdown_comparisons(comparisons: Sequence[Comparison]) -> Iterator[str]:
    heads, *rows = comparison_table(comparisons)
    if rows:
        yield "## Comparisons"
        yield COMPARISONS_NOTE
        yield "\n".join(map(_line, [heads, ["---"] * len(heads), *([_plain(text) for text in row] for row in rows)]))


def _markdown_table(tables: Tables) -> Iterator[str]:
    summaries = tables.summaries
    measures = [measure for measure in COLUMNS if measure in common_measures(summaries)][:MOST_COLUMNS]
    heads = ["cell", "UNet rows", *map(tables.head, measures), "ms per step", "s per image", "images/s"]
    yield _line(heads)
    yield _line(["---", *["---:"] * (len(heads) - 1)])
    names = cell_names(summary.cell for summary in summaries)
    for summary in summaries:
        values = [_value(summary, measure, " ({})") for measure in measures]
        yield _line(
            [
                _plain(names[summary.cell]),
                f"{summary.evaluations:g}",
                *values,
                f"{summary.step_ms.value:.1f}",
                f"{summary.alone_s:.2f}",
                f"{summary.images_per_s:.2f}",
            ]
        )


def _value(summary: CellSummary, measure: Measure, interval_format: str) -> str:
    """Format a measure of a cell, followed by its interval in ``interval_format``; empty if it was not measured."""
    estimate = summary.value(measure)
    if estimate is None:
        return ""
    if estimate.low is None or estimate.high is None:
        return measure.write(estimate.value)
    return measure.write(estimate.value) + interval_format.format(measure.write_range(estimate.low, estimate.high))


def _line(fields: Sequence[str]) -> str:
    return f"| {' | '.join(fields)} |"


def _list(lines: Sequence[str]) -> list[str]:
    return ["\n".join(f"- {line}" for line in lines)] if lines else []


def _plain(text: str) -> str:
    """Escape ``text`` for Markdown and put it on one line."""
    return SPECIAL.sub(r"\\\1", " ".join(text.split())).replace("://", ":\u200b//")


CSS: Final = Path(__file__).with_name("report.css")
SCRIPT: Final = Path(__file__).with_name("compare.js")
MAX_DOUBTFUL_CELLS: Final = 16
"""Number of doubtful cells to show; further ones are folded."""


class DoubtfulCell(NamedTuple):
    """A cell with doubtful images, each with a caption and WebP data."""

    name: str
    images: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True)
class Section:
    """A section of the page with notes, charts, grids of WebP images by caption, and images of doubtful cells."""

    heading: str
    notes: tuple[str, ...]
    charts: tuple[Chart, ...] = ()
    strips: Mapping[str, StripGrid] = field(default_factory=dict)
    doubtful: tuple[DoubtfulCell, ...] = ()


def write_page(
    title: str,
    facts: Mapping[str, Any],
    findings: Sequence[Finding],
    sections: Iterable[Section],
    tables: Tables,
    notes: Sequence[str],
    headline: Sequence[Chart] = (),
) -> str:
    """Render the report as a self-contained HTML page.

    Args:
        title: Title and heading of the page.
        facts: Names and values of the summary list.
        findings: Evaluated claims.
        sections: Sections with figures.
        tables: The cells and their comparisons.
        notes: Notes on the method.
        headline: Charts that summarize the sweep, at the top.
    """
    from diffserve.experiments.plots import figure_html

    sections = list(sections)
    has_strips = any(section.strips for section in sections)
    body = [
        f"<h1>{escape(title)}</h1>",
        figure_html(headline),
        "<dl>",
        *(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items()),
        "</dl>",
        *_findings(findings),
        *(part for section in sections for part in _section(section)),
        *_table(tables),
        *_comparisons(tables.comparisons),
        "<h2>How it was measured</h2><ul>",
        *(f"<li>{escape(note)}</li>" for note in notes),
        "</ul>",
    ]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{STYLE.read_text(encoding='utf-8')}{CSS.read_text(encoding='utf-8')}</style></head><body>",
            *body,
            *([f"<script>\n{SCRIPT.read_text(encoding='utf-8')}</script>"] if has_strips else []),
            "</body></html>\n",
        ]
    )


def _findings(findings: Sequence[Finding]) -> Iterator[str]:
    yield "<h2>Quality versus steps</h2>"
    if findings:
        yield '<p class="note">Expectations from papers, and whether these images confirm them.</p>'
    else:
        yield f"<p>{UNANSWERED}</p>"
    for finding in findings:
        look = LOOKS.get(finding.verdict, "")
        yield f'<h3>{escape(finding.claim)}: <span class="verdict {look}">{escape(finding.verdict)}</span></h3><ul>'
        yield from (f"<li>{_escape_evidence(line)}</li>" for line in finding.evidence)
        yield "</ul>"


def _escape_evidence(line: str) -> str:
    """Escape ``line`` and keep each number and its unit on one line."""
    return UNIT.sub("\u00a0", escape(line))


def _section(section: Section) -> Iterator[str]:
    from diffserve.experiments.plots import figure_html

    yield f"<h2>{escape(section.heading)}</h2>"
    yield from (f'<p class="note">{_escape_evidence(note)}</p>' for note in section.notes)
    yield figure_html(section.charts)
    yield from (_strip(caption, grid) for caption, grid in section.strips.items())
    if section.strips:
        yield COMPARE
    cells = [_doubtful_cell(cell) for cell in section.doubtful]
    if cells:
        yield f'<div class="doubtful">{"".join(cells[:MAX_DOUBTFUL_CELLS])}</div>'
    if folded := cells[MAX_DOUBTFUL_CELLS:]:
        yield f'<details><summary>{len(folded)} more</summary><div class="doubtful">{"".join(folded)}</div></details>'


COMPARE: Final = """\
<div class="compare" hidden><h3>Compare two cells</h3>
<p><label for="compare-prompt">prompt</label> <select id="compare-prompt"></select></p>
<p><label for="compare-left">left</label> <select id="compare-left"></select>
<label for="compare-right">right</label> <select id="compare-right"></select></p>
<div class="pair"><img alt=""><img alt=""></div>
<p><label for="compare-border">border between left and right</label>
<input id="compare-border" type="range" min="0" max="100" value="50"></p></div>"""
"""Controls that ``compare.js`` fills; the left image is clipped over the right one."""


def _strip(caption: str, grid: StripGrid) -> str:
    """Render an image grid, with the rows after the first ones folded."""
    toggle, table = "", _strip_table(grid, slice(grid.num_first))
    if grid.differences:
        toggle = '<label class="toggle"><input type="checkbox"> show difference maps</label>'
    if folded := len(grid.rows[grid.num_first :]):
        folded_table = _strip_table(grid, slice(grid.num_first, None))
        table += f"<details><summary>{folded} more {'row' if folded == 1 else 'rows'}</summary>{folded_table}</details>"
    return f'<figure class="strips"><figcaption>{escape(caption)}</figcaption>{toggle}{table}</figure>'


def _strip_table(grid: StripGrid, part: slice) -> str:
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in grid.heads)
    differences = grid.differences or [[None] * len(grid.heads)] * len(grid.rows)
    rows = []
    for name, images, maps in zip(grid.names[part], grid.rows[part], differences[part], strict=True):
        cells = [
            f"<td>{_picture(f'{name}, {head}', *pair)}</td>"
            for head, *pair in zip(grid.heads, images, maps, strict=True)
        ]
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{"".join(cells)}</tr>')
    head = f"<thead><tr><td></td>{heads}</tr></thead>"
    return f'<div class="wide"><table class="strip">{head}<tbody>{"".join(rows)}</tbody></table></div>'


def _picture(title: str, webp: bytes | None, difference: bytes | None) -> str:
    """Render an image of a grid and its difference map, if it has one."""
    if webp is None:
        return ""
    if difference is None:
        return _image(title, webp, "image")
    text = f"difference of {title} from the converged image"
    return _image(title, webp, "image compared") + _image(text, difference, "difference")


def _image(alt: str, webp: bytes, kind: str) -> str:
    data = base64.b64encode(webp).decode()
    return f'<img class="{kind}" alt="{escape(alt)}" src="data:image/webp;base64,{data}">'


def _doubtful_cell(cell: DoubtfulCell) -> str:
    images = "".join(
        f"<span>{_image(f'{cell.name}, {caption}', webp, 'image')}<small>{_escape_evidence(caption)}</small></span>"
        for caption, webp in cell.images
    )
    return f"<figure><figcaption>{escape(cell.name)}</figcaption>{images}</figure>"


def _table(tables: Tables) -> Iterator[str]:
    summaries = tables.summaries
    measures = [measure for measure in Measure if any(summary.value(measure) for summary in summaries)]
    heads = ["cell", *map(tables.head, measures)]
    heads += ["UNet rows", "ms per step, alone", "s per image, alone", "images/s, full engine"]
    note = "Below each value: its 95 % interval. Below each time: minimum and maximum."
    yield f'<h2>All cells</h2><p class="note">{note}</p>'
    yield '<div class="wide"><table class="cells"><thead><tr>'
    yield "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    yield "</tr></thead><tbody>"
    names = cell_names(summary.cell for summary in summaries)
    for summary in summaries:
        cells = "".join(f"<td>{cell}</td>" for cell in _row(summary, measures))
        yield f'<tr><th scope="row">{escape(names[summary.cell])}</th>{cells}</tr>'
    yield "</tbody></table></div>"


def _row(summary: CellSummary, measures: Iterable[Measure]) -> Iterator[str]:
    yield from (_value(summary, measure, "<small>{}</small>") for measure in measures)
    yield f"{summary.evaluations:g}"
    yield f"{summary.step_ms.value:.1f}<small>{summary.step_ms.low:.1f} to {summary.step_ms.high:.1f}</small>"
    yield f"{summary.alone_s:.2f}"
    yield f"{summary.images_per_s:.2f}"


def _comparisons(comparisons: Sequence[Comparison]) -> Iterator[str]:
    heads, *rows = comparison_table(comparisons)
    if not rows:
        return
    yield f'<h2>Comparisons</h2><p class="note">{escape(COMPARISONS_NOTE)}</p>'
    yield '<div class="wide"><table class="cells"><thead><tr>'
    yield "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    yield "</tr></thead><tbody>"
    for name, *texts in rows:
        cells = "".join(f"<td>{_escape_evidence(text)}</td>" for text in texts)
        yield f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>'
    yield "</tbody></table></div>"
