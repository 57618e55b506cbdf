"""The page: its tabs, its looks, and what happens when somebody comes and goes."""

from __future__ import annotations

import html
from typing import Any, Final

import gradio as gr
from gradio.blocks import Block

from diffserve.errors import DiffserveError
from ui.captions import LOST, READY, status
from ui.create import palette
from ui.create.handlers import Creating
from ui.create.layout import CreateTab, lay_out
from ui.create.parameters import quality_labels, sampler_labels
from ui.create.rewriting import Rewriting
from ui.events import PRIVATE, SILENT, keep_form, keep_tab
from ui.experiment.layout import add_experiment
from ui.server import Models, Server, sentence
from ui.visitors import Visitors

TITLE: Final = "diffserve"
LOADING: Final = "The server is loading its models; this takes a moment."
NO_REWRITER: Final = "No language model is loaded, so prompts are painted as they are written."
MAX_EVENTS: Final = 1000
"""Events that gradio works on at once: more than the engine takes, so that the engine's queue is the only one."""


def build(server: Server) -> gr.Blocks:
    """The page of ``server``, to be mounted or launched. It shows what the models can do once they are loaded."""
    visitors = Visitors(server.files)

    async def leave(request: gr.Request) -> None:
        visitors.leave(request.session_hash)

    with gr.Blocks(title=TITLE, analytics_enabled=False, fill_width=True) as page:
        with gr.Row(elem_id="head"):
            gr.HTML(f"<h1>{TITLE}</h1>", elem_id="title")
            about = gr.HTML(elem_id="about", elem_classes="quiet")
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("Create", id="create", elem_id="create-tab"):
                tab = lay_out()
                creating = Creating(server, visitors, tab)
                creating.connect()
                Rewriting(server, tab).connect()
                palette.connect(server, tab.fields.prompt, tab.fields.rewrite_mode, tab.palette)
            with gr.Tab("Experiment", id="experiment", elem_id="experiment-tab") as experiment:
                add_experiment(server, page, experiment)
        keep_form(page, "create", tab.fields)
        keep_tab(page)
        _greet(page, server, visitors, creating, tab, about)
        page.unload(leave)
    page.max_threads = MAX_EVENTS
    queued: gr.Blocks = page.queue(default_concurrency_limit=None)
    return queued


def _greet(
    page: gr.Blocks, server: Server, visitors: Visitors, creating: Creating, tab: CreateTab, about: gr.HTML
) -> None:
    """When somebody opens the page, perhaps once more: what they had, and what depends on the models once these are
    loaded."""
    fields = tab.fields
    outputs: list[Block] = [about, tab.showing.caption, fields.quality, fields.sampler, fields.guidance]
    outputs += [fields.num_images, fields.rewrite_mode, tab.wording.note, tab.palette.panel, tab.palette.things]

    async def arrive(token: str | None, was_lost: bool | None, request: gr.Request) -> None:
        visitor = visitors.arrive(request.session_hash, token)
        if was_lost and not visitor.is_busy:
            visitor.trouble = LOST

    async def wait(request: gr.Request) -> Any:
        """Say so where the models are still being loaded."""
        try:
            is_ready = await server.client.is_ready() or visitors.of(request.session_hash).has_something
        except DiffserveError:
            return gr.skip()
        return gr.skip() if is_ready else status(LOADING)

    async def greet(request: gr.Request) -> list[Any]:
        try:
            facts = _facts(await server.wait_for_models())
        except DiffserveError as error:
            trouble = status(f"{sentence(error)} Then reload this page.", is_error=True)
            return ["", trouble, *[gr.skip()] * (len(outputs) - 2)]
        said = gr.skip() if visitors.of(request.session_hash).has_something else status(READY)
        return [facts[0], said, *facts[1:]]

    arrived = page.load(
        arrive,
        [tab.token, tab.was_lost],
        None,
        js="() => [...diffserve.token(), diffserve.wasLost('create')]",
        **PRIVATE,
    )
    arrived.then(wait, None, tab.showing.caption, **PRIVATE).then(greet, None, outputs, **PRIVATE)
    arrived.then(
        creating.resume,
        None,
        list(tab.showing),
        api_visibility="private",
        show_progress="hidden",
        concurrency_limit=None,
    )
    arrived.then(js="() => diffserve.goOn()", **SILENT)


def _facts(models: Models) -> list[Any]:
    """What the models can do, for the parts that ``_greet`` names, without the caption."""
    image = models.image
    can_rewrite = models.language is not None
    return [
        html.escape(f"{models.image_id} on {image.device}, {image.dtype}"),
        gr.update(choices=quality_labels(image)),
        gr.update(choices=sampler_labels(image)),
        gr.update(placeholder=f"the model's own, {image.default_guidance_scale:g}"),
        gr.update(maximum=image.max_images),
        gr.skip() if can_rewrite else gr.update(visible=False),
        gr.skip() if can_rewrite else NO_REWRITER,
        *palette.shown(image.world),
    ]
