"""Mailroom: what threads hand in and what they wait for, under one lock."""

from __future__ import annotations

import threading
from collections import deque

from diffserve.engine.text.task import LiveText
from diffserve.text_types import TextEvent


class Mailroom:
    """Requests and cancellations on their way in, events on their way out.

    Every event is delivered exactly once: into the mailbox of whoever follows the request, else to the next tick.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.inbox: dict[str, LiveText] = {}
        self._cancelled: list[str] = []
        self._outbox: deque[TextEvent] = deque()
        self._mailboxes: dict[str, deque[TextEvent]] = {}

    @property
    def has_mail(self) -> bool:
        """Whether anything waits for a tick."""
        with self.lock:
            return bool(self.inbox or self._cancelled or self._outbox)

    def open_mailbox(self, request_id: str) -> None:
        """From now on the events of ``request_id`` are kept for ``next_event``."""
        with self.lock:
            self._mailboxes[request_id] = deque()

    def close_mailbox(self, request_id: str) -> None:
        """Nobody follows ``request_id`` any more: what is left for it is dropped."""
        with self.lock:
            self._mailboxes.pop(request_id, None)

    def post(self, events: list[TextEvent]) -> None:
        """Deliver ``events``."""
        with self.lock:
            for event in events:
                self._mailboxes.get(event.request_id, self._outbox).append(event)

    def next_event(self, request_id: str) -> TextEvent | None:
        """The oldest event of a followed request, if there is one."""
        with self.lock:
            mailbox = self._mailboxes[request_id]
            return mailbox.popleft() if mailbox else None

    def cancel(self, request_id: str) -> bool:
        """Ask the next tick to cancel; False when it has been asked already."""
        with self.lock:
            if request_id in self._cancelled:
                return False
            self._cancelled.append(request_id)
            return True

    def take_inbox(self) -> list[LiveText]:
        """New requests, in order of arrival."""
        with self.lock:
            taken, self.inbox = list(self.inbox.values()), {}
            return taken

    def take_cancelled(self) -> list[str]:
        """Ids to be cancelled."""
        with self.lock:
            taken, self._cancelled = self._cancelled, []
            return taken

    def take_outbox(self) -> list[TextEvent]:
        """Events that nobody follows."""
        with self.lock:
            events = list(self._outbox)
            self._outbox.clear()
            return events
