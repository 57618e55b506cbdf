"""What A1111's clients ask while pictures are painted: how far they are, by task or all that is one's own; or an end.

Everything is limited to the client that asks, as ``service.admission`` tells clients apart: nobody sees or ends what
is another's.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from diffserve.api.types import Accepted, Painted, Picture, Preview, Progress, Queued

MAX_REMEMBERED: Final = 1000
"""Tasks that are over and still told apart from those that never were; and clients whose options are kept."""


class PolledJob:
    """One request on its way. ``further``: with hires fix, the work of its second pass, as a part of the first's;
    ``write`` makes a file of a picture of the way.

    stop       resolves when its client wants no more of it
    has_begun  whether a step was done
    """

    def __init__(
        self, client: str, task: str, num_images: int, further: float = 0.0, *, write: Callable[[Picture], bytes]
    ) -> None:
        self.write = write
        self.client = client
        self.task = task
        self.num_images = num_images
        self.num_passes = 2 if further else 1
        self.began = time.strftime("%Y%m%d%H%M%S")
        self.stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.preview: Preview | None = None
        self.num_previews = 0
        self.has_begun = False
        self.num_steps = 0
        self.num_done = 0
        self._shares: dict[int, float] = {}
        self._step = 0
        self._further = further
        self._begun_s = time.monotonic()
        # when each picture of the second pass will be there; None: all of the first
        self._done_s: dict[int | None, float] = {}
        self._pass = 0

    def next_pass(self) -> None:
        """What comes is of the second pass."""
        self._pass += 1
        self.num_done = 0
        self._done_s.clear()

    def watch(self, event: object, index: int | None = None) -> None:
        """An event of its pictures; ``index``: which picture of the job it is of, where the event cannot say."""
        match event:
            case Accepted() | Queued() if event.seconds_left is not None:
                self._done_s[index] = time.monotonic() + event.seconds_left
            case Progress():
                self.has_begun, self.num_steps = True, event.num_steps
                place = event.image_index if index is None else index
                self._shares[place] = (self._pass + event.step_index / event.num_steps) / self.num_passes
                self._step = event.step_index
                self._done_s[index] = time.monotonic() + (event.request_seconds_left or 0.0)
            case Preview():
                self.preview, self.num_previews = event, self.num_previews + 1
            case Painted():
                self.num_done += 1

    @property
    def progress(self) -> float:
        """Of all of it, 0 to 1."""
        return sum(self._shares.values()) / self.num_images

    @property
    def elapsed_s(self) -> float:
        """Seconds since it came."""
        return time.monotonic() - self._begun_s

    @property
    def seconds_left(self) -> float:
        """Until the last picture, and a second pass where there is to be one, as far as that is known."""
        if not self._done_s:
            return 0.0
        left_s = max(0.0, max(self._done_s.values()) - time.monotonic())
        is_last = self._pass + 1 == self.num_passes
        return left_s if is_last else left_s + self._further * (self.elapsed_s + left_s)

    def state(self) -> dict[str, Any]:
        """As A1111 tells it."""
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
    """The jobs that are inside, in order of arrival, and the options that clients have set."""

    def __init__(self) -> None:
        self._inside: dict[int, PolledJob] = {}
        self._over: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._options: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._next = 0

    @contextmanager
    def listed(self, job: PolledJob) -> Iterator[PolledJob]:
        """For the length of the block."""
        self._next += 1
        place = self._next
        self._inside[place] = job
        try:
            yield job
        finally:
            del self._inside[place]
            if job.task:
                self._over[job.client, job.task] = None
                while len(self._over) > MAX_REMEMBERED:
                    self._over.popitem(last=False)

    def of(self, client: str) -> list[PolledJob]:
        """Those of ``client``, the oldest first."""
        return [job for job in self._inside.values() if job.client == client]

    def find(self, client: str, task: str) -> PolledJob | None:
        """That one, where it is inside."""
        return next((job for job in self.of(client) if job.task == task), None)

    def is_over(self, client: str, task: str) -> bool:
        """Whether there was such a task, and is no more."""
        return (client, task) in self._over

    def stop(self, client: str, how: str, num_jobs: int | None = None) -> None:
        """End the oldest ``num_jobs`` of ``client``, or all: each answers with the pictures it has."""
        for job in self.of(client)[:num_jobs]:
            if not job.stop.done():
                job.stop.set_result(how)

    def options(self, client: str) -> dict[str, Any]:
        """What ``client`` has set."""
        return self._options.get(client, {})

    def set_options(self, client: str, options: dict[str, Any]) -> None:
        """Keep what ``client`` sets, for as long as others do not crowd it out; nothing, or "", takes it back."""
        told = self.options(client) | options
        self._options[client] = {name: value for name, value in told.items() if value not in (None, "")}
        self._options.move_to_end(client)
        while len(self._options) > MAX_REMEMBERED:
            self._options.popitem(last=False)
