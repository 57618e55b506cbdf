"""Frames between the two processes: whole, checked on both sides, and never longer than agreed."""

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


def test_commands_arrive_whole_however_they_are_cut(ends: tuple[socket.socket, socket.socket]) -> None:
    settings = load_settings(env={}, models=["embedded-turbo"])
    sent: list[ipc.Command] = [
        ipc.Load(model=settings.model, engine=settings.engine, text=settings.text, hang_after_s=60.0),
        ipc.Load(
            model=settings.model, engine=settings.engine, text=settings.text, hang_after_s=1.0, models=settings.models
        ),
        ipc.LookAgain(name="other"),
        ipc.Submit(request=GenerationRequest(prompt="a fox 🦊", init_image=PICTURE, seed=2**63 - 1)),
        ipc.Submit(request=GenerationRequest(prompt="a fox", rewriting=RewriteOptions(style="tags", force=True))),
        ipc.Submit(request=TextRequest(prompt="once 🦊", params=SamplingParams(stop=("\n",), logprobs=3))),
        ipc.Submit(request=TextRequest(messages=(ChatMessage(role="user", content="hello"),), cache_salt=b"\xff")),
        ipc.Submit(request=RewriteRequest(wish="something cosy", num_prompts=3, deltas=True)),
        ipc.Cancel(request_id="img-1"),
        ipc.Ping(number=3),
        ipc.ReadTrace(number=4),
    ]
    ours, theirs = ends

    def send_byte_by_byte() -> None:
        with ours:
            for byte in b"".join(ipc.frame(command) for command in sent):
                ours.sendall(bytes([byte]))

    sender = threading.Thread(target=send_byte_by_byte)
    sender.start()
    with theirs:
        assert list(ipc.EngineEnd(theirs).commands()) == sent
    sender.join(5)


def test_reports_come_back_as_they_were(ends: tuple[socket.socket, socket.socket]) -> None:
    report = Preview(request_id="img-1", image_index=0, step_index=3, picture=PICTURE)
    ours, theirs = ends
    with ours, theirs:
        ipc.EngineEnd(theirs).send(report)
        length = ipc.body_length(ours.recv(ipc.HEADER.size))
        assert ipc.decode_report(ours.recv(length)) == report


def test_two_threads_never_mix_their_frames(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    end = ipc.EngineEnd(theirs)
    report = Preview(request_id="img-1", image_index=0, step_index=3, picture=PICTURE)

    def send_many() -> None:
        for _ in range(200):
            end.send(report)

    threads = [threading.Thread(target=send_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    received = 0
    with ours, theirs, ours.makefile("rb") as stream:
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


def test_a_request_is_checked_again_on_the_other_side(ends: tuple[socket.socket, socket.socket]) -> None:
    body = msgspec.msgpack.encode({"type": "Submit", "request": {"type": "image", "prompt": "a", "num_images": 10**9}})
    ours, theirs = ends
    with ours, theirs:
        ours.sendall(ipc.HEADER.pack(len(body)) + body)
        with pytest.raises(InvalidRequest, match="n is 1000000000"):
            next(ipc.EngineEnd(theirs).commands())


def test_a_text_request_is_checked_again_on_the_other_side(ends: tuple[socket.socket, socket.socket]) -> None:
    request = {"type": "text", "prompt": "a", "params": {"temperature": -1.0}}
    body = msgspec.msgpack.encode({"type": "Submit", "request": request})
    ours, theirs = ends
    with ours, theirs:
        ours.sendall(ipc.HEADER.pack(len(body)) + body)
        with pytest.raises(InvalidRequest, match="temperature is -1"):
            next(ipc.EngineEnd(theirs).commands())


def test_a_frame_that_announces_too_much_is_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        ipc.body_length(b"\xff\xff\xff\xff")
    with pytest.raises(ValueError, match="at most"):
        list(ipc.FrameReader().feed(b"\xff\xff\xff\xff"))


@pytest.mark.parametrize("num_bytes", [1, 3, 7, 50, 10**6])
def test_frames_are_whole_in_whatever_pieces_they_come(num_bytes: int) -> None:
    sent = [Cancelled(request_id="a" * length) for length in (0, 1, 40)]
    data, reader = b"".join(map(ipc.frame, sent)), ipc.FrameReader()
    pieces = [data[at : at + num_bytes] for at in range(0, len(data), num_bytes)]
    assert [ipc.decode_report(body) for piece in pieces for body in reader.feed(piece)] == sent


def test_a_frame_cut_off_by_a_death_ends_the_commands(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    with theirs:
        ours.sendall(ipc.frame(ipc.Ping(number=1))[:-1])
        ours.close()
        assert list(ipc.EngineEnd(theirs).commands()) == []
