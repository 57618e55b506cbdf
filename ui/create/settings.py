"""Layout of the settings next to the image: groups of fields, of which one is visible."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import gradio as gr
from gradio.components import Component

from diffserve.api.fields import MAX_GUIDANCE, REQUEST_FIELDS
from diffserve.models.controlnets import MAX_SCALE
from ui.create import adapters, references, start
from ui.create.adapters import AdapterPanel
from ui.create.parameters import ASPECTS, NOISE_SOURCES, SPACINGS
from ui.create.references import ReferencePanel
from ui.create.start import StartPanel
from ui.events import number_field, text_field
from ui.fields import TYPED, as_labelled
from ui.uploads import upload_button

QUALITIES: Final = ("draft", "standard", "fine")
MAX_IMAGES: Final = 10
SAMPLING: Final = (
    *("eta", "guidance_interval", "guidance_rescale", "cache_interval", "sigma_min", "sigma_max"),
    "switch_at",
)
"""Typed fields of the group Sampling; the others are in Extras."""


PLACEHOLDERS: Final = {"best_of": "as Images", "tile_size": "off", "tile_overlap": "a quarter"}
"""What an empty typed field means, where the text of the field table is too long for it or names fields."""

TITLED: Final = {
    "Larger image, second pass (hires fix)": ("hires_scale", "hires_strength", "hires_steps"),
    "Tiles, for images larger than the model's": ("tile_size", "tile_overlap"),
}
"""Typed fields of the group Extras below a title."""


class Fields(NamedTuple):
    """All input components, as in ``ui.create.parameters.Form``; element IDs are the names with dashes."""

    prompt: gr.Textbox
    negative_prompt: gr.Textbox
    quality: gr.Radio
    aspect: gr.Radio
    num_images: gr.Slider
    rewrite_mode: gr.Radio
    steps: gr.Number
    sampler: gr.Dropdown
    guidance: gr.Number
    size: gr.Textbox
    seed: gr.Textbox
    spacing: gr.Dropdown
    noise_source: gr.Dropdown
    loras: gr.Textbox
    model: gr.Dropdown
    strength: gr.Number
    control: gr.Dropdown
    control_scale: gr.Number
    control_steps: gr.Textbox
    preprocessor: gr.Dropdown
    control_picture: gr.Textbox
    typed: dict[str, Component]

    @property
    def all(self) -> list[Component]:
        """The components in the order of ``ui.create.parameters.FORM_FIELDS``."""
        return [*self[:-1], *self.typed.values()]


class Settings(NamedTuple):
    """Components of the settings.

    Attributes:
        groups: The choice of a group; the image to edit is in "start".
        fields: The input components by their names in ``Fields``, without those of the prompt.
        start: The panel with the image to edit.
        adapters: The panel with LoRAs, ControlNet, embeddings and styles.
        references: The panel with reference images.
        random_seed: The button next to the seed.
        read_parameters: The button that loads settings from a picture.
        invalid: The invalid field and its message, for ``screen.js``; not shown.
    """

    groups: gr.Radio
    fields: dict[str, Any]
    start: StartPanel
    adapters: AdapterPanel
    references: ReferencePanel
    random_seed: gr.Button
    read_parameters: gr.UploadButton
    invalid: gr.JSON


GROUPS: Final = {
    "basics": ("Basics", "What to paint, how large and how well."),
    "sampling": ("Sampling", "How the picture is computed from noise. Empty fields have good defaults."),
    "adapters": ("Adapters", "Files that change the style or fix the composition."),
    "start": ("Image-to-image", "Start from a picture, or repaint a part of it."),
    "extras": ("Extras", "Variations, selection and other options."),
}
"""Label and hint of each group of settings by element ID."""


def lay_out() -> Settings:
    """Build the settings in the current context.

    ``page.css`` shows the chosen group. Gradio's tabs build fields only when they are opened, too late for an error.
    """
    choices = [(label, name) for name, (label, _) in GROUPS.items()]
    groups = gr.Radio(choices, value="basics", label="Settings", show_label=False, interactive=True, elem_id="groups")
    with _group("basics"):
        fields, random_seed, read_parameters = _basics()
    with _group("sampling"):
        fields |= _sampling()
    with _group("adapters"):
        panel, reference_panel = adapters.lay_out(MAX_SCALE), references.lay_out()
    with _group("start"):
        begin = start.lay_out(groups)
    with _group("extras"):
        fields |= {"typed": _extras(fields.pop("typed"))}
    fields |= {"strength": begin.strength, **panel.fields}
    invalid = gr.JSON(visible=False)
    return Settings(groups, fields, begin, panel, reference_panel, random_seed, read_parameters, invalid)


def _group(name: str) -> gr.Column:
    """Begin a group with its hint."""
    group = gr.Column(elem_id=name, elem_classes="group")
    with group:
        gr.HTML(f"<p>{GROUPS[name][1]}</p>", elem_classes="quiet hint", js_on_load=None)
    return group


def _basics() -> tuple[dict[str, Any], gr.Button, gr.UploadButton]:
    """Return the fields, the button next to the seed, and the button that loads settings."""
    fields: dict[str, Any] = {
        "model": gr.Dropdown(
            [("Default", "")], value="", label="Model", allow_custom_value=True, visible=False, elem_id="model"
        ),
        "quality": gr.Radio(
            [(name.capitalize(), name) for name in QUALITIES], value="standard", label="Quality", elem_id="quality"
        ),
        "aspect": gr.Radio(
            [(name.capitalize(), name) for name in ASPECTS], value="square", label="Aspect", elem_id="aspect"
        ),
        "num_images": gr.Slider(1, MAX_IMAGES, value=1, step=1, label="Images", elem_id="count", buttons=[]),
        "negative_prompt": gr.Textbox("", label="Negative prompt", info="What to avoid.", elem_id="negative-prompt"),
    }
    with gr.Row(elem_id="seeds"):
        fields["size"] = text_field("Size", "set by aspect", "size", info="In pixels, such as 256x128.")
        fields["seed"] = text_field("Seed", "random", "seed", info="Repeats a picture.")
        random_seed = gr.Button("Random", size="sm", elem_id="random-seed")
    return fields, random_seed, upload_button("Load settings from a picture", "read-parameters")


def _sampling() -> dict[str, Any]:
    """Return the fields, with the first of the typed ones under "typed"."""
    fields: dict[str, Any] = {}
    with gr.Row():
        info = "Number of denoising steps."
        fields["steps"] = number_field("Steps", "set by quality", "steps", info=info, minimum=1)
        info = f"How closely to follow the prompt, 0 to {MAX_GUIDANCE:g}."
        fields["guidance"] = number_field(
            "Guidance", "default", "guidance", info=info, minimum=0, maximum=MAX_GUIDANCE, step=0.5
        )
    fields["sampler"] = gr.Dropdown(
        [("Default", "")],
        value="",
        label="Sampler",
        info="A sigma schedule may follow, such as DPM++ 2M Karras.",
        allow_custom_value=True,
        elem_id="sampler",
    )
    fields["spacing"] = gr.Dropdown(
        [("Default", ""), *((f"{words} ({name})", name) for name, words in SPACINGS.items())],
        value="",
        label="Step spacing",
        info="How the timesteps are distributed.",
        elem_id="spacing",
    )
    fields["noise_source"] = gr.Dropdown(
        [("Default", ""), *NOISE_SOURCES.items()],
        value="",
        label="RNG source",
        info="Random number generator of the noise.",
        elem_id="noise-source",
    )
    fields["typed"] = _typed_rows(SAMPLING)
    return fields


def _extras(typed: dict[str, Component]) -> dict[str, Component]:
    """Build the other typed fields; return all of them in the order of ``TYPED``."""
    titled = [name for names in TITLED.values() for name in names]
    typed = typed | _typed_rows([name for name in TYPED if name not in (*SAMPLING, *titled)])
    for title, names in TITLED.items():
        gr.HTML(f"<h2>{title}</h2>", elem_classes="subtitle", js_on_load=None)
        typed |= _typed_rows(names)
    return {name: typed[name] for name in TYPED}


def _typed_rows(names: Any) -> dict[str, Component]:
    """Build the fields ``names`` of ``TYPED``, two in a row."""
    typed: dict[str, Component] = {}
    for at in range(0, len(names), 2):
        with gr.Row():
            typed |= {name: _typed(name) for name in names[at : at + 2]}
    return typed


def _typed(name: str) -> Component:
    """Return the component for ``name`` of ``TYPED``; seeds are texts, because browsers round large numbers."""
    field, elem_id = REQUEST_FIELDS[name], name.replace("_", "-")
    info, nothing = as_labelled(field.help), PLACEHOLDERS.get(name, field.default_text)
    if field.type not in (int, float) or name == "variation_seed":
        return text_field(field.form, nothing, elem_id, info=info)
    is_whole = field.type is int
    return number_field(
        field.form,
        nothing,
        elem_id,
        info=info,
        minimum=field.minimum if field.minimum is not None else int(is_whole),
        maximum=field.maximum,
        step=1 if is_whole else 0.05,
    )
