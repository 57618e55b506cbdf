"""Webhook endpoints, which receive events of jobs, batches and background responses: types, and client methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypedDict, Unpack
from urllib.parse import urlencode

import msgspec

from diffserve.client.stored import Listed, PageFields
from diffserve.client.transport import HttpClient, resource

ENDPOINTS: Final = "/v1/webhook_endpoints"


class WebhookEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Address that receives events; times are in seconds since 1970.

    Attributes:
        signing_secret: Key of the signatures, whsec_...; only when the endpoint was created or the secret replaced.
        signing_secret_hint: The end of the key.
        is_enabled: False after the endpoint has answered 410; an update enables it.
        last_error: Why the last attempt to deliver an event failed; None if it succeeded.
    """

    id: str
    name: str
    url: str
    event_types: tuple[str, ...]
    created_at: int
    updated_at: int
    signing_secret: str | None = None
    signing_secret_hint: str
    is_enabled: bool
    last_error: str | None = None


class WebhookUpdate(TypedDict, total=False):
    """Changes of a webhook endpoint.

    Attributes:
        name: A name for people.
        url: The https URL that receives the events.
        event_types: Types of the events that it receives.
    """

    name: str
    url: str
    event_types: Sequence[str]


class _EventTypes(msgspec.Struct, frozen=True):
    data: tuple[str, ...]


class _TestResult(msgspec.Struct, frozen=True):
    status_code: int


class WebhookMethods(HttpClient):
    """Methods of the client for webhook endpoints."""

    async def webhook_event_types(self) -> tuple[str, ...]:
        """List the types of events.

        Returns:
            The types, such as job.succeeded.
        """
        return (await self._call("GET", "/v1/webhook_event_types", _EventTypes)).data

    async def create_webhook_endpoint(self, name: str, url: str, event_types: Sequence[str]) -> WebhookEndpoint:
        """Create a webhook endpoint.

        Args:
            name: A name for people.
            url: The https URL that receives the events.
            event_types: Types of the events that it receives, such as job.succeeded.

        Returns:
            The endpoint with its secret, which is not shown again.

        Raises:
            InvalidRequest: A value is wrong, or the server does not send events to this host.
        """
        fields = {"name": name, "url": url, "event_types": list(event_types)}
        return await self._call("POST", ENDPOINTS, WebhookEndpoint, fields)

    async def webhook_endpoints(self, **fields: Unpack[PageFields]) -> Listed[WebhookEndpoint]:
        """List one page of the webhook endpoints.

        Args:
            **fields: Optional request fields, see ``PageFields``.

        Returns:
            The endpoints, the newest first unless ``order`` says otherwise.
        """
        path = f"{ENDPOINTS}?{urlencode(fields)}" if fields else ENDPOINTS
        return await self._call("GET", path, Listed[WebhookEndpoint])

    async def webhook_endpoint(self, endpoint_id: str) -> WebhookEndpoint:
        """Fetch a webhook endpoint.

        Args:
            endpoint_id: The ID of the endpoint.

        Returns:
            The endpoint.

        Raises:
            InvalidRequest: No endpoint has this ID.
        """
        return await self._call("GET", resource(ENDPOINTS, endpoint_id), WebhookEndpoint)

    async def update_webhook_endpoint(self, endpoint_id: str, **fields: Unpack[WebhookUpdate]) -> WebhookEndpoint:
        """Change a webhook endpoint, and enable it if it was disabled.

        Args:
            endpoint_id: The ID of the endpoint.
            **fields: What changes, see ``WebhookUpdate``.

        Returns:
            The changed endpoint.

        Raises:
            InvalidRequest: A value is wrong, or no endpoint has this ID.
        """
        return await self._call("POST", resource(ENDPOINTS, endpoint_id), WebhookEndpoint, dict(fields))

    async def rotate_webhook_secret(self, endpoint_id: str, *, keep_old: bool = False) -> WebhookEndpoint:
        """Replace the secret of a webhook endpoint.

        Args:
            endpoint_id: The ID of the endpoint.
            keep_old: Whether events are also signed with the old secret for 24 hours.

        Returns:
            The endpoint with its new secret, which is not shown again.

        Raises:
            InvalidRequest: No endpoint has this ID.
        """
        fields = {"keep_old_secret_active_for_24_hours": keep_old}
        return await self._call("POST", resource(ENDPOINTS, endpoint_id, "rotate_secret"), WebhookEndpoint, fields)

    async def test_webhook_endpoint(self, endpoint_id: str, event_type: str) -> int:
        """Send a sample event to a webhook endpoint, once.

        Args:
            endpoint_id: The ID of the endpoint.
            event_type: The type of the event.

        Returns:
            The HTTP status with which the endpoint answered.

        Raises:
            InvalidRequest: No endpoint has this ID, or it cannot be reached.
        """
        fields = {"event_type": event_type}
        return (await self._call("POST", resource(ENDPOINTS, endpoint_id, "test"), _TestResult, fields)).status_code

    async def delete_webhook_endpoint(self, endpoint_id: str) -> bool:
        """Delete a webhook endpoint with its undelivered events.

        Args:
            endpoint_id: The ID of the endpoint.

        Returns:
            True if it was deleted, False if it does not exist.
        """
        return await self._succeeds("DELETE", resource(ENDPOINTS, endpoint_id), "webhook_endpoint_not_found")
