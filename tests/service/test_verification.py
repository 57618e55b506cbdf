"""Images of every API declare their origin, and ``/v1/provenance/verify`` detects it, over a real socket."""

from __future__ import annotations

import base64
import json
from io import BytesIO

import httpx
import numpy as np
import pytest
from PIL import Image

from diffserve.client import Client
from tests.service.server import RunningServer, error_of, files_of

pytestmark = pytest.mark.slow

HEADER = "x-content-provenance"


def kind_of(server: RunningServer, file: bytes) -> tuple[str, str]:
    """Return the kinds that the XMP metadata and the watermark of ``file`` declare."""
    with Client(server.url) as client:
        report = client.verify(file)
    assert report.is_generated
    assert report.xmp is not None
    return report.xmp.digital_source_type.rpartition("/")[2], report.watermark.kind if report.watermark else ""


def test_images_of_every_api_are_marked_in_file_and_pixels(server: RunningServer) -> None:
    generated = "trainedAlgorithmicMedia", "generated"
    composite = "compositeWithTrainedAlgorithmicMedia", "composite"
    answer = server.paint(size="128x128")
    [file] = files_of(answer)
    assert answer.headers[HEADER] == "xmp;wm"
    assert files_of(server.paint(size="128x128")) == [file], "the mark is the same each time"
    assert kind_of(server, file) == generated
    streamed = server.paint(size="128x128", stream=True, partial_images=1, num_steps=4, output_format="webp")
    assert streamed.headers[HEADER] == "xmp;wm"
    events = [json.loads(line[6:]) for line in streamed.text.split("\n") if line.startswith("data: {")]
    pictures = {event["type"]: base64.b64decode(event["b64_json"]) for event in events if "b64_json" in event}
    assert kind_of(server, pictures["image_generation.completed"]) == generated
    assert kind_of(server, pictures["image_generation.partial_image"])[0] == "trainedAlgorithmicMedia"
    stored_file = httpx.get(server.paint(size="128x128", response_format="url").json()["data"][0]["url"])
    assert (stored_file.headers[HEADER], stored_file.content) == ("xmp;wm", file)
    fields = {"prompt": "a red fox", "steps": 2, "width": 128, "height": 128, "seed": 1}
    source = {"init_images": [base64.b64encode(file).decode()]}
    hires = {"width": 64, "height": 64, "enable_hr": True}
    for name, extra, expected in (
        ("txt2img", {}, generated), ("txt2img", hires, generated), ("img2img", source, composite)
    ):  # fmt: skip
        spoken = server.client.post(f"/sdapi/v1/{name}", json=fields | extra)
        assert spoken.headers[HEADER] == "xmp;wm"
        assert kind_of(server, base64.b64decode(spoken.json()["images"][0])) == expected
    edited = server.client.post(
        "/v1/images/edits", files={"image": ("a.png", file)}, data={"prompt": "a fox", "steps": "2"}
    )
    assert kind_of(server, files_of(edited)[0]) == composite


def test_a_transparent_image_is_its_own_mask_and_unchanged_pixels_have_no_watermark(server: RunningServer) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (128, 128, 4), dtype=np.uint8)
    pixels[..., 3] = 255
    pixels[:, :64, 3] = 0
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    answer = server.client.post(
        "/v1/images/edits", files={"image": ("a.png", file.getvalue())}, data={"prompt": "a fox", "steps": "2"}
    )
    assert "repainted where it is transparent" in answer.headers["x-diffserve-warnings"]
    assert answer.json()["strength"] == 1.0
    [edited] = files_of(answer)
    after = np.asarray(Image.open(BytesIO(edited)))
    assert np.array_equal(after[:, 64:], pixels[:, 64:, :3])
    assert kind_of(server, edited)[1] == "composite"


def test_invalid_files_and_forbidden_unmarked_requests_are_reported(server: RunningServer) -> None:
    def refusal(**body: object) -> tuple[int, str, str]:
        answer = server.client.post("/v1/provenance/verify", json=body)
        return answer.status_code, error_of(answer)["code"], error_of(answer)["param"]

    assert refusal() == (400, "missing_required_parameter", "image")
    assert refusal(image="https://example.org/a.png") == (400, "url_not_allowed", "image")
    assert refusal(image="R0lGODlh") == (400, "invalid_image", "image")
    form = server.client.post("/v1/provenance/verify", files={"image": ("../a.png", b"GIF89a")})
    assert (form.status_code, error_of(form)["code"]) == (400, "invalid_image")
    bare = BytesIO()
    Image.new("RGB", (64, 64)).save(bare, "PNG")
    report = server.client.post("/v1/provenance/verify", files={"image": ("a.png", bare.getvalue())}).json()
    assert report == {
        "object": "provenance.verification", "is_generated": False, "xmp": None, "watermark": None, "c2pa": None,
        "parameters": False,
    }  # fmt: skip
    unmarked = server.paint(watermark=False)
    assert "watermark: false has no effect" in unmarked.headers["x-diffserve-warnings"]
    assert unmarked.headers[HEADER] == "xmp;wm"
    for path, field in (("/sdapi/v1/png-info", "image"), ("/sdapi/v1/img2img", "init_images")):
        url = "https://169.254.169.254/latest/meta-data"
        answer = server.client.post(path, json={"prompt": "a", field: [url] if field == "init_images" else url})
        reply = answer.json()
        assert (answer.status_code, reply["error"], reply["code"]) == (400, "HTTPException", "url_not_allowed")
