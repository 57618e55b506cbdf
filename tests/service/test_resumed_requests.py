"""Image requests whose engine process is killed: they continue from their last capture, with the same bytes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from diffserve.api.errors import EngineUnavailable
from diffserve.api.types import Captured, DiffusionParams, GenerationRequest, ImageFinished, Picture, Progress
from diffserve.service.engine.client import EngineClient
from diffserve.service.engine.local import open_engines
from diffserve.service.engine.pool import ReplicaPool
from diffserve.settings.layers import load_settings
from tests.service.server import START_S

pytestmark = pytest.mark.slow

NUM_STEPS = 400
KILL_AFTER = 200
"""Step after which the engine is killed."""

CHECKPOINT_EVERY_S = 0.2
MAX_REPEATED_S = 3.0


def settings(model: Path, folder: Path, **serve: Any) -> Any:
    """Return settings for ``model`` in float32 with frequent captures."""
    env = {"DIFFSERVE_MODEL_DTYPE": "float32", "DIFFSERVE_SERVE_SPARE_ENGINE": "false"}
    loaded = load_settings(model=str(model), env=env)
    changes = {"data_dir": str(folder), "checkpoint_every_s": CHECKPOINT_EVERY_S, **serve}
    return replace(loaded, serve=replace(loaded.serve, **changes))


def request(name: str) -> GenerationRequest:
    """Return a request of many steps that draw noise."""
    diffusion = DiffusionParams(sampler="dpmpp_2m_sde", num_steps=NUM_STEPS)
    return GenerationRequest(prompt="a cat", seed=5, width_px=64, height_px=64, diffusion=diffusion, request_id=name)


class Watcher:
    """Collects the events of one request, and kills a process after ``KILL_AFTER`` steps."""

    def __init__(self, find_pid: Callable[[], int | None] = lambda: None) -> None:
        self.steps: list[tuple[float, int]] = []
        self.captures: list[bytes] = []
        self._find_pid = find_pid

    def __call__(self, event: object) -> None:
        assert not isinstance(event, Captured)
        if isinstance(event, Progress):
            self.steps.append((asyncio.get_running_loop().time(), event.step_index))
            if event.step_index == KILL_AFTER and (pid := self._find_pid()) is not None:
                self._find_pid = lambda: None
                os.kill(pid, signal.SIGKILL)

    def check_resumed(self) -> None:
        """Check that the steps go back once, by no more than the work of ``MAX_REPEATED_S``."""
        steps = [step for _, step in self.steps]
        [back] = [place for place in range(1, len(steps)) if steps[place] <= steps[place - 1]]
        lost_s = next(at_s for at_s, step in self.steps if step == steps[back - 1])
        repeated_from_s = next(at_s for at_s, step in self.steps if step == steps[back])
        assert steps[back - 1] - steps[back] < 5 or lost_s - repeated_from_s < MAX_REPEATED_S
        assert steps[back] > 1
        assert steps[-1] == NUM_STEPS


async def paint(engines: Any, order: GenerationRequest, watcher: Watcher, **options: Any) -> Picture:
    """Return the image of ``order``."""
    async with engines.submit(order, watcher, is_whole=True, **options) as job:
        [picture] = [event.result.picture async for event in job if isinstance(event, ImageFinished)]
    return picture


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(START_S):
        while not condition():
            await asyncio.sleep(0.02)


def test_request_of_a_killed_engine_continues_on_another_one(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    async def run() -> None:
        pool = open_engines(settings(tiny_model("sd15"), tmp_path, devices=("cpu", "cpu")))
        assert isinstance(pool, ReplicaPool)
        pool.start()
        try:
            await wait_until(lambda: pool.num_ready == 2)
            expected = await paint(pool, request("undisturbed"), Watcher())

            def busy_pid() -> int | None:
                costs = pool.queue_costs()
                busiest: EngineClient = max(pool.replicas, key=lambda client: costs[client.name])
                return busiest.engine_id

            watcher = Watcher(busy_pid)
            assert await paint(pool, request("killed"), watcher) == expected
            watcher.check_resumed()
        finally:
            await pool.stop()

    asyncio.run(run())


def test_request_of_a_lost_engine_can_be_sent_again_with_its_last_capture(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    async def run() -> None:
        client = EngineClient(settings(tiny_model("sd15"), tmp_path))
        client.start()
        captures: list[bytes] = []
        try:
            await wait_until(lambda: client.is_ready)
            expected = await paint(client, request("undisturbed"), Watcher())
            watcher = Watcher(lambda: client.engine_id)
            with pytest.raises(EngineUnavailable):
                await paint(client, request("killed"), watcher, on_capture=captures.append)
            await wait_until(lambda: client.is_ready)
            again = replace(request("again"), resume_from=captures[-1])
            assert await paint(client, again, watcher, on_capture=captures.append) == expected
            watcher.check_resumed()
        finally:
            await client.stop()

    asyncio.run(run())


def test_no_state_is_captured_if_the_setting_is_off(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    async def run() -> None:
        client = EngineClient(settings(tiny_model("sd15"), tmp_path, checkpoint_every_s=0.0))
        client.start()
        captures: list[bytes] = []
        try:
            await wait_until(lambda: client.is_ready)
            await paint(client, request("undisturbed"), Watcher(), on_capture=captures.append)
        finally:
            await client.stop()
        assert not captures

    asyncio.run(run())
