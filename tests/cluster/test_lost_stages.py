"""Loss of a stage while an image is generated, over simulated replicas: patience and number of retries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from diffserve.api.errors import EngineUnavailable
from diffserve.api.types import Finished, GenerationRequest
from diffserve.cluster import stages
from diffserve.cluster.config import ClusterConfig, StagesConfig
from diffserve.cluster.pool import MAX_ATTEMPTS
from diffserve.cluster.stages import StagedPool
from diffserve.settings.layers import load_settings
from tests.cluster.pretenders import PretendReplica

PAINT_S = 1.0
SOON_S = 20.0


@asynccontextmanager
async def up() -> AsyncIterator[tuple[StagedPool, PretendReplica]]:
    """Yield engines with one replica for each stage, and the replica that denoises."""
    settings, cluster = load_settings(env={}), ClusterConfig(stages=StagesConfig(together=False))
    calls = {deployment.name: PretendReplica(settings, paint_s=PAINT_S) for deployment in cluster.deployments}
    engines = StagedPool(settings, cluster, calls)
    engines.start()
    try:
        await until(lambda: engines.is_ready)
        yield engines, calls["denoise-0"]
    finally:
        await engines.stop()


async def until(look: Callable[[], object]) -> None:
    async with asyncio.timeout(SOON_S):
        while not look():
            await asyncio.sleep(0.01)


async def paint(engines: StagedPool) -> list[object]:
    async with engines.submit(GenerationRequest(prompt="a fox", seed=5), is_whole=True) as events:
        return [event async for event in events]


def test_the_timeout_for_a_stage_starts_at_its_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        async with up() as (engines, denoiser):
            for seat in (replica for pool in engines.pools.values() for replica in pool.replicas):
                seat.start_s = 0.0
            painting = asyncio.create_task(paint(engines))
            await until(lambda: denoiser.inside)
            await asyncio.sleep(0.8 * PAINT_S)
            denoiser.kill()
            assert isinstance((await painting)[-1], Finished)
            assert [seed for _, seed in denoiser.painted] == [5]

    monkeypatch.setattr(stages, "RETRY_TIMEOUT_S", 0.7 * PAINT_S)
    monkeypatch.setattr("diffserve.cluster.replica.RESTART_DELAY_S", 0.01)
    asyncio.run(work())


def test_a_request_that_loses_every_replica_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with up() as (engines, denoiser):
            painting = asyncio.create_task(paint(engines))
            for _ in range(MAX_ATTEMPTS):
                await until(lambda: denoiser.inside)
                denoiser.kill()
                await until(lambda: not denoiser.inside)
            with pytest.raises(EngineUnavailable, match="please try again"):
                await painting
            await until(lambda: engines.is_ready)
            assert not denoiser.painted

    monkeypatch.setattr("diffserve.cluster.replica.RESTART_DELAY_S", 0.01)
    asyncio.run(work())
