"""Recorded requests of apps, and what each app needs of the answers.

A row is an app: its requests are sent in order, and each need is a function of the answer. ``{options}`` as a body
means the options that the app read before, as Open WebUI sends all of them back.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

from diffserve.api.types import Picture
from diffserve.media.images import decode_image, encode_image
from tests.service.server import RunningServer

pytestmark = pytest.mark.slow

Need = Callable[[httpx.Response], bool]
BEARER = {"Authorization": "Bearer sk-anything"}
EMPTY_BASIC = {"Authorization": "Basic"}
EMPTY_PAIR = {"Authorization": f"Basic {base64.b64encode(b':').decode()}"}


class Sent(NamedTuple):
    """One request: a form if there are ``files``, else JSON if there is a ``body``."""

    method: str
    path: str
    needs: Need
    body: Any = None
    files: tuple[tuple[str, str], ...] = ()
    headers: dict[str, str] = {}  # noqa: RUF012 # read only


def file_of(alpha: bool = False) -> bytes:
    """Return an image of 64x64; as a mask its middle is to be painted."""
    pixels = np.full((64, 64, 3), 200, np.uint8)
    if not alpha:
        return encode_image(Picture.from_array(pixels))
    from io import BytesIO

    from PIL import Image

    mask = Image.new("RGBA", (64, 64), (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), (16, 16, 48, 48))
    file = BytesIO()
    mask.save(file, "PNG")
    return file.getvalue()


def is_picture(text: str) -> bool:
    return decode_image(base64.b64decode(text, validate=True)).width_px > 0


def has_b64(answer: httpx.Response) -> bool:
    """Return whether there is an image and no URL, which would take precedence and could not be fetched."""
    return all(is_picture(image["b64_json"]) and "url" not in image for image in list(answer.json()["data"]))


def has_usage(answer: httpx.Response) -> bool:
    return has_b64(answer) and {"input_tokens", "output_tokens", "total_tokens"} <= set(answer.json()["usage"])


def has_images(answer: httpx.Response) -> bool:
    return is_picture(answer.json()["images"][0])


def has_info(answer: httpx.Response) -> bool:
    info = json.loads(answer.json()["info"])
    is_valid = has_images(answer) and isinstance(answer.json()["info"], str)
    return is_valid and bool(info["infotexts"][0]) and {"seed", "width", "height"} <= set(info)


def lists(*fields: str) -> Need:
    return lambda answer: all(set(fields) <= entry.keys() for entry in answer.json()) and len(answer.json()) > 0


def is_list(answer: httpx.Response) -> bool:
    return isinstance(answer.json(), list)


def is_ok(answer: httpx.Response) -> bool:
    return answer.is_success


def has_options(answer: httpx.Response) -> bool:
    """Return whether there are options but none of Forge, for which SillyTavern would ask otherwise."""
    return bool(answer.json()["sd_model_checkpoint"]) and "forge_preset" not in answer.json()


def is_idle(answer: httpx.Response) -> bool:
    return bool(answer.json()["progress"] == 0 and answer.json()["state"]["job_count"] == 0)


def lists_images(answer: httpx.Response) -> bool:
    """Return whether names contain the words by which n8n filters them."""
    names = [entry["id"] for entry in answer.json()["data"]]
    return any("dall-e" in name for name in names) and any("gpt-image" in name for name in names)


GENERATIONS, EDITS, A1111 = "/v1/images/generations", "/v1/images/edits", "/sdapi/v1"
WEBUI_PAINTS = {
    "prompt": "a red fox", "batch_size": 1, "width": 512, "height": 512, "steps": 50, "negative_prompt": "",
    "cfg_scale": 7.0, "sampler_name": "Euler a", "scheduler": "Karras",
}  # fmt: skip
TAVERN_PAINTS = {
    "url": "http://127.0.0.1:7860", "auth": "", "prompt": "a red fox", "negative_prompt": "dog",
    "sampler_name": "DPM++ 2M", "scheduler": "Karras", "steps": 20, "cfg_scale": 7, "width": 64, "height": 64,
    "restore_faces": False, "enable_hr": True, "hr_upscaler": "Latent", "hr_scale": 1.5, "denoising_strength": 0.7,
    "hr_second_pass_steps": 0, "override_settings": {"CLIP_stop_at_last_layers": 1, "sd_vae": "Automatic"},
    "clip_skip": 1, "save_images": True, "send_images": True, "do_not_save_grid": False, "do_not_save_samples": False,
    "alwayson_scripts": {"ADetailer": {"args": [True, True, {"ad_model": "face_yolov8n.pt"}]}},
}  # fmt: skip
SDCPP_PAINTS = {
    "prompt": "a red fox", "negative_prompt": "", "width": 64, "height": 64, "steps": 20, "cfg_scale": 7, "seed": -1,
    "batch_size": 1, "sampler_name": "euler_a", "scheduler": "karras", "clip_skip": -1, "model": "",
}  # fmt: skip
LIBRE_PAINTS = {
    "prompt": "a red fox", "negative_prompt": "dog", "cfg_scale": 4.5, "steps": 22, "width": 1024, "height": 1024,
}  # fmt: skip
LOBE_PAINTS = {
    "model": "gpt-image-1", "prompt": "a red fox", "n": 1, "seed": 5, "cfg": 3.5, "steps": 4, "width": 64, "height": 64,
}  # fmt: skip
CLIENTS: dict[str, tuple[Sent, ...]] = {
    "Open WebUI, openai": (
        Sent(
            "POST", f"{GENERATIONS}?api-version=2025-04-01", has_b64, headers=BEARER,
            body={"model": "dall-e-2", "prompt": "a red fox", "n": 1, "size": "512x512", "response_format": "b64_json"},
        ),
        Sent(
            "POST", GENERATIONS, has_b64, headers=BEARER,
            body={"model": "gpt-image-1", "prompt": "a red fox", "n": 1, "size": "auto"},
        ),
        Sent(
            "POST", EDITS, has_b64, headers=BEARER, files=(("image", "plain"),),
            body={"model": "dall-e-2", "prompt": "a fox", "n": "1", "size": "64x64", "response_format": "b64_json"},
        ),
        Sent(
            "POST", EDITS, has_b64, headers=BEARER, files=(("image[]", "plain"),),
            body={"model": "gpt-image-1", "prompt": "a fox", "n": "1", "size": "64x64", "background": "auto"},
        ),
    ),
    "Open WebUI, automatic1111": (
        Sent("GET", f"{A1111}/options", has_options, headers=EMPTY_BASIC),
        Sent("POST", f"{A1111}/options", is_ok, body="{options}", headers=EMPTY_BASIC),
        Sent("GET", f"{A1111}/sd-models", lists("title", "model_name"), headers=EMPTY_BASIC),
        Sent("POST", f"{A1111}/txt2img", has_info, body=WEBUI_PAINTS, headers=EMPTY_BASIC),
    ),
    "SillyTavern, auto": (
        Sent("GET", f"{A1111}/options", has_options, headers=EMPTY_PAIR),
        Sent("GET", f"{A1111}/upscalers", lists("name"), headers=EMPTY_PAIR),
        Sent("GET", f"{A1111}/latent-upscale-modes", is_list, headers=EMPTY_PAIR),
        Sent("GET", f"{A1111}/sd-vae", is_list, headers=EMPTY_PAIR),
        Sent("GET", f"{A1111}/sd-modules", is_list, headers=EMPTY_PAIR),
        Sent("GET", f"{A1111}/samplers", lists("name"), headers=EMPTY_PAIR),
        Sent("GET", f"{A1111}/schedulers", lists("name", "label"), headers=EMPTY_PAIR),
        Sent("GET", f"{A1111}/sd-models", lists("title"), headers=EMPTY_PAIR),
        Sent("POST", f"{A1111}/options", is_ok, body={"sd_model_checkpoint": "{model}"}, headers=EMPTY_PAIR),
        Sent("GET", f"{A1111}/progress", is_idle, headers=EMPTY_PAIR),
        Sent("POST", f"{A1111}/txt2img", has_images, body=TAVERN_PAINTS, headers=EMPTY_PAIR),
        Sent("POST", f"{A1111}/interrupt", is_ok, body={}, headers=EMPTY_PAIR),
    ),
    "SillyTavern, sdcpp": (
        Sent("OPTIONS", GENERATIONS, is_ok),
        Sent("GET", "/v1/models", lists_images),
        Sent("POST", f"{A1111}/txt2img", has_images, body=SDCPP_PAINTS),
    ),
    "LibreChat, Stable Diffusion": (Sent("POST", f"{A1111}/txt2img", has_info, body=LIBRE_PAINTS),),
    "LibreChat, OpenAI": (
        Sent(
            "POST", GENERATIONS, has_b64, headers=BEARER,
            body={
                "model": "gpt-image-1", "prompt": "a red fox", "n": 1, "background": "auto", "output_format": "png",
                "quality": "auto", "size": "auto",
            },
        ),
        Sent(
            "POST", EDITS, has_b64, headers=BEARER, files=(("image[]", "plain"), ("image[]", "plain")),
            body={"model": "gpt-image-1", "prompt": "a fox", "quality": "auto", "size": "auto"},
        ),
    ),
    "LobeChat": (
        Sent("POST", GENERATIONS, has_usage, body=LOBE_PAINTS, headers=BEARER),
        Sent(
            "POST", GENERATIONS, has_usage, headers=BEARER,
            body={"model": "dall-e-3", "prompt": "a red fox", "n": 1, "response_format": "b64_json"},
        ),
        Sent(
            "POST", EDITS, has_usage, headers=BEARER, files=(("image", "plain"),),
            body={"model": "gpt-image-1", "prompt": "a fox", "n": "1", "input_fidelity": "high"},
        ),
    ),
    "n8n": (
        Sent("GET", "/v1/models", lists_images, headers=BEARER),
        Sent(
            "POST", GENERATIONS, has_b64, headers=BEARER,
            body={"prompt": "a red fox", "model": "gpt-image-1-mini", "n": 1, "quality": "medium", "size": "1024x1024"},
        ),
        Sent(
            "POST", GENERATIONS, has_b64, headers=BEARER,
            body={
                "prompt": "a red fox", "model": "dall-e-3", "n": 1, "quality": "hd", "size": "1024x1024",
                "style": "vivid", "response_format": "b64_json",
            },
        ),
        Sent(
            "POST", EDITS, has_b64, headers=BEARER, files=(("image", "plain"), ("mask", "mask")),
            body={"model": "gpt-image-1", "prompt": "a fox", "n": "1", "size": "auto", "quality": "auto"},
        ),
    ),
}  # fmt: skip


def answers_of(server: RunningServer, client: str) -> Iterator[tuple[Sent, httpx.Response]]:
    """Send the requests of ``client`` in order and yield each with its answer."""
    options: dict[str, Any] = {}
    files = {"plain": file_of(), "mask": file_of(alpha=True)}
    for number, sent in enumerate(CLIENTS[client]):
        body = sent.body
        if body == "{options}":
            body = options
        elif isinstance(body, dict) and "{model}" in body.values():
            body = {"sd_model_checkpoint": options["sd_model_checkpoint"]}
        parts = [(field, (f"{number}.png", files[which], "image/png")) for field, which in sent.files]
        content: dict[str, Any] = {"data": body, "files": parts} if parts else {} if body is None else {"json": body}
        answer = server.client.request(sent.method, sent.path, headers=sent.headers, **content)
        yield sent, answer
        if sent.path.endswith("/options") and sent.method == "GET":
            options = answer.json()


@pytest.mark.parametrize("client", CLIENTS)
def test_an_app_gets_what_it_needs(server: RunningServer, client: str) -> None:
    for sent, answer in answers_of(server, client):
        assert answer.is_success, (sent.path, answer.text[:500])
        assert sent.needs(answer), (sent.path, answer.text[:500])
