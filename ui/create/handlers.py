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
from ui.create.layout import CreateTab
from ui.create.painting import FinishedPicture
from ui.create.parameters import (
    FIELD_OF,
    FORM_FIELDS,
    CheckedForm,
    Form,
    check_lengths,
    doubts,
    form_of,
    infotext_of,
    order_of,
)
from ui.create.queue import Queue
from ui.create.rewriting import rewritten
from ui.create.rewriting import shown as shown_rewrite
from ui.create.settings import Fields
from ui.create.start import PageMarks, read_marks, start_of, still_shown
from ui.create.view import Screen, Update, follow, remaining, resume, shown
from ui.events import PRIVATE, SILENT, called_with, on_selection
from ui.server import Models, Server, sentence
from ui.visitors import Visitors, ask_for_visitor, decoded

CALLED: Final = {"num_images": "count"}
"""Fields with another name in gradio's client API and as element ID."""

A_LITTLE: Final = "0.15"
"""Default variation strength."""

REWRITING: Final = "Rewriting the prompt"

A_FEW: Final = 4
"""Number of variations that are generated at a time, if the model allows as many."""


class CreateHandlers:
    """Events of the Create tab, shared by all visitors."""

    def __init__(self, server: Server, visitors: Visitors, tab: CreateTab) -> None:
        self._server = server
        self._visitors = visitors
        self._tab = tab
        self.queue = Queue(server, visitors)

    def connect(self) -> None:
        """Bind all events; call it inside the page's context."""
        tab = self._tab
        fields, showing, settings = tab.fields, tab.showing, tab.settings
        sent: dict[str, Any] = {
            "triggers": [showing.generate.click, fields.prompt.submit],
            "inputs": [*fields.all, settings.start.marks],
            "trigger_mode": "multiple",
        }
        checked = gr.on(
            fn=self.check,
            outputs=settings.invalid,
            preprocess=False,
            js="(...values) => diffserve.press(values)",
            **PRIVATE,
            **sent,
        )
        checked.success(js="(checked) => diffserve.showInvalid(checked)", inputs=settings.invalid, **SILENT)
        generated = gr.on(
            fn=self.generate,
            js="(...values) => diffserve.pressedValues(values)",
            **sent,
            outputs=list(showing),
            api_name="generate",
            show_progress="hidden",
            concurrency_limit=None,
            validator=self.validate,
        )
        generated.then(self.queue.look, None, list(showing), **PRIVATE)
        showing.stop.click(self.stop, **PRIVATE)
        self.queue.connect(tab)
        for thumbnails, show in ((showing.gallery, self.look_back), (showing.batch, self.look_closer)):
            name = str(thumbnails.elem_id)
            on_selection(thumbnails.select, show, name, f"diffserve.selected({name!r})", list(showing))
        varied = [fields.seed, *(fields.typed[name] for name in ("variation_seed", "variation_strength"))]
        showing.reuse_seed.click(self.reuse_seed, showing.parameters, [*varied, settings.groups], **PRIVATE)
        showing.vary.click(
            self.vary,
            inputs=[showing.parameters, settings.start.marks],
            js="(...values) => diffserve.withMarks(values)",
            outputs=list(showing),
            api_visibility="private",
            show_progress="hidden",
            trigger_mode="multiple",
            concurrency_limit=None,
        )
        shown: dict[str, Any] = {"inputs": showing.picture, "outputs": list(showing), "preprocess": False, **PRIVATE}
        showing.favorite.click(self.favorite, js="(shown) => [shown]", **shown)
        showing.delete.click(self.delete, js="(shown) => [shown]", **shown)
        settings.random_seed.click(fn=None, js="() => ['', '', null]", outputs=varied, api_visibility="private")
        _agree(fields)
        showing.copy_parameters.click(
            fn=None, js="(text) => { diffserveCopy(text); return []; }", inputs=showing.parameters
        )
        loaded = [*fields.all, showing.caption, settings.references.listing]
        read = settings.read_parameters.upload(
            self.read_parameters,
            settings.read_parameters,
            loaded,
            api_name="read_parameters",
            show_progress="hidden",
            concurrency_limit=None,
        )
        reused = showing.reuse_settings.click(self.reuse_settings, showing.parameters, loaded, **PRIVATE)
        for event in (read, reused):
            event.then(self.look_at_start, None, settings.start.outputs, **PRIVATE)

    @called_with(*(CALLED.get(name, name) for name in FORM_FIELDS), "marks")
    async def generate(self, *arguments: Any) -> AsyncIterator[list[Update]]:
        """Generate images and stream updates of the page; closing this generator cancels the request.

        Args:
            arguments: The values of ``FORM_FIELDS`` in order, the mask data, and gradio's request.
        """
        *values, marks, request = arguments
        try:
            page_marks = read_marks(marks)
        except DiffserveError as error:
            yield Screen().draw(caption=captions.status(sentence(error), is_error=True))
            return
        async for update in self._generate(Form.of(values), page_marks, request):
            yield update

    async def _generate(self, form: Form, marks: PageMarks, request: gr.Request) -> AsyncIterator[list[Update]]:
        """Generate the images of ``form``; see ``generate``."""
        screen = Screen()
        visitor = self._visitors.of(request.session_hash)
        ask_for_visitor(request)
        try:
            check_lengths(form)
            start = start_of(marks, form.strength, visitor.start)
            references = await asyncio.to_thread(visitor.references.fields, marks.references)
            picture = await asyncio.to_thread(_read_if_present, visitor.control) if form.control else None
            try:
                image = (await self._server.models()).image_of(form.model)
                references = references if image.references else []
                request_form: CheckedForm | Form = order_of(form, image, start, picture, references)
            except EngineUnavailable:  # the capabilities of the models are not known yet
                if form.control or references:
                    raise
                request_form = form
        except DiffserveError as error:
            trouble = visitor.trouble = sentence(error)
            yield screen.draw(caption=captions.status(trouble, is_error=True))
            return
        if form.rewrite_mode == "Suggest" and not visitor.is_settled(form.prompt or ""):
            prompt = wish = form.prompt or ""
            async for state in rewritten(self._server, wish):
                prompt = state.prompt if state.is_done else wish
                yield screen.draw(caption=captions.status(REWRITING), **shown_rewrite(visitor, wish, state))
            request_form = msgspec.structs.replace(request_form, prompt=prompt)
        if visitor.is_busy and isinstance(request_form, CheckedForm) and not _is_script(request):
            try:
                is_queued = await self.queue.add(visitor, request_form, start)
            except DiffserveError as error:
                visitor.trouble = sentence(error)
                yield screen.draw(caption=captions.status(visitor.trouble, is_error=True))
                return
            if is_queued:
                yield screen.draw(**await self.queue.shown(visitor))
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

    @called_with(*(CALLED.get(name, name) for name in FORM_FIELDS), "marks")
    async def validate(self, *arguments: Any) -> list[Any]:
        """Return gradio's validation of each input of ``generate``: an error at the field that is invalid.

        Scripts get the error of ``generate``, because gradio's client does not show these messages.
        """
        *values, marks, request = arguments
        results = [gr.validate(True, "")] * (len(values) + 1)
        invalid = None if _is_script(request) else await self._invalid(values, marks, request)
        if invalid is not None:
            field, error = invalid
            results[FORM_FIELDS.index(field)] = gr.validate(False, sentence(error))
        return results

    @called_with(*(CALLED.get(name, name) for name in FORM_FIELDS), "marks")
    async def check(self, *arguments: Any) -> dict[str, str] | None:
        """Return the element ID of the invalid field and its message; None if there is none.

        Gradio removes the messages of ``validate`` with the next event of the page; this one stays.
        """
        *values, marks, request = arguments
        invalid = await self._invalid(values, marks, request)
        if invalid is None:
            return None
        field, error = invalid
        return {"field": CALLED.get(field, field).replace("_", "-"), "message": sentence(error)}

    async def _invalid(
        self, values: Sequence[Any], marks: str | None, request: gr.Request
    ) -> tuple[str, InvalidRequest] | None:
        """Return the first invalid field of the form and its error; None if ``generate`` reports the error, if any."""
        visitor = self._visitors.of(request.session_hash)
        try:
            form = Form.of(values)
            check_lengths(form)
            image = (await self._server.models()).image_of(form.model)
            start = start_of(read_marks(marks), form.strength, visitor.start)
            order_of(form, image, start, b"" if visitor.control else None)
        except InvalidRequest as error:
            field = FIELD_OF.get(error.param or "", error.param)
            return (field, error) if field in FORM_FIELDS else None
        except DiffserveError:  # ``generate`` waits for the models
            return None
        return None

    async def look_back(self, index: Any, request: gr.Request) -> list[Update]:
        """Show an image of the gallery."""
        return _shown_at(self._visitors.of(request.session_hash).pictures, index)

    async def look_closer(self, index: Any, request: gr.Request) -> list[Update]:
        """Select one of several images of a request."""
        return _shown_at(self._visitors.of(request.session_hash).batch, index, is_together=True)

    async def favorite(self, picture: Any, request: gr.Request) -> list[Update]:
        """Mark the shown image as a favorite, or unmark it."""
        visitor = self._visitors.of(request.session_hash)
        shown_picture = visitor.picture_at(picture)
        if shown_picture is None or not shown_picture.history_id:
            return Screen().draw(caption=captions.status(captions.GONE, is_error=True))
        ask_for_visitor(request)
        try:
            client = self._server.client
            change = client.remove_favorite if shown_picture.is_favorite else client.add_favorite
            await change(shown_picture.history_id)
        except DiffserveError as error:
            return Screen().draw(caption=captions.status(sentence(error), is_error=True))
        changed = msgspec.structs.replace(shown_picture, is_favorite=not shown_picture.is_favorite)
        visitor.replace(shown_picture, changed)
        return Screen().draw(favorite=shown(changed)["favorite"])

    async def delete(self, picture: Any, request: gr.Request) -> list[Update]:
        """Delete the shown image, also from the history; the first press asks for confirmation."""
        visitor = self._visitors.of(request.session_hash)
        shown_picture = visitor.picture_at(picture)
        if shown_picture is None:
            return Screen().draw(caption=captions.status(captions.GONE, is_error=True))
        if visitor.asked != shown_picture.path:
            visitor.asked = shown_picture.path
            return Screen().draw(delete=gr.update(value=captions.ASK))
        ask_for_visitor(request)
        try:
            if shown_picture.history_id:
                await self._server.client.forget(shown_picture.history_id)
            if shown_picture.job:
                await self._server.client.delete_job(shown_picture.job)
        except DiffserveError as error:
            return Screen().draw(caption=captions.status(sentence(error), is_error=True))
        visitor.replace(shown_picture, None)
        await asyncio.to_thread(self._server.files.discard, shown_picture.path)
        return Screen().draw(**remaining(visitor))

    def reuse_seed(self, parameters: str) -> list[Update]:
        """Return updates with the seeds and variation strength of the image; none if it has no parameters."""
        seeds = _seeds(parameters)
        if seeds is None:
            return [gr.skip()] * 4
        *texts, strength = seeds
        return [*texts, float(strength) if strength else None, gr.update(value="basics")]

    async def vary(self, parameters: str, marks: str | None, request: gr.Request) -> AsyncIterator[list[Update]]:
        """Generate variations of the image with ``parameters``, and leave the form unchanged.

        They have the variation strength of the image, or a small one. The image to edit and the references are used if
        the image had them.
        """
        try:
            models = await self._server.models()
            form, _ = settings_of(parameters, models)
            few = min(A_FEW, models.image_of(form.model).max_images)
            page_marks = read_marks(marks)
        except DiffserveError as error:
            yield Screen().draw(caption=captions.status(sentence(error), is_error=True))
            return
        strength = form.typed.get("variation_strength") or A_LITTLE
        typed = {**form.typed, "variation_strength": strength, "variation_seed": None}
        varied = msgspec.structs.replace(form, typed=typed, num_images=few)
        page_marks = PageMarks(
            is_edit=page_marks.is_edit and form.strength is not None,
            mask=page_marks.mask,
            references=page_marks.references if form.uses_references else (),
        )
        async for update in self._generate(varied, page_marks, request):
            yield update

    async def read_parameters(self, file: str | None, request: gr.Request) -> list[Update]:
        """Fill the form with the parameters of the image in ``file``, and delete the upload."""
        try:
            if not file:
                raise InvalidRequest("No image was uploaded; choose one.", param="image")
            models = await self._server.models()
            form, notes = await decoded(request, lambda decoder: _read_once(Path(file), models, decoder))
        except (DiffserveError, OSError) as error:
            return self._not_loaded(error)
        return self._loaded(form, notes, request)

    async def reuse_settings(self, parameters: str, request: gr.Request) -> list[Update]:
        """Fill the form with the parameters of the shown image."""
        try:
            form, notes = settings_of(parameters, await self._server.models())
        except DiffserveError as error:
            return self._not_loaded(error)
        return self._loaded(form, notes, request)

    def _loaded(self, form: Form, notes: Sequence[str], request: gr.Request) -> list[Update]:
        self._visitors.of(request.session_hash).begin_as(form)
        listing = gr.skip() if form.uses_references else ""
        return [*form.values, captions.status(captions.LOADED, notes=notes), listing]

    def _not_loaded(self, error: DiffserveError | OSError) -> list[Update]:
        return [*[gr.skip()] * len(FORM_FIELDS), captions.status(sentence(error), is_error=True), gr.skip()]

    async def look_at_start(self, request: gr.Request) -> list[Update]:
        """Hide the image to edit if the loaded settings do not use one."""
        return still_shown(self._visitors.of(request.session_hash).start)


def _is_script(request: gr.Request) -> bool:
    """Return whether gradio's client sent ``request``, which waits for the images and shows no messages."""
    return bool(request.headers.get("x-gradio-user") == "api")


def _read_if_present(file: Path | None) -> bytes | None:
    """Return the contents of ``file``, or None if it no longer exists."""
    try:
        return None if file is None else file.read_bytes()
    except OSError:
        return None


def _agree(fields: Fields) -> None:
    """Keep choices and exact values consistent: choosing Quality or Aspect empties Steps or Size, and vice versa."""
    for choice, exact, nothing in ((fields.quality, fields.steps, "null"), (fields.aspect, fields.size, "''")):
        choice.input(js=f"() => {nothing}", outputs=exact, **SILENT)
        exact.input(
            js=f"(value, chosen) => String(value ?? '').trim() ? null : chosen ?? {choice.value!r}",
            inputs=[exact, choice],
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


def _shown_at(pictures: Sequence[FinishedPicture], index: object, *, is_together: bool = False) -> list[Update]:
    """Return updates that show the image with the number ``index``; none if there is no such image.

    Args:
        pictures: The images.
        index: The number, from the browser.
        is_together: Whether the other images stay visible next to it.
    """
    if not isinstance(index, int) or not 0 <= index < len(pictures):
        return Screen().draw()
    values = shown(pictures[index]) | {"caption": captions.picture_caption(pictures[index])}
    if is_together:
        del values["batch"]
    return Screen().draw(**values)


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
