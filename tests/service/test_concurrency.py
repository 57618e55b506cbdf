"""Concurrent requests: images equal those generated alone, UNet calls are shared, disconnects free resources."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from http.client import HTTPResponse
from typing import Any

import httpx
import pytest

from tests.service.server import GENERATIONS, SOON_S, RunningServer, files_of, wait_for

pytestmark = pytest.mark.slow

PROMPTS = ("a red fox", "a blue boat at night", "the dog", "cat, cat and cat")
MIX: list[dict[str, Any]] = [
    {
        "prompt": PROMPTS[i % 4],
        "num_inference_steps": (4, 10, 20, 50)[i % 4],
        "sampler": ("ddim", "euler_a", "dpmpp_2m", "ddpm")[(i // 4) % 4],
        "guidance_scale": (1.0, 5.0, 7.5)[i % 3],
        "seed": 1000 + i,
        "size": ("64x64", "64x64", "512x512", "96x96")[(i // 2) % 4],
    }
    for i in range(16)
]


async def paint_all(server: RunningServer, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    async with httpx.AsyncClient(base_url=server.url, timeout=300.0, trust_env=False) as client:
        return await asyncio.gather(*(client.post(GENERATIONS, json=body) for body in bodies))


def send_and_hold(server: RunningServer, body: dict[str, Any], *, key: str = "anybody") -> socket.socket:
    """Return a connection on which ``key`` has requested ``body``, without reading the answer."""
    content = json.dumps(body).encode()
    head = f"POST {GENERATIONS} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    head += "Content-Type: application/json\r\nContent-Length: "
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=300)
    connection.sendall(f"{head}{len(content)}\r\n\r\n".encode() + content)
    return connection


def read_answer(connection: socket.socket) -> httpx.Response:
    """Return the answer on a connection from ``send_and_hold``."""
    answer = HTTPResponse(connection)
    answer.begin()
    return httpx.Response(answer.status, content=answer.read())


def test_sixteen_mixed_requests_equal_their_solo_runs_byte_for_byte_and_share_calls(server: RunningServer) -> None:
    alone = [files_of(server.client.post(GENERATIONS, json=body)) for body in MIX]
    together = asyncio.run(paint_all(server, MIX))
    calls = server.client.get("/debug/trace").json()["unet_calls"]
    assert [files_of(response) for response in together] == alone
    assert len({file for (file,) in alone}) == 16
    ids = {response.json()["id"] for response in together}
    assert max(len(ids & set(call)) for call in calls) >= 3


def test_the_same_request_twice_at_once_gives_the_same_image_twice(server: RunningServer) -> None:
    first, second = asyncio.run(paint_all(server, [MIX[1], MIX[1]]))
    assert files_of(first) == files_of(second)


def test_a_disconnect_cancels_only_that_request(server: RunningServer) -> None:
    neighbour, cancelled = {**MIX[3], "num_inference_steps": 100}, server.num_ended("cancelled")
    alone = files_of(server.client.post(GENERATIONS, json=neighbour))
    leaver = send_and_hold(server, {"prompt": "a red fox", "num_inference_steps": 1000, "sampler": "ddim", "n": 4})
    with send_and_hold(server, neighbour) as stayer:
        wait_for(lambda: server.num_requests() == 2, SOON_S, "both to be taken")
        leaver.close()
        assert files_of(read_answer(stayer)) == alone
    wait_for(
        lambda: server.num_ended("cancelled") > cancelled, SOON_S, "the cancellation, and not the end of its steps"
    )


def test_disconnected_clients_leave_the_queue(server: RunningServer) -> None:
    body = {**MIX[2], "num_inference_steps": 80, "n": 10}
    connections = [send_and_hold(server, body, key=f"client {number}") for number in range(7)]
    server.wait_for_requests(7)
    for connection in connections:
        connection.close()
    wait_for(lambda: server.num_requests() == 0, SOON_S, "the cancellations")
    assert server.status("/readyz") == 200


def probe_s(server: RunningServer) -> float:
    """Return the time of a trivial request in seconds."""
    asked_s = time.monotonic()
    assert server.status("/livez") == 200
    return time.monotonic() - asked_s


def test_large_images_do_not_hold_up_the_event_loop(server: RunningServer) -> None:
    calm = sorted(probe_s(server) for _ in range(20))[10]

    async def probe_while_painting() -> list[float]:
        body = {"prompt": "a red fox", "num_inference_steps": 1, "size": "2048x2048", "n": 3}
        async with httpx.AsyncClient(base_url=server.url, timeout=300.0, trust_env=False) as client:
            painting = asyncio.create_task(client.post(GENERATIONS, json=body))
            waits: list[float] = []
            while not painting.done():
                asked_s = time.monotonic()
                assert (await client.get("/livez")).status_code == 200
                waits.append(time.monotonic() - asked_s)
                await asyncio.sleep(0.02)
            assert len(files_of(await painting)) == 3
            return sorted(waits)

    waits = asyncio.run(probe_while_painting())
    assert len(waits) >= 10
    assert waits[len(waits) * 3 // 4] < max(1.0, 20 * calm)
