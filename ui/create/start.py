"""A picture that somebody begins from, at the page: sent, or one that was painted here, with what is marked on it.

What is marked is the browser's (``mark.js``): it sends the mask with the request. The picture stays with the visitor,
as a file of the page, so that a page that is reloaded has it again.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import gradio as gr
import msgspec

from diffserve.api.errors import DiffserveError, EngineUnavailable, InvalidRequest
from diffserve.media.decoders import ImageReader
from diffserve.media.images import encode_image, resize
from ui.captions import status
from ui.create.parameters import StartFile
from ui.events import PRIVATE, SILENT
from ui.fields import read_number
from ui.server import Server, sentence
from ui.uploads import keep_no_copies
from ui.visitors import Visitors, decoded

MAX_MARKS_CHARS: Final = 900_000
MAX_START_BYTES: Final = 4_000_000
"""Of a PNG: with its mask, in base64, it is no more than a server takes."""

JPEG_QUALITY: Final = 95
MASK: Final = "data:image/png;base64,"
GONE: Final = "The picture to begin from is no longer here; choose it again, or press Begin from noise."
EDITOR: Final = """<div class="under-marks"><img src="gradio_api/file={}" alt="The picture to begin from"></div>
<div role="group" aria-label="Marking" class="marking">
<button type="button" data-mark="brush" aria-pressed="true">Mark</button>
<button type="button" data-mark="erase" aria-pressed="false">Unmark</button>
<button type="button" data-mark="undo">Undo</button>
<button type="button" data-mark="invert">Invert</button>
<button type="button" data-mark="clear">Clear</button>
<label>Brush <input type="range" id="brush" min="1" max="60" value="12"></label></div>
<p id="marked" role="status"></p>"""

PUT_AWAY: Final = '<span data-from="noise" hidden></span>'
"""In place of the editor: the browser forgets the picture, and what was marked on it."""

Update = Any  # a value of a component, or what gr.update gives


class StartPanel(NamedTuple):
    """The parts of the panel. ``marks``: what the browser tells of it with a request, as :class:`PageMarks` in JSON."""

    panel: gr.Accordion
    choose: gr.UploadButton
    editor: gr.HTML
    strength: gr.Textbox
    remove: gr.Button
    said: gr.HTML
    marks: gr.Textbox

    @property
    def outputs(self) -> list[Any]:
        """What :func:`shown` updates."""
        return [self.panel, self.editor, self.remove, self.said]


class PageMarks(msgspec.Struct, frozen=True):
    """Whether the page shows a picture to begin from, and its mask as a data URL, empty where nothing is marked."""

    is_edit: bool = False
    mask: str = ""


def lay_out() -> StartPanel:
    """Build it in the current context, closed."""
    with gr.Accordion("Edit a picture", open=False, elem_id="start") as panel:
        choose = gr.UploadButton(
            "Choose a picture", file_types=[".png", ".jpg", ".jpeg", ".webp"], size="sm", elem_id="start-choose"
        )
        keep_no_copies(choose)
        editor = gr.HTML(elem_id="start-picture", elem_classes="quiet")
        strength = gr.Textbox(
            "",
            label="Strength",
            info="How much is painted anew, 0 to 1.",
            placeholder="0.75, or 1 where something is marked",
            max_lines=1,
            html_attributes=gr.InputHTMLAttributes(autocomplete="off", spellcheck=False),
            elem_id="strength",
        )
        remove = gr.Button("Begin from noise", size="sm", visible=False, elem_id="start-remove")
        said = gr.HTML(elem_id="start-said")
    return StartPanel(panel, choose, editor, strength, remove, said, gr.Textbox("", label="Marks", visible=False))


def shown(picture: Path | None, trouble: str | None = None) -> list[Update]:
    """Updates of panel, editor, remove and said; a ``picture`` opens the panel, none puts away the one that was there,
    unless there is ``trouble`` with that.
    """
    return [
        gr.update(open=True) if picture or trouble else gr.skip(),
        EDITOR.format(quote(str(picture))) if picture else "" if trouble else PUT_AWAY,
        gr.update(visible=bool(picture or trouble)),
        status(trouble, is_error=True) if trouble else "",
    ]


def still_shown(picture: Path | None) -> list[Update]:
    """Updates of the same once a ``picture`` may have been put away: one that is there stays as it is."""
    return shown(None) if picture is None else [gr.skip()] * 4


class Starting:
    """The events of the panel, for all visitors."""

    def __init__(self, server: Server, visitors: Visitors, panel: StartPanel) -> None:
        self._server = server
        self._visitors = visitors
        self._panel = panel

    def connect(self, edit: gr.Button, picture: gr.Image) -> None:
        """Bind everything, within the page's context. ``edit`` begins from the ``picture`` that is shown."""
        panel = self._panel
        panel.choose.upload(self.choose, panel.choose, panel.outputs, **PRIVATE)
        edited = edit.click(self.edit, picture, panel.outputs, preprocess=False, js="(shown) => [shown]", **PRIVATE)
        edited.then(js="() => diffserve.look('start')", **SILENT)
        panel.remove.click(self.remove, None, panel.outputs, js="() => diffserve.unmark()", **PRIVATE)

    async def choose(self, file: str | None, request: gr.Request) -> list[Update]:
        """Begin from the upload ``file``, which is removed: upright, opaque and no larger than the server paints."""
        try:
            if not file:
                raise InvalidRequest("There is no picture; choose one.", param="image")
            try:
                models = await self._server.models()
                most_px = max(image.max_side_px for image in (models.image, *models.others.values()))
            except EngineUnavailable:  # the server brings it to its own size
                most_px = None
            data, name = await decoded(request, lambda decoder: _read_once(Path(file), most_px, decoder))
            path = await asyncio.to_thread(self._server.files.write, data, name)
        except (DiffserveError, OSError) as error:
            return [gr.skip()] * 3 + [status(sentence(error), is_error=True)]
        self._visitors.of(request.session_hash).start = path
        return shown(path)

    async def edit(self, picture: Any, request: gr.Request) -> list[Update]:
        """Begin from the ``picture`` that is shown, one of this visitor's own."""
        visitor = self._visitors.of(request.session_hash)
        name = picture.get("path") if isinstance(picture, dict) else picture
        own = next((one.path for one in visitor.pictures if str(one.path) == name and one.path.is_file()), None)
        if own is None:
            return [gr.skip()] * 3 + [status("There is no such picture any more; paint it again.", is_error=True)]
        visitor.start = own
        return shown(own)

    async def remove(self, request: gr.Request) -> list[Update]:
        """Begin from noise again."""
        self._visitors.of(request.session_hash).start = None
        return shown(None)

    async def restore(self, is_edit: bool | None, request: gr.Request) -> list[Update]:
        """What a page that was reloaded had; ``is_edit``: whether it had any."""
        visitor = self._visitors.of(request.session_hash)
        if visitor.start is None:
            return shown(None, GONE if is_edit else None)
        return shown(visitor.start)


def start_of(marks: str | None, strength: str | None, picture: Path | None) -> StartFile | None:
    """What a request begins from: the visitor's ``picture``, where the page says that it is to. InvalidRequest where
    that is gone, and where what is said makes no sense.
    """
    if not marks:
        return None
    try:
        if len(marks) > MAX_MARKS_CHARS:
            raise ValueError("too long")
        told = msgspec.json.decode(marks, type=PageMarks)
        if told.mask and not told.mask.startswith(MASK):
            raise ValueError("no PNG")
        mask = base64.b64decode(told.mask.removeprefix(MASK), validate=True) if told.mask else None
    except (ValueError, binascii.Error):  # msgspec's errors are of the former
        raise InvalidRequest("What is marked cannot be read; clear it and mark it again.", param="mask") from None
    if not told.is_edit:
        return None
    if picture is None:
        raise InvalidRequest(GONE, param="image")
    return StartFile(path=picture, mask=mask, strength=read_number(strength, "strength", 1.0))


def _read_once(file: Path, most_px: int | None, reader: ImageReader) -> tuple[bytes, str]:
    """Read the image in ``file``, which is removed; return it as a file with no side above ``most_px``, and a name.

    The file is a PNG or, where that is large, a JPEG. Raises InvalidRequest.
    """
    try:
        picture = reader.decode_image(file.read_bytes(), name="The picture")
    finally:
        file.unlink(missing_ok=True)
    longest = max(picture.width_px, picture.height_px)
    if most_px is not None and longest > most_px:
        sides = [max(1, round(side * most_px / longest)) for side in (picture.width_px, picture.height_px)]
        picture = resize(picture, *sides)
    data = encode_image(picture)
    if len(data) <= MAX_START_BYTES:
        return data, "start.png"
    return encode_image(picture, image_format="jpeg", quality=JPEG_QUALITY), "start.jpg"
