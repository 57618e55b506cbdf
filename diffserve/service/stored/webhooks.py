"""``/v1/webhook_endpoints``: OpenAI's API of webhook endpoints, which receive events of jobs, batches and responses."""

from __future__ import annotations

import base64
import secrets
import time
from typing import Annotated, Any, ClassVar, Final

from fastapi import FastAPI, Query
from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diffserve.api.errors import InvalidRequest
from diffserve.service.http.bodies import Body, show
from diffserve.service.http.errors import HttpError
from diffserve.service.http.outgoing import OutgoingClient
from diffserve.service.http.routing import After, Order
from diffserve.service.lifecycle import read_body
from diffserve.service.stored.delivery_runner import DeliveryError, send_event
from diffserve.service.stored.files import list_response
from diffserve.service.stored.owners import Owners
from diffserve.service.threads import LISTINGS
from diffserve.store.database import PageSelection
from diffserve.store.webhooks import EVENT_TYPES, EventType, WebhookEndpoint, WebhookEndpoints, event_body

MAX_URL_CHARS: Final = 4000
HINT_CHARS: Final = 4
"""Last characters of a secret that are shown."""

EventTypes = Annotated[
    list[EventType], Field(min_length=1, max_length=64, description="Types of the events that it receives.")
]
Name = Annotated[str, Field(min_length=1, max_length=256, description="A name for people.")]
Url = Annotated[str, Field(min_length=1, max_length=MAX_URL_CHARS, description="Where events are posted, by https.")]


class WebhookEndpointBody(Body):
    """The body of ``POST /v1/webhook_endpoints``."""

    model_config = ConfigDict(title="CreateWebhookEndpointRequest")
    hints: ClassVar[dict[str, str]] = {
        "event_types": "give the types of events, such as job.succeeded; GET /v1/webhook_event_types lists them",
        "name": "give a name for people",
        "url": "give the https URL that receives the events",
    }

    event_types: EventTypes
    name: Name
    url: Url


class WebhookUpdateBody(Body):
    """The body of ``POST /v1/webhook_endpoints/{id}``."""

    model_config = ConfigDict(title="UpdateWebhookEndpointRequest")

    event_types: EventTypes | None = None
    name: Name | None = None
    url: Url | None = None


class RotateSecretBody(Body):
    """The body of ``POST /v1/webhook_endpoints/{id}/rotate_secret``."""

    model_config = ConfigDict(title="RotateWebhookSecretRequest")

    keep_old_secret_active_for_24_hours: Annotated[
        bool, Field(description="Whether events are also signed with the old secret for a day.")
    ] = False


class WebhookTestBody(Body):
    """The body of ``POST /v1/webhook_endpoints/{id}/test``."""

    model_config = ConfigDict(title="TestWebhookEndpointRequest")
    hints: ClassVar[dict[str, str]] = {"event_type": "give the type of an event, such as job.succeeded"}

    event_type: EventType


class WebhookRoutes:
    """Routes of webhook ``endpoints``, whose events ``client`` sends."""

    def __init__(self, app: FastAPI, endpoints: WebhookEndpoints, owners: Owners, client: OutgoingClient) -> None:
        self._endpoints = endpoints
        self._owners = owners
        self._client = client
        self._testing: set[str] = set()
        path = "/v1/webhook_endpoints/{webhook_endpoint_id}"
        app.get("/v1/webhook_event_types", summary="List the types of webhook events")(self.list_types)
        app.get("/v1/webhook_endpoints", summary="List webhook endpoints")(self.list_endpoints)
        app.get(path, summary="Describe a webhook endpoint")(self.retrieve)
        app.delete(path, summary="Delete a webhook endpoint")(self.delete)

    async def create(self, request: Request) -> Response:
        """Create an endpoint. Only this answer and that of ``rotate_secret`` contain the secret."""
        owner = self._owners.of(request)
        body = await read_body(request, WebhookEndpointBody)
        check_url(self._client, body.url, "url", "webhook_hosts")
        types = list(dict.fromkeys(body.event_types))
        endpoint = await LISTINGS.run(self._endpoints.add, owner, body.name, body.url, types)
        return JSONResponse(endpoint_object(endpoint, has_secret=True))

    async def update(self, request: Request) -> Response:
        """Change name, url or event types; an endpoint that was disabled receives events again."""
        endpoint = await self._endpoint_of(request)
        body = await read_body(request, WebhookUpdateBody)
        values: dict[str, str] = {} if body.name is None else {"name": body.name}
        if body.url is not None:
            check_url(self._client, body.url, "url", "webhook_hosts")
            values["url"] = body.url
        if body.event_types is not None:
            values["event_types"] = " ".join(dict.fromkeys(body.event_types))
        updated = await LISTINGS.run(self._endpoints.update, endpoint.id, **values)
        return JSONResponse(endpoint_object(_existing(updated)))

    async def rotate_secret(self, request: Request) -> Response:
        """Replace the secret, at once or with a day in which the old one is also valid."""
        endpoint = await self._endpoint_of(request)
        body = await read_body(request, RotateSecretBody)
        keeps_old = body.keep_old_secret_active_for_24_hours
        rotated = await LISTINGS.run(self._endpoints.rotate_secret, endpoint.id, keeps_old=keeps_old)
        return JSONResponse(endpoint_object(_existing(rotated), has_secret=True))

    async def test(self, request: Request) -> Response:
        """Send an event about an object that does not exist, once, and answer with the status of the endpoint.

        Each key sends one at a time, so that slow endpoints of one key do not delay the events of others.
        """
        endpoint = await self._endpoint_of(request)
        body = await read_body(request, WebhookTestBody)
        event = f"evt_{secrets.token_hex(16)}"
        kind = {"batch": "batch", "response": "resp", "job": "job"}[body.event_type.partition(".")[0]]
        content = event_body(event, body.event_type, f"{kind}_{'0' * 32}", time.time())
        if endpoint.owner in self._testing:
            message = "a test of one of your webhook endpoints is running; wait for its answer."
            raise HttpError(409, message, code="test_running")
        self._testing.add(endpoint.owner)
        try:
            status = await send_event(self._client, endpoint, event, content.encode())
        except DeliveryError as error:
            raise InvalidRequest(f"the event was not delivered: {error}", code="delivery_failed") from None
        finally:
            self._testing.remove(endpoint.owner)
        return JSONResponse(
            {
                "object": "webhook_endpoint.test",
                "webhook_endpoint_id": endpoint.id,
                "event_type": body.event_type,
                "status_code": status,
                "success": True,
            }
        )

    async def list_types(self, request: Request) -> Response:
        """List the types of events."""
        return JSONResponse({"object": "list", "data": list(EVENT_TYPES)})

    async def list_endpoints(
        self,
        request: Request,
        after: After = "",
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Order = "desc",
    ) -> Response:
        """List the endpoints of the key, page by page."""
        page = await LISTINGS.run(self._endpoints.page, self._owners.of(request), PageSelection(limit, after, order))
        return list_response(page, endpoint_object)

    async def retrieve(self, request: Request, webhook_endpoint_id: str) -> Response:
        """Answer with an endpoint, and whether its last event was delivered."""
        return JSONResponse(endpoint_object(await self._endpoint_of(request)))

    async def delete(self, request: Request, webhook_endpoint_id: str) -> Response:
        """Delete an endpoint with its undelivered events."""
        endpoint = await self._endpoint_of(request)
        await LISTINGS.run(self._endpoints.delete, endpoint.id)
        return JSONResponse({"id": endpoint.id, "object": "webhook_endpoint.deleted", "deleted": True})

    async def _endpoint_of(self, request: Request) -> WebhookEndpoint:
        owner, name = self._owners.of(request), str(request.path_params["webhook_endpoint_id"])
        endpoint = await LISTINGS.run(self._endpoints.get, name)
        if endpoint is None or endpoint.owner != owner:
            raise HttpError(404, f"you have no webhook endpoint {show(name)}.", code="webhook_endpoint_not_found")
        return endpoint


def check_url(client: OutgoingClient, url: str, param: str, setting: str) -> None:
    """Check that this server may send data to ``url``.

    Args:
        client: The client that would send it.
        url: The URL that a client gave.
        param: The field with the URL.
        setting: The setting with the allowed hosts.

    Raises:
        InvalidRequest: It is not an https URL of an allowed host.
    """
    if not client:
        message = f"{param} cannot be used: this server sends nothing to other servers; its [serve] {setting} is empty."
        raise InvalidRequest(message, param=param, code="url_not_allowed")
    if client.target(url) is None:
        message = (
            f"{param} is {show(url)}; give an https URL of one of these hosts ([serve] {setting}): {client.host_list}."
        )
        raise InvalidRequest(message, param=param, code="url_not_allowed")


def endpoint_object(endpoint: WebhookEndpoint, *, has_secret: bool = False) -> dict[str, Any]:
    """Return the API's object for ``endpoint``, with the secret only if ``has_secret``."""
    secret = f"whsec_{base64.b64encode(endpoint.secret).decode()}"
    return {
        "id": endpoint.id,
        "object": "webhook_endpoint",
        "name": endpoint.name,
        "url": endpoint.url,
        "event_types": endpoint.event_types.split(),
        "created_at": int(endpoint.created_s),
        "updated_at": int(endpoint.updated_s),
        "signing_secret_hint": f"whsec_...{secret.rstrip('=')[-HINT_CHARS:]}",
        "is_enabled": not endpoint.disabled,
        "last_error": endpoint.last_error or None,
        **({"signing_secret": secret} if has_secret else {}),
    }


def _existing(endpoint: WebhookEndpoint | None) -> WebhookEndpoint:
    if endpoint is None:
        raise HttpError(404, "this webhook endpoint was deleted.", code="webhook_endpoint_not_found")
    return endpoint
