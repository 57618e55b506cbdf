"""Base64 images in every JSON field that accepts one, in the spellings that clients and tools produce."""

from __future__ import annotations

import base64
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import Picture
from diffserve.media.images import encode_image
from diffserve.service.images.inputs import image_bytes
from tests.service.server import RunningServer
from tests.service.test_edits import FEW, holed, picture
from tests.service.test_filtered_texts import Leaf, leaves

FILES = [encode_image(Picture.from_array(picture(128, 64)), infotext="a fox\nSteps: 1, Sampler: Euler, Seed: 1" + end)
         for end in ("", " ", "  ")]  # fmt: skip
FILE = next(file for file in FILES if len(file) % 3)  # its base64 ends in padding
PLAIN = base64.b64encode(FILE).decode()
MASK = base64.b64encode(holed()).decode()
PROMPT = {"prompt": "a red fox"}
A1111 = {**PROMPT, "seed": 5, "steps": 2, "width": 64, "height": 64}
TOOL = {"type": "image_generation", "steps": 1, "seed": 5}
WORDS = {"type": "input_text", "text": "a red fox"}


SPELLINGS: dict[str, Callable[[str], str]] = {
    "76 columns": lambda text: "\n".join(textwrap.wrap(text, 76)),
    "CRLF and a final newline": lambda text: "\r\n".join(textwrap.wrap(text, 64)) + "\r\n",
    "leading blanks": lambda text: f" \t\n{text}",
    "no padding": lambda text: text.rstrip("="),
    "capital data URL": lambda text: f"DATA:image/PNG;BASE64,{text}",
    "data URL in lines": lambda text: " data:image/png;base64,\n" + "\n".join(textwrap.wrap(text, 76)),
    "data URL with a name": lambda text: f"data:image/png;name=a.png;base64,{text.rstrip('=')}",
}

FIELDS: dict[str, tuple[str, Callable[[str, str], dict[str, Any]]]] = {
    "init_images and mask": (
        "/sdapi/v1/img2img", lambda image, mask: A1111 | {"init_images": [image], "mask": mask},
    ),
    "unit of the ControlNet extension": (
        "/sdapi/v1/txt2img",
        lambda image, _: A1111 | {"alwayson_scripts": {"controlnet": {"args": [{"model": "x", "image": image}]}}},
    ),
    "png-info": ("/sdapi/v1/png-info", lambda image, _: {"image": image}),
    "image and mask": ("/v1/images/edits", lambda image, mask: PROMPT | FEW | {"image": image, "mask": mask}),
    "image_url": (
        "/v1/images/edits",
        lambda image, mask: PROMPT | FEW | {"images": [{"image_url": image}], "mask": {"image_url": mask}},
    ),
    "image objects": (
        "/v1/images/edits",
        lambda image, mask: PROMPT | FEW | {"image": {"image_url": image}, "mask": {"image_url": mask}},
    ),
    "list of images": ("/v1/images/edits", lambda image, _: PROMPT | FEW | {"images": [image]}),
    "controlnets of an edit": (
        "/v1/images/edits",
        lambda image, _: PROMPT | FEW | {"image": image, "controlnets": [{"name": "x", "image": image}]},
    ),
    "variation": ("/v1/images/variations", lambda image, _: FEW | {"image": image}),
    "image object of a variation": ("/v1/images/variations", lambda image, _: FEW | {"image": {"image_url": image}}),
    "images of a variation": ("/v1/images/variations", lambda image, _: FEW | {"images": [image]}),
    "image objects of a variation": (
        "/v1/images/variations", lambda image, _: FEW | {"images": [{"image_url": image}]},
    ),
    "controlnets of a variation": (
        "/v1/images/variations",
        lambda image, _: FEW | {"image": image, "controlnets": [{"name": "x", "image": image}]},
    ),
    "detect": (
        "/controlnet/detect",
        lambda image, _: {"controlnet_module": "canny", "controlnet_input_images": [image]},
    ),
    "conversation": (
        "/v1/conversations",
        lambda image, _: {"items": [
            {"type": "message", "role": "user", "content": [WORDS, {"type": "input_image", "image_url": image}]},
        ]},
    ),
    "controlnets": (
        "/v1/images/generations", lambda image, _: PROMPT | {"controlnets": [{"name": "x", "image": image}]},
    ),
    "verification": ("/v1/provenance/verify", lambda image, _: {"image": image}),
    "references": (
        "/v1/images/generations", lambda image, _: PROMPT | {"references": [{"name": "x", "image": image}]},
    ),
    "references of an edit": (
        "/v1/images/edits",
        lambda image, _: PROMPT | FEW | {"image": image, "references": [{"name": "x", "image": image}]},
    ),
    "references of a variation": (
        "/v1/images/variations",
        lambda image, _: FEW | {"image": image, "references": [{"name": "x", "image": image}]},
    ),
    "upscaling": ("/v1/images/upscale", lambda image, _: {"image": image, "upscaler": "lanczos"}),
    "image object to upscale": (
        "/v1/images/upscale", lambda image, _: {"image": {"image_url": image}, "upscaler": "lanczos"},
    ),
    "extras": ("/sdapi/v1/extra-single-image", lambda image, _: {"image": image, "upscaler_1": "Lanczos"}),
    "response": (
        "/v1/responses",
        lambda image, mask: {
            "model": "gpt-5",
            "input": [{"role": "user", "content": [WORDS, {"type": "input_image", "image_url": image}]}],
            "tools": [TOOL | {"input_image_mask": {"image_url": mask}}],
        },
    ),
    "chat": (
        "/v1/chat/completions",
        lambda image, _: {
            "modalities": ["image", "text"],
            "messages": [{"role": "user", "content": [
                {"type": "text", "text": "a red fox"}, {"type": "image_url", "image_url": {"url": image}},
            ]}],
        },
    ),
}  # fmt: skip


IMAGE_NAME = re.compile(r"(.*_)?(images?|mask|image_url)")
AS_ELSEWHERE = {("/v1/conversations/{conversation_id}/items", "items.content.image_url")}
"""Fields that the code of another field reads."""


def dotted(leaf: Leaf) -> str:
    return ".".join(part for part in leaf if isinstance(part, str))


def images_in(value: Any, place: str = "") -> Iterator[str]:
    """Yield the places of the images in a body."""
    if value in (PLAIN, MASK):
        yield place
    below = (
        value.items()
        if isinstance(value, dict)
        else ((None, item) for item in value)
        if isinstance(value, list)
        else ()
    )
    for name, item in below:
        yield from images_in(item, ".".join(filter(None, (place, name))))


@pytest.mark.slow
def test_every_field_that_takes_an_image_is_among_those_tested(server: RunningServer) -> None:
    document = server.client.get("/openapi.json").json()
    places = set()
    for path, methods in document["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json")
        for leaf in leaves(content["schema"], document["components"]["schemas"]) if content else ():
            names = [part for part in leaf if isinstance(part, str)]
            if names and IMAGE_NAME.fullmatch(names[-1]):
                places.add((path, dotted(leaf)))
    tested = {(path, place) for path, body in FIELDS.values() for place in images_in(body(PLAIN, MASK))}
    assert len(places) > 15
    assert places - tested == AS_ELSEWHERE


@pytest.mark.slow
@pytest.mark.parametrize("field", FIELDS)
def test_every_field_reads_every_base64_spelling_equally(server: RunningServer, field: str) -> None:
    path, body = FIELDS[field]
    expected = server.client.post(path, json=body(PLAIN, MASK))
    assert expected.status_code == 200 or re.search("(ControlNet|IP-Adapter) 'x'", expected.text)
    for spelling, spell in SPELLINGS.items():
        answer = server.client.post(path, json=body(spell(PLAIN), spell(MASK)))
        assert answer.status_code == expected.status_code, f"{spelling}: {answer.text}"
        if expected.status_code != 200:
            assert answer.text == expected.text, spelling


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", [f"{PLAIN[:80]}!{PLAIN[80:]}", f"{PLAIN[:80]}={PLAIN[80:]}", f"{PLAIN[:81]}", "\u00e9"]
)
def test_other_characters_and_impossible_lengths_are_refused(server: RunningServer, text: str) -> None:
    answer = server.client.post("/sdapi/v1/png-info", json={"image": text})
    assert answer.status_code == 400
    assert "image is not base64" in answer.json()["detail"]


@pytest.mark.parametrize("num_pad", [0, 1, 2])
@pytest.mark.parametrize("num_bytes", [1, 2, 3, 4])
def test_decoded_bytes_do_not_depend_on_padding(num_bytes: int, num_pad: int) -> None:
    data = bytes(range(250, 250 + num_bytes))
    assert image_bytes(base64.b64encode(data).decode().rstrip("=") + "=" * num_pad, "image") == data


def test_blank_text_is_an_empty_image() -> None:
    with pytest.raises(InvalidRequest, match="the image is empty"):
        image_bytes(" \r\n\t", "image")
