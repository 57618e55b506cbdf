"""Layout of the Create tab: prompt, settings and image. ``handlers`` has its events."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import gradio as gr

from ui.captions import READY, status
from ui.create import examples, palette, settings
from ui.create.palette import Palette
from ui.create.parameters import REWRITE_MODES
from ui.create.settings import Fields, Settings
from ui.events import SILENT

GALLERY_COLUMNS: Final = 6


class Wording(NamedTuple):
    """Components of the prompt rewriter; those that requests update, too, are in ``CreateOutputs``."""

    panel: gr.Column
    rewrite: gr.Button
    note: gr.HTML


class CreateOutputs(NamedTuple):
    """Components that a request updates, in order."""

    picture: gr.Image
    batch: gr.Gallery
    caption: gr.HTML
    painted_from: gr.HTML
    gallery: gr.Gallery
    parameters: gr.Textbox
    generate: gr.Button
    stop: gr.Button
    reuse_seed: gr.Button
    vary: gr.Button
    upscale: gr.Button
    copy_parameters: gr.Button
    download: gr.DownloadButton
    edit: gr.Button
    use_reference: gr.Button
    reuse_settings: gr.Button
    favorite: gr.Button
    delete: gr.Button
    queue: gr.HTML
    prompt: gr.Textbox
    difference: gr.HTML
    undo: gr.Button


class CreateTab(NamedTuple):
    """All components of the tab."""

    fields: Fields
    settings: Settings
    wording: Wording
    showing: CreateOutputs
    palette: Palette
    examples: gr.HTML
    token: gr.Textbox
    was_lost: gr.Checkbox
    was_edit: gr.Checkbox


def lay_out() -> CreateTab:
    """Build the tab in the current context, in three blocks: prompt, settings, image (see ``page.css``)."""
    with gr.Row(elem_id="create"):
        with gr.Column(elem_id="wish"):
            prompt, generate, stop = _wish()
            palette_panel, rewrite_mode, wording, difference, undo = _wording()
        with gr.Column(elem_id="settings"):
            groups = settings.lay_out()
        with gr.Column(elem_id="show"):
            caption = gr.HTML(status(READY), label="Caption", elem_id="caption")
            queue = gr.HTML(label="Queue", elem_id="queue", js_on_load=_QUEUE_EVENTS)
            example_buttons = examples.lay_out()
            shown = _show()
    fields = Fields(prompt=prompt, rewrite_mode=rewrite_mode, **groups.fields)
    showing = CreateOutputs(
        caption=caption,
        queue=queue,
        prompt=prompt,
        generate=generate,
        stop=stop,
        difference=difference,
        undo=undo,
        **shown,
    )
    token = gr.Textbox(visible=False)
    was_lost, was_edit = gr.Checkbox(visible=False), gr.Checkbox(visible=False)
    return CreateTab(fields, groups, wording, showing, palette_panel, example_buttons, token, was_lost, was_edit)


_QUEUE_EVENTS: Final = """element.addEventListener('click', (event) => {
    const button = event.target.closest('[data-action]');
    if (!button) return;
    diffserve.pressed.queue.push({ ...button.dataset });
    trigger('click');
});
setInterval(() => {
    const isLost = document.documentElement.classList.contains('lost');
    if (element.querySelector('[data-open]') && !document.hidden && !isLost) trigger('tick');
}, 1500);"""
"""Reports the buttons of the queue, and asks for its state while a job is unfinished and the page is visible."""


def _wish() -> tuple[gr.Textbox, gr.Button, gr.Button]:
    with gr.Row(elem_id="ask"):
        prompt = gr.Textbox(
            label="Prompt",
            placeholder="Describe a picture...",
            lines=1,
            max_lines=8,
            autofocus=True,
            elem_id="prompt",
        )
        with gr.Column(elem_id="run", min_width=120):
            generate = gr.Button("Generate", variant="primary", elem_id="generate")
            stop = gr.Button("Stop", variant="stop", elem_id="stop", visible="hidden")
    return prompt, generate, stop


def _wording() -> tuple[Palette, gr.Radio, Wording, gr.HTML, gr.Button]:
    unknown, rewrite_unknown = palette.lay_out_warning()
    with gr.Row(elem_id="rewriter"):
        mode = gr.Radio(list(REWRITE_MODES), value="Off", label="Rewrite the prompt", elem_id="rewrite-mode")
        note = gr.HTML(elem_id="rewrite-note", elem_classes="quiet")
        with gr.Column(elem_id="rewriting", visible=False, min_width=120) as panel:
            rewrite = gr.Button("Rewrite now", size="sm", elem_id="suggest")
        palette_panel = palette.lay_out(unknown, rewrite_unknown)
    with gr.Row(elem_id="rewritten"):
        difference = gr.HTML(label="Difference", elem_id="difference", elem_classes="difference")
        undo = gr.Button("Undo", size="sm", elem_id="revert", visible=False)
    return palette_panel, mode, Wording(panel, rewrite, note), difference, undo


def _show() -> dict[str, Any]:
    """Return the components of the image by their names in ``CreateOutputs``."""
    picture = gr.Image(
        label="Image",
        show_label=False,
        type="filepath",
        format="png",
        interactive=False,
        buttons=["fullscreen"],
        elem_id="picture",
        alt_text="The latest image",
    )
    gr.HTML("<p></p>", elem_id="true-size", js_on_load=None)
    batch = thumbnails("Images of one request", "batch")
    painted_from = gr.HTML(label="Prompt used", elem_id="painted-from", elem_classes="quiet")
    with gr.Row(elem_id="actions"):
        buttons = {
            name: gr.Button(label, size="sm", interactive=False, elem_id=elem_id)
            for name, (label, elem_id) in ACTIONS.items()
        }
        full_screen = gr.Button("Full screen", size="sm", elem_id="full-screen")
        full_screen.click(js="() => diffserve.fullScreen('batch', 'gallery')", **SILENT)
        download = gr.DownloadButton("Download", size="sm", interactive=False, elem_id="download")
        delete = gr.Button("Delete", size="sm", variant="stop", interactive=False, elem_id="delete")
    parameters = gr.Textbox(label="Parameters", visible=False, elem_id="parameters")
    gallery = thumbnails("Images of this session", "gallery")
    return {
        **{"picture": picture, "batch": batch, "painted_from": painted_from, "gallery": gallery},
        **{"parameters": parameters, "download": download, "delete": delete, **buttons},
    }


ACTIONS: Final = {
    "vary": ("Vary", "vary"),
    "upscale": ("Upscale", "upscale"),
    "edit": ("Edit", "edit-this"),
    "use_reference": ("Use as reference", "use-reference"),
    "reuse_settings": ("Reuse settings", "reuse-settings"),
    "reuse_seed": ("Reuse seed", "reuse-seed"),
    "favorite": ("Favorite", "favorite"),
    "copy_parameters": ("Copy parameters", "copy-parameters"),
}
"""Label and element ID of the buttons under an image, without Download and Delete."""


def thumbnails(label: str, elem_id: str) -> gr.Gallery:
    """Return a gallery whose images can be selected, hidden while empty."""
    return gr.Gallery(
        label=label,
        show_label=False,
        columns=GALLERY_COLUMNS,
        fit_columns=False,
        object_fit="contain",
        allow_preview=False,
        interactive=False,
        buttons=[],
        visible=False,
        elem_id=elem_id,
        format="png",
    )
