"""Frames between the two processes: complete, validated on arrival, and limited in size."""

from __future__ import annotations

import socket
import threading
from typing import get_args

import msgspec
import numpy as np
import pytest

from diffserve.api import ipc
from diffserve.api.errors import InvalidRequest
from diffserve.api.rewrite_types import RewriteEvent, RewriteRequest
from diffserve.api.sampling_params import SamplingParams
from diffserve.api.text_types import ChatMessage, TextDelta, TextEvent, TextRequest
from diffserve.api.types import Cancelled, Event, GenerationRequest, Picture, Preview, RewriteOptions
from diffserve.settings.layers import load_settings

PICTURE = Picture.from_array(np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3))


@pytest.fixture
def ends() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def test_commands_are_complete_when_they_arrive_byte_by_byte(ends: tuple[socket.socket, socket.socket]) -> None:
    settings = load_settings(env={}, models=["embedded-turbo"])
    sent: list[ipc.Command] = [
        ipc.Load(model=settings.model, engine=settings.engine, text=settings.text, hang_after_s=60.0),
        ipc.Load(
            model=settings.model, engine=settings.engine, text=settings.text, hang_after_s=1.0, models=settings.models
        ),
        ipc.LookAgain(name="other"),
        GenerationRequest(prompt="a fox 🦊", init_image=PICTURE, seed=2**63 - 1),
        GenerationRequest(prompt="a fox", rewriting=RewriteOptions(style="tags", force=True)),
        TextRequest(prompt="once 🦊", params=SamplingParams(stop=("\n",), logprobs=3)),
        TextRequest(messages=(ChatMessage(role="user", content="hello"),), cache_salt=b"\xff"),
        RewriteRequest(wish="something cosy", num_prompts=3, deltas=True),
        ipc.Cancel(request_id="img-1"),
        ipc.Ping(number=3),
        ipc.ReadTrace(number=4),
    ]
    http_end, engine_end = ends

    def send_byte_by_byte() -> None:
        with http_end:
            for byte in b"".join(ipc.frame(command) for command in sent):
                http_end.sendall(bytes([byte]))

    sender = threading.Thread(target=send_byte_by_byte)
    sender.start()
    with engine_end:
        assert list(ipc.EngineEnd(engine_end).commands()) == sent
    sender.join(5)


def test_a_report_survives_encoding_and_decoding(ends: tuple[socket.socket, socket.socket]) -> None:
    report = Preview(request_id="img-1", image_index=0, step_index=3, picture=PICTURE)
    http_end, engine_end = ends
    with http_end, engine_end:
        ipc.EngineEnd(engine_end).send(report)
        length = ipc.body_length(http_end.recv(ipc.HEADER.size))
        assert ipc.decode_report(http_end.recv(length)) == report


def test_frames_of_several_threads_do_not_mix(ends: tuple[socket.socket, socket.socket]) -> None:
    http_end, engine_end = ends
    end = ipc.EngineEnd(engine_end)
    report = Preview(request_id="img-1", image_index=0, step_index=3, picture=PICTURE)

    def send_many() -> None:
        for _ in range(200):
            end.send(report)

    threads = [threading.Thread(target=send_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    received = 0
    with http_end, engine_end, http_end.makefile("rb") as stream:
        while received < 800:
            body = stream.read(ipc.body_length(stream.read(ipc.HEADER.size)))
            assert ipc.decode_report(body) == report
            received += 1
    for thread in threads:
        thread.join(5)


def test_every_event_is_a_report() -> None:
    events = {event for family in (Event, TextEvent, RewriteEvent) for event in get_args(family)}
    assert events <= set(get_args(ipc.Report))
    delta = TextDelta(request_id="a", text_index=0, text="fox", token_ids=(7,))
    assert ipc.decode_report(ipc.frame(delta)[ipc.HEADER.size :]) == delta
    assert ipc.decode_report(ipc.frame(Cancelled(request_id="a"))[ipc.HEADER.size :]) == Cancelled(request_id="a")


def test_an_image_request_is_validated_on_arrival(ends: tuple[socket.socket, socket.socket]) -> None:
    body = msgspec.msgpack.encode({"type": "image", "prompt": "a", "num_images": 10**9})
    http_end, engine_end = ends
    with http_end, engine_end:
        http_end.sendall(ipc.HEADER.pack(len(body)) + body)
        with pytest.raises(InvalidRequest, match="n is 1000000000"):
            next(ipc.EngineEnd(engine_end).commands())


def test_a_text_request_is_validated_on_arrival(ends: tuple[socket.socket, socket.socket]) -> None:
    request = {"type": "text", "prompt": "a", "params": {"temperature": -1.0}}
    body = msgspec.msgpack.encode(request)
    http_end, engine_end = ends
    with http_end, engine_end:
        http_end.sendall(ipc.HEADER.pack(len(body)) + body)
        with pytest.raises(InvalidRequest, match="temperature is -1"):
            next(ipc.EngineEnd(engine_end).commands())


def test_a_frame_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        ipc.body_length(b"\xff\xff\xff\xff")
    with pytest.raises(ValueError, match="at most"):
        list(ipc.FrameReader().feed(b"\xff\xff\xff\xff"))


@pytest.mark.parametrize("num_bytes", [1, 3, 7, 50, 10**6])
def test_frames_are_complete_however_they_are_split(num_bytes: int) -> None:
    sent = [Cancelled(request_id="a" * length) for length in (0, 1, 40)]
    data, reader = b"".join(map(ipc.frame, sent)), ipc.FrameReader()
    pieces = [data[at : at + num_bytes] for at in range(0, len(data), num_bytes)]
    assert [ipc.decode_report(body) for piece in pieces for body in reader.feed(piece)] == sent


def test_a_truncated_frame_ends_the_commands(ends: tuple[socket.socket, socket.socket]) -> None:
    http_end, engine_end = ends
    with engine_end:
        http_end.sendall(ipc.frame(ipc.Ping(number=1))[:-1])
        http_end.close()
        assert list(ipc.EngineEnd(engine_end).commands()) == []
