"""Other settings for replicas that are up, one after the other: each ends what it has, and the others do the rest."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from diffserve.api.errors import DiffserveError
from diffserve.cluster.engines import RayEngines
from diffserve.cluster.seat import Seat
from diffserve.settings.config import Settings

LOOK_EVERY_S: Final = 0.05

Renew = Callable[[Settings], Awaitable[None]]

log = logging.getLogger("diffserve.cluster")


async def redeploy(engines: RayEngines, renew: Mapping[str, Renew], settings: Settings) -> None:
    """Have every replica of ``engines`` run with ``settings``; ``renew`` has its deployment make such, by its name.

    Where there is one that is not held, it is held first, and takes the place of the one that goes; where all are, one
    goes and comes back at a time, and a sole one is missed meanwhile. Raises the DiffserveError for which one with
    ``settings`` does not come up; then all are as they were.
    """
    before, seen = engines.settings, list[Seat]()
    try:
        for seat in sorted(engines.seats, key=lambda one: one.is_held):
            seen.append(seat)
            await _Change(engines, renew, settings).of(seat)
    except DiffserveError as error:
        log.warning("other settings are taken back", extra={"reason": error.message})
        for seat in reversed(seen):
            await _Change(engines, renew, before).of(seat)
        raise
    engines.settings = settings


class _Change:
    def __init__(self, engines: RayEngines, renew: Mapping[str, Renew], settings: Settings) -> None:
        self._engines = engines
        self._renew = renew
        self._settings = settings

    async def of(self, seat: Seat) -> None:
        """Give ``seat`` the settings, and have as many held as before."""
        was_held, seat.is_changing = seat.is_held, True
        has_spare = False
        try:
            if was_held:
                has_spare = await self._spare(seat)
                seat.leave()
                while seat.jobs:
                    await asyncio.sleep(LOOK_EVERY_S)
                await seat.let_go()
            await self._renew[seat.name](self._settings)
            seat.forgive()
            self._engines.watch(seat)
            if was_held and not has_spare:
                await _up(seat)
            log.info("replica has other settings", extra={"replica": seat.name})
        finally:
            seat.is_changing = False

    async def _spare(self, seat: Seat) -> bool:
        """Wait until another would do what ``seat`` does; whether one was held for that."""
        others = [one for one in self._engines.seats if one is not seat]
        idle = [one for one in others if not one.is_held]
        if idle:
            idle[0].is_changing = True
            try:
                await _up(idle[0])
            finally:
                idle[0].is_changing = False
            return True
        while others and not any(one.is_ready for one in others):
            if all(one.failed.done() for one in others):
                break
            await asyncio.sleep(LOOK_EVERY_S)
        return False


async def _up(seat: Seat) -> None:
    """Hold ``seat`` until it is ready. Raises what it was given up for."""
    seat.hold()
    while not seat.is_ready:
        if seat.failed.done():
            raise seat.failed.result()
        await asyncio.sleep(LOOK_EVERY_S)
