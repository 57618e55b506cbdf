"""Layout and styles of the Experiment tab. ``handlers`` has its events."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import gradio as gr

from diffserve.api.errors import DiffserveError
from diffserve.experiments.charts import STYLE
from diffserve.experiments.measure import CHECKED_FAMILY
from diffserve.experiments.prompts import held_out_prompts
from ui.captions import status
from ui.events import PRIVATE, keep_form, on_report
from ui.experiment.grid import AXIS_LABELS, MAIN_LABELS, SAMPLER, STEPS
from ui.experiment.handlers import NOT_YET, ExperimentHandlers
from ui.server import Models, Server, sentence

STATUS_STYLES: Final = (Path(__file__).with_name("status.css"),)
GRID_STYLES: Final = (Path(__file__).with_name("grid.css"),)
CURVES_STYLES: Final = (STYLE, Path(__file__).with_name("curves.css"))

DEFAULT_SAMPLERS: Final = (("DDPM", "ddpm"), ("DDIM", "ddim"), ("DPM++ 2M", "dpmpp_2m"))
DEFAULT_STEPS: Final = "5, 10, 20, 50"
DEFAULT_PROMPTS: Final = "a fox next to a cactus on the beach\ntwo apples on a blue background"
DEFAULT_SEEDS: Final = 3
"""Verdicts need at least three."""

DEFAULT_REFERENCE_STEPS: Final = 200
NUM_HELD_OUT: Final = 8
UNKNOWN_YET: Final = "Estimating the duration."
ASK_AGAIN_S: Final = 2.0
"""How often the estimate is retried while the models load."""

REPORT_COMPARED: Final = """const chosen = diffserve.chosen.experiment = new Set();
element.addEventListener('change', ({ target }) => {
    if (!target.dataset.file) return;
    if (target.checked) chosen.add(target.dataset.file); else chosen.delete(target.dataset.file);
    trigger('select');
});
watch('value', () => {
    for (const box of element.querySelectorAll('[data-file]')) box.checked = chosen.has(box.dataset.file);
});"""
"""Keeps the images to compare in ``diffserve.chosen.experiment``; the grid is drawn again while it grows."""

NOTHING_YET: Final = "Images appear here as they are generated, then curves of quality over steps and over seconds."


class ExperimentFields(NamedTuple):
    """Input components in the order of ``ui.experiment.handlers.ExperimentForm``."""

    samplers: gr.Dropdown
    steps: gr.Textbox
    prompts: gr.Textbox
    num_seeds: gr.Number
    first_seed: gr.Number
    guidance: gr.Textbox
    reference_steps: gr.Number
    model: gr.Dropdown
    axis: gr.Dropdown
    axis_values: gr.Textbox
    x: gr.Dropdown
    x_values: gr.Textbox
    y: gr.Dropdown
    y_values: gr.Textbox


class ExperimentOutputs(NamedTuple):
    """Components that an experiment updates, in the order of ``ui.experiment.view.Shown``."""

    status: gr.HTML
    grid: gr.HTML
    curves_over_steps: gr.HTML
    curves_over_seconds: gr.HTML
    csv: gr.DownloadButton
    png: gr.DownloadButton
    report: gr.DownloadButton
    run: gr.Button
    stop: gr.Button
    current: gr.Textbox


def add_experiment(server: Server, page: gr.Blocks, tab: gr.Tab) -> None:
    """Build ``tab`` in the current context and bind its events."""
    with gr.Row(elem_id="exp"):
        with gr.Column(scale=2, min_width=300, elem_id="exp-form"):
            fields, held_out = _fields()
            estimate = _html("exp-estimate", "Estimate", STATUS_STYLES, status(UNKNOWN_YET))
            with gr.Row(elem_id="exp-buttons"):
                run = gr.Button("Run", variant="primary", elem_id="exp-run")
                stop = gr.Button("Stop", variant="stop", elem_id="exp-stop", visible="hidden")
        with gr.Column(scale=5, min_width=300, elem_id="exp-results"):
            outputs, slider = _outputs(run, stop)
    _connect(server, page, tab, fields, held_out, estimate, outputs, slider)


def _fields() -> tuple[ExperimentFields, gr.Button]:
    x, x_values = _axis("x", "X: columns", STEPS)
    y, y_values = _axis("y", "Y: rows", SAMPLER)
    samplers = gr.Dropdown(
        list(DEFAULT_SAMPLERS),
        value=[name for _, name in DEFAULT_SAMPLERS],
        multiselect=True,
        allow_custom_value=True,
        label="Samplers",
        info="A sigma schedule may follow, such as DPM++ 2M Karras. Learned samplers have fixed steps.",
        elem_id="exp-samplers",
    )
    steps = gr.Textbox(DEFAULT_STEPS, label="Steps", info="One or more, such as 5, 10-50 (+10).", elem_id="exp-steps")
    prompts = gr.Textbox(
        DEFAULT_PROMPTS, label="Prompts", info="One per line.", lines=2, max_lines=10, elem_id="exp-prompts"
    )
    held_out = gr.Button(f"Use {NUM_HELD_OUT} test prompts", size="sm", visible=False, elem_id="exp-held-out")
    with gr.Row():
        num_seeds = gr.Number(
            DEFAULT_SEEDS, label="Seeds", info="per prompt", precision=0, min_width=80, elem_id="exp-seeds"
        )
        first_seed = gr.Number(
            0, label="First seed", info="increases by 1 per image", precision=0, min_width=80, elem_id="exp-first-seed"
        )
        guidance = gr.Textbox(
            "",
            label="Guidance",
            info="one or more, with commas",
            placeholder="auto",
            max_lines=1,
            min_width=80,
            elem_id="exp-guidance",
        )
    reference_steps = gr.Number(
        DEFAULT_REFERENCE_STEPS,
        label="Reference steps",
        info="DDIM steps of the image that all others of its seed are compared with.",
        precision=0,
        elem_id="exp-reference-steps",
    )
    model = gr.Dropdown(
        [("Default", "")], value="", label="Model", allow_custom_value=True, visible=False, elem_id="exp-model"
    )
    axis, axis_values = _axis("axis", "Further axis", "")
    listed = (samplers, steps, prompts, num_seeds, first_seed, guidance, reference_steps, model)
    return ExperimentFields(*listed, axis, axis_values, x, x_values, y, y_values), held_out


def _axis(name: str, label: str, value: str) -> tuple[gr.Dropdown, gr.Textbox]:
    """Build the choice of the field of an axis, and its values; an axis with a list of its own has none here."""
    choices = [("None", "")] if not value else [(label, name) for name, label in MAIN_LABELS.items()]
    with gr.Row():
        field = gr.Dropdown(
            [*choices, *((label, name) for name, label in AXIS_LABELS.items())],
            value=value,
            label=label,
            info="Any field, or lora:NAME.",
            allow_custom_value=True,
            min_width=120,
            elem_id=f"exp-{name}",
        )
        values = gr.Textbox(
            "",
            label="Values",
            info="Such as 0, 0.5, 1.",
            max_lines=1,
            min_width=120,
            visible=False,
            elem_id=f"exp-{name}-values",
        )
    field.change(lambda name: gr.update(visible=bool(name) and str(name) not in MAIN_LABELS), field, values, **PRIVATE)
    return field, values


def _outputs(run: gr.Button, stop: gr.Button) -> tuple[ExperimentOutputs, gr.ImageSlider]:
    note = _html("exp-status", "Status", STATUS_STYLES, status(NOTHING_YET))
    grid = _html("exp-grid", "Grid", GRID_STYLES, js_on_load=REPORT_COMPARED)
    slider = gr.ImageSlider(
        label="Comparison", show_label=False, interactive=False, visible=False, format="png", elem_id="exp-slider"
    )
    over_steps = _html("exp-curves-steps", "Curves over steps", CURVES_STYLES)
    over_seconds = _html("exp-curves-seconds", "Curves over seconds", CURVES_STYLES)
    with gr.Row(elem_id="exp-files"):
        csv = gr.DownloadButton("Download CSV", size="sm", scale=0, min_width=140, visible=False, elem_id="exp-csv")
        png = gr.DownloadButton("Download PNG", size="sm", scale=0, min_width=140, visible=False, elem_id="exp-png")
        report = gr.DownloadButton(
            "Download report", size="sm", scale=0, min_width=140, visible=False, elem_id="exp-report"
        )
    current = gr.Textbox(label="Experiment", visible="hidden", elem_id="exp-current")
    return ExperimentOutputs(note, grid, over_steps, over_seconds, csv, png, report, run, stop, current), slider


def _html(name: str, label: str, styles: Iterable[Path], value: str = "", js_on_load: str | None = None) -> gr.HTML:
    """Return an HTML component with its own CSS files; the API shows ``label``."""
    css = "".join(file.read_text(encoding="utf-8") for file in styles)
    return gr.HTML(value, label=label, elem_id=name, css_template=css, apply_default_css=False, js_on_load=js_on_load)


def _connect(
    server: Server,
    page: gr.Blocks,
    tab: gr.Tab,
    fields: ExperimentFields,
    held_out: gr.Button,
    estimate: gr.HTML,
    outputs: ExperimentOutputs,
    slider: gr.ImageSlider,
) -> None:
    events = ExperimentHandlers(server)
    outputs.run.click(
        events.run, list(fields), list(outputs), api_name="experiment", show_progress="hidden", concurrency_limit=None
    )
    outputs.stop.click(events.stop, outputs.current, **PRIVATE)
    on_report([outputs.grid.select], events.compare, "[...diffserve.chosen.experiment]", slider)
    estimated = gr.on(
        [*(field.change for field in fields), tab.select],
        events.estimate,
        list(fields),
        estimate,
        api_name="experiment_estimate",
        show_progress="hidden",
        trigger_mode="always_last",
        queue=False,  # gradio loses an event that is queued in the moment in which a page's last one ends
    )
    again = gr.Timer(ASK_AGAIN_S, active=False)
    for estimate_event in (estimated, again.tick(events.estimate, list(fields), estimate, **PRIVATE)):
        estimate_event.then(lambda text: gr.Timer(active=text == status(NOT_YET)), estimate, again, **PRIVATE)
    held_out.click(lambda: "\n".join(held_out_prompts(NUM_HELD_OUT)), None, fields.prompts, **PRIVATE)

    async def greet(model: str | None) -> tuple[Any, ...]:
        """Return updates with models, samplers and test prompts once the models are loaded."""
        try:
            models = await server.wait_for_models()
        except DiffserveError as error:
            return gr.skip(), gr.skip(), gr.skip(), status(sentence(error), is_error=True)
        choices = [("Default", ""), *((name, name) for name in models.other_models)]
        return *_of_model(models, model), gr.update(choices=choices, visible=bool(models.other_models)), gr.skip()

    async def choose(model: str | None) -> tuple[Any, ...]:
        try:
            return _of_model(await server.models(), model)
        except DiffserveError:
            return gr.skip(), gr.skip()

    keep_form(page, "experiment", fields)
    keep_form(page, "experiment-run", [outputs.current, fields.x, fields.y]).then(
        events.follow,
        [outputs.current, fields.x, fields.y],
        list(outputs),
        api_visibility="private",
        show_progress="hidden",
        concurrency_limit=None,
    )
    page.load(greet, fields.model, [fields.samplers, held_out, fields.model, estimate], **PRIVATE)
    fields.model.change(choose, fields.model, [fields.samplers, held_out], **PRIVATE)


def _of_model(models: Models, model: str | None) -> tuple[Any, Any]:
    """Return updates with the samplers of ``model``, and whether test prompts apply to it."""
    image = models.image_of(model)
    choices = [(choice.label, choice.name) for choice in image.samplers]
    return gr.update(choices=choices), gr.update(visible=image.family == CHECKED_FAMILY)
