"""What happens in the tab Create: painting, stopping, looking back, reading a picture's settings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import gradio as gr

from diffserve.client import ImageCapabilities
from diffserve.errors import DiffserveError, EngineUnavailable, InvalidRequest
from ui import captions
from ui.create.layout import CreateTab, Fields
from ui.create.painting import FinishedPicture
from ui.create.parameters import CheckedForm, Form, check_lengths, doubts, form_of, infotext_of, order_of
from ui.create.view import Screen, Update, follow, resume, shown
from ui.events import PRIVATE, SILENT
from ui.server import Server, sentence
from ui.visitors import Visitors, ask_for_visitor


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
        showing.batch.select(self.look_closer, outputs=list(showing), **PRIVATE)
        showing.reuse_seed.click(self.reuse_seed, showing.parameters, [fields.seed, tab.advanced], **PRIVATE)
        tab.random_seed.click(fn=None, js="() => ''", outputs=fields.seed, api_visibility="private")
        gr.on(
            [showing.generate.click, fields.prompt.submit],
            js="(prompt) => diffserve.remember(prompt)",
            inputs=fields.prompt,
            **SILENT,
        )
        _agree(fields)
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
        quality: str | None,
        aspect: str | None,
        count: int | None,
        rewrite_mode: str,
        steps: str | None,
        sampler: str | None,
        guidance: str | None,
        size: str | None,
        seed: str | None,
        eta: str | None,
        spacing: str | None,
        guidance_interval: str | None,
        cache_interval: str | None,
        token_merging: str | None,
        similarity_threshold: str | None,
        noise_source: str | None,
        request: gr.Request,
    ) -> AsyncIterator[list[Update]]:
        """Paint, and show how far it is; closing this generator hangs up, and the server frees the lane."""
        form = Form(
            prompt=prompt, negative_prompt=negative_prompt, quality=quality, aspect=aspect, num_images=count,
            rewrite_mode=rewrite_mode, steps=steps, sampler=sampler, guidance=guidance, size=size, seed=seed, eta=eta,
            spacing=spacing, guidance_interval=guidance_interval, cache_interval=cache_interval,
            token_merging=token_merging, similarity_threshold=similarity_threshold, noise_source=noise_source,
        )  # fmt: skip
        screen = Screen()
        ask_for_visitor(request)
        try:
            check_lengths(form)
            try:
                asked: CheckedForm | Form = order_of(form, (await self._server.models()).image)
            except EngineUnavailable:  # nobody knows yet what the models can do
                asked = form
        except DiffserveError as error:
            trouble = self._visitors.of(request.session_hash).trouble = sentence(error)
            yield screen.draw(caption=captions.status(trouble, is_error=True))
            return
        visitor = self._visitors.of(request.session_hash)
        async for update in follow(visitor, visitor.paint(self._server, asked), screen):
            yield update

    async def resume(self, request: gr.Request) -> AsyncIterator[list[Update]]:
        """Show a page that was reloaded what it had, and what goes on."""
        async for update in resume(self._visitors.of(request.session_hash)):
            yield update

    async def stop(self, request: gr.Request) -> None:
        """End everything of this visitor, and of nobody else."""
        self._visitors.of(request.session_hash).stop()

    async def look_back(self, chosen: gr.SelectData, request: gr.Request) -> list[Update]:
        """Show a picture of the gallery again."""
        return _alone(self._visitors.of(request.session_hash).pictures, chosen.index)

    async def look_closer(self, chosen: gr.SelectData, request: gr.Request) -> list[Update]:
        """Show one of the pictures of a request alone."""
        return _alone(self._visitors.of(request.session_hash).batch, chosen.index)

    def reuse_seed(self, parameters: str) -> tuple[Update, Update]:
        """The seed of the picture that is shown, into its field; what no picture says changes nothing."""
        try:
            return form_of(parameters, None).seed or "", gr.update(open=True)
        except InvalidRequest:
            return gr.skip(), gr.skip()

    async def read_parameters(self, file: str | None) -> list[Update]:
        """How the picture in ``file`` was painted, into all fields. The upload is removed."""
        try:
            if not file:
                raise InvalidRequest("There is no picture; choose one.", param="image")
            image = (await self._server.models()).image
            form, notes = await asyncio.to_thread(_read_once, Path(file), image)
        except (DiffserveError, OSError) as error:
            said = captions.status(sentence(error), is_error=True)
            return [*[gr.skip()] * len(self._tab.fields), gr.skip(), said]
        said = captions.status("These are the settings of that picture; paint it again.", notes=notes)
        return [*(getattr(form, name) for name in Form.__struct_fields__), gr.update(open=True), said]


def _agree(fields: Fields) -> None:
    """Quality and Aspect say what is painted: choosing one empties Steps or Size, which would win, and what is typed
    there takes the choice back."""
    for choice, number in ((fields.quality, fields.steps), (fields.aspect, fields.size)):
        choice.input(js="() => ''", outputs=number, **SILENT)
        number.input(
            js=f"(text, chosen) => text.trim() ? null : chosen ?? {choice.value!r}",
            inputs=[number, choice],
            outputs=choice,
            **SILENT,
        )


def _alone(pictures: Sequence[FinishedPicture], index: object) -> list[Update]:
    """The one with the number ``index``; nothing new where there is none."""
    if not isinstance(index, int) or not 0 <= index < len(pictures):
        return Screen().draw()
    picture = pictures[index]
    return Screen().draw(**shown(picture), caption=captions.picture_caption(picture))


def _read_once(file: Path, image: ImageCapabilities) -> tuple[Form, tuple[str, ...]]:
    """What an uploaded ``file``, which is removed, puts into the fields, and why it may come out otherwise."""
    data = file.read_bytes()
    file.unlink(missing_ok=True)
    infotext = infotext_of(data)
    return form_of(infotext, image), doubts(infotext, image)
