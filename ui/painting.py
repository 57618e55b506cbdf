"""One request for pictures as the page follows it: from its place in the queue to its files."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from diffserve.client import CompletedImage, ImageEvent, LostImage, PartialImage, Progress
from diffserve.errors import DiffserveError
from diffserve.images import read_infotext
from ui.parameters import Order, sampler_of
from ui.server import Server, sentence

log = logging.getLogger("diffserve.page")


class Picture(NamedTuple):
    """A finished picture: the server's own file, and what it says of itself.

    prompt    what it was painted from
    wish      what was asked for
    rewrites  whether it was to be rewritten first
    infotext  the parameters in the file
    warnings  what the server said about it
    """

    path: Path
    seed: int
    prompt: str
    wish: str
    rewrites: bool
    infotext: str
    warnings: tuple[str, ...]
    facts: str


class Painting:
    """A request that is being painted in a task of its own.

    pictures  those that are finished, in the order in which they were
    preview   the newest file of the way there, ``None`` before the first
    error     why it ended, for a person
    """

    def __init__(self, server: Server, order: Order, changed: Callable[[Picture | None], None]) -> None:
        self.order = order
        self.pictures: list[Picture] = []
        self.preview: Path | None = None
        self.error: str | None = None
        self.was_stopped = False
        self.queue_position: int | None = None
        self.seconds = 0.0
        self._progress: dict[int, Progress] = {}
        self._done: set[int] = set()
        self._lost: list[str] = []
        self._server = server
        self._changed = changed
        self._started_s = time.monotonic()
        self._task = asyncio.create_task(self._run(), name="painting")

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self._task.done()

    @property
    def num_finished(self) -> int:
        """Pictures that are painted or lost."""
        return len(self._done)

    @property
    def lost(self) -> tuple[str, ...]:
        """Why single pictures failed."""
        return tuple(self._lost)

    @property
    def slowest(self) -> Progress | None:
        """How far the picture is that will take longest; ``None`` while all wait."""
        going = [progress for index, progress in self._progress.items() if index not in self._done]
        return max(going, key=lambda progress: (progress.steps or 0) - (progress.step or 0), default=None)

    def stop(self) -> None:
        """Hang up; the server ends the work at its next step."""
        if not self._task.done():
            self.was_stopped = True
            self._task.cancel()

    async def wait(self) -> None:
        """Until it is over. Never raises what went wrong."""
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            async with self._server.client.generate_stream(self.order.prompt, **self.order.fields) as stream:
                async for event in stream:
                    await self._take(event)
        except asyncio.CancelledError:
            self.was_stopped = True
        except DiffserveError as error:
            self.error = sentence(error)
        except Exception as error:
            log.exception("a painting failed inside the page")
            self.error = sentence(error)
        finally:
            self.seconds = time.monotonic() - self._started_s
            self._changed(None)

    async def _take(self, event: ImageEvent) -> None:
        match event:
            case Progress(image_index=None):
                self.queue_position = event.queue_position
            case Progress():
                self.queue_position = None
                self._progress[event.image_index or 0] = event
            case PartialImage():
                self.preview = await self._file(event.file, f"preview-{event.step}.{event.output_format}")
            case CompletedImage():
                self._done.add(event.image_index)
                picture = await self._picture(event)
                self.pictures.append(picture)
                self._changed(picture)
                return
            case LostImage():
                self._done.add(event.image_index)
                self._lost.append(f"Picture {event.image_index + 1} failed: {event.failure.message}")
        self._changed(None)

    async def _picture(self, event: CompletedImage) -> Picture:
        prompt = event.revised_prompt or self.order.prompt
        infotext = read_infotext(event.file) or ""
        path = await self._file(event.file, f"{prompt[:40]}-{event.seed}.{event.output_format}")
        sampler = sampler_of(infotext) or event.sampler
        steps = f"{event.num_inference_steps} step{'s' if event.num_inference_steps != 1 else ''}"
        return Picture(
            path=path,
            seed=event.seed,
            prompt=prompt,
            wish=self.order.prompt,
            rewrites=self.order.rewrites,
            infotext=infotext,
            warnings=event.warnings,
            facts=f"{steps}, {sampler}, guidance {event.guidance_scale:g}, {event.size}, seed {event.seed}",
        )

    async def _file(self, data: bytes, name: str) -> Path:
        return await asyncio.to_thread(self._server.files.write, data, name)
