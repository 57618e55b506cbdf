"""Paint an experiment through a client: many pictures at once, as many as the server takes; then a few alone, for the
seconds of one. What is painted is kept, whatever happens; what is not is given up at the server's next step."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

from diffserve.client import (
    AsyncClient,
    CompletedImage,
    ImageEvent,
    LostImage,
    PartialImage,
    Progress,
    StreamedImageFields,
)
from diffserve.errors import DiffserveError, InvalidRequest, QueueFull
from diffserve.experiments.plan import Cell, Job
from ui.experiment.board import SHOWN, Board, Painted
from ui.experiment.measure import PromptCheck, psnr_db
from ui.experiment.pace import Pace, time_alone
from ui.experiment.plan import GridPlan, Place

AT_ONCE: Final = 16
"""Pictures in flight: enough to fill a batch; others' requests find room beside them."""

LOOK_EVERY_S: Final = 0.25
"""How often somebody who watches is told."""

PREVIEWS: Final = 2
LONGEST_WAIT_S: Final = 30.0
T = TypeVar("T")
log = logging.getLogger("diffserve.page")


class GridRun:
    """One experiment. ``watch`` paints it; ``stop`` ends that.

    board       what is painted so far
    error       what ended it early, ``None`` where nothing did
    is_stopped  whether somebody ended it
    is_timing   whether all is painted, and it is measured how long a picture takes alone
    is_waiting  whether the server's queue was full a moment ago
    """

    def __init__(self, client: AsyncClient, plan: GridPlan, check: PromptCheck, folder: Path) -> None:
        self.plan = plan
        self.board = Board(plan)
        self.error: BaseException | None = None
        self.is_stopped = False
        self.is_timing = False
        self.is_waiting = False
        self._client = client
        self._check = check
        self._folder = folder
        self._task: asyncio.Task[None] | None = None
        self._start_s = time.monotonic()

    @property
    def why_not_exact(self) -> str | None:
        """Why prompts cannot be checked, ``None`` where they can."""
        return self._check.why_not

    async def watch(self) -> AsyncGenerator[None, None]:
        """Paint; every moment in which something may have changed. Leaving it early gives up the rest.

        Raises nothing of what a server does: ``error`` says it.
        """
        if self.is_stopped:
            return
        self._start_s = time.monotonic()
        self._task = asyncio.create_task(self._paint_all())
        try:
            while not self._task.done():
                await asyncio.wait([self._task], timeout=LOOK_EVERY_S)
                yield
        finally:
            await self._end(self._task)

    def stop(self) -> None:
        """Paint no further; what is in flight ends at the server's next step."""
        self.is_stopped = True
        if self._task is not None:
            self._task.cancel()

    def tidy(self) -> None:
        """Remove every file that the grid does not show."""
        shown = {square.look for square in self.board.squares.values()}
        for file in set(self._folder.iterdir()) - shown:
            file.unlink()

    def seconds_left(self, pace: Pace) -> float:
        """How long the rest takes: by what was painted so far, at first by ``pace``."""
        if self.is_timing:
            return 0.0
        done, elapsed_s = self.board.rows_done, time.monotonic() - self._start_s
        begun = done / self.plan.rows_together
        by_now = elapsed_s / begun if begun > 0.1 else pace.seconds(self.plan)
        return by_now * (1 - begun)

    async def _paint_all(self) -> None:
        try:
            jobs = self.plan.jobs()
            async with asyncio.TaskGroup() as group:
                for _ in range(min(AT_ONCE, self.plan.num_pictures)):
                    group.create_task(self._work(jobs))
            self.is_timing = True
            self.board.time(await self._patiently(lambda: time_alone(self._client, self.plan)))
        except* (DiffserveError, OSError) as errors:
            self.error = errors.exceptions[0]

    async def _end(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an experiment failed inside the page", exc_info=error)
            self.error = error

    async def _work(self, jobs: Iterator[Job]) -> None:
        """One of those who paint, job after job."""
        for job in jobs:
            if self.board.squares[job.cell].trouble is None:
                await self._paint(job)

    async def _paint(self, job: Job) -> None:
        """A picture. A cell whose request is refused is painted no further."""
        try:
            await self._patiently(lambda: self._stream(job))
        except InvalidRequest as error:
            self.board.refuse(job.cell, error.message)

    async def _patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        """``work``, and again after a while for as long as the server's queue is full."""
        while True:
            try:
                return await work()
            except QueueFull as full:
                self.is_waiting = True
                await asyncio.sleep(min(LONGEST_WAIT_S, max(LOOK_EVERY_S, full.retry_after_s)))
                self.is_waiting = False

    async def _stream(self, job: Job) -> None:
        prompt = self.plan.sweep.prompts[job.prompt_index]
        async with self._client.generate_stream(prompt, **self._fields(job)) as events:
            async for event in events:
                await self._take(job, event)

    def _fields(self, job: Job) -> StreamedImageFields:
        """A request of the plan; never rewritten, so that all cells paint one prompt."""
        return StreamedImageFields(
            sampler=job.cell.sampler,
            num_inference_steps=job.cell.num_steps,
            guidance_scale=job.cell.guidance_scale,
            seed=self.plan.sweep.seed_of(job.place),
            prompt_rewriter="off",
            output_format="png",
            partial_images=PREVIEWS if job.place == SHOWN else 0,
        )

    async def _take(self, job: Job, event: ImageEvent) -> None:
        match event:
            case Progress(step=int(step), steps=int(steps)):
                self.board.progress(job, step / (steps + 1))
            case PartialImage():
                self.board.look(job, self._save(job, event.file, f"preview-{event.partial_image_index}"))
            case CompletedImage():
                await _to_the_end(self._keep(job, event))
            case LostImage():
                self.board.refuse(job.cell, event.failure.message)

    async def _keep(self, job: Job, image: CompletedImage) -> None:
        """Save a finished picture and measure it."""
        file = self._save(job, image.file, "picture")
        is_exact = await asyncio.to_thread(self._check.is_exact, file, job.prompt_index)
        self.board.paint(job, Painted(file, image.usage.num_evaluations, image.spacing, is_exact))
        if (reference := self.plan.reference) is not None:
            cells = self.plan.cells if job.cell == reference else (job.cell,)
            for cell in cells:
                await self._compare(cell, reference, job.place)

    async def _compare(self, cell: Cell, reference: Cell, place: Place) -> None:
        """Hold a picture against its converged one, if both are there."""
        painted = self.board.squares[cell].painted.get(place)
        converged = self.board.squares[reference].painted.get(place)
        if painted is None or converged is None:
            return
        found = await asyncio.to_thread(psnr_db, painted.file, converged.file)
        if found is not None:
            self.board.measure(cell, place, found)

    def _save(self, job: Job, data: bytes, what: str) -> Path:
        path = self._folder / f"{job.cell.slug}-p{job.prompt_index + 1}-s{job.seed_index + 1}-{what}.png"
        path.write_bytes(data)
        return path


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """All of ``work``, also where whoever waits for it is cancelled meanwhile."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
