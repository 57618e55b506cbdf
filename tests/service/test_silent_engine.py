"""An engine that loads silently: its process's activity decides whether it is given up."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from diffserve.service.engine import client, connection
from diffserve.service.engine.connection import EngineConnection, Loss, ProcessWork
from diffserve.settings.layers import load_settings

COMPUTES = "while True: pass"
WAITS = "import time; time.sleep(600)"
PATIENCE_S = 0.6


class Silent:
    """A connection to a process that answers no ping."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.lost: asyncio.Future[Loss] = asyncio.get_running_loop().create_future()

    def abandon(self, loss: Loss) -> None:
        self.lost.set_result(loss)

    async def ping(self) -> Any:
        await asyncio.Event().wait()

    def work(self) -> ProcessWork:
        return EngineConnection.work(cast(EngineConnection, self))


@contextmanager
def running(program: str) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.DEVNULL) as process:
        try:
            yield process.pid
        finally:
            process.kill()


async def watched_for(seconds: float, program: str) -> Loss | None:
    """Return why a loading engine that runs ``program`` was given up; ``None`` if it was not."""
    engine_client = client.EngineClient(
        load_settings(model="embedded", env={"DIFFSERVE_SERVE_HANG_AFTER_S": f"{PATIENCE_S}"})
    )
    with running(program) as pid:
        silent = Silent(pid)
        loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(seconds, loaded.set_result, None)
        await engine_client._watch(cast(EngineConnection, silent), until=loaded)
        return silent.lost.result() if silent.lost.done() else None


@pytest.mark.parametrize(("program", "is_given_up"), [(COMPUTES, False), (WAITS, True)], ids=["computes", "waits"])
def test_a_computing_engine_is_not_given_up(program: str, is_given_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PING_EVERY_S", 0.3)
    monkeypatch.setattr(client, "LOADING_ANSWERS_S", PATIENCE_S)
    monkeypatch.setattr(connection, "LEAST_WORK_S", 0.01)
    loss = asyncio.run(watched_for(6 * PATIENCE_S, program))
    assert (loss is not None) == is_given_up
    assert loss is None or loss.kind == "silence"
