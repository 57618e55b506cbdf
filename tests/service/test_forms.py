"""Form fields, which arrive as text, compared with JSON fields of the same names."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from diffserve.api.errors import InvalidRequest
from diffserve.service.http.errors import HttpError
from diffserve.service.http.forms import Form, parse_fields, read_form
from diffserve.service.images.schemas import EditBody


@pytest.mark.parametrize(
    ("name", "text"),
    [("strength", "NaN"), ("guidance_scale", "Infinity"), ("guidance_scale", "-Infinity"), ("seed", "1e400"),
     ("n", "NaN"), ("variation_strength", "NaN"), ("loras", '[{"name": "gift", "scale": NaN}]')],
)  # fmt: skip
def test_values_that_are_not_numbers_in_json_are_not_numbers_in_a_form(name: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{name} is "):
        parse_fields(EditBody, {"prompt": "a fox", name: text})


def test_numbers_lists_and_texts_equal_those_in_json() -> None:
    body = parse_fields(EditBody, {"prompt": "NaN", "strength": "1e-1", "n": "2", "loras": '[{"name": "gift"}]'})
    assert (body.prompt, body.strength, body.n) == ("NaN", 0.1, 2)
    assert body.loras is not None
    assert [lora.name for lora in body.loras] == ["gift"]


def test_fields_of_a_second_pass_and_of_tiles_equal_those_in_json() -> None:
    fields = {
        "prompt": "a fox",
        "hires_scale": 1.5,
        "hires_strength": 0.3,
        "hires_steps": 7,
        "hires_upscaler": "embedded-4x",
        "hires_sampler": "heun",
        "hires_schedule": "karras",
        "hires_prompt": "7",
        "hires_negative_prompt": "0.5",
        "tile_size": 64,
        "tile_overlap": 16,
    }
    by_form = parse_fields(EditBody, {name: str(value) for name, value in fields.items()})
    assert by_form.model_dump() == EditBody.model_validate(fields).model_dump()
    with pytest.raises(InvalidRequest, match=r"^tile_size is "):
        parse_fields(EditBody, {"prompt": "a fox", "tile_size": "1.5"})


FORM = (
    b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na fox\r\n'
    b'--b\r\nContent-Disposition: form-data; name="mask"; filename="m.png"\r\n\r\nnearly --c--, and more\r\n--b--\r\n'
)


def read(body: bytes, step: int) -> Form[bytes]:
    """Return the parsed form ``body``, which arrives in pieces of ``step`` bytes."""
    pieces = [body[at : at + step] for at in range(0, len(body), step)]
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    left = iter([*messages, {"type": "http.request", "body": b"", "more_body": False}])

    async def receive() -> Any:
        return next(left)

    headers = [(b"content-type", b"multipart/form-data; boundary=b")]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "app": None}
    return asyncio.run(read_form(Request(scope, receive), max_files=1))


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_truncated_form_is_refused(step: int) -> None:
    for raw_form in (FORM, FORM.removesuffix(b"\r\n"), FORM + b"an epilogue"):
        form = read(raw_form, step)
        assert form.fields == {"prompt": "a fox"}
        assert form.files == {"mask": [b"nearly --c--, and more"]}
    for cut in (6, 8, 30, 100):
        with pytest.raises(HttpError, match="ends before its closing boundary") as caught:
            read(FORM[:-cut], step)
        assert (caught.value.status, caught.value.code) == (400, "invalid_form")


@pytest.mark.parametrize("step", [1, 1000])
def test_a_field_that_is_not_utf_8_is_refused(step: int) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt is not UTF-8 at byte 2; send"):
        read(FORM.replace(b"a fox", b"a \xff\xfe"), step)
    assert read(FORM.replace(b"a fox", "ein Fuchs über".encode()), step).fields == {"prompt": "ein Fuchs über"}
