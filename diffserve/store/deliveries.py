"""Queue of deliveries: events for webhook endpoints, and results of jobs for the URLs that their clients gave.

A process leases a delivery by moving its next attempt beyond the time that one may take. If the process ends, the
delivery is repeated after that time: a recipient may get an event twice, with the same ID.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection
from typing import Final

import msgspec
from sqlalchemy import ColumnElement, Connection, delete, func, select, update

from diffserve.store.database import Database, insert_row, read_row
from diffserve.store.schema import deliveries, jobs, webhook_endpoints

DELAYS_S: Final = (5.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0, 50_400.0, 72_000.0, 86_400.0)
"""Delays after failed attempts, as the Standard Webhooks specification recommends: three days in all."""

MAX_JITTER: Final = 0.1
"""Share by which a delay is extended at random, so that many deliveries do not repeat at once."""

PAUSE_S: Final = 30.0
"""After a failed attempt, the other due deliveries of the recipient wait for this many seconds."""

EVENT_S: Final = 15.0
"""Limit on the delivery of an event."""

UPLOAD_S: Final = 300.0
"""Limit on the upload of a result."""

LEASE_RESERVE_S: Final = 15.0
MAX_AT_ONCE: Final = 8
"""Number of endpoints of one owner that get events at the same time, so that slow ones do not delay those of others."""

UPLOADS: Final = "uploads/"
"""Beginning of the recipient of results; the ID of the owner follows."""


class NewDelivery(msgspec.Struct, frozen=True, kw_only=True):
    """Delivery to insert; its number is assigned by the database.

    Attributes:
        recipient: ID of a webhook endpoint, or ``UPLOADS`` and the owner of the job. Its deliveries take turns.
        event: ID of the event, "" for a result.
        body: The event as JSON, "" for a result.
        job: Number of the job whose result is uploaded, 0 for an event.
        attempts: Number of attempts that have begun.
        created_s: When it was added, in seconds since 1970.
        next_s: When the next attempt is due, in seconds since 1970.
    """

    recipient: str
    event: str = ""
    body: str = ""
    job: int = 0
    attempts: int = 0
    created_s: float
    next_s: float


class Delivery(NewDelivery, frozen=True, kw_only=True):
    """Row of a delivery; ``number`` is its position in the order of creation."""

    number: int


class Deliveries:
    """Table of deliveries.

    Args:
        database: The database.
        clock: Returns seconds since 1970.
    """

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def num_waiting(self) -> int:
        """Return the number of deliveries that were not accepted yet."""
        with self._database.reading() as connection:
            return connection.execute(select(func.count()).select_from(deliveries)).scalar_one()

    def claim(self, busy: Collection[str] = ()) -> Delivery | None:
        """Lease the delivery that is due for the longest time; None if none is due.

        Args:
            busy: Recipients that get no further delivery now. The other endpoints of an owner get none either if
                ``MAX_AT_ONCE`` of its endpoints are busy.
        """
        now_s = self._clock()
        endpoint = webhook_endpoints.c
        busy_owners = select(endpoint.owner).where(endpoint.id.in_(busy)).group_by(endpoint.owner)
        full_owners = busy_owners.having(func.count() >= MAX_AT_ONCE)
        due = select(deliveries).where(
            deliveries.c.next_s <= now_s,
            deliveries.c.recipient.not_in(busy),
            deliveries.c.recipient.not_in(select(endpoint.id).where(endpoint.owner.in_(full_owners))),
        )
        first = due.order_by(deliveries.c.next_s, deliveries.c.number).limit(1)
        with self._database.reading() as connection:
            if connection.execute(first).first() is None:
                return None
        with self._database.writing(at_once=False, exclusive=not self._database.is_postgresql) as connection:
            row = connection.execute(first.with_for_update(skip_locked=True)).first()
            if row is None:
                return None
            delivery = read_row(Delivery, row)
            lease_s = (UPLOAD_S if delivery.job else EVENT_S) + LEASE_RESERVE_S
            changes = {"attempts": delivery.attempts + 1, "next_s": now_s + lease_s}
            connection.execute(update(deliveries).where(deliveries.c.number == delivery.number).values(changes))
        return msgspec.structs.replace(delivery, **changes)

    def succeed(self, delivery: Delivery) -> None:
        """End a leased delivery that was accepted by its recipient."""
        self._end(delivery, "")

    def fail(self, delivery: Delivery, error: str, *, is_final: bool = False) -> bool:
        """Record why the attempt of a leased delivery failed, and plan the next one.

        Args:
            delivery: The delivery as it was claimed.
            error: A sentence about the reason.
            is_final: Whether there are no further attempts; so it is after the last of ``DELAYS_S``.

        Returns:
            Whether this call planned another attempt; False if the lease was lost.
        """
        if is_final or delivery.attempts > len(DELAYS_S):
            self._end(delivery, error)
            return False
        now_s = self._clock()
        delay_s = DELAYS_S[delivery.attempts - 1] * (1.0 + MAX_JITTER * random.random())
        repeat = update(deliveries).where(_is_leased(delivery)).values(next_s=now_s + delay_s)
        is_due = (deliveries.c.recipient == delivery.recipient) & (deliveries.c.next_s <= now_s)
        pause = update(deliveries).where(is_due, deliveries.c.number != delivery.number)
        with self._database.writing(at_once=False, exclusive=True) as connection:  # one server at a time: no deadlock
            is_leased = connection.execute(repeat).rowcount == 1
            if is_leased:
                connection.execute(pause.values(next_s=now_s + PAUSE_S))
                _note(connection, delivery, error, "waiting")
        return is_leased

    def give_back(self, delivery: Delivery) -> None:
        """Return a leased delivery whose attempt was interrupted by this server."""
        values = {"attempts": delivery.attempts - 1, "next_s": self._clock()}
        with self._database.writing(at_once=False) as connection:
            connection.execute(update(deliveries).where(_is_leased(delivery)).values(values))

    def drop(self, delivery: Delivery) -> None:
        """Delete a delivery whose recipient does not exist any more."""
        with self._database.writing(at_once=False) as connection:
            connection.execute(delete(deliveries).where(deliveries.c.number == delivery.number))

    def _end(self, delivery: Delivery, error: str) -> None:
        with self._database.writing(at_once=False) as connection:
            if connection.execute(delete(deliveries).where(_is_leased(delivery))).rowcount:
                _note(connection, delivery, error, "failed" if error else "delivered")


def add_upload(connection: Connection, owner: str, job: int, now_s: float) -> None:
    """Add the upload of the result of a job to the transaction of ``connection``."""
    new = NewDelivery(recipient=f"{UPLOADS}{owner}", job=job, created_s=now_s, next_s=now_s)
    insert_row(connection, deliveries, new)


def _is_leased(delivery: Delivery) -> ColumnElement[bool]:
    """Return the condition that no other process has leased the delivery since."""
    return (deliveries.c.number == delivery.number) & (deliveries.c.attempts == delivery.attempts)


def _note(connection: Connection, delivery: Delivery, error: str, status: str) -> None:
    """Record the outcome of an attempt where the owner can read it: in the endpoint or in the job."""
    if not delivery.job:
        is_it = webhook_endpoints.c.id == delivery.recipient
        is_new = webhook_endpoints.c.last_error != error
        connection.execute(update(webhook_endpoints).where(is_it, is_new).values(last_error=error))
        return
    is_job = jobs.c.number == delivery.job
    output = connection.execute(select(jobs.c.output).where(is_job)).scalar()
    if output is not None:
        changed = msgspec.json.decode(output, type=dict[str, str]) | {"status": status, "error": error}
        connection.execute(update(jobs).where(is_job).values(output=msgspec.json.encode(changed).decode()))
