"""Checks the cells of an experiment with the engines, and predicts its duration on an idle machine.

An engine checks a request with an unreachable deadline as any other, and refuses it with the predicted duration, which
follows from the measured cost of UNet rows, text encoding and decoding. So nothing is generated.
"""

from __future__ import annotations

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
so a cell of fewer images takes its share of such a call."""

START_S: Final = 3.7
"""Seconds from the start of an experiment's process to its first request, measured on two cores as the next ones."""

MEASURE_S: Final = 0.03
"""Seconds that measuring and storing an image adds."""

REPORT_S: Final = 10.0
REPORT_CELL_S: Final = 0.15
"""Seconds to write a report, and those that each cell adds."""


class ExperimentForecast:
    """Asks ``engine`` about the cells of ``plan`` on behalf of ``client``."""

    def __init__(self, engine: Engines, plan: SweepPlan, info: ModelInfo, client: str) -> None:
        self._engine = engine
        self._plan = plan
        self._options: dict[str, Any] = {"priority": "batch", "client": client, "model": info.model_id}

    async def seconds(self) -> float | None:
        """Check every cell, and return the expected seconds of the experiment; None if the engines cannot predict.

        Raises:
            DiffserveError: A cell is refused.
        """
        plan = self._plan
        num_images = len(plan.places)
        together = min(TOGETHER, plan.num_images)
        total_s = START_S + REPORT_S + REPORT_CELL_S * len(plan.all_cells) + MEASURE_S * plan.num_images
        timed = dict.fromkeys(timed_cells(plan).values(), TIMED_ROUNDS)
        timed[next(iter(timed))] += 1  # the first one warms up
        is_known = True
        for cell in plan.all_cells:
            cell_s = await self._predict(cell, together)
            if cell_s is None and is_known:  # no engine has run a row yet
                await self._run_a_step(cell)
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

    async def _run_a_step(self, cell: Cell) -> None:
        """Run the first step of an image, so that the engine knows its pace."""
        async with self._engine.submit(self._request(cell)) as job:
            async for event in job:
                if isinstance(event, Progress | ImageFinished | Failed):
                    break

    def _request(self, cell: Cell, **changes: Any) -> GenerationRequest:
        request = request_for(self._plan, cell, self._plan.places[0])
        return msgspec.structs.replace(request, seed=0, **self._options, **changes)
