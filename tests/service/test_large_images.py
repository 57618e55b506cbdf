"""Hires fix, tiles, outpainting and variations over HTTP: sizes, kept pixels, and parameters that repeat the image."""

from __future__ import annotations

import base64
from io import BytesIO
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from diffserve.client import Client
from diffserve.media.images import decode_image, read_infotext
from diffserve.media.infotext import parse_infotext
from tests.service.server import GENERATIONS, RunningServer

pytestmark = pytest.mark.slow
FEW: dict[str, Any] = {"num_inference_steps": 2, "seed": 5, "sampler": "euler"}
EDITS, VARIATIONS = "/v1/images/edits", "/v1/images/variations"


def picture(width: int = 64, height: int = 64) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)


def file_of(pixels: NDArray[np.uint8]) -> bytes:
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


START = base64.b64encode(file_of(picture())).decode()


def image_of(answer: httpx.Response) -> bytes:
    assert answer.status_code == 200, answer.text
    return base64.b64decode(answer.json()["data"][0]["b64_json"])


def pixels_of(file: bytes) -> NDArray[np.uint8]:
    return decode_image(file).array


@pytest.mark.parametrize(
    ("fields", "size", "recorded"),
    [
        ({"hires_scale": 1.5, "hires_steps": 4, "size": "64x64"}, (96, 96), {"Size": "64x64", "Hires upscale": "1.5"}),
        ({"hires_size": "100x76", "size": "64x64"}, (100, 76), {"Size": "64x64", "Hires resize": "100x76"}),
        (
            {
                "hires_scale": 2.0,
                "size": "64x64",
                "tile_size": 64,
                "hires_prompt": "a dog, red",
                "hires_sampler": "ddim",
            },
            (128, 128),
            {"Hires prompt": "a dog, red", "Hires sampler": "DDIM", "Tile size": "64"},
        ),
        ({"size": "200x96", "tile_size": 64, "tile_overlap": 16}, (200, 96), {"Tile size": "64", "Tile overlap": "16"}),
    ],
)
def test_large_images_have_their_size_and_repeat_from_their_parameters(
    fields: dict[str, Any], size: tuple[int, int], recorded: dict[str, str], server: RunningServer
) -> None:
    answer = server.client.post(GENERATIONS, json={"prompt": "a red fox", **FEW, **fields})
    file = image_of(answer)
    assert answer.json()["size"] == "{}x{}".format(*size)
    assert pixels_of(file).shape == (size[1], size[0], 3)
    text = read_infotext(file) or ""
    written = parse_infotext(text).fields
    assert {name: written.get(name) for name in recorded} == recorded
    again = server.client.post(GENERATIONS, json={"infotext": text})
    assert again.json()["warnings"] == answer.json()["warnings"]
    assert np.array_equal(pixels_of(image_of(again)), pixels_of(file))


def test_outpainting_keeps_the_picture_and_paints_around_it(server: RunningServer) -> None:
    body = {"prompt": "a red fox", "image": START, "outpaint": "0,0,64,32", **FEW}
    file = image_of(server.client.post(EDITS, json=body))
    pixels = pixels_of(file)
    assert pixels.shape == (96, 128, 3)
    assert np.array_equal(pixels[:56, :56], picture()[:56, :56]), "outside the band nothing changes"
    assert not np.array_equal(pixels[:64, 64:], np.repeat(picture()[:, -1:], 64, axis=1)), "the new area is painted"
    text = read_infotext(file) or ""
    assert parse_infotext(text).fields["Outpaint"] == "0,0,64,32"
    again = server.client.post(EDITS, json={"infotext": text, "image": START})
    assert np.array_equal(pixels_of(image_of(again)), pixels)
    form = {name: str(value) for name, value in body.items() if name != "image"}
    sent = server.client.post(EDITS, data=form, files={"image": ("a.png", file_of(picture()))})
    assert np.array_equal(pixels_of(image_of(sent)), pixels)


@pytest.mark.parametrize(
    ("outpaint", "message"), [("1,2,3", "write LEFT,TOP,RIGHT,BOTTOM"), ("0,0,0,0", "at least one")]
)
def test_margins_that_cannot_be_read_are_refused(outpaint: str, message: str, server: RunningServer) -> None:
    answer = server.client.post(EDITS, json={"prompt": "a fox", "image": START, "outpaint": outpaint, **FEW})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "outpaint"


def test_variations_take_a_strength_and_a_prompt(server: RunningServer) -> None:
    base = image_of(server.client.post(GENERATIONS, json={"prompt": "a red fox", "size": "64x64", **FEW}))
    image = base64.b64encode(base).decode()
    few = FEW | {"num_inference_steps": 4}
    weak, strong, other = (
        server.client.post(VARIATIONS, json={"image": image, **few, **fields})
        for fields in ({"strength": 0.3}, {"strength": 0.9}, {"strength": 0.9, "prompt": "a dog"})
    )
    assert weak.json()["strength"] == 0.3
    assert "a red fox" in (read_infotext(image_of(weak)) or "")
    distances = [np.abs(pixels_of(image_of(each)).astype(int) - pixels_of(base)).mean() for each in (weak, strong)]
    assert distances[0] < distances[1]
    assert not np.array_equal(pixels_of(image_of(other)), pixels_of(image_of(strong)))


def test_the_typed_client_sends_the_fields(server: RunningServer) -> None:
    with Client(server.url) as client:
        images = client.generate(
            "a red fox",
            size="64x64",
            hires_scale=1.5,
            hires_strength=0.5,
            seed=5,
            num_inference_steps=2,
            sampler="euler",
        )
        assert images.size == "96x96"
        assert (images.hires_scale, images.hires_strength) == (1.5, 0.5)
        extended = client.edit(
            "a red fox", file_of(picture()), outpaint="64,0,0,0", seed=5, num_inference_steps=2, sampler="euler"
        )
        assert extended.size == "128x64"
