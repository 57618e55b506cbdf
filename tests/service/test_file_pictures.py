"""Images referenced by file ids: only those of the same key, within limits, in every image field."""

from __future__ import annotations

import asyncio
import base64
from io import BytesIO
from pathlib import Path

import pytest
from starlette.requests import Request

from diffserve.api.errors import InvalidRequest
from diffserve.service.images.schemas import EditBody
from diffserve.service.responses.schemas import ResponseBody
from diffserve.service.stored.files import FilePictures
from diffserve.service.stored.owners import Owners
from diffserve.settings.layers import load_settings
from diffserve.store.database import Database
from diffserve.store.files import Files

REQUEST = Request({"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b""})


def edit_of(*names: str, mask: str | None = None) -> EditBody:
    masked = {} if mask is None else {"mask": {"file_id": mask}}
    return EditBody.model_validate({"prompt": "a fox", "images": [{"file_id": name} for name in names], **masked})


def test_own_files_are_read_and_other_files_are_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files(Database(tmp_path), 1 << 20)
    own_file, other_file, long = (
        files.add(owner, "vision", "a.png", BytesIO(data), max_bytes=1 << 20).id
        for owner, data in (("", b"ours"), ("key-2", b"theirs"), ("", b"much longer"))
    )
    monkeypatch.setattr("diffserve.service.stored.files.MAX_REQUEST_BYTES", 10)
    file_images = FilePictures(files, Owners(load_settings(env={}).serve, None))
    url = f"data:;base64,{base64.b64encode(b'ours').decode()}"

    body = edit_of(own_file, mask=own_file)
    asyncio.run(file_images.fill(REQUEST, body))
    assert [image.image_url for image in (*(body.images or ()), body.mask)] == [url, url]
    content = [{"type": "input_text", "text": "a"}, {"type": "input_image", "file_id": own_file}]
    tool = {"type": "image_generation", "input_image_mask": {"file_id": own_file}, "file_id": "of no meaning"}
    response_body = ResponseBody.model_validate({"input": [{"role": "user", "content": content}], "tools": [tool]})
    asyncio.run(file_images.fill(REQUEST, response_body))
    assert response_body.input[0].content[1].image_url == url  # type: ignore[union-attr, index]
    assert response_body.tools is not None
    assert response_body.tools[0].input_image_mask is not None
    assert response_body.tools[0].input_image_mask.image_url == url

    for refused, code, name in (
        (edit_of(own_file, other_file), "file_not_found", "images[1].file_id"),
        (edit_of("../../etc/passwd"), "file_not_found", "images[0].file_id"),
        (edit_of(long), "image_too_large", "images[0].file_id"),
        (
            edit_of(own_file, own_file, mask=own_file),
            "image_too_large",
            "mask.file_id",
        ),  # together they exceed the limit
    ):
        with pytest.raises(InvalidRequest) as caught:
            asyncio.run(file_images.fill(REQUEST, refused))
        assert (caught.value.code, caught.value.param) == (code, name)
    with pytest.raises(InvalidRequest, match="this server stores no files"):
        asyncio.run(FilePictures(None, None).fill(REQUEST, edit_of(own_file)))
