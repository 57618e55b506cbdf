"""Edits and variations over a real socket, with the ``openai`` client where it supports them."""

from __future__ import annotations

import base64
import json
from io import BytesIO
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from openai import OpenAI
from PIL import Image

from diffserve.api.types import Picture
from diffserve.client import Client
from diffserve.media.images import decode_image, encode_image
from diffserve.service.http.middleware import PICTURE_BODY_BYTES
from tests.service.server import RunningServer

FEW: dict[str, Any] = {"num_inference_steps": 2, "seed": 5, "sampler": "euler"}


def file_of(pixels: NDArray[np.uint8]) -> bytes:
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def picture(width: int = 128, height: int = 64, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)


def in_base64(pixels: NDArray[np.uint8]) -> str:
    return base64.b64encode(file_of(pixels)).decode()


def holed(width: int = 128, height: int = 64) -> bytes:
    """Return a mask in OpenAI's format whose transparent left half is repainted."""
    pixels = np.full((height, width, 4), 255, np.uint8)
    pixels[:, : width // 2, 3] = 0
    return file_of(pixels)


def pixels_of(b64_json: str | None) -> NDArray[np.uint8]:
    assert b64_json is not None
    return decode_image(base64.b64decode(b64_json)).array


@pytest.mark.slow
def test_openai_client_edits_one_or_two_images_and_keeps_unmasked_pixels(client: OpenAI) -> None:
    before = picture()
    answer = client.images.edit(
        model="gpt-image-1", image=("a.png", file_of(before)), mask=("m.png", holed()), prompt="a red fox", n=2,
        size="auto", extra_body=FEW,
    )  # fmt: skip
    assert answer.data is not None
    assert len(answer.data) == 2
    assert answer.size == "128x64"  # the size of the image
    for entry in answer.data:
        after = pixels_of(entry.b64_json)
        assert np.array_equal(after[:, 64:], before[:, 64:])
        assert not np.array_equal(after[:, :60], before[:, :60])
    two = client.images.edit(
        image=[("a.png", file_of(before)), ("b.png", file_of(picture(seed=1)))], prompt="a red fox", extra_body=FEW
    )
    assert two.data is not None
    assert pixels_of(two.data[0].b64_json).shape == before.shape
    assert "starts from one" in str((two.model_extra or {})["warnings"])
    faithful = client.images.edit(
        image=("a.png", file_of(before)), prompt="a red fox", input_fidelity="high", extra_body=FEW
    )
    assert (faithful.model_extra or {})["strength"] == 0.5
    with pytest.raises(openai.BadRequestError, match="mask is 64x64 and image 128x64; they must have the same size"):
        client.images.edit(image=("a.png", file_of(before)), mask=("m.png", holed(64)), prompt="a fox")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # OpenAI deprecates variations
def test_openai_client_streams_an_edit_and_requests_variations(client: OpenAI) -> None:
    stream = client.images.edit(
        image=("a.png", file_of(picture())), prompt="a red fox", stream=True, partial_images=1,
        extra_body=FEW | {"num_inference_steps": 4, "progress": False},
    )  # fmt: skip
    assert [event.type for event in stream] == ["image_edit.partial_image", "image_edit.completed"]
    painted = client.images.generate(prompt="a red fox", size="64x64", extra_body=FEW)
    assert painted.data is not None
    file = base64.b64decode(painted.data[0].b64_json or "")
    varied = client.images.create_variation(image=("a.png", file), n=2, extra_body=FEW)
    edited = client.images.edit(image=("a.png", file), prompt="a red fox", extra_body=FEW)
    assert varied.data is not None
    assert edited.data is not None
    assert len(varied.data) == 2
    assert varied.data[0].b64_json == edited.data[0].b64_json, "the prompt is the one in the picture"
    untold = client.images.create_variation(image=("a.png", file_of(picture())), extra_body=FEW)
    assert (untold.model_extra or {})["guidance_scale"] == 1.0
    assert "generated without one" in str((untold.model_extra or {})["warnings"])


@pytest.mark.slow
def test_a_form_may_ask_for_tiles_and_is_refused_a_second_pass(server: RunningServer) -> None:
    before, url = picture(), f"{server.url}/v1/images/edits"
    fields = {"prompt": "a red fox", "num_inference_steps": 2, "seed": 5, "tile_size": 64, "tile_overlap": 32}

    def by_form(**further: str) -> httpx.Response:
        files = {"image": ("a.png", file_of(before))}
        data = {name: str(value) for name, value in fields.items()}
        return httpx.post(url, files=files, data=data | further, timeout=60)

    by_json = httpx.post(url, json=fields | {"image": in_base64(before)}, timeout=60).json()["data"][0]
    assert by_form().json()["data"][0]["b64_json"] == by_json["b64_json"]
    assert by_form(tile_size="0").json()["data"][0]["b64_json"] != by_json["b64_json"]
    refused = by_form(hires_scale="2")
    assert refused.status_code == 400
    assert "hires_scale and hires_size are for images from text" in refused.json()["error"]["message"]


@pytest.mark.slow
def test_json_and_form_requests_give_equal_images_and_the_client_sends_json(server: RunningServer) -> None:
    file, mask = encode_image(Picture.from_array(picture())), holed()
    form = httpx.post(
        f"{server.url}/v1/images/edits",
        files={"image": ("a.png", file), "mask": ("m.png", mask)},
        data={"prompt": "a red fox", "steps": "2", "seed": "5", "guidance_scale": "3.5", "loras": "[]", "n": "1"},
        timeout=60,
    )
    assert form.status_code == 200, form.text
    with Client(server.url) as diffserve_client:
        fields: dict[str, Any] = {"num_inference_steps": 2, "seed": 5, "guidance_scale": 3.5}
        edited = diffserve_client.edit("a red fox", file, mask, **fields)
        *_, last = diffserve_client.edit_stream("a red fox", file, mask, **fields)
        assert diffserve_client.vary(file, **fields, strength=0.5).strength == 0.5
    assert form.json()["data"][0]["b64_json"] == base64.b64encode(edited.images[0].file).decode()
    assert getattr(last, "file", None) == edited.images[0].file


@pytest.mark.slow
def test_images_and_masks_are_referenced_by_uploaded_files(server: RunningServer, client: OpenAI) -> None:
    file, mask = file_of(picture()), holed()
    file_ids = [client.files.create(file=("a.png", data), purpose="vision").id for data in (file, mask)]
    by_file_id = {"images": [{"file_id": file_ids[0]}], "mask": {"file_id": file_ids[1]}}
    by_value = {"images": [base64.b64encode(file).decode()], "mask": base64.b64encode(mask).decode()}
    edits = [
        httpx.post(f"{server.url}/v1/images/edits", json={"prompt": "a red fox", **FEW, **fields}, timeout=60)
        for fields in (by_file_id, by_value)
    ]
    assert edits[0].json()["data"][0]["b64_json"] == edits[1].json()["data"][0]["b64_json"]
    tool = {"type": "image_generation", **FEW}
    answers = []
    for image_url, masked in (
        ({"file_id": file_ids[0]}, {"file_id": file_ids[1]}),
        ({"image_url": f"data:image/png;base64,{by_value['images'][0]}"}, {"image_url": by_value["mask"]}),
    ):
        content = [{"type": "input_text", "text": "a red fox"}, {"type": "input_image", **image_url}]
        body = {"input": [{"role": "user", "content": content}], "tools": [tool | {"input_image_mask": masked}]}
        answers.append(httpx.post(f"{server.url}/v1/responses", json=body, timeout=60).json()["output"][0]["result"])
    assert answers[0] == answers[1]
    for name in file_ids:
        client.files.delete(name)
    gone = httpx.post(f"{server.url}/v1/images/edits", json={"prompt": "a red fox", **by_file_id})
    assert (gone.status_code, gone.json()["error"]["code"]) == (400, "file_not_found")


SMALL = base64.b64encode(file_of(picture(64, 64))).decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {},
            "image is missing; upload a PNG, JPEG or WebP file, send it in base64, or give the ID of a file from "
            "/v1/files",
        ),
        ({"image": "!!"}, "image is not base64"),
        ({"image": "https://example.org/a.png"}, "image is a URL, and this server does not fetch images"),
        ({"image": "file:///etc/passwd"}, "image is a URL"),
        ({"image": base64.b64encode(b"GIF89a").decode()}, "image is not a PNG, JPEG or WebP file"),
        ({"images": []}, "images is an empty list"),
        ({"images": [{"file_id": "file-1"}]}, 'images[0].file_id is "file-1", which is not one of your files'),
        ({"images": [{"file_id": "file-1", "image_url": "data:,"}]}, "images[0].file_id and image_url are both given"),
        ({"images": [{}]}, "the image has no image_url; give a data URL, or a file_id."),
        ({"images": [SMALL] * 17}, "images has 17 entries; at most 16 are allowed."),
        ({"image": SMALL, "strength": 1.5}, "strength is 1.5; it must be at most 1.0."),
        ({"image": SMALL, "mask": SMALL, "strength": -1}, "strength is -1; it must be at least 0.0."),
        ({"image": SMALL, "input_fidelity": "much"}, "input_fidelity is"),
        ({"image": SMALL, "prompt": ""}, "the prompt is empty; describe the image."),
        ({"image": SMALL, "size": "9000x16"}, "size is 9000x16; each side must lie between"),
        *(
            ({"image": in_base64(picture(*size))}, f"image is {size[0]}x{size[1]}; each side must have at least 64")
            for size in ((1, 1), (1, 4000), (63, 63))  # row 47 of the bad input
        ),
        ({"image": SMALL, "mask": in_base64(picture(32, 64))}, "mask is 32x64 and image 64x64; they must have"),  # 48
    ],
)
def test_bad_input_is_one_sentence(server: RunningServer, body: dict[str, Any], message: str) -> None:
    answer = httpx.post(f"{server.url}/v1/images/edits", json={"prompt": "a fox"} | body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["../../x", "/etc/x", "a\0.png", "n" * 4096], ids=["up", "root", "zero", "long"])
def test_file_names_have_no_effect(server: RunningServer, name: str) -> None:
    files = {"image": (name, file_of(picture(64, 64)))}
    answer = httpx.post(f"{server.url}/v1/images/edits", files=files, data={"prompt": "x", **FEW}, timeout=60)
    assert answer.status_code == 200, answer.text  # row 51 of the bad input
    assert name[:20] not in server.errors.read_text()


@pytest.mark.slow
def test_bad_forms_are_refused_and_large_json_is_read_only_by_image_routes(server: RunningServer) -> None:
    url = f"{server.url}/v1/images/edits"
    black = file_of(np.zeros((64, 64), np.uint8))
    files = {"image": ("a.png", file_of(picture(64, 64)))}
    part = b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nx\r\n--b--\r\n'
    raw = {"Content-Type": "multipart/form-data; boundary=b"}
    lines = part.replace(b"--b\r\n", b"--b\r\n" + b"X: y\r\n" * 10_000, 1)
    for answer, message in (
        (
            httpx.post(url, files=files | {"mask": ("m.png", black)}, data={"prompt": "x"}),
            "selects no area to generate",
        ),
        (httpx.post(url, files=files | {"model": ("m", b"x")}, data={"prompt": "x"}), "'model' is not a file field"),
        (httpx.post(url, files=files, data={"prompt": "x", "n": "many"}), 'n is "many"; it must be a whole number'),
        (httpx.post(url, files=files, data={"prompt": ["x", "y"]}), "prompt is given twice"),
        (httpx.post(url, files=[("image", ("a", b"x"))] * 18, data={"prompt": "x"}), "the form cannot be read"),
        (httpx.post(url, files=files, data=dict.fromkeys(map(str, range(10_001)), "1")), "Too many fields"),  # row 51
        (httpx.post(url, files=files, data={"prompt": "x" * (1 << 19)}), "the form cannot be read"),
        (httpx.post(url, content=b"x" * (1 << 20) + b"\r\n" + part, headers=raw), "the form cannot be read"),
        (httpx.post(url, content=part + b"x" * (1 << 20), headers=raw), "image is missing"),
        (httpx.post(url, content=lines, headers=raw), "the form cannot be read"),
        (httpx.post(url, content=b"--x", headers={"Content-Type": "multipart/form-data"}), "the form cannot be read"),
    ):
        assert answer.status_code == 400, answer.text
        assert message in answer.json()["error"]["message"]
    long = json.dumps({"prompt": "a fox", "image": "A" * PICTURE_BODY_BYTES})
    headers = {"Content-Type": "application/json"}
    assert httpx.post(url, content=long, headers=headers).status_code == 400
    assert httpx.post(url.replace("edits", "generations"), content=long, headers=headers).status_code == 413
