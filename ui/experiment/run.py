"""An experiment of the page as it runs. What is painted is kept, whatever happens; what is not is given up."""

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
"""How often somebody who watches is told."""

log = logging.getLogger("diffserve.page")


class GridRun:
    """One experiment. ``watch`` paints it; ``stop`` ends that.

    board       what is painted so far
    check       what checks the pictures against their prompts
    error       what ended it early, ``None`` where nothing did
    is_stopped  whether somebody ended it
    is_timing   whether all is painted, and it is measured how long a picture takes alone
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
        """Whether the server's queue was full a moment ago."""
        return self._painter.is_waiting

    async def watch(self) -> AsyncGenerator[None, None]:
        """Paint; every moment in which something may have changed. Leaving it early gives up the rest.

        Raises nothing of what a server does: ``error`` says it.
        """
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
        """Paint no further; what is in flight ends at the server's next step."""
        self.is_stopped = True
        self._painter.close()

    def seconds_left(self, speed: ServerSpeed) -> float:
        """How long the rest takes: by what was painted so far, at first by ``speed``."""
        if self.is_timing:
            return 0.0
        elapsed_s = time.monotonic() - self._start_s
        begun = self.board.rows_done / self.plan.num_painted_rows
        by_now = elapsed_s / begun if begun > 0.1 else speed.seconds(self.plan)
        return by_now * (1 - begun)

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
