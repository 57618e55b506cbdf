"""Back soon after a loss: a spare process takes over, and who is refused meanwhile is told how long a load takes."""

from __future__ import annotations

import asyncio
import json
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from httpx import ASGITransport, AsyncClient

from diffserve.config import load_settings
from diffserve.service.app import create_app
from diffserve.service.engine.client import USUAL_LOAD_S, EngineClient, LoadTimes
from diffserve.service.engine.connection import EngineConnection
from diffserve.service.lifecycle import Gate
from tests.service.server import GENERATIONS, SOON_S, START_S, RunningServer, files_of, running_server, wait_for

Model = Callable[[str], Path]


def logged(server: RunningServer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.errors.read_text().splitlines() if line.startswith("{")]


def ready_ones(server: RunningServer) -> list[int]:
    """Process ids of the engines that came up, as the log tells."""
    return [line["engine_pid"] for line in logged(server) if line["event"] == "engine ready"]


@pytest.mark.slow
@pytest.mark.chaos
def test_a_spare_that_has_its_libraries_takes_the_place_of_a_lost_engine_and_is_replaced(
    tiny_model: Model, tmp_path: Path
) -> None:
    env = {"DIFFSERVE_SERVE_SPARE_ENGINE": "true", "DIFFSERVE_MODEL_DTYPE": "float32"}
    with running_server(tiny_model("sd15"), tmp_path, env=env) as server:
        server.wait_until_ready()
        before = files_of(server.paint(seed=5))
        (first,) = ready_ones(server)
        (dead,) = wait_for(lambda: server.engines - {first}, START_S, "a spare")
        psutil.Process(dead).kill()
        (spare,) = wait_for(lambda: server.engines - {first, dead}, START_S, "another, for that is gone")
        psutil.Process(first).kill()
        wait_for(lambda: server.status("/readyz") == 503, SOON_S, "the loss to be noticed")
        server.wait_until_ready()
        assert ready_ones(server) == [first, spare]
        assert files_of(server.paint(seed=5)) == before
        (stuck,) = wait_for(lambda: server.engines - {spare}, START_S, "the next spare")
        psutil.Process(stuck).suspend()
        psutil.Process(spare).kill()
        wait_for(lambda: len(ready_ones(server)) == 3, START_S, "one that is no spare")
        assert ready_ones(server)[2] not in (first, spare, stuck)
        assert not psutil.pid_exists(stuck)
        assert server.stop() == 0
        lost = [line for line in logged(server) if line["event"] == "engine lost"]
        assert [line["exit_code"] for line in lost] == [-signal.SIGKILL] * 2


def test_how_long_a_model_takes_to_load_is_known_to_the_next_server(tmp_path: Path) -> None:
    first, other = (load_settings(model=name, env=cached(tmp_path)) for name in ("embedded", "embedded-turbo"))
    assert LoadTimes(first).expected_s(spare=False) == USUAL_LOAD_S
    LoadTimes(first).learn(23.4, spare=False)
    assert LoadTimes(first).expected_s(spare=False) == LoadTimes(first).expected_s(spare=True) == 23.4
    LoadTimes(first).learn(3.0, spare=True)
    assert [LoadTimes(first).expected_s(spare=spare) for spare in (False, True)] == [23.4, 3.0]
    assert LoadTimes(other).expected_s(spare=True) == USUAL_LOAD_S


def test_who_comes_while_the_model_loads_is_told_when_it_should_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_settings(env=cached(tmp_path))
    LoadTimes(settings).learn(23.4, spare=False)

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(EngineConnection, "start", never)

    async def ask() -> list[int]:
        client = EngineClient(settings)
        client.start()
        app = create_app(client, settings.serve, Gate())
        async with AsyncClient(transport=ASGITransport(app=app), base_url="http://127.0.0.1") as http:
            answers = [await http.post(GENERATIONS, json={"prompt": "x"}), await http.get("/readyz")]
        await client.stop()
        assert {answer.status_code for answer in answers} == {503}
        return [int(answer.headers["retry-after"]) for answer in answers]

    for seconds in asyncio.run(ask()):
        assert math.ceil(23.4) - 10 <= seconds <= math.ceil(23.4)


def cached(folder: Path) -> dict[str, str]:
    return {"DIFFSERVE_ENGINE_CACHE_DIR": str(folder / "cache")}
