"""The tab Create: a wish, its settings, and the picture that comes of it. Layout here, what happens in ``creating``."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import gradio as gr

from ui.captions import READY, status
from ui.create import palette
from ui.create.palette import Palette
from ui.create.parameters import ASPECTS, NOISE_SOURCES, REWRITE_MODES, SPACINGS
from ui.uploads import keep_no_copies

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
    """Everything that can be set, in the order of :class:`ui.create.parameters.Form`."""

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
    eta: gr.Textbox
    spacing: gr.Dropdown
    guidance_interval: gr.Textbox
    cache_interval: gr.Textbox
    token_merging: gr.Textbox
    similarity_threshold: gr.Textbox
    noise_source: gr.Dropdown


class Wording(NamedTuple):
    """The rewriter's part."""

    suggest: gr.Button
    panel: gr.Column
    suggestion: gr.Textbox
    difference: gr.HTML
    accept: gr.Button
    revert: gr.Button
    note: gr.HTML


class CreateOutputs(NamedTuple):
    """What a painting changes, in the order in which ``creating`` fills it."""

    picture: gr.Image
    batch: gr.Gallery
    caption: gr.HTML
    painted_from: gr.HTML
    gallery: gr.Gallery
    parameters: gr.Textbox
    generate: gr.Button
    stop: gr.Button
    reuse_seed: gr.Button
    copy_parameters: gr.Button
    download: gr.DownloadButton


class CreateTab(NamedTuple):
    """All parts of the tab."""

    fields: Fields
    wording: Wording
    showing: CreateOutputs
    palette: Palette
    token: gr.Textbox
    was_lost: gr.Checkbox
    random_seed: gr.Button
    read_parameters: gr.UploadButton
    advanced: gr.Accordion


def lay_out() -> CreateTab:
    """Build the tab in the current context. Three blocks: the wish, the picture, the settings (see ``page.css``)."""
    with gr.Row(elem_id="create"):
        with gr.Column(elem_id="wish"):
            prompt, generate, stop = _wish()
            known = palette.lay_out()
            rewrite_mode, wording = _wording()
        with gr.Column(elem_id="show"):
            showing = _show(generate, stop)
        with gr.Column(elem_id="settings"):
            quality = gr.Radio(
                [(name.capitalize(), name) for name in QUALITIES], value="standard", label="Quality", elem_id="quality"
            )
            aspect = gr.Radio(
                [(name.capitalize(), name) for name in ASPECTS], value="square", label="Aspect", elem_id="aspect"
            )
            count = gr.Slider(1, MAX_IMAGES, value=1, step=1, label="Pictures", elem_id="count", buttons=[])
            advanced, random_seed, rest = _advanced()
            read_parameters = gr.UploadButton(
                "Read the settings of a picture",
                file_types=[".png", ".jpg", ".jpeg", ".webp"],
                size="sm",
                elem_id="read-parameters",
            )
            keep_no_copies(read_parameters)
    fields = Fields(prompt=prompt, quality=quality, aspect=aspect, num_images=count, rewrite_mode=rewrite_mode, **rest)
    token, was_lost = gr.Textbox(visible=False), gr.Checkbox(visible=False)
    return CreateTab(fields, wording, showing, known, token, was_lost, random_seed, read_parameters, advanced)


def _wish() -> tuple[gr.Textbox, gr.Button, gr.Button]:
    prompt = gr.Textbox(
        label="Prompt",
        placeholder="What would you like to see?",
        lines=1,
        max_lines=8,
        autofocus=True,
        elem_id="prompt",
    )
    with gr.Row(elem_id="run"):
        generate = gr.Button("Generate", variant="primary", elem_id="generate")
        stop = gr.Button("Stop", variant="stop", elem_id="stop", visible=False)
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
            info="Change it as you like, then accept it.",
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
        label="Picture",
        show_label=False,
        type="filepath",
        format="png",
        interactive=False,
        buttons=["fullscreen"],
        elem_id="picture",
        alt_text="The picture that was painted last",
    )
    batch = _thumbnails("The pictures of one request", "batch")
    caption = gr.HTML(status(READY), label="Caption", elem_id="caption")
    painted_from = gr.HTML(label="Painted from", elem_id="painted-from", elem_classes="quiet")
    with gr.Row(elem_id="actions"):
        reuse_seed = gr.Button("Use this seed again", size="sm", interactive=False, elem_id="reuse-seed")
        copy_parameters = gr.Button("Copy parameters", size="sm", interactive=False, elem_id="copy-parameters")
        download = gr.DownloadButton("Download PNG", size="sm", interactive=False, elem_id="download")
    parameters = gr.Textbox(label="Parameters", visible=False, elem_id="parameters")
    gallery = _thumbnails("Painted on this page", "gallery")
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
        copy_parameters,
        download,
    )


def _thumbnails(label: str, elem_id: str) -> gr.Gallery:
    """Pictures to choose one of, not there while there are none."""
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
    """The panel, the button beside the seed, and the other fields by their names in ``Fields``."""
    with gr.Accordion("Advanced", open=False, elem_id="advanced") as advanced:
        negative = gr.Textbox("", label="Negative prompt", info="What should not be there.", elem_id="negative-prompt")
        with gr.Row():
            steps = _number("Steps", "as the quality says", "steps", info="From noise to picture.")
            guidance = _number("Guidance", "the model's own", "guidance", info="How closely your words are followed.")
        sampler = gr.Dropdown(
            [("Model's own", "")],
            value="",
            label="Sampler",
            info="A sigma schedule may follow, such as DPM++ 2M Karras.",
            allow_custom_value=True,
            elem_id="sampler",
        )
        spacing = gr.Dropdown(
            [("Model's own", ""), *((f"{words} ({name})", name) for name, words in SPACINGS.items())],
            value="",
            label="Where the steps lie",
            info="On the way from noise to picture.",
            elem_id="spacing",
        )
        with gr.Row():
            size = _number("Size", "as the aspect says", "size", info="In pixels, 512x512.")
            eta = _number("Fresh noise", "the sampler's own", "eta", info="Of every step (eta), 0 to 1.")
        with gr.Row():
            guided = _number(
                "Guided part", "all steps", "guidance-interval", info="From and to, as parts of the way: 0.2-0.8."
            )
            cached = _number(
                "Whole network every", "1", "cache-interval", info="So many steps, a part of it between (DeepCache)."
            )
        with gr.Row():
            merged = _number(
                "Merged tokens", "none", "token-merging", info="Share of them in self-attention, 0 to 0.75."
            )
            similar = _number(
                "Similar enough", "never", "similarity-threshold", info="To begin from a kept picture, above 0 to 1."
            )
        noise_source = gr.Dropdown(
            [("Server's own", ""), *NOISE_SOURCES.items()],
            value="",
            label="Noise",
            info="Where a seed's numbers come from.",
            elem_id="noise-source",
        )
        with gr.Row(elem_id="seeds"):
            seed = _number("Seed", "random", "seed")
            random_seed = gr.Button("Random", size="sm", elem_id="random-seed")
    return (
        advanced,
        random_seed,
        {
            **{"negative_prompt": negative, "steps": steps, "sampler": sampler, "guidance": guidance, "size": size},
            **{"seed": seed, "eta": eta, "spacing": spacing, "guidance_interval": guided, "cache_interval": cached},
            **{"token_merging": merged, "similarity_threshold": similar, "noise_source": noise_source},
        },
    )


def _number(label: str, placeholder: str, elem_id: str, *, info: str | None = None) -> gr.Textbox:
    """A number that may be left out: gradio's own field for numbers makes a zero of nothing."""
    return gr.Textbox(
        "",
        label=label,
        placeholder=placeholder,
        info=info,
        max_lines=1,
        html_attributes=gr.InputHTMLAttributes(autocomplete="off", spellcheck=False),
        elem_id=elem_id,
    )
