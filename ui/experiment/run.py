"""A running experiment of the page; finished images are kept if it stops or fails."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final

from diffserve.api.errors import DiffserveError
from diffserve.client import AsyncClient
from diffserve.experiments.experiment import paint_measured
from diffserve.experiments.measure import ImageMeasures, PromptCheck
from diffserve.experiments.plan import SweepPlan
from ui.experiment.board import Board
from ui.experiment.client_painter import ClientPainter
from ui.experiment.speed import ServerSpeed

LOOK_EVERY_S: Final = 0.25
"""Longest time between updates."""

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
        self._painter = ClientPainter(client, plan, model)
        self._start_s = time.monotonic()

    @property
    def is_waiting(self) -> bool:
        """Whether a request waits because the server's queue is full."""
        return self._painter.is_waiting

    async def watch(self) -> AsyncGenerator[None, None]:
        """Run the experiment; yield whenever something may have changed. Server errors are stored in ``error``."""
        if self.is_stopped:
            return
        self._start_s = time.monotonic()
        task = asyncio.create_task(self._paint_all())
        try:
            while not task.done():
                await asyncio.wait([task], timeout=LOOK_EVERY_S)
                yield
        finally:
            if not task.done():
                self.stop()
            await asyncio.wait([task])
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("an experiment failed inside the page", exc_info=error)
                self.error = error

    def stop(self) -> None:
        """Stop; running requests end at the server's next step."""
        self.is_stopped = True
        self._painter.close()

    def seconds_left(self, speed: ServerSpeed) -> float:
        """Return the expected remaining time: from the progress so far, at first from ``speed``."""
        if self.is_timing:
            return 0.0
        elapsed_s = time.monotonic() - self._start_s
        share_done = self.board.rows_done / self.plan.num_painted_rows
        total_s = elapsed_s / share_done if share_done > 0.1 else speed.seconds(self.plan)
        return total_s * (1 - share_done)

    async def _paint_all(self) -> None:
        plan, measures, board = self.plan, ImageMeasures(self.check), self.board
        images = plan.images_by_place()
        try:
            await paint_measured(plan, self._painter, measures, board, images, board.handle, asyncio.to_thread)
            if not self.is_stopped:
                self.is_timing = True
                board.set_timing(await self._painter.time_alone())
        except (DiffserveError, OSError) as error:
            self.error = error
