"""Order of image encoding: small images go before large ones, without starvation or losses."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from diffserve.service import threads
from diffserve.service.threads import AHEAD_S_PER_MPX, EncodingQueue

LARGE = 4_000_000


def run(story: Coroutine[Any, Any, list[str]]) -> list[str]:
    return asyncio.run(asyncio.wait_for(story, 20))


def test_a_small_image_goes_before_many_large_ones() -> None:
    async def story() -> list[str]:
        turns, started = EncodingQueue(1), list[str]()

        async def encode(name: str, num_pixels: int) -> None:
            async with turns.slot(num_pixels):
                started.append(name)
                await asyncio.sleep(0)

        await asyncio.gather(*(encode(f"large {number}", LARGE) for number in range(3)), encode("small", 100))
        return started

    assert run(story()) == ["large 0", "small", "large 1", "large 2"]


def test_a_large_image_that_waited_long_is_not_overtaken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "AHEAD_S_PER_MPX", AHEAD_S_PER_MPX / 1000)

    async def story() -> list[str]:
        turns, started = EncodingQueue(1), list[str]()

        async def encode(name: str, num_pixels: int) -> None:
            async with turns.slot(num_pixels):
                started.append(name)

        async with turns.slot(0):
            large = asyncio.create_task(encode("large", LARGE))
            await asyncio.sleep(0.1)
            small = asyncio.create_task(encode("small", 100))
            await asyncio.sleep(0)
        await asyncio.gather(large, small)
        return started

    assert run(story()) == ["large", "small"]


def test_a_cancelled_encoding_frees_its_place() -> None:
    async def story() -> list[str]:
        turns = EncodingQueue(2)

        async def encode() -> None:
            async with turns.slot(0):
                await asyncio.sleep(60)

        tasks = [asyncio.create_task(encode()) for _ in range(5)]
        await asyncio.sleep(0)
        tasks[0].cancel()  # the task that gets the place is cancelled at the same moment
        tasks[4].cancel()
        await asyncio.sleep(0)
        tasks[2].cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with turns.slot(0), turns.slot(0):
            return ["both"]

    assert run(story()) == ["both"]
