"""Webhook endpoints of API keys, with the secrets that sign their events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection
from typing import Any, Final, Literal, get_args

import msgspec
from sqlalchemy import Connection, delete, func, select, update

from diffserve.api.errors import InvalidRequest
from diffserve.store.database import Database, PageSelection, find_row, insert_row, read_row
from diffserve.store.deliveries import NewDelivery
from diffserve.store.schema import deliveries, webhook_endpoints

EventType = Literal[
    "batch.completed", "batch.failed", "batch.expired", "batch.cancelled",
    "response.completed", "response.failed", "response.cancelled", "response.incomplete",
    "job.succeeded", "job.failed", "job.cancelled", "job.expired",
]  # fmt: skip
"""Type of an event; those of batches and background responses have OpenAI's names."""

EVENT_TYPES: Final[tuple[EventType, ...]] = get_args(EventType)

MAX_ENDPOINTS: Final = 20
"""Endpoints per owner."""

MAX_PENDING: Final = 10_000
"""Undelivered events per endpoint; further ones are dropped."""

SECRET_BYTES: Final = 32
OLD_SECRET_S: Final = 24 * 3600.0
"""Seconds for which a replaced secret may stay valid."""


class WebhookEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Row of a webhook endpoint.

    Attributes:
        event_types: Types of the events that it receives, with spaces between them.
        secret: Key of the signatures.
        old_secret: Replaced key, b"" if there is none; events are also signed with it until ``old_secret_until_s``.
        updated_s: When the row was changed by its owner, in seconds since 1970.
        disabled: Why it receives no events any more, "" if it does.
        last_error: Why the last attempt to deliver an event failed, "" if it succeeded.
    """

    id: str
    owner: str
    name: str
    url: str
    event_types: str
    secret: bytes
    old_secret: bytes = b""
    old_secret_until_s: float = 0.0
    created_s: float
    updated_s: float
    disabled: str = ""
    last_error: str = ""


class WebhookEndpoints:
    """Table of webhook endpoints.

    Args:
        database: The database.
        clock: Returns seconds since 1970.
    """

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def add(self, owner: str, name: str, url: str, event_types: Collection[str]) -> WebhookEndpoint:
        """Add an endpoint with a new secret.

        Raises:
            InvalidRequest: ``owner`` has too many endpoints.
        """
        now_s = self._clock()
        endpoint = WebhookEndpoint(
            id=f"we_{secrets.token_hex(16)}", owner=owner, name=name, url=url, event_types=" ".join(event_types),
            secret=secrets.token_bytes(SECRET_BYTES), created_s=now_s, updated_s=now_s,
        )  # fmt: skip
        count = select(func.count()).where(webhook_endpoints.c.owner == owner)
        with self._database.writing(exclusive=True) as connection:
            if connection.execute(count).scalar_one() >= MAX_ENDPOINTS:
                message = f"you have {MAX_ENDPOINTS} webhook endpoints, which is the limit; delete one."
                raise InvalidRequest(message, code="too_many_webhook_endpoints")
            insert_row(connection, webhook_endpoints, endpoint)
        return endpoint

    def get(self, endpoint_id: str) -> WebhookEndpoint | None:
        """Return the endpoint with the ID ``endpoint_id`` of any owner, or None."""
        with self._database.reading() as connection:
            return find_row(connection, WebhookEndpoint, webhook_endpoints, id=endpoint_id)

    def page(self, owner: str, selection: PageSelection) -> tuple[list[WebhookEndpoint], bool] | None:
        """Return a page of ``owner``'s endpoints and whether more follow; None if ``after`` does not exist."""
        return self._database.page(WebhookEndpoint, webhook_endpoints, owner, selection)

    def update(self, endpoint_id: str, **values: str) -> WebhookEndpoint | None:
        """Change name, url or event_types of an endpoint and enable it; None if it does not exist."""
        return self._update(endpoint_id, disabled="", last_error="", **values)

    def rotate_secret(self, endpoint_id: str, *, keeps_old: bool) -> WebhookEndpoint | None:
        """Replace the secret of an endpoint; with ``keeps_old`` the old one is valid for another day.

        Returns:
            The endpoint, or None if it does not exist.
        """
        endpoint = self.get(endpoint_id)
        if endpoint is None:
            return None
        new = {"secret": secrets.token_bytes(SECRET_BYTES), "old_secret": endpoint.secret if keeps_old else b""}
        return self._update(endpoint_id, **new, old_secret_until_s=self._clock() + OLD_SECRET_S if keeps_old else 0.0)

    def disable(self, endpoint_id: str, reason: str) -> None:
        """Stop the events of an endpoint until it is updated; waiting ones are dropped."""
        with self._database.writing() as connection:
            is_it = webhook_endpoints.c.id == endpoint_id
            # deliveries first, as in the outcomes of attempts: another order of locks could be a deadlock
            connection.execute(delete(deliveries).where(deliveries.c.recipient == endpoint_id))
            connection.execute(update(webhook_endpoints).where(is_it).values(disabled=reason, last_error=reason))

    def delete(self, endpoint_id: str) -> None:
        """Delete an endpoint with its waiting events."""
        with self._database.writing() as connection:
            connection.execute(delete(deliveries).where(deliveries.c.recipient == endpoint_id))
            connection.execute(delete(webhook_endpoints).where(webhook_endpoints.c.id == endpoint_id))

    def add_event(self, owner: str, event_type: str, object_id: str) -> None:
        """Add an event of an object that is not in the database."""
        with self._database.writing() as connection:
            add_event(connection, owner, event_type, object_id, self._clock())

    def _update(self, endpoint_id: str, **values: Any) -> WebhookEndpoint | None:
        changes = values | {"updated_s": self._clock()}
        with self._database.writing() as connection:
            connection.execute(update(webhook_endpoints).where(webhook_endpoints.c.id == endpoint_id).values(changes))
            return find_row(connection, WebhookEndpoint, webhook_endpoints, id=endpoint_id)


def event_body(event: str, event_type: str, object_id: str, now_s: float) -> str:
    """Return an event as JSON, in OpenAI's form."""
    data = {"id": event, "object": "event", "created_at": int(now_s), "type": event_type, "data": {"id": object_id}}
    return msgspec.json.encode(data).decode()


def add_event(connection: Connection, owner: str, event_type: str, object_id: str, now_s: float) -> None:
    """Add a delivery for each of ``owner``'s endpoints that receives ``event_type``.

    It belongs to the transaction of ``connection``, which also changes the state of the object, so that a crash loses
    no event.

    Args:
        connection: A connection that writes.
        owner: The ID of the API key.
        event_type: One of ``EVENT_TYPES``.
        object_id: The ID of the object whose state changed.
        now_s: The time, in seconds since 1970.
    """
    query = select(webhook_endpoints).where(webhook_endpoints.c.owner == owner, webhook_endpoints.c.disabled == "")
    event = f"evt_{secrets.token_hex(16)}"
    for row in connection.execute(query).all():
        endpoint = read_row(WebhookEndpoint, row)
        if event_type not in endpoint.event_types.split():
            continue
        count = select(func.count()).where(deliveries.c.recipient == endpoint.id)
        if connection.execute(count).scalar_one() >= MAX_PENDING:
            message = f"{MAX_PENDING} events wait for this endpoint, which is the limit; further ones are dropped."
            is_it = webhook_endpoints.c.id == endpoint.id
            connection.execute(update(webhook_endpoints).where(is_it).values(last_error=message))
            continue
        body = event_body(event, event_type, object_id, now_s)
        new = NewDelivery(recipient=endpoint.id, event=event, body=body, created_s=now_s, next_s=now_s)
        insert_row(connection, deliveries, new)
