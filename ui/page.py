"""The page: tabs, header, theme, and what happens when a page is opened or closed."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import gradio as gr
from gradio.blocks import Block
from gradio.events import Dependency

from diffserve.api.errors import DiffserveError
from ui import history, history_view
from ui.blocks import PageBlocks
from ui.captions import LOST, READY, status
from ui.create import adapters, examples, palette, references
from ui.create.adapters import AdapterHandlers
from ui.create.handlers import CreateHandlers
from ui.create.layout import CreateTab, lay_out
from ui.create.parameters import NUMBERS, quality_labels, sampler_labels
from ui.create.references import ReferenceHandlers
from ui.create.rewriting import Rewriting
from ui.create.start import Starting
from ui.create.upscaling import Upscaling
from ui.events import PRIVATE, SILENT, keep_form, keep_tab
from ui.experiment.layout import add_experiment
from ui.fields import TYPED
from ui.guard import key_of
from ui.server import Models, Server, sentence
from ui.visitors import Visitors, ask_for_visitor

STYLE: Final = Path(__file__).with_name("page.css")
SCRIPTS: Final = tuple(
    Path(__file__).with_name(f"{name}.js")
    for name in ("memory", "page", "hold", "keys", "drop", "palette", "mark", "lost", "screen")
)
"""Scripts in the order in which they run."""
TITLE: Final = "diffserve"
LOADING: Final = "The server is loading its models; this takes a moment."
TOOLS: Final = Path(__file__).with_name("tools.html")
"""Buttons of the header, and the dialogs of shortcuts and full screen (``screen.js``)."""

LEAVE: Final = '<form method="post" action="logout"><button>Log out</button></form>'
NO_REWRITER: Final = "No language model is loaded, so prompts are used as written."

MAX_EVENTS: Final = 1000
"""Concurrent gradio events: more than the engine accepts, so that only the engine queues."""


def build(server: Server) -> PageBlocks:
    """Build the page of ``server``; its choices are filled in once the models are loaded."""
    visitors = Visitors(server.files, grace_s=server.grace_s)

    async def leave(request: gr.Request) -> None:
        visitors.leave(request.session_hash)

    page = PageBlocks(server, title=TITLE, analytics_enabled=False, fill_width=True)
    with page:
        with gr.Row(elem_id="head"):
            gr.HTML(f"<h1>{TITLE}</h1>", elem_id="title")
            about = gr.HTML(elem_id="about", elem_classes="quiet")
            gr.HTML(TOOLS.read_text(encoding="utf-8"), elem_id="tools", js_on_load=None)
            leaving = gr.HTML(LEAVE, visible=False, elem_id="leave")
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("Create", id="create", elem_id="create-tab"):
                tab = lay_out()
                fields, showing, panel = tab.fields, tab.showing, tab.settings.adapters
                creating = CreateHandlers(server, visitors, tab)
                creating.connect()
                starting = Starting(server, visitors, tab.settings.start)
                starting.connect(showing.edit, showing.picture)
                Upscaling(server, visitors, tab).connect()
                Rewriting(server, visitors, tab).connect()
                palette.connect(server, fields.prompt, fields.loras, fields.rewrite_mode, fields.model, tab.palette)
                AdapterHandlers(server, visitors, panel).connect(fields.prompt, fields.negative_prompt, showing.caption)
                referring = ReferenceHandlers(server, visitors, tab.settings.references)
                referring.connect(showing.use_reference, showing.picture, fields.model, tab.settings.groups)
            with gr.Tab("Experiment", id="experiment", elem_id="experiment-tab") as experiment:
                add_experiment(server, page, experiment)
            with gr.Tab("History", id="history", elem_id="history-tab") as opened:
                history_tab = history_view.lay_out()
                history.HistoryHandlers(server, visitors).connect(history_tab, opened, tab)
        keep_form(page, "create", tab.fields.all)
        keep_tab(page)
        arrived = _greet(page, server, visitors, creating, tab, about, leaving)
        arrived.then(
            starting.restore, tab.was_edit, tab.settings.start.outputs, js="() => [diffserve.isEdit()]", **PRIVATE
        )
        arrived.then(referring.show, fields.model, tab.settings.references.listing, **PRIVATE)
        arrived.then(creating.queue.look, None, list(showing), **PRIVATE)
        arrived.then(js="() => diffserve.goOn()", **SILENT)
        page.unload(leave)
    page.max_threads = MAX_EVENTS
    page.queue(default_concurrency_limit=None)
    return page


def _greet(
    page: gr.Blocks,
    server: Server,
    visitors: Visitors,
    creating: CreateHandlers,
    tab: CreateTab,
    about: gr.HTML,
    leaving: gr.HTML,
) -> Dependency:
    """Connect the events of a page that opens: show what the loaded models support, and the visitor's images.

    Returns:
        The event after which the visitor is known.
    """
    fields, panel = tab.fields, tab.settings.adapters
    of_model: list[Block] = [about, fields.quality, fields.sampler, fields.guidance, fields.num_images, tab.examples]
    of_model += [
        panel.lora,
        panel.lora_buttons,
        panel.embeddings,
        panel.style,
        fields.loras,
        panel.controlling,
        fields.control,
    ]
    referring = tab.settings.references
    of_model += [referring.panel, referring.missing, tab.showing.use_reference]
    of_model += [tab.palette.panel, tab.palette.things, *fields.typed.values()]
    outputs = [*of_model, fields.model, fields.rewrite_mode, tab.wording.note, tab.showing.caption]

    async def arrive(token: str | None, was_lost: bool | None, request: gr.Request) -> Any:
        visitor = visitors.arrive(request.session_hash, token, key_of(request))
        if was_lost and not visitor.is_busy:
            visitor.trouble = LOST
        return gr.update(visible=bool(key_of(request)))

    async def wait(request: gr.Request) -> Any:
        """Show that the models are being loaded, if they are."""
        try:
            is_ready = await server.client.is_ready() or visitors.of(request.session_hash).has_something
        except DiffserveError:
            return gr.skip()
        return gr.skip() if is_ready else status(LOADING)

    async def greet(model: str | None, request: gr.Request) -> list[Any]:
        try:
            models = await server.wait_for_models()
        except DiffserveError as error:
            trouble = status(f"{sentence(error)} Then reload this page.", is_error=True)
            return ["", *[gr.skip()] * (len(outputs) - 2), trouble]
        caption = gr.skip() if visitors.of(request.session_hash).has_something else status(READY)
        return [*await facts(models, model, request), *_choices(models, model), caption]

    async def facts(models: Models, model: str | None, request: gr.Request) -> list[Any]:
        ask_for_visitor(request)
        return _facts(models, model, await adapters.styles_of(server, models.image_of(model)))

    async def choose(model: str | None, request: gr.Request) -> list[Any]:
        try:
            return await facts(await server.models(), model, request)
        except DiffserveError:
            return [gr.skip()] * len(of_model)

    arrived = page.load(
        arrive,
        [tab.token, tab.was_lost],
        leaving,
        js="() => [...diffserve.token(), diffserve.wasLost('create')]",
        **PRIVATE,
    )
    arrived.then(wait, None, tab.showing.caption, **PRIVATE).then(greet, fields.model, outputs, **PRIVATE)
    fields.model.change(choose, fields.model, of_model, **PRIVATE)
    arrived.then(
        creating.resume,
        None,
        list(tab.showing),
        api_visibility="private",
        show_progress="hidden",
        concurrency_limit=None,
    )
    return arrived


def _facts(models: Models, model: str | None, styles: Sequence[str]) -> list[Any]:
    """Return updates that show the capabilities of ``model``, or of the first model."""
    image = models.image_of(model)
    name = model if isinstance(model, str) and model in models.other_models else models.image_id
    return [
        html.escape(f"{name} on {image.device}, {image.dtype}"),
        gr.update(choices=quality_labels(image)),
        gr.update(choices=sampler_labels(image)),
        gr.update(placeholder=f"default, {image.default_guidance_scale:g}"),
        gr.update(maximum=image.max_images),
        examples.shown(image.world is not None),
        *adapters.shown(image, styles),
        *references.shown(image.references),
        *palette.shown(image.world),
        *(_unsupported(name) if name in image.refused_fields else gr.update(visible=True) for name in TYPED),
    ]


def _unsupported(name: str) -> Any:
    """Return the update of a field that the model does not support: hidden and empty, because its value is sent too."""
    return gr.update(value=None if name in NUMBERS else "", visible="hidden")


def _choices(models: Models, model: str | None) -> list[Any]:
    """Return updates with the available models, and whether one of them rewrites prompts."""
    can_rewrite = models.language is not None
    selected = model if model in models.names else models.image_id
    return [
        gr.update(choices=models.names, value=selected, visible=True)
        if models.other_models
        else gr.update(value="", visible=False),
        gr.skip() if can_rewrite else gr.update(visible=False),
        gr.skip() if can_rewrite else NO_REWRITER,
    ]


def looks() -> dict[str, Any]:
    """Return the theme, scripts and styles for both ways of serving."""
    return {
        "theme": theme(),
        "css_paths": STYLE,
        "head": "".join(f"<script>{script.read_text(encoding='utf-8')}</script>" for script in SCRIPTS),
        "footer_links": [],
        "run_history": False,
        "show_error": False,
    }


def theme() -> gr.themes.Base:
    """Return the theme: gray, one accent color and system fonts, which are not downloaded; see also ``page.css``."""
    fonts = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "sans-serif")
    mono = ("ui-monospace", "SFMono-Regular", "Consolas", "monospace")
    return gr.themes.Base(
        primary_hue="teal", secondary_hue="teal", neutral_hue="zinc", radius_size="lg", font=fonts, font_mono=mono
    ).set(
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_400",
        block_title_text_color="*neutral_600",
        block_title_text_color_dark="*neutral_300",
        block_label_text_color="*neutral_600",
        block_label_text_color_dark="*neutral_300",
        body_background_fill="*neutral_50",
        body_background_fill_dark="*neutral_950",
        block_background_fill="transparent",
        block_background_fill_dark="transparent",
        block_border_width="0px",
        block_border_width_dark="0px",
        block_shadow="none",
        block_label_background_fill="transparent",
        block_label_background_fill_dark="transparent",
        block_title_text_weight="500",
        block_padding="0px",
        input_background_fill="white",
        input_background_fill_dark="*neutral_900",
        input_border_width="1px",
        input_border_color="*neutral_300",
        input_border_color_dark="*neutral_700",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover_dark="*primary_800",
        button_primary_text_color="white",
        button_secondary_background_fill="white",
        button_secondary_background_fill_dark="*neutral_800",
        button_secondary_background_fill_hover="*neutral_100",
        button_secondary_background_fill_hover_dark="*neutral_700",
        button_secondary_border_color="*neutral_300",
        button_secondary_border_color_dark="*neutral_600",
        button_border_width="1px",
        color_accent="*primary_700",
        color_accent_soft="*primary_50",
        color_accent_soft_dark="*primary_900",
        layout_gap="16px",
    )
