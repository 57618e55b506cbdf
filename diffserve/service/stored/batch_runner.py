"""Batch runner: sends a few lines at a time through the normal endpoints while no interactive request waits.

One process per data folder runs batches, selected by a file lock. Lines that were interrupted by the end of a process
are run again by the next one; finished lines are not.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from diffserve.api.errors import DiffserveError, InvalidRequest
from diffserve.api.types import new_request_id
from diffserve.service.admission import Admission
from diffserve.service.http.errors import log_failure
from diffserve.service.stored.background import (
    LOOK_EVERY_S,
    MAX_RETRY_S,
    Answered,
    error_answer,
    folder_lock,
    refuse_early_answers,
    request_of,
    run_to_end,
    until_served,
    yield_to_interactive,
)
from diffserve.service.stored.owners import Owners
from diffserve.service.threads import BATCHES, FILES, LISTINGS
from diffserve.store.batch_input import lines_of, read_line
from diffserve.store.batches import Batch, Batches, LineDone
from diffserve.store.errors import StoreError
from diffserve.store.files import Files

LINES_AT_ONCE: Final = 8
"""Limit on the active lines of all batches."""

SWEEP_EVERY_S: Final = 3600.0

Answer = Callable[[Request], Awaitable[Response]]

log = logging.getLogger("diffserve.batches")


class KeyGoneError(Exception):
    """Error of a batch whose key is no longer valid."""


class BatchRunner:
    """Runs ``batches``; ``endpoints`` maps paths to handlers of lines."""

    def __init__(
        self,
        app: FastAPI,
        batches: Batches,
        files: Files,
        owners: Owners,
        admission: Admission,
        endpoints: Mapping[str, Answer],
    ) -> None:
        self._app = app
        self._batches = batches
        self._files = files
        self._owners = owners
        self._admission = admission
        self._endpoints = endpoints
        self._slots = asyncio.Semaphore(LINES_AT_ONCE)
        self._wakeup = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def wake(self) -> None:
        """Look for new batches now."""
        self._wakeup.set()

    def stop(self, name: str) -> None:
        """Cancel the batch with ID ``name``."""
        if name in self._tasks:
            self._tasks[name].cancel()
        self.wake()

    async def run_for_ever(self) -> None:
        """Run unfinished and new batches until cancelled."""
        async with folder_lock(self._files.folder.parent / "batches.lock", "batches", log):
            await self._run_all()

    async def _run_all(self) -> None:
        swept_s = -SWEEP_EVERY_S
        try:
            while True:
                self._wakeup.clear()
                try:
                    if time.monotonic() - swept_s >= SWEEP_EVERY_S:
                        swept_s = time.monotonic()
                        await FILES.run(self._sweep)
                    for batch in await LISTINGS.run(self._batches.unfinished):
                        if batch.id not in self._tasks:
                            task = self._tasks[batch.id] = asyncio.create_task(self._run(batch))
                            task.add_done_callback(partial(self._forget, batch.id))
                        elif not await self._owners.is_good(batch.owner):
                            self._tasks[batch.id].cancel()  # it starts again and fails at its first line
                except (OSError, StoreError) as error:
                    log_failure(log, "batches cannot be read", error)
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._wakeup.wait()
        finally:
            running = list(self._tasks.values())
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _sweep(self) -> None:
        self._batches.sweep()
        self._files.sweep(self._batches.files_in_use())

    def _forget(self, name: str, _: asyncio.Task[None]) -> None:
        self._tasks.pop(name, None)
        self.wake()

    async def _run(self, batch: Batch) -> None:
        """Run a batch to its end; after disk or database errors it is resumed later."""
        facts = {"batch": batch.id, "num_lines": batch.num_lines}
        try:
            result = await self._advance(batch)
            if result is not None:
                await run_to_end(self._batches.finish, batch.id, *result)
            log.info("batch finished", extra=facts)
        except (OSError, StoreError) as error:
            log_failure(log, "a batch waits", error, **facts)
            await asyncio.sleep(MAX_RETRY_S)
        except Exception:
            log.exception("a batch failed", extra=facts)
            await run_to_end(self._batches.finish, batch.id, "failed", "internal_error: internal server error.")

    async def _advance(self, batch: Batch) -> tuple[str, str] | None:
        """Run all lines; return the final status and the reason if it failed, or None if the batch has ended."""
        if batch.status == "cancelling":
            return "cancelled", ""
        if batch.status == "finalizing":
            return "completed", ""
        if batch.endpoint not in self._endpoints:
            return "failed", f"unknown_endpoint: {batch.endpoint} is not supported any more."
        moved = await run_to_end(self._batches.move, batch.id, "in_progress", of=("validating",))
        if moved is None or moved.status != "in_progress":
            return None
        try:
            async with asyncio.timeout(max(0.0, batch.expires_s - time.time())):
                await self._run_lines(batch)
        except TimeoutError:
            await self._expire_lines(batch)
            return "expired", ""
        except KeyGoneError:
            return "failed", "invalid_key: its API key is not valid any more."
        except FileNotFoundError:
            return "failed", "no_file: its file does not exist any more."
        await run_to_end(self._batches.move, batch.id, "finalizing", of=("in_progress",))
        return "completed", ""

    async def _run_lines(self, batch: Batch) -> None:
        """Run all unfinished lines in order, as many at once as there are free slots."""
        done = await BATCHES.run(self._batches.done_lines, batch)
        writing = asyncio.Lock()
        with closing(await BATCHES.run(self._files.path(batch.input_file).open, "rb")) as file:
            left = (line for line in lines_of(file) if line[0] not in done)
            try:
                async with asyncio.TaskGroup() as group:
                    while (line := await run_to_end(next, left, None)) is not None:
                        await self._acquire_slot()
                        task = group.create_task(self._finish_line(batch, line[0], line[1], writing))
                        task.add_done_callback(lambda _: self._slots.release())  # also if it never began
            except BaseExceptionGroup as failed:
                raise failed.exceptions[0] from None

    async def _acquire_slot(self) -> None:
        """Wait for a free slot, then at most ``MAX_YIELD_S`` for waiting interactive requests to begin."""
        await self._slots.acquire()
        try:
            await yield_to_interactive(self._admission)
        except BaseException:
            self._slots.release()
            raise

    async def _finish_line(self, batch: Batch, number: int, line: bytes, writing: asyncio.Lock) -> None:
        done = await self._run_line(batch, number, line)
        async with writing:
            await run_to_end(self._batches.finish_lines, batch.id, [done])

    async def _run_line(self, batch: Batch, number: int, line: bytes) -> LineDone:
        if not await self._owners.is_good(batch.owner):
            raise KeyGoneError
        try:
            line_request = read_line(line)
            refuse_early_answers(line_request.body, "batches do not stream", "a batch runs in the background")
        except InvalidRequest as error:
            wrong = InvalidRequest(f"line {number}: {error.message}", param=error.param, code=error.code)
            return line_done(number, custom_id_of(line), error_answer(wrong, new_request_id()))
        answer_of_line = await self._answer(batch, bytes(line_request.body))
        return line_done(number, line_request.custom_id, answer_of_line)

    async def _answer(self, batch: Batch, body: bytes) -> Answered:
        """Return the response to ``body``; full queues and missing engines are retried."""
        request_id = ""

        async def work() -> Answered:
            nonlocal request_id
            request = request_of(self._app, batch.endpoint, body, batch.owner, batch.base_url)
            request_id = request.state.request_id
            answer = await self._endpoints[batch.endpoint](request)
            return Answered(answer.status_code, request_id, bytes(answer.body))

        try:
            return await until_served(self._app.state.engine, work)
        except Exception as error:
            if not isinstance(error, DiffserveError):
                log_failure(log, "a line of a batch failed", error, request_id=request_id)
            return error_answer(error, request_id)

    async def _expire_lines(self, batch: Batch) -> None:
        """Mark all unfinished lines as expired."""
        done = await BATCHES.run(self._batches.done_lines, batch)
        path = self._files.path(batch.input_file)
        await run_to_end(self._batches.finish_lines, batch.id, await BATCHES.run(expired_lines, path, done))


def expired_lines(path: Path, done: set[int]) -> Sequence[LineDone]:
    """Return an error for each line of the input file at ``path`` whose number is not in ``done``."""
    error = {"code": "batch_expired", "message": "the batch expired before this line was processed."}
    with path.open("rb") as file:
        return [
            LineDone(number, _encode_line(custom_id_of(line), None, error), is_error=True)
            for number, line in lines_of(file)
            if number not in done
        ]


def line_done(number: int, name: str | None, answer: Answered) -> LineDone:
    """Format the output of line ``number`` with the custom ID ``name``."""
    body = answer.body if b"\n" not in answer.body else msgspec.json.encode(msgspec.json.decode(answer.body))
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": msgspec.Raw(body)}
    return LineDone(number, _encode_line(name, response, None), is_error=answer.status >= 400)


def _encode_line(name: str | None, response: Any, error: Any) -> bytes:
    answer = {"id": f"batch_req_{secrets.token_hex(16)}", "custom_id": name, "response": response, "error": error}
    return msgspec.json.encode(answer) + b"\n"


def custom_id_of(line: bytes) -> str | None:
    """Return the custom ID in a line, which may be an invalid request; None if it has none."""
    try:
        return msgspec.json.decode(line, type=_Named).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


class _Named(msgspec.Struct):
    custom_id: str | None = None
