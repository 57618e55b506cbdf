"""Generates the images of an experiment with a server, several at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import Final, TypeVar

from diffserve.api.errors import DiffserveError, InvalidRequest, QueueFull
from diffserve.client import AsyncClient, CompletedImage, LostImage, PartialImage, Progress, StreamedImageFields
from diffserve.experiments.painter import FinishedImage, PaintEvent, PreviewImage, RefusedImage, RowsDone
from diffserve.experiments.plan import Cell, PlannedImage, SweepPlan
from diffserve.media.images import decode_image
from ui.experiment.board import SHOWN
from ui.experiment.speed import Timing, time_alone

AT_ONCE: Final = 16
"""Concurrent requests: enough to fill a batch, and few enough to leave room for other clients."""

PREVIEWS: Final = 2
LONGEST_WAIT_S, SHORTEST_WAIT_S = 30.0, 0.25
T = TypeVar("T")
Tell = Callable[[PaintEvent], None]


class ClientPainter:
    """Generates images with a server; a cell whose request is refused is skipped from then on.

    Attributes:
        is_waiting: Whether a request waits because the server's queue is full.
    """

    def __init__(self, client: AsyncClient, plan: SweepPlan, model: str = "") -> None:
        self.is_waiting = False
        self._model = model
        self._client = client
        self._plan = plan
        self._refused: set[Cell] = set()
        self._task: asyncio.Task[None] | asyncio.Task[Timing] | None = None

    async def paint(self, images: Iterable[PlannedImage]) -> AsyncGenerator[PaintEvent, None]:
        """Yield events of ``images``; after ``close``, those received until then.

        Raises:
            DiffserveError: The client failed.
        """
        events: asyncio.Queue[PaintEvent | None] = asyncio.Queue()
        self._task = task = asyncio.create_task(self._paint_all(iter(images), events.put_nowait))
        task.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
        finally:
            self.close()
            await asyncio.wait([task])
            error = None if task.cancelled() else task.exception()
        if error is not None:
            raise error

    def close(self) -> None:
        """Cancel the running requests at the server's next step."""
        if self._task is not None:
            self._task.cancel()

    async def time_alone(self) -> Timing:
        """Measure how long one image of the plan takes without concurrency.

        Raises:
            DiffserveError: The client failed.
        """
        self._task = task = asyncio.create_task(
            self._patiently(partial(time_alone, self._client, self._plan, self._model))
        )
        return await task

    async def _paint_all(self, images: Iterator[PlannedImage], tell: Tell) -> None:
        error: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(AT_ONCE, self._plan.num_images)):
                    group.create_task(self._work(images, tell))
        except* DiffserveError as errors:
            error = errors.exceptions[0]
        if error is not None:
            raise error

    async def _work(self, images: Iterator[PlannedImage], tell: Tell) -> None:
        """Generate images one after the other."""
        for image in images:
            if image.cell not in self._refused:
                try:
                    await self._patiently(partial(self._stream, image, tell))
                except InvalidRequest as error:
                    self._refuse(image, error.message, tell)

    async def _patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await ``work()``, and retry it while the server's queue is full."""
        while True:
            try:
                return await work()
            except QueueFull as full:
                self.is_waiting = True
                await asyncio.sleep(min(LONGEST_WAIT_S, max(SHORTEST_WAIT_S, full.retry_after_s)))
                self.is_waiting = False

    async def _stream(self, image: PlannedImage, tell: Tell) -> None:
        prompt, reported_rows = self._plan.prompts[image.prompt_index], 0.0
        async with self._client.generate_stream(prompt, **self._fields(image)) as events:
            async for event in events:
                match event:
                    case Progress(step=int(step), steps=int(steps)):
                        rows = image.cell.rows * step / (steps + 1)
                        tell(RowsDone({image: rows - reported_rows}))
                        reported_rows = rows
                    case PartialImage():
                        tell(PreviewImage(image, event.file, event.partial_image_index))
                    case CompletedImage():
                        pixels, rows = decode_image(event.file).array, event.usage.num_evaluations
                        tell(FinishedImage(image, pixels, event.seed, event.spacing, rows, file=event.file))
                    case LostImage():
                        self._refuse(image, event.failure.message, tell)

    def _fields(self, image: PlannedImage) -> StreamedImageFields:
        """Return the request fields of ``image``: no rewriting and no watermark, so that all cells are comparable."""
        fields = StreamedImageFields(
            watermark=False,
            sampler=image.cell.sampler,
            num_inference_steps=image.cell.num_steps,
            guidance_scale=image.cell.guidance_scale,
            seed=self._plan.seed_of(image.place),
            prompt_rewriter="off",
            output_format="png",
            partial_images=PREVIEWS if image.place == SHOWN else 0,
        )
        if self._model:
            fields["model"] = self._model
        return fields

    def _refuse(self, image: PlannedImage, reason: str, tell: Tell) -> None:
        self._refused.add(image.cell)
        tell(RefusedImage(image, reason))
