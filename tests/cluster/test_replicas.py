"""Ray pool over simulated replicas: counts, scaling, restarts and redeployment under load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from diffserve.api.errors import DiffserveError, EngineUnavailable, ModelLoadError
from diffserve.api.types import Finished, GenerationRequest
from diffserve.cluster.config import ClusterConfig, ReplicaConfig, ScalingConfig
from diffserve.cluster.pool import RayPool
from diffserve.cluster.run import redeploy
from diffserve.settings.config import Settings
from diffserve.settings.layers import load_settings
from tests.cluster.pretenders import BROKEN, PretendReplica

SOON_S = 20.0


class Fleet:
    """Simulated replicas behind the engines of a front."""

    def __init__(
        self, min_replicas: int, max_replicas: int, *, rows: float = 1e6, idle_s: float = 1e6, **moments: float
    ) -> None:
        self.settings = load_settings(env={})
        self.cluster = ClusterConfig(
            replicas=ReplicaConfig(min=min_replicas, max=max_replicas),
            scaling=ScalingConfig(rows_per_replica=rows, idle_s=idle_s),
        )
        self.replicas = {
            f"replica-{number}": PretendReplica(self.settings, **moments) for number in range(max_replicas)
        }
        self.engines = RayPool(self.settings, self.cluster, self.replicas)

    @property
    def held_names(self) -> list[str]:
        return [name for name, replica in self.replicas.items() if replica.is_held]

    @property
    def renew(self) -> dict[str, Callable[[Settings], Coroutine[Any, Any, None]]]:
        return {name: replica.renew for name, replica in self.replicas.items()}

    async def paint(self, prompt: str = "a fox", *, is_whole: bool = True, seed: int | None = None) -> list[object]:
        """Return all events of an image."""
        request = GenerationRequest(prompt=prompt, seed=seed)
        async with self.engines.submit(request, is_whole=is_whole) as job:
            return [event async for event in job]

    async def until(self, look: Callable[[], object]) -> None:
        async with asyncio.timeout(SOON_S):
            while not look():
                await asyncio.sleep(0.01)


@asynccontextmanager
async def up(min_replicas: int, max_replicas: int, num_ready: int, **moments: float) -> AsyncIterator[Fleet]:
    fleet = Fleet(min_replicas, max_replicas, **moments)
    fleet.engines.start()
    try:
        await fleet.until(lambda: fleet.engines.num_ready == num_ready)
        yield fleet
    finally:
        await fleet.engines.stop()


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


def other(settings: Settings, path: str) -> Settings:
    return replace(settings, model=replace(settings.model, path=path))


def test_replicas_count_their_requests() -> None:
    async def work() -> None:
        async with up(2, 2, 2, paint_s=60.0) as fleet:
            painting = asyncio.create_task(fleet.paint())
            await fleet.until(lambda: any(replica.inside for replica in fleet.replicas.values()))
            assert await fleet.engines.num_requests() == 1
            fleet.replicas["replica-1"].num_strangers = 5  # requests of another front
            assert await fleet.engines.num_requests() == 6
            await fleet.until(lambda: sum(seat.reported_requests for seat in fleet.engines.replicas) == 1)
            painting.cancel()
            await fleet.until(lambda: not any(replica.inside for replica in fleet.replicas.values()))
            assert await fleet.engines.num_requests() == 5

    run(work)


def test_a_replica_lost_during_a_query_is_omitted_and_without_replicas_the_query_fails() -> None:
    async def work() -> None:
        async with up(1, 2, 1) as fleet:
            fleet.engines.replicas[1].ready = fleet.engines.replicas[0].ready  # stale state: the replica is lost

            async def lose_question(question: bytes) -> bytes:
                raise RuntimeError("gone")

            fleet.replicas["replica-1"].ask = lose_question  # type: ignore[method-assign]
            fleet.replicas["replica-0"].num_strangers = 2
            assert await fleet.engines.num_requests() == 2
        with pytest.raises(EngineUnavailable):
            await fleet.engines.num_requests()

    run(work)


def test_threads_without_an_event_loop_read_the_models() -> None:
    async def work() -> None:
        async with up(1, 1, 1) as fleet:
            [model] = await asyncio.to_thread(lambda: fleet.engines.models)
            assert model.is_loaded
            assert await asyncio.to_thread(lambda: fleet.engines.is_ready)
            assert await asyncio.to_thread(lambda: fleet.engines.retry_after_s) >= 1.0

    run(work)


def test_scaling_continues_after_an_error_and_logs_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("diffserve.cluster.pool.SCALE_EVERY_S", 0.01)

    async def work() -> None:
        async with up(1, 2, 1, rows=1.0, paint_s=0.5) as fleet:
            decide = fleet.engines._scaler.target
            fallen: list[None] = []

            def falls(*args: Any, **kwargs: Any) -> int:
                if len(fallen) < 3:
                    fallen.append(None)
                    raise ZeroDivisionError
                return decide(*args, **kwargs)

            monkeypatch.setattr(fleet.engines._scaler, "target", falls)
            await asyncio.gather(*(fleet.paint(str(number)) for number in range(4)))
            await fleet.until(lambda: len(fleet.held_names) == 2)
            assert len(fallen) == 3

    with caplog.at_level(logging.ERROR, "diffserve.cluster"):
        run(work)
    assert [record.getMessage() for record in caplog.records] == ["scaling failed; it will be retried"] * 3


def test_requests_of_a_lost_replica_restart_with_their_seed_unless_they_are_streamed() -> None:
    async def work() -> None:
        async with up(2, 2, 2, paint_s=0.3) as fleet:
            for is_whole in (True, False):
                painting = asyncio.create_task(fleet.paint(is_whole=is_whole))
                await fleet.until(lambda: any(replica.inside for replica in fleet.replicas.values()))
                [holder] = [replica for replica in fleet.replicas.values() if replica.inside]
                [left] = [replica for replica in fleet.replicas.values() if replica is not holder]
                await asyncio.sleep(0.1)
                holder.kill()
                if is_whole:
                    assert isinstance((await painting)[-1], Finished)
                    assert [seed for _, seed in left.painted] == [77]
                    await fleet.until(lambda: fleet.engines.num_ready == 2)
                else:
                    with pytest.raises(EngineUnavailable, match="please try again"):
                        await painting
                    assert len(left.painted) + len(holder.painted) == 1

    run(work)


def test_requests_of_a_silent_lost_replica_move_at_once() -> None:
    async def work() -> None:
        async with up(2, 2, 2) as fleet:
            for replica in fleet.replicas.values():
                replica.is_silent = True
            painting = asyncio.create_task(fleet.paint())
            await fleet.until(lambda: any(replica.inside for replica in fleet.replicas.values()))
            [holder] = [replica for replica in fleet.replicas.values() if replica.inside]
            for replica in fleet.replicas.values():
                replica.is_silent = replica is holder
            holder.kill()
            assert isinstance((await painting)[-1], Finished)
            assert not holder.inside
            await fleet.until(lambda: fleet.engines.num_ready == 2)
            job = fleet.engines.submit(GenerationRequest(prompt="a fox"))
            await asyncio.gather(*(seat.stop() for seat in fleet.engines.replicas))
            with pytest.raises(EngineUnavailable, match="please try again"):
                _ = [event async for event in job]

    run(work)


@pytest.mark.parametrize(("min_replicas", "max_replicas"), [(1, 2), (2, 2), (2, 3)])
def test_redeployment_goes_replica_by_replica_without_losing_requests(min_replicas: int, max_replicas: int) -> None:
    async def work() -> None:
        async with up(min_replicas, max_replicas, min_replicas, start_s=0.1, paint_s=0.05) as fleet:
            is_over, answered, least_ready = asyncio.Event(), list[object](), [min_replicas]

            async def client(number: int) -> None:
                while not is_over.is_set():
                    answered.append((await fleet.paint(f"{number}", is_whole=number % 2 == 0))[-1])
                    least_ready.append(fleet.engines.num_ready)

            clients = [asyncio.create_task(client(number)) for number in range(4)]
            new = other(fleet.settings, "embedded-turbo")
            await redeploy(fleet.engines, fleet.renew, new)
            num_before = len(answered)
            await fleet.until(lambda: len(answered) > num_before + 8)
            is_over.set()
            await asyncio.gather(*clients)
            assert num_before > 4
            assert all(isinstance(answer, Finished) for answer in answered)
            assert {replica.settings.model.path for replica in fleet.replicas.values()} == {"embedded-turbo"}
            assert fleet.engines.settings is new
            assert len(fleet.held_names) == min_replicas
            assert min(least_ready) >= max(1, min_replicas - (min_replicas == max_replicas)), (
                "all that were wanted were there all the time"
            )

    run(work)


@pytest.mark.parametrize(("min_replicas", "max_replicas"), [(1, 1), (1, 2), (2, 2)])
def test_settings_that_do_not_load_are_rolled_back_with_the_reason(min_replicas: int, max_replicas: int) -> None:
    async def work() -> None:
        async with up(min_replicas, max_replicas, min_replicas) as fleet:
            with pytest.raises(ModelLoadError, match="there is no such model"):
                await redeploy(fleet.engines, fleet.renew, other(fleet.settings, BROKEN))
            assert all(replica.settings is fleet.settings for replica in fleet.replicas.values())
            assert fleet.engines.settings is fleet.settings
            await fleet.until(lambda: fleet.engines.num_ready >= min_replicas)
            assert isinstance((await fleet.paint())[-1], Finished)
            assert not fleet.engines.failed.done()

    run(work)


def test_a_single_replica_is_unavailable_during_a_redeployment_and_requests_get_retry_after() -> None:
    async def work() -> None:
        async with up(1, 1, 1, start_s=0.2, paint_s=0.2) as fleet:
            painting = asyncio.create_task(fleet.paint())
            await fleet.until(lambda: fleet.replicas["replica-0"].inside)
            changing = asyncio.create_task(
                redeploy(fleet.engines, fleet.renew, other(fleet.settings, "embedded-turbo"))
            )
            await fleet.until(lambda: not fleet.engines.is_ready)
            with pytest.raises(DiffserveError) as refused:
                await fleet.paint()
            assert isinstance(refused.value, EngineUnavailable)
            assert (refused.value.retry_after_s or 0.0) >= 1.0
            assert isinstance((await painting)[-1], Finished), "what it had it ends"
            await changing
            assert isinstance((await fleet.paint())[-1], Finished)

    run(work)


def test_a_draining_replica_is_kept_for_a_new_request() -> None:
    async def work() -> None:
        async with up(0, 1, 1, paint_s=0.3) as fleet:
            painting = asyncio.create_task(fleet.paint())
            await fleet.until(lambda: fleet.replicas["replica-0"].inside)
            fleet.engines.replicas[0].drain()
            assert not fleet.engines.is_ready
            assert isinstance((await fleet.paint())[-1], Finished)
            assert isinstance((await painting)[-1], Finished)
            assert fleet.engines.num_ready == 1

    run(work)
