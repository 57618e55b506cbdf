"""Server without its socket: engines, application and background tasks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from diffserve.media.decoders import shared_decoders
from diffserve.media.provenance import HEADER
from diffserve.service.app import create_app
from diffserve.service.engine.engines import Engines
from diffserve.service.http.keys import KeyRing
from diffserve.service.images.image_store import ImageStore
from diffserve.service.images.service import ImageChecks
from diffserve.service.lifecycle import Gate
from diffserve.service.page import PageRoute
from diffserve.service.telemetry import GenAiMetrics, Traces
from diffserve.service.threads import LISTINGS, keep_loop_nimble, watch_loop
from diffserve.settings.config import Settings
from diffserve.store.database import Database


class Front:
    """Engines and application of one event loop; ``app`` serves requests after ``begin``."""

    def __init__(
        self,
        settings: Settings,
        engine: Engines,
        *,
        ring: KeyRing | None,
        database: Database | None,
        checks: ImageChecks,
        page: PageRoute | None = None,
    ) -> None:
        keep_loop_nimble()
        self.gate = Gate()
        self.engine = engine
        engine.metrics.traces = traces = Traces.from_environment(os.environ)
        engine.metrics.genai = genai = GenAiMetrics.from_environment(os.environ)
        self._sent = [sent for sent in (traces, genai) if sent is not None]
        config = settings.serve
        self._pictures = ImageStore(
            Path(config.data_dir).expanduser() / "pictures",
            max_bytes=config.url_pictures_bytes,
            headers={HEADER: checks.marks.header},
        )
        self.app = create_app(
            engine, config, self.gate,
            rewriter=settings.text.prompt_rewriter, page=page, pictures=self._pictures, ring=ring, database=database,
            checks=checks,
        )  # fmt: skip
        self._background_tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Start the engines and the background tasks."""
        self.engine.start()
        sweeping, watching = self._pictures.sweep_for_ever(), watch_loop(self.engine.metrics.observe_loop)
        works = [sweeping, watching, *(start() for start in self.app.state.background_tasks)]
        self._background_tasks = [asyncio.create_task(work) for work in works]

    async def stop(self, drained: Coroutine[Any, Any, None]) -> None:
        """Refuse new work, wait for ``drained``, and stop the engines."""
        for task in self._background_tasks:
            task.cancel()
        self.gate.close()
        await drained
        await self.engine.stop()

    async def close(self) -> None:
        """End the background tasks after the last response."""
        await asyncio.gather(*self._background_tasks, return_exceptions=True)
        shared_decoders().close()
        for sent in self._sent:
            await LISTINGS.run(sent.close)
