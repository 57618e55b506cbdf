"""The report as one HTML page that needs nothing else: pictures are inside, nothing is loaded, all text is escaped."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from diffserve.experiments.estimates import Estimate, Measure
from diffserve.experiments.findings import AS_EXPECTED, IN_PART, OTHERWISE, Finding
from diffserve.experiments.summary import CellSummary

CSS = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; } h2 { margin-top: 2.2rem; font-size: 1.25rem; } h3 { font-size: 1rem; margin-bottom: .3rem; }
figure { margin: 1rem 0; } figcaption, .note { color: light-dark(#555, #aaa); font-size: .9rem; }
img { max-width: 100%; height: auto; background: #fff; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
td small { color: light-dark(#666, #999); }
.verdict { border-radius: .3rem; padding: .05rem .45rem; font-size: .85rem; color: #fff; background: #555; }
.verdict.yes { background: #00704f; } .verdict.no { background: #a63d00; } .verdict.part { background: #80600a; }
"""

LOOKS = {AS_EXPECTED: "yes", IN_PART: "part", OTHERWISE: "no"}


def write_page(
    title: str,
    facts: Mapping[str, Any],
    findings: Sequence[Finding],
    figures: Sequence[tuple[str, str, bytes]],
    summaries: Sequence[CellSummary],
    notes: Sequence[str],
) -> str:
    """The page. ``figures``: heading, caption and PNG of each; ``facts``: name and value, shown as they are."""
    body = [
        f"<h1>{escape(title)}</h1>",
        *_facts(facts),
        *_findings(findings),
        *(part for heading, caption, png in figures for part in _figure(heading, caption, png)),
        *_table(summaries),
        *_notes(notes),
    ]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{CSS}</style></head><body>",
            *body,
            "</body></html>\n",
        ]
    )


def _facts(facts: Mapping[str, Any]) -> Iterator[str]:
    yield '<p class="note">'
    yield "<br>".join(f"<b>{escape(name)}</b>: {escape(str(value))}" for name, value in facts.items())
    yield "</p>"


def _findings(findings: Sequence[Finding]) -> Iterator[str]:
    yield "<h2>What a step buys</h2>"
    if not findings:
        yield "<p>These cells answer none of the usual questions: take ddim, ddpm and dpmpp_2m, 10 to 100 steps.</p>"
    for finding in findings:
        look = LOOKS.get(finding.verdict, "")
        yield f'<h3>{escape(finding.claim)}: <span class="verdict {look}">{escape(finding.verdict)}</span></h3><ul>'
        yield from (f"<li>{escape(line)}</li>" for line in finding.evidence)
        yield "</ul>"


def _figure(heading: str, caption: str, png: bytes) -> Iterator[str]:
    yield f"<h2>{escape(heading)}</h2>" if heading else ""
    yield f'<figure><img alt="{escape(caption)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
    yield f"<figcaption>{escape(caption)}</figcaption></figure>"


def _table(summaries: Sequence[CellSummary]) -> Iterator[str]:
    measures = [measure for measure in Measure if any(one.value(measure) for one in summaries)]
    heads = ["cell", "guidance", "images", *(measure.short_title for measure in measures)]
    heads += ["evaluations an image", "ms a step, alone", "s an image, alone", "images/s, engine full"]
    yield '<h2>Every cell</h2><p class="note">In brackets the 95 % interval; of times, the least and the most.</p>'
    yield '<div class="wide"><table><thead><tr>'
    yield "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    yield "</tr></thead><tbody>"
    for one in summaries:
        yield f"<tr>{''.join(f'<td>{cell}</td>' for cell in _row(one, measures))}</tr>"
    yield "</tbody></table></div>"


def _row(one: CellSummary, measures: Iterable[Measure]) -> Iterator[str]:
    yield escape(one.cell.label)
    yield f"{one.cell.guidance_scale:g}"
    yield f"{one.num_images}"
    for measure in measures:
        found = one.value(measure)
        yield "" if found is None else _with_interval(found, measure)
    yield f"{one.evaluations:g}"
    yield f"{one.step_ms.value:.1f} <small>({one.step_ms.low:.1f} to {one.step_ms.high:.1f})</small>"
    yield f"{one.alone_s:.2f}"
    yield f"{one.images_per_s:.2f}"


def _with_interval(found: Estimate, measure: Measure) -> str:
    value = escape(measure.write(found.value))
    if found.low is None or found.high is None:
        return value
    return f"{value} <small>({escape(measure.write(found.low))} to {escape(measure.write(found.high))})</small>"


def _notes(notes: Sequence[str]) -> Iterator[str]:
    yield "<h2>How it was measured</h2><ul>"
    yield from (f"<li>{escape(note)}</li>" for note in notes)
    yield "</ul>"
