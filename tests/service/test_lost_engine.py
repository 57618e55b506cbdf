"""Engines that run but are unusable: a lost device, a hang or silence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.server import (
    GENERATIONS,
    SOON_S,
    RunningServer,
    error_of,
    files_of,
    running_server,
    wait_for,
)

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

FULL_PRECISION = '[model]\ndtype = "float32"\n'
LONG: dict[str, Any] = {"num_steps": 1000, "sampler": "ddim", "guidance_scale": 1.0}
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
WORK: dict[str, dict[str, Any]] = {
    GENERATIONS: {"prompt": "a fox"},
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "once"},
    "/v1/prompts/rewrite": {"prompt": "a fox"},
}

HANG_AFTER_S = 12.0
SERVE = """
import os, sys
from pathlib import Path
from diffserve.settings.layers import load_settings
from diffserve.service.engine import client, connection
from diffserve.service.run import serve

client.SILENT_AFTER_S, client.PING_EVERY_S = 1.0, 0.25
start = connection.EngineConnection.start

async def start_with_faults(*arguments):
    os.environ["DIFFSERVE_FAULTS"] = (Path(sys.argv[0]).parent / "faults").read_text()
    return await start(*arguments)

connection.EngineConnection.start = start_with_faults
own = {"DIFFSERVE_SERVE_PORT": "0", "DIFFSERVE_SERVE_DATA_DIR": os.environ["DIFFSERVE_SERVE_DATA_DIR"]}
own["DIFFSERVE_ENGINE_COMPILE"] = "warm"  # avoids packages in the cache folder that all tests share
serve(load_settings(model=sys.argv[2], config=sys.argv[6], env=own))
"""
"""A server that is sooner told, and each of whose engines begins with the faults that are written in a file by then."""

Model = Callable[[str], Path]


class BreakingServer:
    """A server whose engine breaks on purpose, in a different way each time."""

    def __init__(self, server: RunningServer, faults: Path) -> None:
        self.server = server
        self._faults = faults

    def break_next(self, faults: str) -> None:
        """Give ``faults`` to the next engine."""
        self._faults.write_text(faults)

    @contextmanager
    def losing(self, kind: str, reason: str) -> Iterator[RunningServer]:
        """Yield the server while its engine is lost in this block.

        At the end the engine was replaced once, ``kind`` is counted and ``reason`` is in the log.
        """
        self.server.wait_until_ready()
        engine, before, num_reasons = self.server.engine, losses(self.server), len(reasons(self.server))
        yield self.server
        self.server.wait_until_ready()
        assert self.server.engine.pid != engine.pid
        [logged_reason] = wait_for(lambda: reasons(self.server)[num_reasons:], SOON_S, "the reason in the log")
        assert reason in logged_reason
        assert losses(self.server) == before | {kind: before.get(kind, 0.0) + 1.0}


@pytest.fixture(scope="module")
def breaking(tiny_model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BreakingServer]:
    """Run one server for four losses; five within five minutes end it."""
    folder = tmp_path_factory.mktemp("breaking")
    script, faults = folder / "serve.py", folder / "faults"
    script.write_text(SERVE)
    faults.write_text("unet.sticky@60")
    config = FULL_PRECISION + f"[serve]\ndebug = true\nspare_engine = false\nhang_after_s = {HANG_AFTER_S}\n"
    with running_server(tiny_model("sd15"), folder, config=config, command=[str(script)]) as server:
        yield BreakingServer(server, faults)


def check_unavailable(response: httpx.Response) -> None:
    """Check for a 503 with a Retry-After."""
    assert response.status_code == 503, response.text[:300]
    assert error_of(response)["code"] == "engine_unavailable"
    assert re.fullmatch(r"\d+", response.headers["retry-after"])
    assert 1 <= int(response.headers["retry-after"]) <= 60
    assert response.headers.get("x-should-retry") != "false"


def reasons(server: RunningServer) -> list[str]:
    """Return the logged reasons for which engines were lost."""
    lines = [json.loads(line) for line in server.errors.read_text().splitlines() if line.startswith("{")]
    return [line["reason"] for line in lines if line["event"] == "engine lost"]


def losses(server: RunningServer) -> dict[str, float]:
    """Return the numbers of lost engines in ``/metrics`` by kind."""
    samples = re.findall(r'diffserve_engine_restarts_total\{reason="(\w+)"\} (\S+)', server.client.get("/metrics").text)
    return {kind: float(count) for kind, count in samples}


def test_a_persistent_device_error_replaces_the_engine_with_503_for_its_requests(
    breaking: BreakingServer,
) -> None:
    with breaking.losing("device", "device-side assert") as server, ThreadPoolExecutor(3) as pool:
        breaking.break_next("unet.error@2,unet.broken@30")
        waiting = [pool.submit(server.paint, **LONG) for _ in range(2)]
        watching = pool.submit(server.paint, **LONG, stream=True, partial_images=1)
        for future in waiting:
            check_unavailable(future.result(timeout=SOON_S))
        events = watching.result(timeout=SOON_S)
        assert events.status_code == 503 or '"code":"engine_unavailable"' in events.text.rstrip().rpartition("\n")[2]
    assert len(files_of(server.paint(num_steps=1))) == 1


def test_one_failed_image_fails_alone_and_an_unknown_device_error_replaces_the_engine(
    breaking: BreakingServer,
) -> None:
    with breaking.losing("device", "an injected, permanent fault") as server:
        breaking.break_next("unet.hang@20")
        first = server.engine
        failed = server.paint(num_steps=2, guidance_scale=1.0)
        assert (failed.status_code, error_of(failed)["code"]) == (500, "internal_error")
        assert len(files_of(server.paint(num_steps=2))) == 1
        assert server.engine.pid == first.pid
        check_unavailable(server.paint(**LONG))


def test_an_engine_hanging_in_a_call_is_replaced_although_it_answers_pings(breaking: BreakingServer) -> None:
    with breaking.losing("hang", "has taken") as server:
        breaking.break_next("")
        check_unavailable(server.paint(**LONG))
    assert len(files_of(server.paint())) == 1


def test_a_silent_engine_is_replaced_and_every_route_refuses_work_meanwhile(
    breaking: BreakingServer,
) -> None:
    with breaking.losing("silence", "no response for") as server, ThreadPoolExecutor(1) as pool:
        engine = server.engine
        waiting = pool.submit(server.paint, **LONG)
        wait_for(lambda: server.num_requests() == 1, SOON_S, "it to be taken")
        engine.suspend()
        wait_for(lambda: server.status("/readyz") == 503, SOON_S, "readiness to end")
        for route, body in WORK.items():
            for stream in (False, True):
                check_unavailable(server.client.post(route, json=body | {"stream": stream}))
        assert not waiting.done(), "it took longer to refuse eight requests than to replace the engine"
        check_unavailable(waiting.result(timeout=SOON_S))
