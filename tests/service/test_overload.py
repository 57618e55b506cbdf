"""Overload: requests beyond the capacity are refused at once, and one client cannot use everything."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.open_loop import Answer, ask, flood, quantile
from diffserve.client import Client
from tests.service.server import GENERATIONS, SOON_S, RunningServer, error_of, running_server, wait_for
from tests.service.test_image_stream import stream

pytestmark = pytest.mark.slow

MAX_WAITING = 16
CONFIG = f"""
[model]
dtype = "float32"
[engine]
max_rows = 4
max_lanes = 4
max_waiting = {MAX_WAITING}
[serve]
max_backlog_s = 1e9
request_timeout_s = 100000.0
"""
LONG: dict[str, Any] = {"prompt": "a red fox", "num_inference_steps": 1000, "sampler": "ddim", "n": 4}


@pytest.fixture(scope="module")
def small_server(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """Run a server with a small queue."""
    with running_server(tiny_model("sd15"), tmp_path_factory.mktemp("small"), config=CONFIG) as server:
        server.wait_until_ready()
        yield server


@contextmanager
def full_queue(
    server: RunningServer, headers: dict[str, str] | None = None, *, waiting: dict[str, Any] = LONG
) -> Iterator[None]:
    """Fill the server as far as one client can: one request has all slots, others are ``waiting``.

    At the end all connections are closed.
    """
    with ExitStack() as stack:
        first = stack.enter_context(sent(server, {**LONG, "stream": True}, headers=headers))
        wait_for(lambda: re.search(rb'"step":[1-9]', first.recv(1 << 16)), SOON_S, "the first step")
        for _ in range(MAX_WAITING):
            stack.enter_context(sent(server, waiting, headers=headers))
        wait_for(lambda: server.num_requests() == 1 + MAX_WAITING - 2, SOON_S, "the others, but for two")
        yield
    wait_for(lambda: server.num_requests() == 0, SOON_S, "everybody to be forgotten")


def metric(server: RunningServer, name: str) -> float:
    """Return a value of ``/metrics``."""
    match = re.search(rf"^diffserve_{re.escape(name)} (\S+)", server.client.get("/metrics").text, re.MULTILINE)
    return 0.0 if match is None else float(match[1])


def sent(
    server: RunningServer, body: dict[str, Any], *, num_bytes: int | None = None, headers: dict[str, str] | None = None
) -> socket.socket:
    """Open a connection, send ``body`` or its first ``num_bytes``, and read nothing."""
    content = json.dumps(body).encode()
    lines = [f"POST {GENERATIONS} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in {"Content-Length": len(content), **(headers or {})}.items()]
    lines += ["", ""]
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60.0)
    connection.sendall("\r\n".join(lines).encode() + content[:num_bytes])
    return connection


@contextmanager
def asleep(server: RunningServer) -> Iterator[None]:
    """Suspend the engine's process during the block."""
    server.engine.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.engine.send_signal(signal.SIGCONT)


def test_a_refusal_does_not_wait_for_the_engine(small_server: RunningServer) -> None:
    with full_queue(small_server):
        with asleep(small_server):
            answers = [small_server.paint("a blue boat") for _ in range(5)]
        for answer in answers:
            assert answer.status_code == 429
            assert (error_of(answer)["type"], error_of(answer)["code"]) == ("rate_limit_error", "queue_full")
            assert 1 <= int(answer.headers["retry-after"]) <= 60


def test_a_refusal_does_not_wait_for_the_body_and_the_connection_stays_open(small_server: RunningServer) -> None:
    body = {"prompt": "a red fox " * 1000}
    with full_queue(small_server), sent(small_server, body, num_bytes=100) as connection:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 429")
        tail = json.dumps(body).encode()[100:]
        connection.sendall(tail + b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_for(lambda: b"HTTP/1.1 200" in connection.recv(1 << 16), SOON_S, "the next answer")


def test_a_stream_is_refused_with_a_status_instead_of_an_event(small_server: RunningServer) -> None:
    with full_queue(small_server):
        refused = small_server.paint("a blue boat", stream=True)
        assert refused.status_code == 429
        assert refused.headers["content-type"] == "application/json"


def test_a_client_that_fills_the_server_delays_another_by_at_most_one_turn(small_server: RunningServer) -> None:
    """Fill all slots and queue places of one client with long images; the second client is served first."""
    crowd, guest = ({"Authorization": f"Bearer {name}"} for name in ("crowd", "guest"))
    small = {"prompt": "a red fox", "num_inference_steps": 2}

    with full_queue(small_server, crowd):
        painted = 'images_total{model="sd15",outcome="painted"}'
        before = metric(small_server, painted)
        assert small_server.client.post(GENERATIONS, json=small, headers=crowd).status_code == 429
        assert small_server.client.post(GENERATIONS, json=small, headers=guest).status_code == 200
        wait_for(lambda: metric(small_server, painted) > before, SOON_S, "the numbers")
        assert metric(small_server, painted) == before + 1
        assert small_server.num_requests() >= MAX_WAITING // 2, "the crowd is still there"


def test_queued_streams_get_their_new_position(small_server: RunningServer) -> None:
    streamed = {**LONG, "stream": True}
    with (
        stream(small_server, streamed) as running,
        stream(small_server, streamed) as next_one,
        stream(small_server, streamed) as last_one,
    ):
        running_id = next(running)["id"]
        next_id = next(event for event in next_one if event["queue_position"] == 0)["id"]
        assert any(event["queue_position"] == 1 for event in last_one)
        small_server.client.post(f"{GENERATIONS}/{running_id}/cancel")
        moved = next(last_one)
        assert (moved["queue_position"], moved["step"], moved["image_index"]) == (0, 0, None)
        small_server.client.post(f"{GENERATIONS}/{next_id}/cancel")
        started = next(last_one)
        assert (started["queue_position"], started["image_index"]) == (None, 0)


def test_an_experiment_waits_while_the_queue_is_full(small_server: RunningServer) -> None:
    with Client(small_server.url) as client, ExitStack() as crowd:
        name = client.begin_experiment(
            samplers="ddim,euler", steps=[2], guidance=3.0, prompts=["a red fox", "a castle"], num_seeds=1,
            reference_steps=2,
        ).id  # fmt: skip
        crowd.enter_context(full_queue(small_server, waiting={**LONG, "num_inference_steps": 1, "n": 1}))
        experiment = client.experiment(name)
        assert (experiment.is_over, experiment.cells) == (False, ())
        crowd.close()
        wait_for(lambda: client.experiment(name).is_over, SOON_S, "the experiment")
        over = client.experiment(name)
        assert (over.status, len(over.cells)) == ("completed", 3)


def test_a_tenfold_burst_is_served_or_refused_quickly(small_server: RunningServer) -> None:
    """Request ten times the images that finish in the time of five; counts do not depend on the machine."""
    body = {"prompt": "a red fox", "num_inference_steps": 10, "sampler": "ddim"}

    async def send(number: int) -> Answer:
        return await ask(small_server.url, {**body, "seed": number})

    async def story() -> list[Answer]:
        started_s = time.monotonic()
        assert {answer.status for answer in await asyncio.gather(*map(send, range(8)))} == {200}
        rate_per_s = min(120.0, 10.0 * 8 / (time.monotonic() - started_s))
        answers = await flood(send, rate_per_s=rate_per_s, seconds=50 / rate_per_s)
        assert (await send(1)).status == 200, "it is over"
        return answers

    answers = asyncio.run(story())
    statuses = Counter(answer.status for answer in answers)
    assert set(statuses) == {200, 429}, statuses
    assert statuses[200] >= MAX_WAITING - 2, "those who fit in were let in"
    painted, refused = ([answer for answer in answers if answer.status == status] for status in (200, 429))
    assert all(answer.retry_after_s is not None and 1 <= answer.retry_after_s <= 60 for answer in refused)
    assert quantile([answer.seconds for answer in refused], 0.5) < 0.25 * quantile(
        [answer.seconds for answer in painted], 0.5
    )
    wait_for(lambda: small_server.num_requests() == 0, SOON_S, "the end of it")
