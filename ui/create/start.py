"""The panel with an image to edit: an uploaded image or one of the page, with an optional mask.

The mask is drawn in the browser (``mark.js``) and sent with the request. The image is stored as a file of the visitor,
so that a reloaded page shows it again.
"""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import gradio as gr
import msgspec

from diffserve.api.errors import DiffserveError, EngineUnavailable, InvalidRequest
from diffserve.media.decoders import ImageReader
from diffserve.media.images import encode_image, resize
from ui.captions import GONE, status
from ui.create.parameters import StartFile
from ui.create.reference_files import ReferenceSettings
from ui.events import PRIVATE, SILENT, number_field
from ui.fields import read_number
from ui.server import Server, sentence
from ui.uploads import upload_button
from ui.visitors import Visitors, decoded

MAX_MARKS_CHARS: Final = 900_000
MAX_START_BYTES: Final = 4_000_000
"""Largest PNG: with its mask in base64 it fits the server's body limit."""

JPEG_QUALITY: Final = 95
MASK: Final = "data:image/png;base64,"
UNREADABLE_MASK: Final = "The mask cannot be read; clear it and draw it again."
MISSING_IMAGE: Final = "The image to edit no longer exists; choose it again, or press Remove picture."
EDITOR: Final = """<div class="under-marks"><img src="gradio_api/file={}" alt="The image to edit"></div>
<div role="group" aria-label="Mask" class="marking">
<button type="button" data-mark="brush" aria-pressed="true">Brush</button>
<button type="button" data-mark="erase" aria-pressed="false">Eraser</button>
<button type="button" data-mark="undo">Undo</button>
<button type="button" data-mark="invert">Invert</button>
<button type="button" data-mark="clear">Clear</button>
<label>Brush size <input type="range" id="brush" min="1" max="60" value="12"></label></div>
<p id="marked" role="status"></p>"""

NO_IMAGE: Final = '<span data-from="noise" hidden></span>'
"""Replaces the editor, so that the browser forgets the image and its mask."""

Update = Any  # a value of a component, or what gr.update gives


class StartPanel(NamedTuple):
    """Components of the panel; ``marks`` is ``PageMarks`` in JSON, set by the browser with each request."""

    groups: gr.Radio
    choose: gr.UploadButton
    editor: gr.HTML
    strength: gr.Number
    remove: gr.Button
    note: gr.HTML
    marks: gr.Textbox

    @property
    def outputs(self) -> list[Any]:
        """The components that ``shown`` updates."""
        return [self.groups, self.editor, self.remove, self.note]


class PageMarks(msgspec.Struct, frozen=True):
    """Values that the browser sends with a request, apart from the fields of the form.

    Attributes:
        is_edit: Whether the page shows an image to edit.
        mask: Its mask as a data URL, empty without a mask.
        references: Settings of the reference images.
    """

    is_edit: bool = False
    mask: str = ""
    references: tuple[ReferenceSettings, ...] = ()


def lay_out(groups: gr.Radio) -> StartPanel:
    """Build the panel in the current context, which is the group "start" of ``groups``."""
    choose = upload_button("Choose a picture", "start-choose")
    editor = gr.HTML(elem_id="start-picture", elem_classes="quiet")
    info = "How much of the picture changes, 0 to 1."
    strength = number_field(
        "Strength", "0.75, or 1 with a mask", "strength", info=info, minimum=0, maximum=1, step=0.05
    )
    remove = gr.Button("Remove picture", size="sm", visible=False, elem_id="start-remove")
    note = gr.HTML(elem_id="start-note")
    return StartPanel(groups, choose, editor, strength, remove, note, gr.Textbox("", label="Marks", visible=False))


def shown(picture: Path | None, trouble: str | None = None) -> list[Update]:
    """Return updates of ``StartPanel.outputs`` that show ``picture``, remove it if None, or show an error."""
    return [
        gr.update(value="start") if picture or trouble else gr.skip(),
        EDITOR.format(quote(str(picture))) if picture else "" if trouble else NO_IMAGE,
        gr.update(visible=bool(picture or trouble)),
        status(trouble, is_error=True) if trouble else "",
    ]


def still_shown(picture: Path | None) -> list[Update]:
    """Return updates of ``StartPanel.outputs`` that remove the image if ``picture`` is None, else change nothing."""
    return shown(None) if picture is None else [gr.skip()] * 4


class Starting:
    """Events of the panel, shared by all visitors."""

    def __init__(self, server: Server, visitors: Visitors, panel: StartPanel) -> None:
        self._server = server
        self._visitors = visitors
        self._panel = panel

    def connect(self, edit: gr.Button, picture: gr.Image) -> None:
        """Bind all events; ``edit`` starts from the image in ``picture``. Call it inside the page's context."""
        panel = self._panel
        panel.choose.upload(self.choose, panel.choose, panel.outputs, **PRIVATE)
        edited = edit.click(self.edit, picture, panel.outputs, preprocess=False, js="(shown) => [shown]", **PRIVATE)
        edited.then(js="() => diffserve.look('start')", **SILENT)
        panel.remove.click(self.remove, None, panel.outputs, js="() => diffserve.unmark()", **PRIVATE)

    async def choose(self, file: str | None, request: gr.Request) -> list[Update]:
        """Use the upload ``file``, which is deleted: rotated, opaque and limited to the model's largest size."""
        try:
            if not file:
                raise InvalidRequest("No image was uploaded; choose one.", param="image")
            try:
                models = await self._server.models()
                most_px = max(image.max_side_px for image in (models.image, *models.other_models.values()))
            except EngineUnavailable:  # the server resizes it
                most_px = None
            data, name = await decoded(request, lambda decoder: read_upload(Path(file), most_px, decoder))
            path = await asyncio.to_thread(self._server.files.write, data, name)
        except (DiffserveError, OSError) as error:
            return [gr.skip()] * 3 + [status(sentence(error), is_error=True)]
        self._visitors.of(request.session_hash).start = path
        return shown(path)

    async def edit(self, picture: Any, request: gr.Request) -> list[Update]:
        """Use the shown ``picture``, if it belongs to this visitor."""
        visitor = self._visitors.of(request.session_hash)
        shown_picture = visitor.picture_at(picture)
        if shown_picture is None:
            return [gr.skip()] * 3 + [status(GONE, is_error=True)]
        visitor.start = shown_picture.path
        return shown(shown_picture.path)

    async def remove(self, request: gr.Request) -> list[Update]:
        """Remove the image to edit."""
        self._visitors.of(request.session_hash).start = None
        return shown(None)

    async def restore(self, is_edit: bool | None, request: gr.Request) -> list[Update]:
        """Show the image of a reloaded page; ``is_edit`` says whether the browser had one."""
        visitor = self._visitors.of(request.session_hash)
        if visitor.start is None:
            return shown(None, MISSING_IMAGE if is_edit else None)
        return shown(visitor.start)


def read_marks(text: object) -> PageMarks:
    """Parse what the browser sends with a request, None or a text. Raises InvalidRequest."""
    if not text:
        return PageMarks()
    try:
        if not isinstance(text, str) or len(text) > MAX_MARKS_CHARS:
            raise ValueError("no text, or too long")
        return msgspec.json.decode(text, type=PageMarks)
    except ValueError:  # msgspec's errors are ValueErrors
        raise InvalidRequest(UNREADABLE_MASK, param="mask") from None


def start_of(marks: PageMarks, strength: str | None, picture: Path | None) -> StartFile | None:
    """Return the image and mask of a request, or None if it starts from noise.

    Raises:
        InvalidRequest: The image no longer exists, or the mask or strength is invalid.
    """
    if not marks.is_edit:
        return None
    try:
        if marks.mask and not marks.mask.startswith(MASK):
            raise ValueError("no PNG")
        mask = base64.b64decode(marks.mask.removeprefix(MASK), validate=True) if marks.mask else None
    except ValueError:  # so are those of base64
        raise InvalidRequest(UNREADABLE_MASK, param="mask") from None
    if picture is None:
        raise InvalidRequest(MISSING_IMAGE, param="image")
    return StartFile(path=picture, mask=mask, strength=read_number(strength, "strength", 1.0))


def read_upload(file: Path, most_px: int | None, reader: ImageReader) -> tuple[bytes, str]:
    """Read the uploaded ``file``, which is removed, and return its image as ``fit_picture`` does."""
    try:
        data = file.read_bytes()
    finally:
        file.unlink(missing_ok=True)
    return fit_picture(data, most_px, reader)


def fit_picture(data: bytes, most_px: int | None, reader: ImageReader) -> tuple[bytes, str]:
    """Return the image in ``data`` as an opaque file with no side above ``most_px``, and a file name.

    The file is a PNG or, where that is large, a JPEG. Raises InvalidRequest.
    """
    picture = reader.decode_image(data, name="The image")
    longest = max(picture.width_px, picture.height_px)
    if most_px is not None and longest > most_px:
        sides = [max(1, round(side * most_px / longest)) for side in (picture.width_px, picture.height_px)]
        picture = resize(picture, *sides)
    data = encode_image(picture)
    if len(data) <= MAX_START_BYTES:
        return data, "start.png"
    return encode_image(picture, image_format="jpeg", quality=JPEG_QUALITY), "start.jpg"
