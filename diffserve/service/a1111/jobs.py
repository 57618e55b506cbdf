"""Active A1111 requests: their progress, which clients poll, and their interruption.

A client sees and stops its own requests only, as ``service.admission`` identifies clients.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from cachetools import LRUCache

from diffserve.api.types import Accepted, ImageFinished, Picture, Preview, Progress, Queued

MAX_REMEMBERED: Final = 1000
"""Limits on the stored ids of finished tasks and on the clients with stored options."""


class PolledJob:
    """Progress of one request.

    Attributes:
        write: Encodes a preview.
        stop: Resolves when the client stops the request, to "skip" or "interrupt".
        has_begun: Whether a step is done.
    """

    def __init__(self, client: str, task: str, num_images: int, *, write: Callable[[Picture], bytes]) -> None:
        self.write = write
        self.client = client
        self.task = task
        self.num_images = num_images
        self.began = time.strftime("%Y%m%d%H%M%S")
        self.stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.preview: Preview | None = None
        self.num_previews = 0
        self.has_begun = False
        self.num_steps = 0
        self.num_done = 0
        self._shares: dict[int, float] = {}
        self._step = 0
        self._done_s: float | None = None  # expected end

    def watch(self, event: object) -> None:
        """Take an event of the engine."""
        match event:
            case Accepted() | Queued() if event.seconds_left is not None:
                self._done_s = time.monotonic() + event.seconds_left
            case Progress():
                self.has_begun, self.num_steps = True, event.num_steps
                self._shares[event.image_index] = event.step_index / event.num_steps
                self._step = event.step_index
                self._done_s = time.monotonic() + (event.request_seconds_left or 0.0)
            case Preview():
                self.preview, self.num_previews = event, self.num_previews + 1
            case ImageFinished():
                self.num_done += 1

    @property
    def progress(self) -> float:
        """Completed share of the request, 0 to 1."""
        return sum(self._shares.values()) / self.num_images

    @property
    def seconds_left(self) -> float:
        """Estimated seconds until the last image; 0 if unknown."""
        return 0.0 if self._done_s is None else max(0.0, self._done_s - time.monotonic())

    def state(self) -> dict[str, Any]:
        """Return A1111's ``state`` object."""
        is_stopped = self.stop.done()
        return {
            "skipped": is_stopped and self.stop.result() == "skip",
            "interrupted": is_stopped and self.stop.result() == "interrupt",
            "stopping_generation": is_stopped,
            "job": self.task,
            "job_count": self.num_images,
            "job_timestamp": self.began,
            "job_no": self.num_done,
            "sampling_step": self._step,
            "sampling_steps": self.num_steps,
        }


IDLE: Final[dict[str, Any]] = {
    "skipped": False, "interrupted": False, "stopping_generation": False, "job": "", "job_count": 0,
    "job_timestamp": "0", "job_no": 0, "sampling_step": 0, "sampling_steps": 0,
}  # fmt: skip


class Jobs:
    """Active jobs in order of arrival, and the options that clients have set."""

    def __init__(self) -> None:
        self._inside: dict[int, PolledJob] = {}
        self._over: LRUCache[tuple[str, str], bool] = LRUCache(MAX_REMEMBERED)
        self._options: LRUCache[str, dict[str, Any]] = LRUCache(MAX_REMEMBERED)
        self._next = 0

    @contextmanager
    def listed(self, job: PolledJob) -> Iterator[PolledJob]:
        """List a job for the length of the block."""
        self._next += 1
        place = self._next
        self._inside[place] = job
        try:
            yield job
        finally:
            del self._inside[place]
            if job.task:
                self._over[job.client, job.task] = True

    def of(self, client: str) -> list[PolledJob]:
        """Return the jobs of ``client``, the oldest first."""
        return [job for job in self._inside.values() if job.client == client]

    def find(self, client: str, task: str) -> PolledJob | None:
        """Return an active job by its task; None if there is none."""
        return next((job for job in self.of(client) if job.task == task), None)

    def is_over(self, client: str, task: str) -> bool:
        """Return whether a task has ended."""
        return (client, task) in self._over

    def stop(self, client: str, how: str, num_jobs: int | None = None) -> None:
        """Stop the oldest ``num_jobs`` of ``client``, or all; each answers with its images so far."""
        for job in self.of(client)[:num_jobs]:
            if not job.stop.done():
                job.stop.set_result(how)

    def options(self, client: str) -> dict[str, Any]:
        """Return the options of ``client``."""
        return self._options.get(client, {})

    def set_options(self, client: str, options: dict[str, Any]) -> None:
        """Store options of ``client``; None or "" removes one. The least recent clients are dropped."""
        merged = self.options(client) | options
        self._options[client] = {name: value for name, value in merged.items() if value not in (None, "")}
