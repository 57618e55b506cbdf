"""Source images of a request: marks in the browser and images of the same visitor only."""

from __future__ import annotations

import asyncio
import base64
from io import BytesIO
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from diffserve.api.errors import InvalidRequest
from diffserve.media.images import decode_image
from tests.ui.capabilities import MODEL
from tests.ui.gradio_request import Request
from ui.create.painting import FinishedPicture
from ui.create.parameters import Form, order_of
from ui.create.start import MASK, MAX_MARKS_CHARS, MISSING_IMAGE, PageMarks, Starting, read_marks, start_of
from ui.server import Models, Server
from ui.visitors import Visitors

PNG = b"\x89PNG\r\n\x1a\nand so on"
URL = MASK + base64.b64encode(PNG).decode()


def painted(path: Path) -> FinishedPicture:
    """Return an image stored at ``path``."""
    path.write_bytes(PNG)
    return FinishedPicture(path=path, seed=1, prompt="", wish="", rewrites=False, infotext="", warnings=(), settings="")


def marks(mask: str = "", *, is_edit: bool = True) -> str:
    return msgspec.json.encode(PageMarks(is_edit, mask)).decode()


def test_marks_come_with_the_image_and_its_size(tmp_path: Path) -> None:
    start = start_of(read_marks(marks(URL)), "0,5", tmp_path)
    assert start is not None
    assert (start.path, start.mask, start.strength) == (tmp_path, PNG, 0.5)
    assert order_of(Form(prompt="a fox"), MODEL, start).fields["size"] == "auto"
    assert order_of(Form(prompt="a fox", size="96x64"), MODEL, start).fields["size"] == "96x64"
    for noise in (None, "", marks(is_edit=False)):
        assert start_of(read_marks(noise), "nonsense", tmp_path) is None
    with pytest.raises(InvalidRequest, match=MISSING_IMAGE[:30]):
        start_of(read_marks(marks()), "", None)
    with pytest.raises(InvalidRequest, match="strength is '2'"):
        start_of(read_marks(marks()), "2", tmp_path)


@pytest.mark.parametrize(
    "odd", ["[", "[1]", "5", marks("data:image/svg+xml,x"), marks(MASK + "%%"), "x" * (MAX_MARKS_CHARS + 1)]
)
def test_invalid_marks_are_refused_with_a_message(odd: str) -> None:
    with pytest.raises(InvalidRequest, match="draw it again"):
        start_of(read_marks(odd), "", Path("start.png"))


def test_a_visitor_can_start_only_from_own_uploads_and_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def models(self: Server, *, is_fresh: bool = False) -> Models:
        return Models("tiny", msgspec.structs.replace(MODEL, max_side_px=64))

    async def story() -> None:
        server, visitors = Server("http://127.0.0.1:9"), Visitors()
        starting = Starting(server, visitors, None)  # type: ignore[arg-type]
        visitor = visitors.of(Request.session_hash)
        own_image, foreign = painted(tmp_path / "own.png"), painted(tmp_path / "foreign.png")
        visitor.pictures = [own_image]
        for name in (str(foreign.path), "/etc/passwd", None, {"path": [1]}, 7):
            assert "image no longer exists" in (await starting.edit(name, Request()))[-1]  # type: ignore[arg-type]
            assert visitor.start is None
        assert str(own_image.path) in (await starting.edit({"path": str(own_image.path)}, Request()))[1]  # type: ignore[arg-type]
        assert visitor.start == own_image.path

        sent = BytesIO()
        Image.fromarray(np.zeros((32, 128, 3), np.uint8)).save(sent, "JPEG", exif=_sideways())
        upload = tmp_path / "photo.jpg"
        upload.write_bytes(sent.getvalue())
        await starting.choose(str(upload), Request())  # type: ignore[arg-type]
        assert not upload.exists()
        assert visitor.start is not None
        read = decode_image(visitor.start.read_bytes())
        assert (read.width_px, read.height_px) == (16, 64), "upright, and no larger than the model paints"
        upload.write_bytes(b"<svg>")
        assert "PNG, JPEG or WebP" in (await starting.choose(str(upload), Request()))[-1]  # type: ignore[arg-type]
        assert visitor.start is not None, "what was there stays"
        visitor.start.unlink()
        assert MISSING_IMAGE in (await starting.restore(True, Request()))[-1]  # type: ignore[arg-type]
        await server.close()

    monkeypatch.setattr(Server, "models", models)
    asyncio.run(story())


def _sideways() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif
