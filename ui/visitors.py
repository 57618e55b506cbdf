"""Who is at the page, and what is being painted for whom. Nobody stops anything but what is their own."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from typing import Final

from ui.painting import Painting, Picture
from ui.parameters import Order
from ui.server import Server

MAX_PICTURES: Final = 24
"""In a gallery; the oldest go first."""

MAX_VISITORS: Final = 1000


class Visitor:
    """One open page: its paintings in the order in which they were asked for, and its gallery, the newest first.

    news     grows whenever something changes
    trouble  why the last request came to nothing, ``None`` once another one is taken
    """

    def __init__(self) -> None:
        self.pictures: list[Picture] = []
        self.news = 0
        self.trouble: str | None = None
        self._paintings: list[Painting] = []
        self._changed = asyncio.Event()

    @property
    def is_busy(self) -> bool:
        """Whether anything is being painted."""
        return bool(self.paintings)

    @property
    def paintings(self) -> list[Painting]:
        """Those that are not over."""
        self._paintings = [painting for painting in self._paintings if not painting.is_over]
        return self._paintings

    def paint(self, server: Server, order: Order) -> Painting:
        """Begin to paint ``order``."""
        self.trouble = None
        painting = Painting(server, order, self._take)
        self._paintings.append(painting)
        return painting

    def stop(self) -> int:
        """End everything of this visitor; how many paintings that were."""
        paintings = list(self.paintings)
        for painting in paintings:
            painting.stop()
        return len(paintings)

    async def wait_for_news(self, seen: int, seconds: float) -> None:
        """Until ``news`` is no longer ``seen``, ``seconds`` at most."""
        if self.news != seen:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def _take(self, picture: Picture | None) -> None:
        if picture is not None:
            self.pictures = [picture, *self.pictures][:MAX_PICTURES]
        self.news += 1
        self._changed.set()
        self._changed = asyncio.Event()


class Visitors:
    """All open pages, by the session that gradio gives each of them."""

    def __init__(self) -> None:
        self._visitors: OrderedDict[str, Visitor] = OrderedDict()

    def of(self, session: str | None) -> Visitor:
        """The visitor of ``session``, a new one where it is not known; without a session, one for this call alone."""
        if not session:
            return Visitor()
        visitor = self._visitors.setdefault(session, Visitor())
        self._visitors.move_to_end(session)
        self._forget()
        return visitor

    def leave(self, session: str | None) -> None:
        """The page was closed: its paintings end."""
        visitor = self._visitors.pop(session or "", None)
        if visitor is not None:
            visitor.stop()

    def _forget(self) -> None:
        """Those that have been idle for longest, where nobody told that they left."""
        if len(self._visitors) > MAX_VISITORS:
            for key, visitor in list(self._visitors.items())[: len(self._visitors) - MAX_VISITORS]:
                if not visitor.is_busy:
                    del self._visitors[key]
