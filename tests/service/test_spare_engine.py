"""Fast recovery after a loss: a spare process takes over, and refusals name the expected load time."""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import msgspec
import numpy as np
import psutil
import pytest
from httpx import ASGITransport, AsyncClient

from diffserve.api.types import DiffusionParams, GenerationRequest, ImageFinished
from diffserve.service.app import create_app
from diffserve.service.engine import client as engine_client
from diffserve.service.engine.client import USUAL_LOAD_S, EngineClient, LoadTimes
from diffserve.service.engine.connection import EngineConnection
from diffserve.service.lifecycle import Gate
from diffserve.settings.layers import load_settings
from tests.service.server import GENERATIONS, SOON_S, START_S

Model = Callable[[str], Path]
T = TypeVar("T")


REQUEST = GenerationRequest(
    prompt="a red fox", width_px=64, height_px=64, seed=5, diffusion=DiffusionParams(num_steps=2, sampler="ddim")
)


def engines() -> set[int]:
    """Return the process ids of the running engines that this process has started."""
    children = psutil.Process().children()
    return {
        process.pid for process in children if process.is_running() and "diffserve.engine.process" in process.cmdline()
    }


async def until(look: Callable[[], T], seconds: float = START_S) -> T:
    """Return the first true result of ``look``."""
    async with asyncio.timeout(seconds):
        while not (result := look()):
            await asyncio.sleep(0.02)
        return result


async def picture(client: EngineClient) -> Any:
    """Return the image that the engine generates for REQUEST."""
    async with client.submit(msgspec.structs.replace(REQUEST, request_id=uuid4().hex)) as job:
        [painted] = [event async for event in job if isinstance(event, ImageFinished)]
    return painted.result.picture


@pytest.mark.slow
@pytest.mark.chaos
def test_a_ready_spare_replaces_a_lost_engine_and_is_replaced_itself(
    tiny_model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Start a spare earlier than in production.

    A spare that must answer gets all the time it needs, one that cannot answer gets a moment.
    """
    env = {"DIFFSERVE_SERVE_SPARE_ENGINE": "true", "DIFFSERVE_MODEL_DTYPE": "float32"}
    monkeypatch.setattr(engine_client, "SPARE_AFTER_S", 0.2)
    monkeypatch.setattr(engine_client, "SPARE_STARTS_S", START_S)
    caplog.set_level("INFO", "diffserve.engine")

    def facts(event: str, fact: str) -> list[Any]:
        return [vars(record)[fact] for record in caplog.records if record.message == event]

    async def live() -> None:
        client = EngineClient(load_settings(model=str(tiny_model("sd15")), env=env))
        client.start()
        await until(lambda: client.is_ready)
        before = await picture(client)
        [first] = facts("engine ready", "engine_pid")
        [dead] = await until(lambda: engines() - {first})
        psutil.Process(dead).kill()
        [spare] = await until(lambda: engines() - {first, dead})
        psutil.Process(first).kill()
        await until(lambda: not client.is_ready, SOON_S)
        await until(lambda: client.is_ready)
        assert facts("engine ready", "engine_pid") == [first, spare]
        assert np.array_equal((await picture(client)).array, before.array)
        [stuck] = await until(lambda: engines() - {spare})
        monkeypatch.setattr(engine_client, "SPARE_STARTS_S", 0.0)
        psutil.Process(stuck).suspend()
        psutil.Process(spare).kill()
        await until(lambda: len(facts("engine ready", "engine_pid")) == 3)
        assert facts("engine ready", "engine_pid")[2] not in (first, spare, stuck)
        assert not psutil.pid_exists(stuck)
        await client.stop()
        assert engines() == set()
        assert facts("engine lost", "exit_code") == [-signal.SIGKILL] * 2

    asyncio.run(live())


def test_load_times_are_stored_for_the_next_server(tmp_path: Path) -> None:
    first, other = (load_settings(model=name, env=cached(tmp_path)) for name in ("embedded", "embedded-turbo"))
    assert LoadTimes(first).expected_s(spare=False) == USUAL_LOAD_S
    LoadTimes(first).learn(23.4, spare=False)
    assert LoadTimes(first).expected_s(spare=False) == LoadTimes(first).expected_s(spare=True) == 23.4
    LoadTimes(first).learn(3.0, spare=True)
    assert [LoadTimes(first).expected_s(spare=spare) for spare in (False, True)] == [23.4, 3.0]
    assert LoadTimes(other).expected_s(spare=True) == USUAL_LOAD_S


def test_requests_during_a_load_get_the_expected_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
