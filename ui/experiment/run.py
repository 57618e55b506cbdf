"""A running experiment of the page, generated with a server; finished images are kept if it stops or fails."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from diffserve.api.errors import DiffserveError, InvalidRequest, QueueFull
from diffserve.client import AsyncClient, CompletedImage, LostImage, PartialImage, Progress, StreamedImageFields
from diffserve.experiments.generation import generate_measured
from diffserve.experiments.measure import ImageMeasures, PromptCheck
from diffserve.experiments.plan import Cell, PlannedImage, SweepPlan
from diffserve.experiments.records import FinishedImage, GenerationEvent, PreviewImage, RefusedImage, RowsDone
from diffserve.media.images import decode_image
from ui.experiment.board import SHOWN, Board
from ui.experiment.speed import ServerSpeed, Timing, time_alone

LOOK_EVERY_S: Final = 0.25
"""Longest time between updates."""

AT_ONCE: Final = 16
"""Concurrent requests: enough to fill a batch, and few enough to leave room for other clients."""

PREVIEWS: Final = 2
LONGEST_WAIT_S, SHORTEST_WAIT_S = 30.0, 0.25
T = TypeVar("T")
OnEvent = Callable[[GenerationEvent], None]

log = logging.getLogger("diffserve.page")


class GridRun:
    """Experiment that ``watch`` runs and ``stop`` ends.

    Attributes:
        board: The images so far.
        check: The checker of images against their prompts.
        error: The error that ended it, or None.
        is_stopped: Whether it was stopped.
        is_timing: Whether only the time of a single image is left to measure.
    """

    def __init__(self, client: AsyncClient, plan: SweepPlan, check: PromptCheck, folder: Path, model: str = "") -> None:
        self.plan = plan
        self.check = check
        self.board = Board(plan, folder)
        self.error: BaseException | None = None
        self.is_stopped = False
        self.is_timing = False
        self._generator = ClientGenerator(client, plan, model)
        self._start_s = time.monotonic()

    @property
    def is_waiting(self) -> bool:
        """Whether a request waits because the server's queue is full."""
        return self._generator.is_waiting

    async def watch(self) -> AsyncGenerator[None, None]:
        """Run the experiment; yield whenever something may have changed. Server errors are stored in ``error``."""
        if self.is_stopped:
            return
        self._start_s = time.monotonic()
        task = asyncio.create_task(self._generate_all())
        try:
            while not task.done():
                await asyncio.wait([task], timeout=LOOK_EVERY_S)
                yield
        finally:
            if not task.done():
                self.stop()
            await asyncio.wait([task])
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("an experiment of the page failed", exc_info=error)
                self.error = error

    def stop(self) -> None:
        """Stop; running requests end at the server's next step."""
        self.is_stopped = True
        self._generator.close()

    def seconds_left(self, speed: ServerSpeed) -> float:
        """Return the expected remaining time: from the progress so far, at first from ``speed``."""
        if self.is_timing:
            return 0.0
        elapsed_s = time.monotonic() - self._start_s
        share_done = self.board.rows_done / self.plan.num_painted_rows
        total_s = elapsed_s / share_done if share_done > 0.1 else speed.seconds(self.plan)
        return total_s * (1 - share_done)

    async def _generate_all(self) -> None:
        plan, measures, board = self.plan, ImageMeasures(self.check), self.board
        images = plan.images_by_place()
        try:
            await generate_measured(
                plan, self._generator, measures, board, images, board.handle, call=asyncio.to_thread
            )
            if not self.is_stopped:
                self.is_timing = True
                board.set_timing(await self._generator.time_alone())
        except (DiffserveError, OSError) as error:
            self.error = error


class ClientGenerator:
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

    async def generate(self, images: Iterable[PlannedImage]) -> AsyncGenerator[GenerationEvent, None]:
        """Yield events of ``images``; after ``close``, those received until then.

        Raises:
            DiffserveError: The client failed.
        """
        events: asyncio.Queue[GenerationEvent | None] = asyncio.Queue()
        self._task = task = asyncio.create_task(self._generate_all(iter(images), events.put_nowait))
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
            self._retry_when_full(partial(time_alone, self._client, self._plan, self._model))
        )
        return await task

    async def _generate_all(self, images: Iterator[PlannedImage], on_event: OnEvent) -> None:
        error: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(AT_ONCE, self._plan.num_images)):
                    group.create_task(self._work(images, on_event))
        except* DiffserveError as errors:
            error = errors.exceptions[0]
        if error is not None:
            raise error

    async def _work(self, images: Iterator[PlannedImage], on_event: OnEvent) -> None:
        """Generate images one after the other."""
        for image in images:
            if image.cell not in self._refused:
                try:
                    await self._retry_when_full(partial(self._stream, image, on_event))
                except InvalidRequest as error:
                    self._refuse(image, error.message, on_event)

    async def _retry_when_full(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await ``work()``, and retry it while the server's queue is full."""
        while True:
            try:
                return await work()
            except QueueFull as full:
                self.is_waiting = True
                await asyncio.sleep(min(LONGEST_WAIT_S, max(SHORTEST_WAIT_S, full.retry_after_s)))
                self.is_waiting = False

    async def _stream(self, image: PlannedImage, on_event: OnEvent) -> None:
        prompt, reported_rows = self._plan.prompts[image.prompt_index], 0.0
        async with self._client.generate_stream(prompt, **self._fields(image)) as events:
            async for event in events:
                match event:
                    case Progress(step=int(step), steps=int(steps)):
                        rows = image.cell.rows * step / (steps + 1)
                        on_event(RowsDone({image: rows - reported_rows}))
                        reported_rows = rows
                    case PartialImage():
                        on_event(PreviewImage(image, event.file, event.partial_image_index))
                    case CompletedImage():
                        pixels, rows = decode_image(event.file).array, event.usage.num_evaluations
                        on_event(FinishedImage(image, pixels, event.seed, event.spacing, rows, file=event.file))
                    case LostImage():
                        self._refuse(image, event.failure.message, on_event)

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

    def _refuse(self, image: PlannedImage, reason: str, on_event: OnEvent) -> None:
        self._refused.add(image.cell)
        on_event(RefusedImage(image, reason))
