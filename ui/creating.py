"""What happens in the tab Create: painting, stopping, looking back, reading a picture's settings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import gradio as gr

from diffserve.errors import DiffserveError
from ui import captions
from ui.create import CreateTab, Showing
from ui.events import PRIVATE
from ui.painting import Painting, Picture
from ui.parameters import Form, doubts, form_of, infotext_of, order_of
from ui.server import Server, sentence
from ui.visitors import Visitor, Visitors

UPDATE_EVERY_S: Final = 0.25
LOOK_EVERY_S: Final = 1.0
"""A page is told at least so often, so that one that is gone is noticed."""

PARTS: Final = Showing._fields
OF_PICTURE: Final = frozenset({"picture", "painted_from", "parameters", "reuse_seed", "copy_parameters", "download"})
"""Those that speak of the picture that is shown, and of no other."""

Update = Any  # a value of a component, or what gr.update gives


class Creating:
    """The events of the tab, for all visitors."""

    def __init__(self, server: Server, visitors: Visitors, tab: CreateTab) -> None:
        self._server = server
        self._visitors = visitors
        self._tab = tab

    def connect(self) -> None:
        """Bind everything, within the page's context."""
        tab = self._tab
        fields, showing = tab.fields, tab.showing
        gr.on(
            [showing.generate.click, fields.prompt.submit],
            self.generate,
            inputs=list(fields),
            outputs=list(showing),
            api_name="generate",
            show_progress="hidden",
            trigger_mode="multiple",
            concurrency_limit=None,
        )
        showing.stop.click(self.stop, **PRIVATE)
        showing.gallery.select(self.look_back, outputs=list(showing), **PRIVATE)
        showing.reuse_seed.click(self.reuse_seed, showing.parameters, [fields.seed, tab.advanced], **PRIVATE)
        tab.random_seed.click(fn=None, js="() => ''", outputs=fields.seed, api_visibility="private")
        showing.copy_parameters.click(
            fn=None, js="(text) => { diffserveCopy(text); return []; }", inputs=showing.parameters
        )
        tab.read_parameters.upload(
            self.read_parameters,
            tab.read_parameters,
            [*fields, tab.advanced, showing.caption],
            api_name="read_parameters",
            show_progress="hidden",
            concurrency_limit=None,
        )

    async def generate(
        self,
        prompt: str | None,
        negative_prompt: str | None,
        quality: str,
        aspect: str,
        count: int | None,
        rewrite_mode: str,
        steps: str | None,
        sampler: str | None,
        guidance: str | None,
        size: str | None,
        seed: str | None,
        eta: str | None,
        spacing: str | None,
        request: gr.Request,
    ) -> AsyncIterator[list[Update]]:
        """Paint, and show how far it is; closing this generator hangs up, and the server frees the lane."""
        form = Form(
            prompt=prompt, negative_prompt=negative_prompt, quality=quality, aspect=aspect, num_images=count,
            rewrite_mode=rewrite_mode, steps=steps, sampler=sampler, guidance=guidance, size=size, seed=seed, eta=eta,
            spacing=spacing,
        )  # fmt: skip
        visitor, screen = self._visitors.of(request.session_hash), Screen()
        try:
            order = order_of(form, (await self._server.models()).image)
        except DiffserveError as error:
            visitor.trouble = sentence(error)
            yield screen.draw(caption=captions.status(visitor.trouble, is_error=True))
            return
        painting = visitor.paint(self._server, order)
        try:
            async for update in _follow(visitor, painting, screen):
                yield update
        finally:
            painting.stop()

    def stop(self, request: gr.Request) -> None:
        """End everything of this visitor, and of nobody else."""
        self._visitors.of(request.session_hash).stop()

    def look_back(self, chosen: gr.SelectData, request: gr.Request) -> list[Update]:
        """Show a picture of the gallery again."""
        pictures = self._visitors.of(request.session_hash).pictures
        index = chosen.index if isinstance(chosen.index, int) else 0
        if not 0 <= index < len(pictures):
            return Screen().draw()
        picture = pictures[index]
        return Screen().draw(**shown(picture), caption=captions.picture_caption(picture))

    def reuse_seed(self, parameters: str) -> tuple[str, Update]:
        """The seed of the picture that is shown, into its field."""
        return form_of(parameters, None).seed or "", gr.update(open=True)

    async def read_parameters(self, file: str) -> list[Update]:
        """How the picture in ``file`` was painted, into all fields. The upload is removed."""
        try:
            image = (await self._server.models()).image
            infotext = await asyncio.to_thread(_read_once, Path(file))
            form, doubt = form_of(infotext, image), doubts(infotext, image)
        except (DiffserveError, OSError) as error:
            said = captions.status(sentence(error), is_error=True)
            return [*[gr.skip()] * len(self._tab.fields), gr.skip(), said]
        notes = (doubt,) if doubt else ()
        said = captions.status("These are the settings of that picture; paint it again.", notes=notes)
        return [*values_of(form), gr.update(open=True), said]


class Screen:
    """What one page shows of a painting: only what changed is sent."""

    def __init__(self) -> None:
        self._sent: dict[str, Update] = {}

    def draw(self, **values: Update) -> list[Update]:
        """Updates for all parts of :class:`ui.create.Showing`, in order; those not named stay as they are.

        A new picture brings along all that speaks of it: somebody may have looked back at another one meanwhile.
        """
        new = {name for name, value in values.items() if name not in self._sent or self._sent[name] != value}
        if "picture" in new:
            new |= values.keys() & OF_PICTURE
        self._sent |= values
        return [values[name] if name in new else gr.skip() for name in PARTS]


def shown(picture: Picture) -> dict[str, Update]:
    """A finished ``picture``, and what can be done with it."""
    return {
        "picture": str(picture.path),
        "painted_from": captions.painted_from(picture),
        "parameters": picture.infotext,
        "reuse_seed": gr.update(interactive=True),
        "copy_parameters": gr.update(interactive=True),
        "download": gr.update(value=str(picture.path), interactive=True),
    }


def shown_unfinished(preview: Path | None) -> dict[str, Update]:
    """A ``preview``, or no picture at all: nothing can be done with it."""
    off = gr.update(interactive=False)
    return {
        "picture": None if preview is None else str(preview),
        "painted_from": "",
        "parameters": "",
        "reuse_seed": off,
        "copy_parameters": off,
        "download": off,
    }


def values_of(form: Form) -> list[Update]:
    """What the fields get, in their order."""
    return [getattr(form, name) for name in Form.__struct_fields__]


async def _follow(visitor: Visitor, painting: Painting, screen: Screen) -> AsyncIterator[list[Update]]:
    """Everything that is to be seen of ``painting``, at most four times a second, and its end."""
    while not painting.is_over:
        seen, began_s = visitor.news, asyncio.get_running_loop().time()
        yield screen.draw(**_going_on(visitor, painting))
        await visitor.wait_for_news(seen, LOOK_EVERY_S)
        rest_s = UPDATE_EVERY_S - (asyncio.get_running_loop().time() - began_s)
        if rest_s > 0 and not painting.is_over:
            await asyncio.sleep(rest_s)
    yield screen.draw(**_over(visitor, painting))


def _going_on(visitor: Visitor, painting: Painting) -> dict[str, Update]:
    """Of several paintings the oldest is shown."""
    paintings = visitor.paintings
    if not paintings or paintings[0] is not painting:
        return {}
    parts = {
        "caption": captions.caption_of(painting, len(paintings) - 1, visitor.trouble),
        "gallery": _gallery(visitor),
        **_buttons(is_busy=True),
    }
    if painting.preview is not None:
        parts |= shown_unfinished(painting.preview)
    return parts


def _over(visitor: Visitor, painting: Painting) -> dict[str, Update]:
    """Its picture; where there is none, the newest of the gallery in place of its preview."""
    visitor.trouble = painting.error or visitor.trouble
    parts = {
        "caption": captions.caption_of(painting, trouble=visitor.trouble),
        "gallery": _gallery(visitor),
        **_buttons(visitor.is_busy),
    }
    if painting.pictures:
        parts |= shown(painting.pictures[-1])
    elif painting.preview is not None:
        parts |= shown(visitor.pictures[0]) if visitor.pictures else shown_unfinished(None)
    return parts


def _buttons(is_busy: bool) -> dict[str, Update]:
    return {"generate": gr.update(visible=not is_busy), "stop": gr.update(visible=is_busy)}


def _gallery(visitor: Visitor) -> Update:
    pictures = [(str(picture.path), f"seed {picture.seed}") for picture in visitor.pictures]
    return gr.update(value=pictures, visible=bool(pictures))


def _read_once(file: Path) -> str:
    """The parameters in an uploaded ``file``, which is removed."""
    data = file.read_bytes()
    file.unlink(missing_ok=True)
    return infotext_of(data)
