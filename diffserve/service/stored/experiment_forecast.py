"""Checks the cells of an experiment with the engines, and predicts its duration on an idle machine.

An engine checks a request with an unreachable deadline as any other, and refuses it with the predicted duration, which
follows from the measured cost of UNet rows, text encoding and decoding. So nothing is generated.
"""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec

from diffserve.api.errors import DeadlineUnreachable
from diffserve.api.types import Accepted, Failed, GenerationRequest, ImageFinished, ModelInfo, Progress
from diffserve.experiments.engine_generator import request_for, timed_cells
from diffserve.experiments.plan import TIMED_ROUNDS, Cell, SweepPlan
from diffserve.service.engine.engines import Engines

UNREACHABLE_S: Final = 1e-6
TOGETHER: Final = 8
"""Images of a predicted request: with guidance 16 rows, as many as a CPU runs at once. Cells share the engine's calls,
so a cell of fewer images takes its share of such a call. Converged images come first, and share calls only with each
other."""

START_S: Final = 3.7
"""Seconds from the start of an experiment's process to its first request, measured on two cores as the next ones."""

MEASURE_S: Final = 0.01
"""Seconds that measuring and storing an image adds."""

REPORT_S: Final = 7.0
REPORT_CELL_S: Final = 0.15
"""Seconds to write a report, and those that each cell adds."""


WARM_UP_S: Final = 2.0
"""Seconds after which each of two requests is ended that measure the costs of a fresh engine."""


class ExperimentForecast:
    """Asks ``engine`` about the cells of ``plan`` on behalf of ``client``."""

    def __init__(self, engine: Engines, plan: SweepPlan, info: ModelInfo, client: str) -> None:
        self._engine = engine
        self._plan = plan
        self._options: dict[str, Any] = {"priority": "batch", "client": client, "model": info.model_id}

    async def seconds(self, *, warms_up: bool = False) -> float | None:
        """Check every cell, and return the expected seconds of the experiment; None if the engines cannot predict.

        Args:
            warms_up: Generate images for a few seconds when the cells are checked: the first ones of an engine are
                slower than later ones. An engine that has run nothing does it anyway.

        Raises:
            DiffserveError: A cell is refused.
        """
        total_s = await self._total()
        if warms_up or total_s is None:
            await self._warm_up()
            total_s = await self._total()
        return total_s

    async def _total(self) -> float | None:
        """Return the expected seconds by the costs that are known now."""
        plan = self._plan
        num_images = len(plan.places)
        total_s = START_S + REPORT_S + REPORT_CELL_S * len(plan.all_cells) + MEASURE_S * plan.num_images
        timed = dict.fromkeys(timed_cells(plan).values(), TIMED_ROUNDS)
        timed[next(iter(timed))] += 1  # the first one warms up
        is_known = True
        for cell in plan.all_cells:
            together = min(TOGETHER, num_images if cell.is_reference else plan.num_images)
            cell_s = await self._predict(cell, together)
            alone_s = await self._predict(cell, 1) if cell in timed else 0.0
            is_known = is_known and cell_s is not None and alone_s is not None
            total_s += (cell_s or 0.0) / together * num_images + (alone_s or 0.0) * timed.get(cell, 0)
        return total_s if is_known else None

    async def _predict(self, cell: Cell, num_images: int) -> float | None:
        """Return the seconds of a request for ``num_images`` of a cell, None if the engine does not know its pace.

        Raises:
            DiffserveError: The engine refuses the request.
        """
        request = self._request(cell, num_images=num_images, deadline_s=UNREACHABLE_S)
        try:
            async with self._engine.submit(request) as job:
                async for event in job:
                    if isinstance(event, Accepted):
                        break
        except DeadlineUnreachable as refusal:
            return refusal.predicted_s
        return None

    async def _warm_up(self) -> None:
        """Generate images of the cells with the fewest and the most steps, to measure the usual costs."""
        plan = self._plan
        cells = sorted(plan.all_cells, key=lambda each: each.num_steps)
        for cell, num_images in ((cells[0], plan.num_images), (cells[-1], len(plan.places))):
            started_s = time.monotonic()
            async with self._engine.submit(self._request(cell, num_images=min(TOGETHER, num_images))) as job:
                async for event in job:
                    is_late = time.monotonic() - started_s > WARM_UP_S
                    if isinstance(event, Failed):
                        return
                    if is_late and isinstance(event, Progress | ImageFinished):
                        break

    def _request(self, cell: Cell, **changes: Any) -> GenerationRequest:
        request = request_for(self._plan, cell, self._plan.places[0])
        return msgspec.structs.replace(request, seed=0, **self._options, **changes)
