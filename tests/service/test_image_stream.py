"""Streamed images with the ``openai`` client and as raw events: previews, progress, cancel, disconnect."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from openai import OpenAI

from diffserve.media.images import decode_image, read_infotext, resize
from tests.service.server import (
    GENERATIONS,
    SOON_S,
    RunningServer,
    error_of,
    files_of,
    wait_for,
)
from tests.service.talker import FOX

pytestmark = pytest.mark.slow

PARTIAL, COMPLETED = "image_generation.partial_image", "image_generation.completed"
PROGRESS = "image_generation.progress"
SOON: dict[str, Any] = {"prompt": "a red fox", "seed": 5, "sampler": "ddim", "num_inference_steps": 20, "stream": True}
LONG: dict[str, Any] = {**SOON, "num_inference_steps": 1000}


def events_in(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Return the events among ``lines``; each names its type twice."""
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            data: dict[str, Any] = json.loads(line.removeprefix("data: "))
            assert data.get("type", "") == name
            name = ""
            yield data
        else:
            assert line == "" or line.startswith(":")


@contextmanager
def stream(server: RunningServer, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
    with httpx.stream("POST", f"{server.url}{GENERATIONS}", json=body, timeout=300.0) as response:
        assert response.status_code == 200, response.read()
        yield events_in(response.iter_lines())


def events_of(server: RunningServer, **fields: Any) -> list[dict[str, Any]]:
    with stream(server, {**SOON, **fields}) as events:
        return list(events)


def kind(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == name]


def pixels_of(event: Any, side_px: int = 64) -> NDArray[np.float64]:
    """Return the image in an event at a fixed size, as signed numbers."""
    text = event["b64_json"] if isinstance(event, dict) else event.b64_json
    return resize(decode_image(base64.b64decode(text)), side_px, side_px).array.astype(np.float64)


def test_openai_client_receives_previews_of_increasing_quality(client: OpenAI) -> None:
    stream = client.images.generate(
        prompt="a red fox", stream=True, partial_images=3,
        extra_body={"num_inference_steps": 40, "sampler": "ddim", "seed": 5},
    )  # fmt: skip
    events: list[Any] = [event for event in stream if event.type in (PARTIAL, COMPLETED)]
    assert [event.type for event in events] == [PARTIAL] * 3 + [COMPLETED]
    *partials, last = events
    assert [event.partial_image_index for event in partials] == [0, 1, 2]
    distances = [float(np.abs(pixels_of(event) - pixels_of(last)).mean()) for event in partials]
    assert all(earlier > later for earlier, later in pairwise(distances)), distances
    assert (last.size, last.output_format, last.quality, last.background) == ("64x64", "png", "auto", "opaque")
    assert last.created_at > 1_600_000_000
    assert last.usage.total_tokens == last.usage.input_tokens + last.usage.output_tokens


def test_openai_client_ignores_diffserve_events(client: OpenAI) -> None:
    stream = client.images.generate(prompt="a red fox", stream=True, extra_body={"num_inference_steps": 5})
    types = [str(event.type) for event in stream]
    assert types[0] == PROGRESS
    assert types[-1] == COMPLETED
    assert set(types) == {PROGRESS, COMPLETED}


def test_streamed_and_plain_images_are_equal(server: RunningServer) -> None:
    [completed] = kind(events_of(server, partial_images=2, size="96x80"), COMPLETED)
    plain = server.client.post(GENERATIONS, json={**SOON, "stream": False, "size": "96x80"})
    assert [base64.b64decode(completed["b64_json"])] == files_of(plain)
    reply = plain.json()
    same = set(completed) & set(reply)
    for answer in (completed, reply):
        assert answer["usage"].pop("device_s") > 0
    same -= {"id", "created", "timings", "history_id"}
    assert {name: completed[name] for name in same} == {name: reply[name] for name in same}
    assert {"sampler", "size", "usage", "warnings", "model_digest"} <= same
    assert (completed["seed"], completed["revised_prompt"]) == (5, None)


def test_progress_starts_with_an_id_and_ends_with_the_last_step(server: RunningServer) -> None:
    progress = kind(events_of(server), PROGRESS)
    first, last = progress[0], progress[-1]
    assert first["id"].startswith("img-")
    assert (first["step"], first["queue_position"], first["seed"]) == (0, 0, 5)
    assert (last["step"], last["steps"], last["image_index"]) == (20, 20, 0)
    assert first["request_seconds_left"] == first["seconds_left"]
    assert last["request_seconds_left"] >= last["seconds_left"] >= 0
    assert {event["id"] for event in progress} == {first["id"]}
    steps = [event["step"] for event in progress]
    assert steps == sorted(steps)
    assert kind(events_of(server, progress=False), PROGRESS) == []


@pytest.mark.parametrize(
    ("num_previews", "num_steps", "steps"),
    [(0, 20, []), (1, 20, [10]), (3, 20, [5, 10, 15]), (3, 2, [1]), (3, 7, [2, 4, 6]), (2, 1, [])],
)
def test_previews_are_spread_evenly(server: RunningServer, num_previews: int, num_steps: int, steps: list[int]) -> None:
    partials = kind(events_of(server, partial_images=num_previews, num_inference_steps=num_steps), PARTIAL)
    assert [(event["partial_image_index"], event["step"]) for event in partials] == list(enumerate(steps))


@pytest.mark.parametrize(("output_format", "magic"), [("jpeg", b"\xff\xd8\xff"), ("webp", b"RIFF")])
def test_previews_have_the_requested_format_and_their_actual_size(
    server: RunningServer, output_format: str, magic: bytes
) -> None:
    [partial] = kind(events_of(server, partial_images=1, output_format=output_format, size="512x512"), PARTIAL)
    file = base64.b64decode(partial["b64_json"])
    assert file.startswith(magic)
    assert partial["output_format"] == output_format
    picture = decode_image(file)
    assert partial["size"] == f"{picture.width_px}x{picture.height_px}"


def test_each_image_of_a_request_has_its_own_completed_event(server: RunningServer) -> None:
    events = events_of(server, n=3, partial_images=1)
    completed = sorted(kind(events, COMPLETED), key=lambda event: event["image_index"])
    assert [(event["image_index"], event["seed"]) for event in completed] == [(0, 5), (1, 6), (2, 7)]
    partials = kind(events, PARTIAL)
    assert sorted(event["image_index"] for event in partials) == [0, 1, 2]
    assert {event["partial_image_index"] for event in partials} == {0}


def test_a_wish_is_rewritten_in_a_stream_too(text_server: RunningServer) -> None:
    [completed] = kind(events_of(text_server, prompt="with a fox", prompt_rewriter="auto"), COMPLETED)
    assert completed["revised_prompt"] == FOX
    text = read_infotext(base64.b64decode(completed["b64_json"]))
    assert text is not None
    assert 'Original prompt: "with a fox"' in text


def test_a_stream_can_be_cancelled_by_its_id_without_affecting_others(server: RunningServer) -> None:
    with stream(server, {**LONG, "n": 4}) as leaving, stream(server, SOON) as staying:
        request_id = next(leaving)["id"]
        assert next(leaving)["step"] >= 1
        answer = server.client.post(f"{GENERATIONS}/{request_id}/cancel")
        assert answer.json() == {"id": request_id, "object": "image.generation", "status": "cancelled"}
        *_, last = leaving
        assert (last["error"]["code"], last["error"]["type"]) == ("cancelled", "invalid_request_error")
        assert kind(list(staying), COMPLETED)
    logged = re.compile(rf'"request_id":"{request_id}".*"status":200.*"error":"cancelled"')
    wait_for(lambda: logged.search(server.errors.read_text()) is not None, SOON_S, "the line in the log")
    server.wait_for_requests(0)
    again = server.client.post(f"{GENERATIONS}/{request_id}/cancel")
    assert (again.status_code, error_of(again)["code"]) == (404, "request_not_found")


def test_openai_client_raises_when_its_stream_is_cancelled(server: RunningServer, client: OpenAI) -> None:
    stream = client.images.generate(prompt="a red fox", stream=True, extra_body={**LONG, "stream": True})
    request_id = stream.response.headers["x-request-id"]
    assert next(stream).type
    server.client.post(f"{GENERATIONS}/{request_id}/cancel")
    with pytest.raises(openai.APIError, match="cancelled") as caught:
        list(stream)
    assert caught.value.code == "cancelled"


def test_a_disconnect_midway_frees_the_slot(server: RunningServer) -> None:
    with stream(server, {**LONG, "n": 2}) as events:
        request_id = next(events)["id"]
        assert next(events)["step"] >= 1
        server.wait_for_requests(1)
    wait_for(
        lambda: server.num_requests() == 0, SOON_S, "the cancellation, long before its two thousand steps are done"
    )
    after = server.paint(seed=3).json()["id"]
    calls = server.client.get("/debug/trace").json()["unet_calls"]
    last_of_the_leaver = max(at for at, call in enumerate(calls) if request_id in call)
    assert all(call == [after] * len(call) for call in calls[last_of_the_leaver + 1 :])


def test_an_invalid_value_in_a_stream_is_a_plain_error(server: RunningServer, client: OpenAI) -> None:
    response = server.client.post(GENERATIONS, json={**SOON, "num_inference_steps": 0})
    assert (response.status_code, error_of(response)["param"]) == (400, "num_inference_steps")
    with pytest.raises(openai.BadRequestError):
        client.images.generate(prompt=" ", stream=True)


def test_partial_images_without_a_stream_are_reported(server: RunningServer) -> None:
    answer = server.paint(partial_images=2)
    assert any("partial_images" in warning for warning in answer.json()["warnings"])
