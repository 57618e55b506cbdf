"""Images in chat completions as LobeChat requests them, over a real socket, and the errors."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from diffserve.media.images import decode_image
from diffserve.service.models import is_alias
from diffserve.service.responses.chat_images import wants_image
from tests.service.server import RunningServer, error_of

CHAT = "/v1/chat/completions"
FOX: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "a red fox"}]}]
LOBE: dict[str, Any] = {"messages": FOX, "modalities": ["image", "text"], "stream": False}


def picture_in(message: dict[str, Any]) -> bytes:
    head, _, data = message["images"][0]["image_url"]["url"].partition(",")
    assert head == "data:image/png;base64"
    return base64.b64decode(data)


@pytest.mark.parametrize(
    ("body", "is_one"),
    [
        (b'{"model": "sd15", "modalities": ["image", "text"]}', True),
        (b'{"model": "sd15:image"}', True),
        (b'{"model": "sd15"}', False),
        (b'{"messages": "an :image"}', False),
        (b'{"modalities": "image"}', False),
        (b'{"image": ' + b"[" * 100_000, False),
        (b"image \xff", False),
    ],
)
def test_a_body_that_requests_an_image_is_recognized(body: bytes, is_one: bool) -> None:
    assert wants_image(body) is is_one


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "text") for name in ("gpt-4o", "gpt-4.1-mini", "gpt-3.5-turbo", "gpt-5", "chatgpt-4o-latest", "o3")),
        *((name, "text") for name in ("o4-mini", "gpt-4")),
        ("gpt-image-1", "image"),
        ("text-embedding-3-small", "embedding"),
        *((name, None) for name in ("gpt-", "gpt-oss", "llama-3", "o", "o3/../x", "text-embedding-", "openai/gpt-4o")),
    ],
)
def test_an_alias_has_one_kind(name: str, kind: str | None) -> None:
    kinds: tuple[Any, ...] = ("image", "text", "embedding")
    assert [kind for kind in kinds if is_alias(name, kind)] == ([] if kind is None else [kind])


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"model": "gpt-image-1"}, {"model": "gpt-4o"}, {"model": "dall-e-3:image"}, {}])
def test_an_image_has_the_format_that_apps_expect(server: RunningServer, fields: dict[str, str]) -> None:
    body = LOBE | fields | {"size": "64x64", "seed": 5, "num_inference_steps": 2, "temperature": 0.7}
    answer = server.client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    reply = answer.json()
    assert (reply["object"], reply["choices"][0]["finish_reason"]) == ("chat.completion", "stop")
    assert reply["usage"]["total_tokens"] == reply["usage"]["prompt_tokens"] + reply["usage"]["completion_tokens"]
    message = reply["choices"][0]["message"]
    assert (message["role"], message["seed"], reply["warnings"]) == ("assistant", 5, [])
    alone = server.paint(prompt="a red fox", size="64x64", seed=5, num_inference_steps=2).json()["data"][0]
    assert decode_image(picture_in(message)) == decode_image(base64.b64decode(alone["b64_json"]))


@pytest.mark.slow
def test_generation_starts_from_the_image_of_the_conversation_and_keeps_its_aspect(server: RunningServer) -> None:
    body = LOBE | {"num_inference_steps": 2, "image_config": {"aspect_ratio": "1:2"}}
    first = server.client.post(CHAT, json=body).json()["choices"][0]["message"]
    picture = decode_image(picture_in(first))
    assert picture.height_px == pytest.approx(2 * picture.width_px, rel=0.2)
    messages = [*FOX, {**first, "content": None}, {"role": "user", "content": "a blue fox"}]
    edited = server.client.post(CHAT, json=LOBE | {"messages": messages, "num_inference_steps": 2})
    assert edited.status_code == 200, edited.text
    again = decode_image(picture_in(edited.json()["choices"][0]["message"]))
    assert (again.width_px, again.height_px) == (picture.width_px, picture.height_px)


@pytest.mark.slow
def test_a_stream_has_the_image_in_a_chunk(server: RunningServer) -> None:
    body = LOBE | {"stream": True, "size": "64x64", "num_inference_steps": 2}
    answer = server.client.post(CHAT, json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.count('"images":[') == 1
    stop = next(line for line in answer.text.splitlines() if '"finish_reason":"stop"' in line)
    assert json.loads(stop.removeprefix("data: "))["usage"]["completion_tokens"] > 0
    assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": ""}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content"),
        ({"model": "nobody"}, 404, "model"),
        ({"size": "1x"}, 400, "size"),
        ({"n": 0}, 400, "n"),
        ({"seed": "x"}, 400, "seed"),
        ({"seed": 2**70}, 400, "seed"),
        ({"image_config": {"aspect_ratio": "wide"}}, 400, "image_config.aspect_ratio"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"messages": [{"role": "user", "content": "x" * (1 << 20)}]}, 413, None),
    ],
)
def test_unsupported_options_are_reported(
    server: RunningServer, fields: dict[str, Any], status: int, param: Any
) -> None:
    answer = server.client.post(CHAT, json=LOBE | fields)
    assert (answer.status_code, error_of(answer)["param"]) == (status, param), answer.text


@pytest.mark.slow
def test_openai_model_names_select_the_loaded_language_model(text_server: RunningServer) -> None:
    body: dict[str, Any] = {"model": "gpt-4o", "temperature": 0}
    answer = text_server.client.post(CHAT, json=body | {"messages": [{"role": "user", "content": "a fox"}]})
    assert (answer.status_code, answer.json()["model"]) == (200, "talker")
    response = text_server.client.post("/v1/responses", json=body | {"input": "a fox", "model": "gpt-4.1-mini"})
    assert (response.status_code, response.json()["model"]) == (200, "talker")
    for name in ("nobody", "gpt-image-1"):
        for place, words in ((CHAT, {"messages": FOX}), ("/v1/responses", {"input": "a fox"})):
            refused = text_server.client.post(place, json={"model": name, **words})
            assert (refused.status_code, error_of(refused)["code"]) == (404, "model_not_found")
            assert "talker" in error_of(refused)["message"]
