"""Slots for long work: limited in total and per client, served in order of arrival, and released on cancellation."""

from __future__ import annotations

import asyncio

import pytest

from diffserve.media.client_slots import ClientSlots


class Work:
    """Concurrent work of clients in ``places`` that runs until :meth:`end`."""

    def __init__(self, num_slots: int) -> None:
        self.places = ClientSlots(num_slots)
        self.inside: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, *names: str) -> None:
        """Start work for each name; the client is its first letter."""
        for name in names:
            self.ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._work(name))
        await self.settle()

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await self.settle()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def _work(self, name: str) -> None:
        async with self.places.taken(name[0]):
            self.inside.append(name)
            try:
                await self.ends[name].wait()
            finally:
                self.inside.remove(name)


def test_a_client_holds_one_slot_and_others_overtake_its_waiting_work() -> None:
    async def run() -> None:
        work = Work(2)
        await work.begin("a1", "a2", "a3", "b1", "c1")
        assert work.inside == ["a1", "b1"]
        await work.end("b1")
        assert work.inside == ["a1", "c1"], "a holds its slot"
        await work.end("a1")
        assert work.inside == ["c1", "a2"]
        await work.begin("b2")
        await work.end("c1")
        assert work.inside == ["a2", "b2"], "a3 waits for a2"
        await work.end("a2")
        assert work.inside == ["b2", "a3"]

    asyncio.run(run())


@pytest.mark.parametrize("is_at_once", [False, True])
def test_cancelled_work_releases_its_slot_or_its_place_in_the_queue(is_at_once: bool) -> None:
    async def run() -> None:
        work = Work(1)
        await work.begin("a1", "b1", "c1", "d1")
        await work.cancel("b1")
        assert work.inside == ["a1"]
        if is_at_once:  # c1 gets the slot and is cancelled in the same iteration of the event loop
            work.ends["a1"].set()
            await asyncio.sleep(0)
            work.tasks["c1"].cancel()
            await work.settle()
        else:
            await work.cancel("a1")
            assert work.inside == ["c1"]
            await work.cancel("c1")
        assert work.inside == ["d1"]
        await work.end("d1")
        await work.begin("a2")
        assert work.inside == ["a2"], "no slot is lost"

    asyncio.run(run())
