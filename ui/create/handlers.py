"""What happens in the tab Create: painting, stopping, looking back, reading a picture's settings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import gradio as gr
import msgspec

from diffserve.api.errors import DiffserveError, EngineUnavailable, InvalidRequest
from diffserve.media import images
from diffserve.media.decoders import ImageReader
from diffserve.media.infotext import parse_infotext
from ui import captions
from ui.create.layout import CreateTab, Fields
from ui.create.painting import FinishedPicture
from ui.create.parameters import FORM_FIELDS, CheckedForm, Form, check_lengths, doubts, form_of, infotext_of, order_of
from ui.create.start import start_of, still_shown
from ui.create.view import Screen, Update, follow, resume, shown
from ui.events import PRIVATE, SILENT, called_with
from ui.files import MAX_NAME_CHARS, PageFiles
from ui.server import Models, Server, sentence
from ui.visitors import Visitors, ask_for_visitor, decoded

CALLED: Final = {"num_images": "count"}
"""Fields that those who paint by gradio's client know by another name."""

A_LITTLE: Final = "0.15"
"""So far a picture is varied where nobody says how far."""

A_FEW: Final = 4
"""Pictures of a variation, where as many may be asked for at a time."""


class CreateHandlers:
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
            inputs=[*fields.all, tab.start.marks],
            js="(...values) => diffserve.withMarks(values)",
            outputs=list(showing),
            api_name="generate",
            show_progress="hidden",
            trigger_mode="multiple",
            concurrency_limit=None,
        )
        showing.stop.click(self.stop, **PRIVATE)
        showing.gallery.select(self.look_back, outputs=list(showing), **PRIVATE)
        showing.batch.select(self.look_closer, outputs=list(showing), **PRIVATE)
        varied = [fields.seed, *(fields.typed[name] for name in ("variation_seed", "variation_strength")), tab.advanced]
        showing.reuse_seed.click(self.reuse_seed, showing.parameters, varied, **PRIVATE)
        everything = [*fields.all, tab.advanced, showing.caption]
        showing.vary.click(self.vary, showing.parameters, everything, **PRIVATE).then(
            self.look_at_start, None, tab.start.outputs, **PRIVATE
        )
        tab.random_seed.click(fn=None, js="() => ['', '', '']", outputs=varied[:3], api_visibility="private")
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
            [*fields.all, tab.advanced, showing.caption],
            api_name="read_parameters",
            show_progress="hidden",
            concurrency_limit=None,
        ).then(self.look_at_start, None, tab.start.outputs, **PRIVATE)
        tab.read_control.upload(
            self.read_control,
            tab.read_control,
            [fields.control_picture, showing.caption],
            api_name="read_control",
            show_progress="hidden",
            concurrency_limit=None,
        )

    @called_with(*(CALLED.get(name, name) for name in FORM_FIELDS), "marks")
    async def generate(self, *arguments: Any) -> AsyncIterator[list[Update]]:
        """Paint, and show how far it is; closing this generator hangs up, and the server frees the lane.

        ``arguments``: what stands in the fields, in the order of ``FORM_FIELDS``, the marks, and gradio's request.
        """
        *values, marks, request = arguments
        form = Form.of(values)
        screen = Screen()
        visitor = self._visitors.of(request.session_hash)
        ask_for_visitor(request)
        try:
            check_lengths(form)
            start = start_of(marks, form.strength, visitor.start)
            picture = await asyncio.to_thread(_kept, visitor.control) if form.control else None
            try:
                image = (await self._server.models()).image_of(form.model)
                asked: CheckedForm | Form = order_of(form, image, start, picture)
            except EngineUnavailable:  # nobody knows yet what the models can do
                if form.control:
                    raise
                asked = form
        except DiffserveError as error:
            trouble = visitor.trouble = sentence(error)
            yield screen.draw(caption=captions.status(trouble, is_error=True))
            return
        async for update in follow(visitor, visitor.paint(self._server, asked, start), screen):
            yield update

    async def resume(self, request: gr.Request) -> AsyncIterator[list[Update]]:
        """Show a page that was reloaded what it had, and what goes on."""
        async for update in resume(self._visitors.of(request.session_hash)):
            yield update

    async def stop(self, request: gr.Request) -> None:
        """End all paintings of this visitor, and keep the unfinished pictures."""
        self._visitors.of(request.session_hash).stop(keeps_unfinished=True)

    async def look_back(self, chosen: gr.SelectData, request: gr.Request) -> list[Update]:
        """Show a picture of the gallery again."""
        return _alone(self._visitors.of(request.session_hash).pictures, chosen.index)

    async def look_closer(self, chosen: gr.SelectData, request: gr.Request) -> list[Update]:
        """Show one of the pictures of a request alone."""
        return _alone(self._visitors.of(request.session_hash).batch, chosen.index)

    def reuse_seed(self, parameters: str) -> list[Update]:
        """The seeds of the picture that is shown, and how far it was varied, into their fields; what no picture says
        changes nothing.
        """
        seeds = _seeds(parameters)
        return [gr.skip()] * 4 if seeds is None else [*seeds, gr.update(open=True)]

    async def vary(self, parameters: str, request: gr.Request) -> list[Update]:
        """All fields for pictures like the one that is shown: each as far from its seed's as it is, or a little, in a
        way of its own.
        """
        try:
            models = await self._server.models()
            form, notes = settings_of(parameters, models)
            few = min(A_FEW, models.image_of(form.model).max_images)
        except DiffserveError as error:
            said = captions.status(sentence(error), is_error=True)
            return [*[gr.skip()] * len(FORM_FIELDS), gr.skip(), said]
        self._visitors.of(request.session_hash).begin_as(form)
        strength = form.typed.get("variation_strength") or A_LITTLE
        typed = {**form.typed, "variation_strength": strength, "variation_seed": None}
        said = captions.status("Generate: each is another picture like that one.", notes=notes)
        return [*msgspec.structs.replace(form, typed=typed, num_images=few).values, gr.update(open=True), said]

    async def read_parameters(self, file: str | None, request: gr.Request) -> list[Update]:
        """How the picture in ``file`` was painted, into all fields; where it began from noise, so does the next one.
        The upload is removed.
        """
        try:
            if not file:
                raise InvalidRequest("There is no picture; choose one.", param="image")
            models = await self._server.models()
            form, notes = await decoded(request, lambda decoder: _read_once(Path(file), models, decoder))
        except (DiffserveError, OSError) as error:
            said = captions.status(sentence(error), is_error=True)
            return [*[gr.skip()] * len(FORM_FIELDS), gr.skip(), said]
        self._visitors.of(request.session_hash).begin_as(form)
        said = captions.status("These are the settings of that picture; paint it again.", notes=notes)
        return [*form.values, gr.update(open=True), said]

    async def look_at_start(self, request: gr.Request) -> list[Update]:
        """Show no picture to begin from where the settings that were read know of none."""
        return still_shown(self._visitors.of(request.session_hash).start)

    async def read_control(self, file: str | None, request: gr.Request) -> list[Update]:
        """Keep the picture in ``file`` for this visitor's ControlNet. The upload is removed."""
        try:
            if not file:
                raise InvalidRequest("There is no picture; choose one.", param="image")
            files = self._server.files
            kept, said = await decoded(request, lambda decoder: _keep_control(Path(file), files, decoder))
        except (DiffserveError, OSError) as error:
            return [gr.skip(), captions.status(sentence(error), is_error=True)]
        self._visitors.of(request.session_hash).control = kept
        return [said, gr.skip()]


def _keep_control(file: Path, files: PageFiles, reader: ImageReader) -> tuple[Path, str]:
    """Keep an uploaded image; return its place and what to show of it."""
    data = file.read_bytes()
    file.unlink(missing_ok=True)
    picture = reader.decode_image(data)
    return files.write(data, file.name), f"{file.name[:MAX_NAME_CHARS]}, {picture.width_px}x{picture.height_px}"


def _kept(file: Path | None) -> bytes | None:
    """What is in ``file``; ``None`` where it is gone."""
    try:
        return None if file is None else file.read_bytes()
    except OSError:
        return None


def _agree(fields: Fields) -> None:
    """Quality and Aspect say what is painted: choosing one empties Steps or Size, which would win, and what is typed
    there takes the choice back.
    """
    for choice, number in ((fields.quality, fields.steps), (fields.aspect, fields.size)):
        choice.input(js="() => ''", outputs=number, **SILENT)
        number.input(
            js=f"(text, chosen) => text.trim() ? null : chosen ?? {choice.value!r}",
            inputs=[number, choice],
            outputs=choice,
            **SILENT,
        )


def _seeds(parameters: str) -> tuple[str, str, str] | None:
    """Seed, variation seed and how far it was varied; ``None`` where ``parameters`` are none."""
    try:
        form = form_of(parameters, None)
    except InvalidRequest:
        return None
    return form.seed or "", form.typed.get("variation_seed") or "", form.typed.get("variation_strength") or ""


def _alone(pictures: Sequence[FinishedPicture], index: object) -> list[Update]:
    """The one with the number ``index``; nothing new where there is none."""
    if not isinstance(index, int) or not 0 <= index < len(pictures):
        return Screen().draw()
    picture = pictures[index]
    return Screen().draw(**shown(picture), caption=captions.picture_caption(picture))


def _read_once(file: Path, models: Models, reader: ImageReader) -> tuple[Form, tuple[str, ...]]:
    """Return what an uploaded ``file``, which is removed, puts into the fields, and why the result may differ."""
    data = file.read_bytes()
    file.unlink(missing_ok=True)
    return settings_in(data, models, reader)


def settings_in(data: bytes, models: Models, reader: ImageReader = images) -> tuple[Form, tuple[str, ...]]:
    """Return what the image file ``data`` puts into the fields, and why the result may differ.

    Takes a while: call it in a thread. Raises InvalidRequest.
    """
    return settings_of(infotext_of(data, reader), models)


def settings_of(infotext: str, models: Models) -> tuple[Form, tuple[str, ...]]:
    """The same for the parameters of a picture."""
    name = parse_infotext(infotext).fields.get("Model")
    image = models.image_of(name)
    form = msgspec.structs.replace(form_of(infotext, image), model=name if name in models.names else models.image_id)
    return form, doubts(infotext, image)
