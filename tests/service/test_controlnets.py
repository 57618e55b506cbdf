"""ControlNets over HTTP: listing, refusals, generation, and their record in answers and files."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest

from diffserve.api.errors import InvalidRequest
from diffserve.api.types import Picture
from diffserve.client import Client, Images
from diffserve.media.images import encode_image, read_infotext
from diffserve.media.infotext import parse_infotext
from diffserve.models.controlnets import Control, digest_of
from diffserve.runtime.loading.library_imports import import_quietly
from diffserve.service.http.middleware import TEXT_BODY_BYTES
from tests.engine.controlnets import control_map, save_controlnet
from tests.service.server import running_server
from tests.ui.gradio_request import Request
from tests.ui.test_creating import Page
from ui.server import Server


@pytest.mark.slow
def test_images_with_controlnets_are_generated_from_base64_files_and_record_them(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    unet = import_quietly("diffusers", "UNet2DConditionModel").from_pretrained(str(tiny_model("sd15") / "unet"))
    folder = save_controlnet(unet, tmp_path / "controls" / "edges", 1).parent
    config = f'[model]\ndtype = "float32"\ncontrolnet_dir = {json.dumps(str(folder))}\n'
    fields = {"prompt": "a cat", "seed": 3, "num_inference_steps": 2, "size": "64x64", "sampler": "ddim"}
    picture = control_map(5, 128, 128)
    file = encode_image(picture)
    control = Control("edges", 0.8, 0.0, 0.5, "canny", digest_of(128, 128, picture.data), resize=True)
    control_fields = {"name": "edges", "scale": 0.8, "end": 0.5, "preprocessor": "canny", "resize": True}
    with running_server(tiny_model("sd15"), tmp_path / "server", config=config) as server, Client(server.url) as client:
        server.wait_until_ready()
        url = f"{server.url}/v1/images/generations"

        def painted(**more_fields: object) -> bytes:
            answer = httpx.post(url, json=fields | more_fields, timeout=60).raise_for_status().json()
            controls = answer["controlnets"]
            assert controls == ([json.loads(msgspec.json.encode(control))] if more_fields else [])
            return base64.b64decode(answer["data"][0]["b64_json"])

        plain = base64.b64encode(file).decode()
        first = painted(controlnets=[control_fields | {"image": plain}])
        assert painted(controlnets=[control_fields | {"image": f"data:image/png;base64,{plain}"}]) == first != painted()
        assert parse_infotext(read_infotext(first) or "").fields["ControlNet 0"] == control.label
        [image] = [model.capabilities.image for model in client.models() if model.capabilities is not None]
        assert image is not None
        assert image.controlnets == ("edges",)
        new_image = paint(client, file)
        assert [(control.name, control.image, control.resize) for control in new_image.controlnets] == [
            ("edges", control.image, True)
        ]
        with pytest.raises(
            InvalidRequest, match="'edges' is 128x64 px, the generated image 64x64 px; give one of that aspect"
        ):
            paint(client, encode_image(control_map(0, 128, 64)))
        refused = httpx.post(url, json=fields | {"controlnets": [control_fields | {"image": plain, "resize": False}]})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"], error["code"]) == (400, "controlnets", "invalid_image")
        assert error["message"] == (
            "the image of ControlNet 'edges' is 128x128 px, the generated image 64x64 px; give one of 64x64 px, or ask "
            "for size 128x128, or set resize."
        )
        noise = np.random.default_rng(0).integers(0, 256, (1024, 1024, 3), dtype=np.uint8)
        large = encode_image(Picture.from_array(noise))
        assert len(large) > 3 * TEXT_BODY_BYTES
        paint(client, large)
        assert server.num_stalls() == 0
        asyncio.run(at_the_page(server.url, tmp_path / "edges.png", file))


async def at_the_page(url: str, upload: Path, file: bytes) -> None:
    """Generate on the page with a ControlNet: without an image, with an invalid upload and with a valid one."""
    server = Server(url)
    page = Page(server)
    try:
        fields = {"control": "edges", "control_scale": "0.8", "control_steps": "0-0.5", "preprocessor": "canny"}
        await page.finish(page.ask(**fields))
        assert "has no control image; choose one" in page.caption
        upload.write_bytes(b"no picture")
        assert 'role="alert"' in (await page.choose_control(upload))[1]
        upload.write_bytes(file)
        assert (await page.choose_control(upload))[0] == "edges.png, 128x128"
        assert not upload.exists()
        await page.finish(page.ask(**fields, size="64x64"))
        [picture] = page.visitors.of(Request.session_hash).pictures
        assert "Module: canny, Model: edges, Weight: 0.8" in picture.infotext
        assert "Resize Mode: Just Resize" in picture.infotext
    finally:
        await server.close()


def paint(client: Client, image: bytes) -> Images:
    return client.generate(
        "a cat", controlnets=[{"name": "edges", "image": image, "resize": True}], size="64x64", num_inference_steps=1
    )
