"""``/v1/conversations``: conversations with ids, which responses continue and extend.

They are stored in memory like responses, within the same limits, for the key that created them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Final

import msgspec
from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diffserve.api.errors import InvalidRequest
from diffserve.service.http.bodies import Body, show
from diffserve.service.http.errors import HttpError
from diffserve.service.lifecycle import json_response, owner_of, read_body
from diffserve.service.responses.response_store import ResponseStore, StoredResponse
from diffserve.service.responses.schemas import Item, Metadata
from diffserve.service.responses.turns import Turn, items_of, page_of, read_turns

MAX_ITEMS: Final = 20
"""Limit on the items of one request; responses add more."""

TOO_LONG: Final = "the conversation is too long to be stored; start a new one."


class ConversationBody(Body):
    """``POST /v1/conversations``."""

    model_config = ConfigDict(title="CreateConversationRequest")

    items: Annotated[list[Item], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = None
    metadata: Metadata | None = None


class MetadataBody(Body):
    """``POST /v1/conversations/{conversation_id}``."""

    model_config = ConfigDict(title="UpdateConversationRequest")
    hints: ClassVar[Mapping[str, str]] = {"metadata": "give an object, which replaces the metadata"}

    metadata: Metadata | None


class ItemsBody(Body):
    """``POST /v1/conversations/{conversation_id}/items``."""

    model_config = ConfigDict(title="CreateConversationItemsRequest")
    hints: ClassVar[Mapping[str, str]] = {"items": "give a list of messages"}

    items: Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]


class Conversations:
    """Stored conversations and their routes."""

    def __init__(self) -> None:
        self._store = ResponseStore(called="conversation")

    async def begin(self, request: Request) -> Response:
        """Create a conversation; images in its items are data URLs."""
        body = await read_body(request, ConversationBody)
        turns = _with_ids(read_turns(body.items, _find_nothing, "items")) if body.items else ()
        name = f"conv_{secrets.token_hex(16)}"
        fields = {"id": name, "object": "conversation", "created_at": int(time.time()), "metadata": body.metadata or {}}
        stored = StoredResponse(owner_of(request), msgspec.json.encode(fields), turns)
        self._store.put(name, stored)
        return json_response(stored.body, body.warnings)

    async def get(self, request: Request) -> Response:
        """Return a conversation."""
        return Response(self._find(request).body, media_type="application/json")

    async def update(self, request: Request) -> Response:
        """Replace the metadata of a conversation."""
        body, stored = await read_body(request, MetadataBody), self._find(request)
        changed = msgspec.json.decode(stored.body) | {"metadata": body.metadata or {}}
        self._store.put(_name(request), stored._replace(body=msgspec.json.encode(changed)))
        return json_response(self._find(request).body, body.warnings)

    async def add_items(self, request: Request) -> Response:
        """Add messages to the end of a conversation and answer with them."""
        body, stored = await read_body(request, ItemsBody), self._find(request)
        turns = _with_ids(read_turns(body.items, _find_nothing, "items"))
        if not self._store.put(_name(request), stored._replace(turns=(*stored.turns, *turns))):
            raise InvalidRequest(TOO_LONG, param="items")
        return JSONResponse(page_of(items_of(turns, ""), {"order": "asc", "limit": str(MAX_ITEMS)}))

    async def get_item(self, request: Request) -> Response:
        """Answer with one item of a conversation."""
        return JSONResponse(items_of([self._item(request)], "")[0])

    async def remove_item(self, request: Request) -> Response:
        """Remove one item from a conversation and answer with the conversation."""
        stored, item = self._find(request), self._item(request)
        self._store.put(_name(request), stored._replace(turns=tuple(turn for turn in stored.turns if turn is not item)))
        return Response(stored.body, media_type="application/json")

    async def remove(self, request: Request) -> Response:
        """Delete a conversation; its responses stay."""
        name = _name(request)
        self._store.remove(name, owner_of(request))
        return JSONResponse({"id": name, "object": "conversation.deleted", "deleted": True})

    async def items(self, request: Request) -> Response:
        """Return a page of the items of a conversation."""
        turns = self._find(request).turns
        return JSONResponse(page_of(items_of(turns, _name(request).removeprefix("conv_")), request.query_params))

    def turns(self, name: str, owner: str) -> tuple[Turn, ...]:
        """Return the turns of a conversation of ``owner``. Raises HttpError 404."""
        return self._store.get(name, owner).turns

    def add(self, name: str, owner: str, turns: tuple[Turn, ...]) -> bool:
        """Extend a conversation; return False if it gets too long. A deleted one stays deleted."""
        if not self._store.has(name, owner):
            return True
        before = self._store.get(name, owner)
        return self._store.put(name, before._replace(turns=(*before.turns, *_with_ids(turns))))

    def _find(self, request: Request) -> StoredResponse:
        return self._store.get(_name(request), owner_of(request))

    def _item(self, request: Request) -> Turn:
        name = str(request.path_params["item_id"])
        for turn in self._find(request).turns:
            if turn.id == name:
                return turn
        raise HttpError(404, f"there is no item {show(name)} in this conversation.", code="item_not_found")


def _with_ids(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Give an id to each turn that has none."""
    return tuple(turn if turn.id else turn._replace(id=f"msg_{secrets.token_hex(16)}") for turn in turns)


def _name(request: Request) -> str:
    return str(request.path_params["conversation_id"])


def _find_nothing(_: str) -> Turn | None:
    return None
