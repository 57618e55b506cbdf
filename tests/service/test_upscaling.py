"""Upscaling over a real socket: JSON, forms, the client, A1111's extras with ``webuiapi``, marks and limits."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import webuiapi
from PIL import Image

from diffserve.api.types import Picture
from diffserve.client import Client
from diffserve.media.images import decode_image, encode_image, read_infotext
from diffserve.media.infotext import parse_infotext
from diffserve.media.provenance import examine
from diffserve.media.upscaling import FLATTENED
from diffserve.models.upscalers import EMBEDDED_UPSCALER, SHIPPED
from diffserve.runtime import choose_device
from diffserve.runtime.upscaling.network import Upscaler
from diffserve.service.lifecycle import WARNINGS
from tests.conftest import SERVER_CONFIG
from tests.service.server import RunningServer, error_of, files_of, running_server
from tests.service.test_edits import file_of, holed, in_base64, picture, pixels_of
from tests.upscalers import write_upscaler

pytestmark = pytest.mark.slow

ROUTE = "/v1/images/upscale"
INFOTEXT = "a fox\nSteps: 2, Sampler: Euler, CFG scale: 3, Seed: 5, Size: 64x64, Model: tiny"


@pytest.fixture(scope="module")
def shared_upscaling(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """Start a server with the upscaler "small", a filter that judges images, and no watermark."""
    folder = tmp_path_factory.mktemp("upscaling")
    write_upscaler(folder / "upscalers" / "small.safetensors")
    folder_line = f'[model]\nupscaler_dir = "{folder / "upscalers"}"\n'
    config = SERVER_CONFIG.replace("[model]\n", folder_line)
    with running_server(tiny_model("sd15"), folder / "work", config=config) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture
def upscaling(shared_upscaling: RunningServer) -> Iterator[RunningServer]:
    yield shared_upscaling
    shared_upscaling.wait_until_idle()


def post(server: RunningServer, **fields: Any) -> httpx.Response:
    return server.client.post(ROUTE, json=fields)


def by_network(pixels: np.ndarray, file: Path) -> np.ndarray:
    return Upscaler.load(file, choose_device("cpu", "float32")).upscale(pixels)


def test_json_and_forms_give_what_the_network_gives(upscaling: RunningServer) -> None:
    before = picture()
    answer = post(upscaling, image=in_base64(before), upscaler=EMBEDDED_UPSCALER)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert {"id", "created", "data", "usage", "warnings", "background"} <= set(body)
    assert (body["upscaler"], body["scale"], body["size"], body["output_format"]) == (
        EMBEDDED_UPSCALER, 4.0, "512x256", "png",
    )  # fmt: skip
    assert body["usage"]["device_s"] > 0
    after = pixels_of(body["data"][0]["b64_json"])
    expected = by_network(before, SHIPPED / f"{EMBEDDED_UPSCALER}.safetensors")
    assert np.abs(after.astype(int) - expected.astype(int)).max() <= 6, "but for the watermark"
    form = {"upscaler": EMBEDDED_UPSCALER, "output_format": "webp", "scale": "2"}
    by_form = upscaling.client.post(ROUTE, data=form, files={"image": ("a.png", file_of(before))})
    assert by_form.status_code == 200, by_form.text
    assert (by_form.json()["size"], by_form.json()["output_format"]) == ("256x128", "webp")
    url = f"data:image/png;base64,{in_base64(before)}"
    assert post(upscaling, image={"image_url": url}, upscaler="lanczos").json()["size"] == "256x128"


def test_upscaled_images_are_in_the_history_and_can_be_upscaled_again(upscaling: RunningServer) -> None:
    upscaling.client.delete("/v1/history")
    [small] = files_of(upscaling.paint("a hill with snow", seed=8, size="64x64"))
    plain = file_of(picture())
    sent = [base64.b64encode(file).decode() for file in (small, plain)]
    answers = [post(upscaling, image=image, upscaler=EMBEDDED_UPSCALER) for image in sent]
    [large], _ = map(files_of, answers)
    listed = upscaling.client.get("/v1/history").json()["data"]
    assert [entry["id"] for entry in listed[1::-1]] == [each.json()["data"][0]["history_id"] for each in answers]
    entry = listed[1]
    assert (entry["prompt"], entry["seed"], entry["model"]) == ("a hill with snow", 8, EMBEDDED_UPSCALER)
    assert (entry["width"], entry["height"]) == (256, 256)
    assert (listed[0]["prompt"], listed[0]["seed"]) == ("", None)
    assert upscaling.client.get(entry["content"]).content == large
    restore = entry["restore"]
    assert restore["needs"] == ["image"]
    again = upscaling.client.post(restore["url"], json=restore["body"] | {"image": sent[0]})
    assert files_of(again) == [large]
    with Client(upscaling.url) as client:
        assert client.upscale(plain, upscaler="nearest").files[0].history_id == client.history().data[0].id
        assert client.history(q="snow").data[0].seed == 8


def test_scale_and_size_are_reached_by_passes_filters_and_cropping(upscaling: RunningServer) -> None:
    sent = in_base64(picture())
    for fields, size in (
        ({"upscaler": "small"}, "256x128"),
        ({"upscaler": "small", "scale": 3.5}, "448x224"),
        ({"upscaler": "small", "scale": 0.5}, "64x32"),
        ({"upscaler": "small", "size": "300x300"}, "300x300"),
        ({"upscaler": "nearest", "scale": 3}, "384x192"),
        ({"upscaler": "Lanczos"}, "256x128"),
        ({}, "256x128"),  # the first file of the folder
    ):
        answer = post(upscaling, image=sent, **fields)
        assert answer.status_code == 200, answer.text
        assert answer.json()["size"] == size
        assert pixels_of(answer.json()["data"][0]["b64_json"]).shape[:2] == tuple(map(int, size.split("x")))[::-1]
    nearest = post(upscaling, image=sent, upscaler="nearest", scale=2).json()["data"][0]["b64_json"]
    assert np.array_equal(pixels_of(nearest), picture().repeat(2, 0).repeat(2, 1)), "a filter adds no watermark"


def test_parameters_and_marks_of_the_image_stay(upscaling: RunningServer) -> None:
    plain = Picture.from_array(picture())
    for kind, expected in (("generated", "generated"), ("composite", "composite"), (None, "composite")):
        file = encode_image(plain, infotext=INFOTEXT, kind=kind)  # type: ignore[arg-type]
        answer = post(upscaling, image=base64.b64encode(file).decode(), upscaler="small")
        written = base64.b64decode(answer.json()["data"][0]["b64_json"])
        infotext = parse_infotext(read_infotext(written) or "")
        assert infotext.prompt == "a fox"
        assert (infotext.fields["Seed"], infotext.fields["Upscale"]) == ("5", "small x2")
        report = examine(written)
        assert report.watermark is not None
        assert report.watermark.kind == expected
        assert answer.headers["x-content-provenance"] == "xmp;wm"
    twice = post(upscaling, image=base64.b64encode(written).decode(), upscaler="nearest", scale=1.5)
    file = base64.b64decode(twice.json()["data"][0]["b64_json"])
    assert parse_infotext(read_infotext(file) or "").fields["Upscale"] == "small x2, nearest x1.5"
    assert examine(file).is_generated, "a filter keeps the mark"
    photo = post(upscaling, image=in_base64(picture()), upscaler="lanczos")
    assert not examine(base64.b64decode(photo.json()["data"][0]["b64_json"])).is_generated
    assert "x-content-provenance" not in photo.headers
    repeated = upscaling.paint(infotext=parse_text(file), prompt="a fox")
    assert "upscaled (small x2, nearest x1.5), which /v1/images/upscale repeats" in str(repeated.json()["warnings"])


def parse_text(file: bytes) -> str:
    return read_infotext(file) or ""


BAD: list[tuple[dict[str, Any], str | None, str, str]] = [
    ({"image": ...}, "image", "missing_required_parameter", "image is missing"),
    ({"image": ""}, "image", "empty_image", "empty"),
    ({"image": "!!"}, "image", "invalid_image", "is not base64"),
    ({"image": "AAAA"}, "image", "invalid_image", "not a PNG, JPEG or WebP"),
    ({"image": 7}, "image", "invalid_value", "7"),
    ({"image": "https://example.org/a.png"}, "image", "url_not_allowed", "does not fetch images"),
    ({"image": {"file_id": "file-x"}}, "image.file_id", "file_not_found", "file-x"),
    ({"upscaler": "warp"}, "upscaler", "unknown_upscaler", "there is no upscaler 'warp'; the known ones are small,"),
    ({"upscaler": "../small"}, "upscaler", "unknown_upscaler", "../small"),
    ({"upscaler": ""}, "upscaler", "empty_upscaler", "empty"),
    ({"upscaler": "x" * 300}, "upscaler", "string_above_max_length", "300"),
    ({"scale": 0}, "scale", "invalid_value", "more than 0"),
    ({"scale": 17}, "scale", "invalid_value", "17"),
    ({"scale": "NaN"}, "scale", "invalid_value", "NaN"),
    ({"size": "512"}, "size", "invalid_size", '"512"'),
    ({"size": "0x5"}, "size", "invalid_value", "0x5"),
    ({"size": "99999x99999"}, "size", "invalid_value", "99999x99999"),
    ({"size": "4000x4000"}, "size", "invalid_value", "62.5 times the image; at most 16"),
    ({"size": "64x64", "scale": 2}, "size", "invalid_value", "both given"),
    ({"output_format": "svg"}, "output_format", "invalid_value", '"svg"'),
    ({"output_compression": 101}, "output_compression", "invalid_value", "101"),
    ({"response_format": "exe"}, "response_format", "invalid_value", '"exe"'),
    ({"deadline_s": 0}, "deadline_s", "invalid_value", "more than 0"),
    ({"priority": "high"}, "priority", "invalid_value", "high"),
]


@pytest.mark.parametrize(("fields", "param", "code", "words"), BAD)
def test_wrong_values_are_reported_in_one_sentence(
    upscaling: RunningServer, fields: dict[str, Any], param: str | None, code: str, words: str
) -> None:
    body = {"image": in_base64(picture()), "upscaler": "small"} | fields
    answer = post(upscaling, **{name: value for name, value in body.items() if value is not ...})
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert (error["param"], error["code"]) == (param, code)
    assert words in error["message"]
    assert upscaling.num_requests() == 0


def test_images_that_are_too_large_are_refused(upscaling: RunningServer) -> None:
    large = in_base64(np.zeros((1300, 3300, 3), np.uint8))
    answer = post(upscaling, image=large, upscaler="small")
    assert "the image has 3300x1300 pixels; at most 4,194,304 pixels can be upscaled" in error_of(answer)["message"]
    medium = in_base64(np.zeros((1024, 2048, 3), np.uint8))
    answer = post(upscaling, image=medium, upscaler=EMBEDDED_UPSCALER, scale=2)
    message = error_of(answer)["message"]
    assert message.startswith("upscaler 'embedded-4x' makes 8192x4096 pixels of the image, before they are fitted")
    assert "give an image of at most 1,048,576 pixels, a network with a smaller scale, or lanczos" in message
    two = upscaling.client.post(ROUTE, files=[("image", ("a.png", file_of(picture())))] * 2)
    assert error_of(two)["message"] == "2 images were sent; send one."
    other = upscaling.client.post(ROUTE, files={"picture": ("a.png", file_of(picture()))})
    assert error_of(other)["param"] == "picture"


def test_the_typed_client_and_the_lists_know_upscalers(upscaling: RunningServer) -> None:
    with Client(upscaling.url) as client:
        result = client.upscale(file_of(picture()), upscaler="small", scale=4.0)
        model = client.models()[0]
    assert (result.size, result.upscaler, result.scale) == ("512x256", "small", 4.0)
    assert decode_image(result.file).width_px == 512
    assert model.capabilities is not None
    image = model.capabilities.image
    assert image is not None
    assert image.upscalers == ("small", EMBEDDED_UPSCALER, "lanczos", "nearest")
    assert image.default_upscaler == "small"


def test_webuiapi_upscales_one_image_and_several(upscaling: RunningServer) -> None:
    port = int(upscaling.url.rpartition(":")[2])
    api = webuiapi.WebUIApi(host="127.0.0.1", port=port)
    assert {"None", "Lanczos", "Nearest", "small", EMBEDDED_UPSCALER} == {item["name"] for item in api.get_upscalers()}
    before = Image.fromarray(picture())
    single = api.extra_single_image(image=before, upscaler_1="small", upscaling_resize=3)
    assert single.image.size == (384, 192)
    assert "small to 384x192" in single.info
    many = api.extra_batch_images(images=[before, before], upscaler_1="Lanczos", upscaling_resize=2)
    assert [image.size for image in many.images] == [(256, 128)] * 2
    cropped = api.extra_single_image(
        image=before, resize_mode=1, upscaling_resize_w=200, upscaling_resize_h=200, upscaler_1="small"
    )
    assert cropped.image.size == (200, 200)
    covering = api.extra_single_image(
        image=before, resize_mode=1, upscaling_resize_w=200, upscaling_resize_h=200, upscaling_crop=False,
        upscaler_1="Nearest",
    )  # fmt: skip
    assert covering.image.size == (400, 200)
    unchanged = api.extra_single_image(image=before, upscaler_1="None", upscaling_resize=2)
    assert np.array_equal(np.asarray(unchanged.image), np.asarray(before))
    parts = [
        np.asarray(api.extra_single_image(image=before, upscaler_1=name, upscaling_resize=2).image, np.float32)
        for name in ("Nearest", "Lanczos")
    ]
    mixed = api.extra_single_image(
        image=before, upscaler_1="Nearest", upscaler_2="Lanczos", extras_upscaler_2_visibility=0.25, upscaling_resize=2
    )
    assert np.abs(np.asarray(mixed.image, np.float32) - (0.75 * parts[0] + 0.25 * parts[1])).max() <= 1
    for name in ("gfpgan_visibility", "codeformer_visibility"):
        with pytest.raises(RuntimeError, match=f"{name} is 0.5; restoring faces is not supported"):
            api.extra_single_image(image=before, upscaler_1="small", **{name: 0.5})
    bad = {"image": in_base64(picture()), "upscaler_1": "R-ESRGAN 4x+"}
    answer = upscaling.client.post("/sdapi/v1/extra-single-image", json=bad)
    assert answer.status_code == 400
    assert "there is no upscaler 'R-ESRGAN 4x+'; the known ones are small" in answer.text
    empty = upscaling.client.post("/sdapi/v1/extra-batch-images", json={"imageList": []})
    assert empty.status_code == 400


def test_a_warning_says_that_transparency_was_removed(upscaling: RunningServer) -> None:
    clear, opaque = base64.b64encode(holed()).decode(), in_base64(picture())
    answer = post(upscaling, image=clear, upscaler="nearest", scale=1)
    assert answer.json()["warnings"] == [f"image {FLATTENED}"]
    assert answer.headers[WARNINGS] == f"image {FLATTENED}"
    assert (pixels_of(answer.json()["data"][0]["b64_json"]) == 255).all()
    assert post(upscaling, image=opaque, upscaler="nearest", scale=1).json()["warnings"] == []
    files = {"upscaler_1": "Nearest", "imageList": [{"data": opaque, "name": "a"}, {"data": clear, "name": "b"}]}
    many = upscaling.client.post("/sdapi/v1/extra-batch-images", json=files)
    assert many.json()["html_info"].endswith(f"<p>imageList[1].data {FLATTENED}</p>")
    assert many.headers[WARNINGS] == f"imageList[1].data {FLATTENED}"
    damaged = {"upscaler_1": "Nearest", "imageList": [{"data": opaque}, {"data": opaque[:400]}]}
    refused = upscaling.client.post("/sdapi/v1/extra-batch-images", json=damaged)
    assert "imageList[1].data is damaged" in refused.text


def test_images_are_the_same_during_an_upscaling(upscaling: RunningServer) -> None:
    alone = upscaling.paint(seed=3, num_steps=8).json()["data"][0]["b64_json"]
    sent = in_base64(picture(512, 512))
    with ThreadPoolExecutor(1) as thread:
        upscaled = thread.submit(post, upscaling, image=sent, upscaler=EMBEDDED_UPSCALER)
        again = upscaling.paint(seed=3, num_steps=8).json()["data"][0]["b64_json"]
        assert upscaled.result().json()["size"] == "2048x2048"
    assert again == alone


def test_a_client_that_hangs_up_stops_the_upscaling(upscaling: RunningServer) -> None:
    sent = in_base64(picture(1000, 1000))
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{upscaling.url}{ROUTE}", json={"image": sent, "upscaler": EMBEDDED_UPSCALER}, timeout=4)
    upscaling.wait_until_idle(10.0)


def test_upscaled_images_can_have_urls(upscaling: RunningServer) -> None:
    answer = post(upscaling, image=in_base64(picture()), upscaler="small", response_format="url").json()
    file = httpx.get(answer["data"][0]["url"]).content
    assert Image.open(BytesIO(file)).size == (256, 128)
