"""The Adapters tab: LoRAs with trigger words and strengths, embeddings, styles, and ControlNet with its control map."""

from __future__ import annotations

import asyncio
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import gradio as gr

from diffserve.api.errors import DiffserveError, InvalidRequest
from diffserve.client import ImageCapabilities, PromptStyle
from diffserve.media.decoders import ImageReader
from ui.captions import status
from ui.events import LATEST, MAX_PRESSES, PRIVATE, number_field, on_report, text_field
from ui.fields import check_text
from ui.files import MAX_NAME_CHARS, PageFiles
from ui.server import Server, sentence
from ui.uploads import upload_button
from ui.visitors import Visitors, ask_for_visitor, decoded

NO_LORAS: Final = "This server has no LoRAs; start it with --lora-dir to add some."
MAX_STRENGTH: Final = 2.0
NUM_BUTTONS: Final = 8
"""LoRAs that have buttons; the others are in the list only."""

REPORT_LORA: Final = """element.addEventListener('click', (event) => {
    const button = event.target.closest('[data-lora]');
    if (!button) return;
    diffserve.pressed.loras.push(button.dataset.lora);
    trigger('click');
});"""
NEGATIVE_PRESETS: Final = (
    PromptStyle("Negative: blurry or noisy", negative_prompt="blurry, noisy, low quality, jpeg artifacts"),
    PromptStyle("Negative: text and watermarks", negative_prompt="text, watermark, signature, logo"),
    PromptStyle("Negative: bad anatomy", negative_prompt="bad anatomy, extra fingers, deformed hands"),
)
"""Presets for models with an open vocabulary."""

Update = Any  # a value of a component, or what gr.update gives


class AdapterPanel(NamedTuple):
    """Components of the tab; ``fields`` are those of ``ui.create.settings.Fields`` by name."""

    lora: gr.Dropdown
    lora_buttons: gr.HTML
    lora_strength: gr.Slider
    words: gr.HTML
    embeddings: gr.HTML
    style: gr.Dropdown
    controlling: gr.Column
    read_control: gr.UploadButton
    control_map: gr.Image
    fields: dict[str, Any]


def lay_out(max_scale: float) -> AdapterPanel:
    """Build the panel in the current context; ``max_scale`` is the largest weight of a ControlNet."""
    with gr.Row(elem_id="lora-row"):
        lora = gr.Dropdown(
            [], value=None, label="LoRA", info="Choose one to add it.", min_width=120, elem_id="lora-choice"
        )
        strength = gr.Slider(
            0, MAX_STRENGTH, value=1, step=0.05, label="LoRA strength", buttons=[], min_width=120, elem_id="lora-scale"
        )
    lora_buttons = gr.HTML(label="LoRAs", elem_id="lora-buttons", elem_classes="quiet", js_on_load=REPORT_LORA)
    words = gr.HTML(elem_id="lora-words", elem_classes="quiet", js_on_load=None)
    loras = text_field("Used LoRAs", "none", "loras", info="Names with strengths: ink:0.8, paper.")
    embeddings = gr.HTML(elem_id="embeddings", elem_classes="quiet", js_on_load=None)
    style = gr.Dropdown(
        [], value=None, label="Style", info="Adds its words to the prompts.", visible=False, elem_id="style"
    )
    with gr.Column(visible=False, elem_id="controlling") as controlling:
        control = gr.Dropdown(
            [("None", "")],
            value="",
            label="ControlNet",
            info="Keeps the outlines or depth of another picture.",
            allow_custom_value=True,
            elem_id="control",
        )
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
        control_map = gr.Image(
            label="Control map", interactive=False, visible=False, buttons=[], format="png", elem_id="control-map"
        )
        with gr.Row():
            scale = number_field(
                "Weight", "1", "control-scale", info="0 to 2.", minimum=0, maximum=max_scale, step=0.05
            )
            steps = text_field("Active steps", "all", "control-steps", info="Fractions: 0-0.5.")
    fields = {"loras": loras, "control": control, "control_scale": scale, "control_steps": steps}
    fields |= {"preprocessor": preprocessor, "control_picture": picture}
    return AdapterPanel(
        lora, lora_buttons, strength, words, embeddings, style, controlling, choose, control_map, fields
    )


class AdapterHandlers:
    """Events of the tab, shared by all visitors."""

    def __init__(self, server: Server, visitors: Visitors, panel: AdapterPanel) -> None:
        self._server = server
        self._visitors = visitors
        self._panel = panel

    def connect(self, prompt: gr.Textbox, negative_prompt: gr.Textbox, caption: gr.HTML) -> None:
        """Bind all events; call it inside the page's context."""
        panel, loras = self._panel, self._panel.fields["loras"]
        inputs = [panel.lora, panel.lora_strength, loras]
        gr.on([panel.lora.input, panel.lora_strength.input], self.use_lora, inputs, [loras, panel.words], **LATEST)
        on_report(
            [panel.lora_buttons.click],
            self.press_loras,
            "diffserve.pressed.loras.splice(0)",
            [panel.lora, loras, panel.words],
            [panel.lora_strength, loras],
        )
        prompts = [prompt, negative_prompt]
        panel.style.input(self.add_style, [panel.style, *prompts], [*prompts, panel.style, caption], **LATEST)
        read = panel.read_control.upload(
            self.read_control,
            panel.read_control,
            [panel.fields["control_picture"], caption],
            api_name="read_control",
            show_progress="hidden",
            concurrency_limit=None,
        )
        preprocessor = panel.fields["preprocessor"]
        for event in (read.then, preprocessor.change):
            event(self.show_map, preprocessor, panel.control_map, **PRIVATE)

    async def press_loras(
        self, names: Any, strength: float | None, used: str | None, request: gr.Request
    ) -> list[Update]:
        """Use the LoRAs whose buttons were pressed since the last request, and select the last one."""
        pressed = [name for name in names[:MAX_PRESSES] if isinstance(name, str)] if isinstance(names, list) else []
        for name in pressed:
            used = with_lora(name, strength, used)
        last = pressed[-1] if pressed else None
        return [last or gr.skip(), used or "", await self._words(last, request)]

    async def use_lora(
        self, name: str | None, strength: float | None, used: str | None, request: gr.Request
    ) -> list[Update]:
        """Add a LoRA to the used ones, or change its strength there, and show its trigger words."""
        return [with_lora(name, strength, used), await self._words(name, request)]

    async def _words(self, name: str | None, request: gr.Request) -> str:
        """Return the trigger words of a LoRA as HTML."""
        ask_for_visitor(request)
        try:
            loras = await self._server.client.loras()
        except DiffserveError as error:
            return status(sentence(error), is_error=True)
        words = next((lora.trigger_words for lora in loras if name in (lora.name, lora.alias)), ())
        return word_buttons("Trigger words", words)

    async def add_style(
        self, name: str | None, prompt: str | None, negative_prompt: str | None, request: gr.Request
    ) -> list[Update]:
        """Add the words of a style to the prompts, and empty the choice, so that it can be added again."""
        ask_for_visitor(request)
        try:
            check_text(prompt, "prompt")
            check_text(negative_prompt, "negative prompt")
            styles = (*await self._server.client.prompt_styles(), *NEGATIVE_PRESETS)
        except DiffserveError as error:
            return [gr.skip(), gr.skip(), None, status(sentence(error), is_error=True)]
        style = next((style for style in styles if style.name == name), PromptStyle(""))
        return [*style.apply(prompt or "", negative_prompt or ""), None, gr.skip()]

    async def read_control(self, file: str | None, request: gr.Request) -> list[Update]:
        """Store the image in ``file`` as this visitor's control image, and delete the upload."""
        try:
            if not file:
                raise InvalidRequest("No image was uploaded; choose one.", param="image")
            files = self._server.files
            stored, description = await decoded(request, lambda decoder: _keep_control(Path(file), files, decoder))
        except (DiffserveError, OSError) as error:
            return [gr.skip(), status(sentence(error), is_error=True)]
        self._visitors.of(request.session_hash).control = stored
        return [description, gr.skip()]

    async def show_map(self, preprocessor: str | None, request: gr.Request) -> Update:
        """Show what the ControlNet sees of the control image; nothing without one."""
        file = self._visitors.of(request.session_hash).control
        if file is None:
            return gr.skip()
        ask_for_visitor(request)
        try:
            data = await asyncio.to_thread(file.read_bytes)
            control_map = await self._server.client.control_map(data, preprocessor or "none")
            path = await asyncio.to_thread(self._server.files.write, control_map, "control-map.png")
        except (DiffserveError, OSError):
            return gr.update(visible=False)
        return gr.update(value=str(path), visible=True)


async def styles_of(server: Server, image: ImageCapabilities) -> list[str]:
    """Return the names of the server's styles, and of the negative presets if the vocabulary of the model is open."""
    presets = () if image.world is not None else NEGATIVE_PRESETS
    try:
        styles: Sequence[PromptStyle] = (*await server.client.prompt_styles(), *presets)
    except DiffserveError:
        styles = presets
    return [style.name for style in styles]


def shown(image: ImageCapabilities, styles: Sequence[str]) -> list[Update]:
    """Return updates of (lora, its buttons, embeddings, style, loras, controlling, control) for a model."""
    buttons = "".join(
        f'<button type="button" data-lora="{html.escape(name)}">{html.escape(name)}</button>'
        for name in image.loras[:NUM_BUTTONS]
    )
    return [
        gr.update(choices=list(image.loras), info="Choose one to add it." if image.loras else NO_LORAS),
        f'<div class="words" role="group" aria-label="LoRAs">{buttons}</div>' if buttons else "",
        word_buttons("Embeddings", image.learnt_words),
        gr.update(choices=list(styles), visible=bool(styles)),
        gr.update(visible=bool(image.loras)),
        gr.update(visible=bool(image.controlnets)),
        gr.update(choices=[("None", ""), *((name, name) for name in image.controlnets)]),
    ]


def with_lora(name: str | None, strength: float | None, used: str | None) -> str:
    """Return the list of names and strengths ``used`` with that of the LoRA ``name``."""
    if not name:
        return used or ""
    parts = [part.strip() for part in (used or "").split(",")]
    other_loras = [part for part in parts if part and part.partition(":")[0] != name]
    return ", ".join([*other_loras, f"{name}:{1 if strength is None else strength:g}"])


def word_buttons(title: str, words: Sequence[str]) -> str:
    """Return a button for each word that adds it to the prompt, as HTML; empty without words."""
    buttons = "".join(
        f'<button type="button" data-word="{html.escape(word)}">{html.escape(word)}</button>' for word in words
    )
    return f'<div class="words" role="group" aria-label="{title}"><span>{title}</span> {buttons}</div>' if words else ""


def _keep_control(file: Path, files: PageFiles, reader: ImageReader) -> tuple[Path, str]:
    """Store an uploaded control image and return its path and description."""
    data = file.read_bytes()
    file.unlink(missing_ok=True)
    picture = reader.decode_image(data)
    return files.write(data, file.name), f"{file.name[:MAX_NAME_CHARS]}, {picture.width_px}x{picture.height_px}"
