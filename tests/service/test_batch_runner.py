"""The batch runner with endpoints that answer at once: retries, final results and cancellation."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import io
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diffserve.api.errors import EngineUnavailable, QueueFull
from diffserve.service.admission import Admission
from diffserve.service.http.keys import KeyRing
from diffserve.service.metrics import Metrics
from diffserve.service.stored import background, batch_runner
from diffserve.service.stored.batch_runner import BatchRunner
from diffserve.service.stored.owners import Owners
from diffserve.settings.layers import load_settings
from diffserve.store import Database, Keys
from diffserve.store.batches import WINDOW_S, Batch, Batches
from diffserve.store.files import Files

PATH = "/v1/echo"
Echo = Callable[[Request], Awaitable[Response]]


class Works:
    """A runner over a folder, with ``echo`` as its only endpoint."""

    def __init__(self, folder: Path, echo: Echo, *, age_s: float = 0.0) -> None:
        self.settings = load_settings(env={})
        self.database = Database(folder)
        self.files = Files(self.database, 10**9)
        self.batches = Batches(self.database, self.files, lambda: time.time() - age_s)
        self.echo = echo
        self.keys = Keys(self.database)
        self.key = self.keys.add("app")[1]

    def begin(self, *numbers: int) -> str:
        lines = [json.dumps({"custom_id": str(n), "body": {"n": n}}) for n in numbers]
        file = self.files.add(self.key.id, "batch", "a", io.BytesIO("\n".join(lines).encode()), max_bytes=10**6)
        return self.batches.add(self.key.id, PATH, file.id, len(numbers), {}).id

    def run(self, name: str, *, until: Callable[[Batch], bool] = lambda batch: batch.is_over) -> Batch:
        async def go() -> Batch:
            app = FastAPI()
            app.state.engine = SimpleNamespace(is_ready=True)
            admission = Admission(self.settings, Metrics())
            owners = Owners(self.settings.serve, KeyRing(self.database))
            runner = self.runner = BatchRunner(app, self.batches, self.files, owners, admission, {PATH: self.echo})
            task = asyncio.create_task(runner.run_for_ever())
            try:
                async with asyncio.timeout(20):
                    while not until(batch := self.batches.get(name)):  # type: ignore[arg-type]
                        await asyncio.sleep(0.005)
                assert batch is not None
                return batch
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        return asyncio.run(go())

    def output_of(self, file: str) -> dict[str, Any]:
        lines = [json.loads(line) for line in self.files.path(file).read_text().splitlines()]
        assert len({line["custom_id"] for line in lines}) == len(lines)
        return {line["custom_id"]: line for line in lines}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_EVERY_S", "MAX_RETRY_S"):
        monkeypatch.setattr(batch_runner, name, 0.01)
        monkeypatch.setattr(background, name, 0.01)


def test_lines_are_retried_after_a_full_queue_or_a_lost_engine(tmp_path: Path) -> None:
    calls: list[int] = []
    clients = set()

    async def echo(request: Request) -> Response:
        n = (await request.json())["n"]
        calls.append(n)
        clients.add((request.state.client, request.state.key_id, request.state.priority))
        if n == 1 and calls.count(1) < 3:
            raise QueueFull("full", retry_after_s=0.01)
        if n == 2 and calls.count(2) < 2:
            raise EngineUnavailable("lost")
        if n == 3:
            raise EngineUnavailable("lost, by this very line")
        if n == 4:
            raise ZeroDivisionError("secret")
        return JSONResponse({"n": n})

    works = Works(tmp_path, echo)
    batch = works.run(works.begin(*range(6)))
    assert (batch.status, batch.num_completed, batch.num_failed) == ("completed", 4, 2)
    assert [calls.count(n) for n in range(6)] == [1, 3, 2, 3, 1, 1]
    output, errors = works.output_of(batch.output_file), works.output_of(batch.error_file)
    assert {int(name): line["response"]["body"]["n"] for name, line in output.items()} == {n: n for n in (0, 1, 2, 5)}
    assert {name: line["response"]["status_code"] for name, line in errors.items()} == {"3": 503, "4": 500}
    assert "secret" not in str(errors)
    assert clients == {(f"batch/{works.key.id}", works.key.id, "batch")}


def test_a_full_disk_pauses_the_batch_and_torn_lines_are_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_full = 0

    async def echo(request: Request) -> Response:
        return JSONResponse(await request.json())

    works = Works(tmp_path, echo)
    write = works.batches._write

    def full(file: str, text: bytes, at: int) -> None:
        nonlocal num_full
        num_full += 1
        if num_full % 3:
            with works.files.path(file).open("ab") as torn:
                torn.write(text[:5])
            raise OSError(errno.ENOSPC, "full")
        write(file, text, at)

    monkeypatch.setattr(works.batches, "_write", full)
    batch = works.run(works.begin(*range(4)))
    assert (batch.status, batch.num_completed, num_full) == ("completed", 4, 12)
    assert set(works.output_of(batch.output_file)) == {"0", "1", "2", "3"}


def test_a_stopped_batch_continues(tmp_path: Path) -> None:
    stuck = asyncio.Event()
    calls: list[int] = []

    async def echo(request: Request) -> Response:
        n = (await request.json())["n"]
        calls.append(n)
        if n >= 3:
            await stuck.wait()
        return JSONResponse({"n": n})

    works = Works(tmp_path, echo)
    name = works.begin(*range(6))
    works.run(name, until=lambda batch: batch.num_completed == 3)
    stuck.set()
    batch = works.run(name)
    assert (batch.status, batch.num_completed, calls.count(0)) == ("completed", 6, 1)


def test_old_batches_expire_and_a_revoked_key_ends_its_batch(tmp_path: Path) -> None:
    async def never(request: Request) -> Response:
        await asyncio.Event().wait()
        raise AssertionError

    works = Works(tmp_path, never, age_s=WINDOW_S)
    batch = works.run(works.begin(1, 2))
    assert (batch.status, batch.num_failed) == ("expired", 2)
    assert {line["error"]["code"] for line in works.output_of(batch.error_file).values()} == {"batch_expired"}
    works = Works(tmp_path / "other", never)
    name = works.begin(1)
    works.keys.add("another")
    works.keys.revoke("app")
    batch = works.run(name)
    assert (batch.status, batch.error) == ("failed", "invalid_key: its API key is not valid any more.")


def test_a_cancelled_batch_frees_its_concurrency(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "LINES_AT_ONCE", 2)

    async def echo(request: Request) -> Response:
        n = (await request.json())["n"]
        if n < 100:
            name = cancelled[n // 10]
            works.batches.move(name, "cancelling", of=("validating", "in_progress"))
            works.runner.stop(name)
            await asyncio.Event().wait()
        return JSONResponse({"n": n})

    works = Works(tmp_path, echo)
    cancelled = [works.begin(*range(first, first + 9)) for first in range(0, 50, 10)]

    def all_over(batch: Batch) -> bool:
        return batch.is_over and all(batch is not None and batch.is_over for batch in map(works.batches.get, cancelled))

    batch = works.run(works.begin(100, 101, 102, 103), until=all_over)
    assert (batch.status, batch.num_completed) == ("completed", 4)
    ends = [works.batches.get(name) for name in cancelled]
    assert [end.status for end in ends if end is not None] == ["cancelled"] * 5


def test_batches_wait_and_log_while_another_server_uses_the_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def echo(request: Request) -> Response:
        return JSONResponse(await request.json())

    def warnings() -> list[str]:
        return [record.message for record in caplog.records if "another server" in record.message]

    works = Works(tmp_path, echo)
    events: list[str] = []
    with (works.files.folder.parent / "batches.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def goes_on(batch: Batch) -> bool:
            events.append(batch.status)
            if warnings() and len(events) > 20:
                fcntl.flock(other, fcntl.LOCK_UN)
            return batch.is_over

        batch = works.run(works.begin(1), until=goes_on)
    assert (batch.status, batch.num_completed) == ("completed", 1)
    assert len(set(events[:20])) == 1
    assert len(warnings()) == 1
