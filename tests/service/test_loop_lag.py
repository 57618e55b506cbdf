"""The event loop stays responsive with any input, on any route, and with a hundred readers."""

from __future__ import annotations

import asyncio
import hashlib
import re
import struct
import time
import zlib
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from diffserve.api.types import Picture
from diffserve.media.images import encode_image
from diffserve.service.threads import LOOK_EVERY_S, watch_loop
from tests.service.server import GENERATIONS, SOON_S, RunningServer
from tests.service.test_bad_input import WRONG_VALUES


def seen_while(work: Callable[[], object]) -> tuple[float, float]:
    """Return the longest (late, blocked) in seconds while ``work`` runs in the loop."""
    delays: list[tuple[float, float]] = []

    async def run() -> None:
        watching = asyncio.create_task(watch_loop(lambda late_s, blocked_s: delays.append((late_s, blocked_s))))
        await asyncio.sleep(LOOK_EVERY_S / 2)
        work()
        await asyncio.sleep(2 * LOOK_EVERY_S)
        watching.cancel()

    asyncio.run(run())
    return max(late_s for late_s, _ in delays), max(blocked_s for _, blocked_s in delays)


def compute(seconds: float) -> None:
    """Keep a core busy for this much CPU time of the thread."""
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        hashlib.sha256(b"x" * 1000)


def test_computation_within_the_loop_is_detected() -> None:
    late_s, blocked_s = seen_while(lambda: compute(0.4))
    assert late_s >= 0.3
    assert 0.3 <= blocked_s <= late_s


def test_sleeping_counts_as_late_but_not_as_blocked() -> None:
    late_s, blocked_s = seen_while(lambda: time.sleep(0.4))
    assert late_s >= 0.3
    assert blocked_s < 0.3


POST_ROUTES = (
    *(GENERATIONS, "/v1/chat/completions", "/v1/completions", "/v1/prompts/rewrite"),
    *("/v1/responses", "/v1/embeddings"),
)
PAGE_NAMES = ("queue/join", "run/generate", "call/generate", "cancel", "reset")
PAGE_ROUTES = tuple(f"/gradio_api/{name}" for name in PAGE_NAMES)
GET_ROUTES = (
    *("/livez", "/readyz", "/metrics", "/v1/models", "/v1/models/dall-e-3", "/openapi.json", "/nowhere"),
    *("/", "/config", "/theme.css", "/gradio_api/info", "/gradio_api/startup-events"),
)
NUM_READERS = 100
BODIES = {
    "no-json": b"{",
    "deep-list": b"[" * 10_000 + b"]" * 10_000,
    "long-text": b'{"prompt": "%s", "data": ["%s"]}' % (b"x" * 400_000, b"y" * 400_000),
    "numbers": b'{"prompt": "a", "data": [' + b"1," * 400_000 + b"1]}",
    "objects": b'{"prompt": "a", "messages": [' + b"{}," * 250_000 + b'{}], "data": []}',
    "lists": b'{"prompt": [' + b"[]," * 250_000 + b'[]], "data": [[]]}',
    "19-mb": b'{"prompt": "a", "foo": "' + b"x" * 19_000_000 + b'"}',
}


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def hostile_pictures() -> dict[str, bytes]:
    """Return PNGs that are built to keep a reader busy; the first once blocked the server for a minute."""
    file = encode_image(Picture.from_array(np.zeros((8, 8, 3), dtype=np.uint8)))
    pairs = ", ".join(f"k{i}: v" for i in range(250_000)).encode()
    inflated = zlib.compress(b"a" * 1_000_000)
    within = {
        "pairs": chunk(b"tEXt", b"parameters\0" + pairs),
        "pairs-within-the-cap": chunk(b"tEXt", b"parameters\0" + pairs[:8000]),
        "inflating": b"".join(chunk(b"zTXt", b"k%d\0\0" % i + inflated) for i in range(60)),
        "many-chunks": b"".join(chunk(b"tEXt", b"k%d\0v" % i) for i in range(500_000)),
    }
    return {name: file[:33] + chunks + file[33:] for name, chunks in within.items()}


@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("path", [*POST_ROUTES, *PAGE_ROUTES])
def test_a_hostile_body_does_not_block_the_loop(page_server: RunningServer, path: str, body: bytes) -> None:
    answer = page_server.client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code < 500 or path in PAGE_ROUTES


@pytest.mark.slow
@pytest.mark.parametrize("path", POST_ROUTES)
def test_invalid_values_do_not_block_the_loop(text_server: RunningServer, path: str) -> None:
    for _, fields, *_ in WRONG_VALUES:
        body = {"prompt": "a red fox", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1} | fields
        sent = {name: value for name, value in body.items() if value is not ...}
        text_server.client.post(path, json=sent)


@pytest.mark.slow
def test_a_hostile_image_does_not_block_the_loop_and_is_answered_soon(page_server: RunningServer) -> None:
    client = page_server.client
    for name, picture in hostile_pictures().items():
        [path] = client.post("/gradio_api/upload", files={"files": (f"{name}.png", picture)}).json()
        file = {"path": path, "meta": {"_type": "gradio.FileData"}}
        started_s = time.monotonic()
        answer = client.post("/gradio_api/run/read_parameters", json={"data": [file]})
        assert answer.status_code == 200, name
        assert time.monotonic() - started_s < SOON_S / 2


@pytest.mark.slow
def test_large_images_do_not_block_the_loop(page_server: RunningServer) -> None:
    bodies: list[dict[str, Any]] = [{}, {"stream": True, "partial_images": 3}, {"output_format": "webp"}]
    for fields in bodies:
        answer = page_server.paint(size="2048x2048", n=4, response_format="url", **fields)
        assert answer.status_code == 200
    for url in re.findall(r'"url":"([^"]+)"', answer.text):
        assert page_server.client.get(url).status_code == 200


async def read_at_once(server: RunningServer, calls: list[dict[str, Any]], patience_s: float) -> list[int | None]:
    """Return the status of every concurrent call; ``None`` where the answer continues after ``patience_s``."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=SOON_S, trust_env=False, limits=limits) as client:

        async def read(call: dict[str, Any]) -> int | None:
            try:
                async with asyncio.timeout(patience_s), client.stream(**call) as answer:
                    async for _ in answer.aiter_bytes():
                        pass
                    return answer.status_code
            except TimeoutError:
                return None

        return await asyncio.gather(*(read(call) for call in calls))


@pytest.mark.slow
@pytest.mark.parametrize("path", GET_ROUTES)
def test_a_hundred_readers_do_not_block_the_loop(page_server: RunningServer, path: str) -> None:
    calls = [{"method": "GET", "url": path} for _ in range(NUM_READERS)]
    statuses = set(asyncio.run(read_at_once(page_server, calls, SOON_S)))
    assert statuses == {page_server.status(path)}


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/gradio_api/heartbeat/{}", "/gradio_api/queue/data?session_hash={}"])
def test_a_hundred_visitors_do_not_block_the_loop(page_server: RunningServer, path: str) -> None:
    calls = [{"method": "GET", "url": path.format(f"reader{i}")} for i in range(NUM_READERS)]
    assert set(asyncio.run(read_at_once(page_server, calls, 2.0))) <= {None, 200}
    time.sleep(2.0)  # the server notices the disconnects a moment later


@pytest.mark.slow
def test_a_hundred_streams_do_not_block_the_loop(server: RunningServer) -> None:
    body = {"prompt": "a red fox", "steps": 4, "stream": True, "partial_images": 3, "size": "512x512"}
    calls = [{"method": "POST", "url": GENERATIONS, "json": body | {"seed": i}} for i in range(NUM_READERS)]
    assert set(asyncio.run(read_at_once(server, calls, 4 * SOON_S))) <= {200, 429}
