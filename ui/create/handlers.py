"""Events of the Create tab: generate, stop, select an image, load settings from an image."""

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
"""Fields with another name in gradio's client API."""

A_LITTLE: Final = "0.15"
"""Default variation strength."""

A_FEW: Final = 4
"""Number of variations that are generated at a time, if the model allows as many."""


class CreateHandlers:
    """Events of the Create tab, shared by all visitors."""

    def __init__(self, server: Server, visitors: Visitors, tab: CreateTab) -> None:
        self._server = server
        self._visitors = visitors
        self._tab = tab

    def connect(self) -> None:
        """Bind all events; call it inside the page's context."""
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
        showing.vary.click(
            self.vary,
            inputs=[showing.parameters, tab.start.marks],
            js="(...values) => diffserve.withMarks(values)",
            outputs=list(showing),
            api_visibility="private",
            show_progress="hidden",
            trigger_mode="multiple",
            concurrency_limit=None,
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
        """Generate images and stream updates of the page; closing this generator cancels the request.

        Args:
            arguments: The values of ``FORM_FIELDS`` in order, the mask data, and gradio's request.
        """
        *values, marks, request = arguments
        async for update in self._generate(Form.of(values), marks, request):
            yield update

    async def _generate(self, form: Form, marks: str | None, request: gr.Request) -> AsyncIterator[list[Update]]:
        """Generate the images of ``form``; see ``generate``."""
        screen = Screen()
        visitor = self._visitors.of(request.session_hash)
        ask_for_visitor(request)
        try:
            check_lengths(form)
            start = start_of(marks, form.strength, visitor.start)
            picture = await asyncio.to_thread(_read_if_present, visitor.control) if form.control else None
            try:
                image = (await self._server.models()).image_of(form.model)
                request_form: CheckedForm | Form = order_of(form, image, start, picture)
            except EngineUnavailable:  # the capabilities of the models are not known yet
                if form.control:
                    raise
                request_form = form
        except DiffserveError as error:
            trouble = visitor.trouble = sentence(error)
            yield screen.draw(caption=captions.status(trouble, is_error=True))
            return
        async for update in follow(visitor, visitor.paint(self._server, request_form, start), screen):
            yield update

    async def resume(self, request: gr.Request) -> AsyncIterator[list[Update]]:
        """Show a reloaded page its images and open requests."""
        async for update in resume(self._visitors.of(request.session_hash)):
            yield update

    async def stop(self, request: gr.Request) -> None:
        """Stop all requests of this visitor, and keep the unfinished images."""
        self._visitors.of(request.session_hash).stop(keeps_unfinished=True)

    async def look_back(self, selection: gr.SelectData, request: gr.Request) -> list[Update]:
        """Show an image of the gallery."""
        return _alone(self._visitors.of(request.session_hash).pictures, selection.index)

    async def look_closer(self, selection: gr.SelectData, request: gr.Request) -> list[Update]:
        """Show one image of a request alone."""
        return _alone(self._visitors.of(request.session_hash).batch, selection.index)

    def reuse_seed(self, parameters: str) -> list[Update]:
        """Return updates with the seeds and variation strength of the image; none if it has no parameters."""
        seeds = _seeds(parameters)
        return [gr.skip()] * 4 if seeds is None else [*seeds, gr.update(open=True)]

    async def vary(self, parameters: str, marks: str | None, request: gr.Request) -> AsyncIterator[list[Update]]:
        """Generate variations of the image with ``parameters``, and leave the form unchanged.

        They have the variation strength of the image, or a small one. The image to edit is used if the image had one.
        """
        try:
            models = await self._server.models()
            form, _ = settings_of(parameters, models)
            few = min(A_FEW, models.image_of(form.model).max_images)
        except DiffserveError as error:
            yield Screen().draw(caption=captions.status(sentence(error), is_error=True))
            return
        strength = form.typed.get("variation_strength") or A_LITTLE
        typed = {**form.typed, "variation_strength": strength, "variation_seed": None}
        varied = msgspec.structs.replace(form, typed=typed, num_images=few)
        async for update in self._generate(varied, None if form.strength is None else marks, request):
            yield update

    async def read_parameters(self, file: str | None, request: gr.Request) -> list[Update]:
        """Fill the form with the parameters of the image in ``file``, and delete the upload."""
        try:
            if not file:
                raise InvalidRequest("No image was uploaded; choose one.", param="image")
            models = await self._server.models()
            form, notes = await decoded(request, lambda decoder: _read_once(Path(file), models, decoder))
        except (DiffserveError, OSError) as error:
            caption = captions.status(sentence(error), is_error=True)
            return [*[gr.skip()] * len(FORM_FIELDS), gr.skip(), caption]
        self._visitors.of(request.session_hash).begin_as(form)
        caption = captions.status("Settings loaded from the image; press Generate.", notes=notes)
        return [*form.values, gr.update(open=True), caption]

    async def look_at_start(self, request: gr.Request) -> list[Update]:
        """Hide the image to edit if the loaded settings do not use one."""
        return still_shown(self._visitors.of(request.session_hash).start)

    async def read_control(self, file: str | None, request: gr.Request) -> list[Update]:
        """Store the image in ``file`` as this visitor's control image, and delete the upload."""
        try:
            if not file:
                raise InvalidRequest("No image was uploaded; choose one.", param="image")
            files = self._server.files
            stored, description = await decoded(request, lambda decoder: _keep_control(Path(file), files, decoder))
        except (DiffserveError, OSError) as error:
            return [gr.skip(), captions.status(sentence(error), is_error=True)]
        self._visitors.of(request.session_hash).control = stored
        return [description, gr.skip()]


def _keep_control(file: Path, files: PageFiles, reader: ImageReader) -> tuple[Path, str]:
    """Store an uploaded control image and return its path and description."""
    data = file.read_bytes()
    file.unlink(missing_ok=True)
    picture = reader.decode_image(data)
    return files.write(data, file.name), f"{file.name[:MAX_NAME_CHARS]}, {picture.width_px}x{picture.height_px}"


def _read_if_present(file: Path | None) -> bytes | None:
    """Return the contents of ``file``, or None if it no longer exists."""
    try:
        return None if file is None else file.read_bytes()
    except OSError:
        return None


def _agree(fields: Fields) -> None:
    """Keep choices and exact values consistent: choosing Quality or Aspect empties Steps or Size, and vice versa."""
    for choice, number in ((fields.quality, fields.steps), (fields.aspect, fields.size)):
        choice.input(js="() => ''", outputs=number, **SILENT)
        number.input(
            js=f"(text, chosen) => text.trim() ? null : chosen ?? {choice.value!r}",
            inputs=[number, choice],
            outputs=choice,
            **SILENT,
        )


def _seeds(parameters: str) -> tuple[str, str, str] | None:
    """Return seed, variation seed and variation strength, or None if ``parameters`` has none."""
    try:
        form = form_of(parameters, None)
    except InvalidRequest:
        return None
    return form.seed or "", form.typed.get("variation_seed") or "", form.typed.get("variation_strength") or ""


def _alone(pictures: Sequence[FinishedPicture], index: object) -> list[Update]:
    """Return updates that show the image with the number ``index``; none if there is no such image."""
    if not isinstance(index, int) or not 0 <= index < len(pictures):
        return Screen().draw()
    picture = pictures[index]
    return Screen().draw(**shown(picture), caption=captions.picture_caption(picture))


def _read_once(file: Path, models: Models, reader: ImageReader) -> tuple[Form, tuple[str, ...]]:
    """Read the settings of an uploaded file, delete it, and return form values and reasons for differences."""
    data = file.read_bytes()
    file.unlink(missing_ok=True)
    return settings_in(data, models, reader)


def settings_in(data: bytes, models: Models, reader: ImageReader = images) -> tuple[Form, tuple[str, ...]]:
    """Read the settings of the image file ``data``; this is slow, so call it in a thread.

    Returns:
        The form values, and the reasons why the result may differ.

    Raises:
        InvalidRequest: The file has no parameters.
    """
    return settings_of(infotext_of(data, reader), models)


def settings_of(infotext: str, models: Models) -> tuple[Form, tuple[str, ...]]:
    """Convert parameters as text to form values, and reasons why the result may differ."""
    name = parse_infotext(infotext).fields.get("Model")
    image = models.image_of(name)
    form = msgspec.structs.replace(form_of(infotext, image), model=name if name in models.names else models.image_id)
    return form, doubts(infotext, image)
