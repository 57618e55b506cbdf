"""The images of an experiment as a table: one field along the columns, another one along the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

from diffserve.api.fields import REQUEST_FIELDS
from diffserve.experiments.axes import MAIN_AXES, NOT_AXES, Value, write_settings
from diffserve.experiments.estimates import Measure
from diffserve.experiments.plan import Cell, SweepPlan
from diffserve.experiments.series import line_names, line_of, steps_text
from diffserve.experiments.summary import CellSummary

STEPS, SAMPLER, GUIDANCE = "num_inference_steps", "sampler", "guidance_scale"
MAIN_LABELS: Final = {STEPS: "Steps", SAMPLER: "Sampler", GUIDANCE: "Guidance"}
"""Labels of the fields that have lists of their own in the form."""

AXIS_LABELS: Final = {
    name: field.form or field.label
    for name, field in REQUEST_FIELDS.items()
    if (field.form or field.label) and name not in (*NOT_AXES, *MAIN_AXES)
}
"""Labels of the other request fields that can be an axis; LoRA strengths are "lora:NAME"."""


class Arrangement(NamedTuple):
    """Request fields of the columns and rows."""

    columns: str
    rows: str


STEPS_BY_SAMPLER: Final = Arrangement(STEPS, SAMPLER)


def address(file: Path) -> str:
    """Return the URL of a file, relative to the page."""
    return f"gradio_api/file={quote(str(file))}"


def grid(
    plan: SweepPlan,
    cells: Mapping[Cell, CellSummary],
    looks: Mapping[Cell, Path],
    names: Mapping[str, str],
    arrangement: Arrangement = STEPS_BY_SAMPLER,
) -> str:
    """Return the table as HTML.

    Args:
        plan: The plan.
        cells: The finished cells.
        looks: Their images of the first prompt and seed.
        names: The labels of the samplers.
        arrangement: The fields of columns and rows; a field without values in the plan is replaced by the steps.
    """
    columns = arrangement.columns if arrangement.columns in (*MAIN_LABELS, *plan.axes) else STEPS
    num_hidden = len(plan.places) - 1
    hidden_note = f"; {num_hidden} more for each, not shown" if num_hidden else ""
    caption = f"“{escape(plan.prompts[0])}”, seed {plan.seed_of(plan.places[0])}{hidden_note}"
    at_columns = dict.fromkeys(_value(cell, columns) for cell in plan.cells)
    heads = "".join(f'<th scope="col">{escape(_head(value, columns, names))}</th>' for value in at_columns)
    for reference in plan.references:
        note = f"DDIM {reference.num_steps}{_guidance_of(reference, plan)}{write_settings(reference.settings)}"
        heads += f'<th scope="col" class="converged">converged<small>{escape(note)}</small></th>'
    body = ""
    for name, row in _rows(plan, names, columns, arrangement.rows):
        targets = {plan.reference_of(cell) for cell in row.values()}
        compared = [row.get(value) for value in at_columns]
        squares = "".join(
            _square(cell, cells, looks, names, plan)
            for cell in (*compared, *(reference if reference in targets else None for reference in plan.references))
        )
        body += f'<tr><th scope="row">{escape(name)}</th>{squares}</tr>'
    corner = escape((MAIN_LABELS | AXIS_LABELS).get(columns, columns).lower())
    return (
        f'<div class="exp-scroll" tabindex="0" role="region" aria-label="images of the experiment"><table>'
        f"<caption>{caption}</caption>"
        f'<thead><tr><th scope="col" class="corner">{corner}</th>{heads}</tr></thead><tbody>{body}</tbody>'
        "</table></div>"
    )


def _value(cell: Cell, field: str) -> Value | None:
    """Return the value of a cell on the axis ``field``; None if it has none."""
    main: dict[str, Value] = {STEPS: cell.num_steps, SAMPLER: cell.sampler, GUIDANCE: cell.guidance_scale}
    return main[field] if field in main else dict(cell.settings).get(field)


def _head(value: Value | None, field: str, names: Mapping[str, str]) -> str:
    if field == SAMPLER:
        return names.get(str(value), str(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _rows(
    plan: SweepPlan, names: Mapping[str, str], columns: str, rows: str
) -> list[tuple[str, dict[Value | None, Cell]]]:
    """Return the rows in order: name, and cells by their values on the axis ``columns``.

    Cells that differ in further fields are in groups of rows; within a group, the field ``rows`` varies.
    """
    labels = line_names(plan.cells, names)
    several = {STEPS: len(plan.step_counts) > 1, GUIDANCE: len({cell.guidance_scale for cell in plan.cells}) > 1}
    by_name: dict[str, dict[Value | None, Cell]] = {}
    for cell in plan.cells:
        if columns == STEPS:
            name = labels[line_of(cell)]
        else:
            settings = tuple((field, value) for field, value in cell.settings if field != columns)
            parts = [names.get(cell.sampler, cell.sampler)] if columns != SAMPLER else []
            parts += [steps_text(cell.num_steps)] if several[STEPS] or columns == SAMPLER else []
            parts += [f"guidance {cell.guidance_scale:g}"] if several[GUIDANCE] and columns != GUIDANCE else []
            name = ", ".join(parts) + write_settings(settings)
        by_name.setdefault(name, {})[_value(cell, columns)] = cell
    return _grouped(list(by_name.items()), rows)


def _grouped(
    unsorted_rows: Sequence[tuple[str, dict[Value | None, Cell]]], rows: str
) -> list[tuple[str, dict[Value | None, Cell]]]:
    """Sort rows so that those that differ in the field ``rows`` only are next to each other."""
    values: dict[Value | None, int] = {}
    groups: dict[object, int] = {}

    def place(row: tuple[str, dict[Value | None, Cell]]) -> tuple[int, int]:
        cell = next(iter(row[1].values()))
        sampler, scale, settings = line_of(cell)
        other_values = {SAMPLER: sampler, STEPS: cell.num_steps, GUIDANCE: scale, **dict(settings)}
        value = other_values.pop(rows, None)
        group = tuple(other_values.values())
        return groups.setdefault(group, len(groups)), values.setdefault(value, len(values))

    return sorted(unsorted_rows, key=place)


def _guidance_of(cell: Cell, plan: SweepPlan) -> str:
    """Return the guidance of a cell as the end of its name; empty if all cells have the same."""
    several = len({each.guidance_scale for each in plan.cells}) > 1
    return f", guidance {cell.guidance_scale:g}" if several else ""


def _square(
    cell: Cell | None,
    cells: Mapping[Cell, CellSummary],
    looks: Mapping[Cell, Path],
    names: Mapping[str, str],
    plan: SweepPlan,
) -> str:
    if cell is None:
        return "<td></td>"
    summary, look = cells.get(cell), looks.get(cell)
    if summary is None or look is None:
        return '<td><div class="blank"></div><small>&nbsp;</small></td>'
    settings = f"{_guidance_of(cell, plan)}{write_settings(cell.settings)}"
    name = escape(f"{names.get(cell.sampler, cell.sampler)}, {steps_text(cell.num_steps)}{settings}")
    source = escape(address(look))
    image = f'<a href="{source}" target="_blank" rel="noopener"><img src="{source}" alt="{name}"></a>'
    box = f'<input type="checkbox" data-file="{escape(str(look))}" aria-label="Compare {name}">'
    return f"<td>{image}{box}<small>{_worth(summary)}</small></td>"


def _worth(summary: CellSummary) -> str:
    """Return the measurements of a cell in a few characters."""
    exact, near = summary.value(Measure.EXACT), summary.value(Measure.PSNR_DB)
    parts = []
    if exact is not None:
        hits = round(exact.value * summary.num_images)
        parts.append(("✓" if hits else "✗") if summary.num_images == 1 else f"{hits}/{summary.num_images} ✓")
    if near is not None:
        parts.append(Measure.PSNR_DB.write(near.value))
    return " · ".join(parts) or "&nbsp;"
