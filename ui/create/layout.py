"""Layout of the Create tab: prompt, image and settings. ``handlers`` has its events."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import gradio as gr
from gradio.components import Component

from diffserve.api.fields import REQUEST_FIELDS
from ui.captions import READY, status
from ui.create import palette, start
from ui.create.palette import Palette
from ui.create.parameters import ASPECTS, NOISE_SOURCES, REWRITE_MODES, SPACINGS
from ui.create.start import StartPanel
from ui.events import number_field
from ui.fields import TYPED
from ui.uploads import upload_button

EXAMPLES: Final = (
    "a fox next to a cactus on the beach",
    "two apples on a blue background",
    "an owl above a castle at night",
    "a small boat in the ocean",
    "three penguins in the snow",
)
QUALITIES: Final = ("draft", "standard", "fine")
MAX_IMAGES: Final = 10
GALLERY_COLUMNS: Final = 6


class Fields(NamedTuple):
    """All input components, as in ``ui.create.parameters.Form``."""

    prompt: gr.Textbox
    negative_prompt: gr.Textbox
    quality: gr.Radio
    aspect: gr.Radio
    num_images: gr.Slider
    rewrite_mode: gr.Radio
    steps: gr.Textbox
    sampler: gr.Dropdown
    guidance: gr.Textbox
    size: gr.Textbox
    seed: gr.Textbox
    spacing: gr.Dropdown
    noise_source: gr.Dropdown
    loras: gr.Textbox
    model: gr.Dropdown
    strength: gr.Textbox
    control: gr.Dropdown
    control_scale: gr.Textbox
    control_steps: gr.Textbox
    preprocessor: gr.Dropdown
    control_picture: gr.Textbox
    typed: dict[str, gr.Textbox]

    @property
    def all(self) -> list[Component]:
        """The components in the order of ``ui.create.parameters.FORM_FIELDS``."""
        return [*self[:-1], *self.typed.values()]


class Wording(NamedTuple):
    """Components of the prompt rewriter."""

    suggest: gr.Button
    panel: gr.Column
    suggestion: gr.Textbox
    difference: gr.HTML
    accept: gr.Button
    revert: gr.Button
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
    copy_parameters: gr.Button
    download: gr.DownloadButton
    edit: gr.Button


class CreateTab(NamedTuple):
    """All components of the tab."""

    fields: Fields
    wording: Wording
    showing: CreateOutputs
    palette: Palette
    start: StartPanel
    token: gr.Textbox
    was_lost: gr.Checkbox
    was_edit: gr.Checkbox
    random_seed: gr.Button
    read_parameters: gr.UploadButton
    advanced: gr.Accordion
    controlling: gr.Accordion
    read_control: gr.UploadButton


def lay_out() -> CreateTab:
    """Build the tab in the current context, in three blocks: prompt, image, settings (see ``page.css``)."""
    with gr.Row(elem_id="create"):
        with gr.Column(elem_id="wish"):
            prompt, generate, stop = _wish()
            palette_panel = palette.lay_out()
            rewrite_mode, wording = _wording()
            begin = start.lay_out()
        with gr.Column(elem_id="show"):
            showing = _show(generate, stop)
        with gr.Column(elem_id="settings"):
            model = gr.Dropdown(
                [("Default", "")],
                value="",
                label="Model",
                allow_custom_value=True,
                visible=False,
                elem_id="model",
            )
            quality = gr.Radio(
                [(name.capitalize(), name) for name in QUALITIES], value="standard", label="Quality", elem_id="quality"
            )
            aspect = gr.Radio(
                [(name.capitalize(), name) for name in ASPECTS], value="square", label="Aspect", elem_id="aspect"
            )
            count = gr.Slider(1, MAX_IMAGES, value=1, step=1, label="Images", elem_id="count", buttons=[])
            advanced, random_seed, advanced_fields = _advanced()
            controlling, read_control, controls = _controlling()
            read_parameters = upload_button("Load settings from a picture", "read-parameters")
    selected: dict[str, Any] = {"quality": quality, "aspect": aspect, "num_images": count, "model": model}
    selected["strength"] = begin.strength
    fields = Fields(prompt=prompt, rewrite_mode=rewrite_mode, **selected, **advanced_fields, **controls)
    token = gr.Textbox(visible=False)
    was_lost, was_edit = gr.Checkbox(visible=False), gr.Checkbox(visible=False)
    return CreateTab(
        fields,
        wording,
        showing,
        palette_panel,
        begin,
        token,
        was_lost,
        was_edit,
        random_seed,
        read_parameters,
        advanced,
        controlling,
        read_control,
    )


def _wish() -> tuple[gr.Textbox, gr.Button, gr.Button]:
    prompt = gr.Textbox(
        label="Prompt",
        placeholder="Describe a picture...",
        lines=1,
        max_lines=8,
        autofocus=True,
        elem_id="prompt",
    )
    with gr.Row(elem_id="run"):
        generate = gr.Button("Generate", variant="primary", elem_id="generate")
        stop = gr.Button("Stop", variant="stop", elem_id="stop", visible="hidden")
    with gr.Row(elem_id="examples"):
        for example in EXAMPLES:
            button = gr.Button(example, size="sm", elem_classes="example")
            button.click(
                fn=None, js=f"() => {example!r}", outputs=prompt, api_visibility="private", show_progress="hidden"
            )
    return prompt, generate, stop


def _wording() -> tuple[gr.Radio, Wording]:
    mode = gr.Radio(list(REWRITE_MODES), value="Off", label="Rewrite the prompt", elem_id="rewrite-mode")
    note = gr.HTML(elem_id="rewrite-note", elem_classes="quiet")
    with gr.Column(elem_id="rewriting", visible=False) as panel:
        suggest = gr.Button("Suggest a prompt", size="sm", elem_id="suggest")
        suggestion = gr.Textbox(
            label="Suggestion",
            info="Edit it if needed, then accept it.",
            lines=2,
            max_lines=8,
            placeholder=" ",
            interactive=True,
            elem_id="suggestion",
        )
        difference = gr.HTML(label="Difference", elem_id="difference", elem_classes="difference")
        with gr.Row():
            accept = gr.Button("Accept", size="sm", variant="primary", elem_id="accept", visible=False)
            revert = gr.Button("Revert", size="sm", elem_id="revert", visible=False)
    return mode, Wording(suggest, panel, suggestion, difference, accept, revert, note)


def _show(generate: gr.Button, stop: gr.Button) -> CreateOutputs:
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
    batch = thumbnails("Images of one request", "batch")
    caption = gr.HTML(status(READY), label="Caption", elem_id="caption")
    painted_from = gr.HTML(label="Prompt used", elem_id="painted-from", elem_classes="quiet")
    with gr.Row(elem_id="actions"):
        reuse_seed = gr.Button("Reuse seed", size="sm", interactive=False, elem_id="reuse-seed")
        vary = gr.Button("Make variations", size="sm", interactive=False, elem_id="vary")
        copy_parameters = gr.Button("Copy parameters", size="sm", interactive=False, elem_id="copy-parameters")
        download = gr.DownloadButton("Download PNG", size="sm", interactive=False, elem_id="download")
        edit = gr.Button("Edit image", size="sm", interactive=False, elem_id="edit-this")
    parameters = gr.Textbox(label="Parameters", visible=False, elem_id="parameters")
    gallery = thumbnails("Images of this session", "gallery")
    return CreateOutputs(
        picture,
        batch,
        caption,
        painted_from,
        gallery,
        parameters,
        generate,
        stop,
        reuse_seed,
        vary,
        copy_parameters,
        download,
        edit,
    )


def thumbnails(label: str, elem_id: str) -> gr.Gallery:
    """Return a gallery whose images can be selected, hidden while empty."""
    return gr.Gallery(
        label=label,
        show_label=False,
        columns=GALLERY_COLUMNS,
        fit_columns=False,
        object_fit="cover",
        allow_preview=False,
        interactive=False,
        buttons=[],
        visible=False,
        elem_id=elem_id,
        format="png",
    )


def _advanced() -> tuple[gr.Accordion, gr.Button, dict[str, Any]]:
    """Return the Advanced panel, the button next to the seed, and the fields by their names in ``Fields``."""
    with gr.Accordion("Advanced", open=False, elem_id="advanced") as advanced:
        negative = gr.Textbox("", label="Negative prompt", info="What to avoid.", elem_id="negative-prompt")
        with gr.Row():
            steps = number_field("Steps", "set by quality", "steps", info="Number of denoising steps.")
            guidance = number_field("Guidance", "default", "guidance", info="How closely to follow the prompt.")
        sampler = gr.Dropdown(
            [("Default", "")],
            value="",
            label="Sampler",
            info="A sigma schedule may follow, such as DPM++ 2M Karras.",
            allow_custom_value=True,
            elem_id="sampler",
        )
        spacing = gr.Dropdown(
            [("Default", ""), *((f"{words} ({name})", name) for name, words in SPACINGS.items())],
            value="",
            label="Step spacing",
            info="How the timesteps are distributed.",
            elem_id="spacing",
        )
        noise_source = gr.Dropdown(
            [("Default", ""), *NOISE_SOURCES.items()],
            value="",
            label="RNG source",
            info="Random number generator of the noise.",
            elem_id="noise-source",
        )
        with gr.Row():
            size = number_field("Size", "set by aspect", "size", info="In pixels, 512x512.")
            loras = number_field("Adapters", "none", "loras", info="LoRA names with weights: ink:0.8, paper.")
        typed: dict[str, gr.Textbox] = {}
        names = tuple(TYPED)
        for at in range(0, len(names), 2):
            with gr.Row():
                typed |= {name: _typed(name) for name in names[at : at + 2]}
        with gr.Row(elem_id="seeds"):
            seed = number_field("Seed", "random", "seed")
            random_seed = gr.Button("Random", size="sm", elem_id="random-seed")
    return (
        advanced,
        random_seed,
        {
            **{"negative_prompt": negative, "steps": steps, "sampler": sampler, "guidance": guidance, "size": size},
            **{"seed": seed, "spacing": spacing, "noise_source": noise_source, "loras": loras, "typed": typed},
        },
    )


def _controlling() -> tuple[gr.Accordion, gr.UploadButton, dict[str, Any]]:
    """Return the ControlNet panel, its upload button, and its fields by their names in ``Fields``."""
    with gr.Accordion("ControlNet", open=False, visible=False, elem_id="controlling") as panel:
        name = gr.Dropdown([("None", "")], value="", label="ControlNet", allow_custom_value=True, elem_id="control")
        picture = gr.Textbox(
            "", label="Control image", placeholder="none", interactive=False, max_lines=1, elem_id="control-picture"
        )
        choose = upload_button("Choose a control image", "read-control")
        preprocessor = gr.Dropdown(
            [("None (a control map)", ""), ("Edges (canny)", "canny")],
            value="",
            label="Preprocessor",
            elem_id="preprocessor",
        )
        with gr.Row():
            scale = number_field("Weight", "1", "control-scale", info="0 to 2.")
            steps = number_field("Active steps", "all", "control-steps", info="Start and end as fractions: 0-0.5.")
    fields = {"control": name, "control_scale": scale, "control_steps": steps}
    return panel, choose, {**fields, "preprocessor": preprocessor, "control_picture": picture}


def _typed(name: str) -> gr.Textbox:
    """Return the text field for the entry ``name`` of ``TYPED``."""
    field = REQUEST_FIELDS[name]
    return number_field(field.form, field.default_text, name.replace("_", "-"), info=field.help)
