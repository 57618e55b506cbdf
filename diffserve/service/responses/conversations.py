"""``/v1/conversations``: conversations by an id of their own, which every response that names it goes on with and adds
to. Kept as responses are: in memory, within the same bounds, for the key that began them."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Final

import msgspec
from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diffserve.service.http.bodies import Body
from diffserve.service.lifecycle import json_response, read_body
from diffserve.service.responses.conversation import Turn, items_of, page_of, read_turns
from diffserve.service.responses.kept import KeptResponse, KeptResponses, owner_of
from diffserve.service.responses.schemas import Item, Metadata

MAX_ITEMS: Final = 20
"""That one begins with; more come with responses."""

TOO_LONG: Final = "the conversation is too long to be kept any further; begin a new one."


class ConversationBody(Body):
    """``POST /v1/conversations``."""

    model_config = ConfigDict(title="CreateConversationRequest")

    items: Annotated[list[Item], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = None
    metadata: Metadata | None = None


class Conversations:
    """Those that are kept, and their routes."""

    def __init__(self) -> None:
        self._kept = KeptResponses(called="conversation")

    async def begin(self, request: Request) -> Response:
        """A new one. Pictures in its items are data URLs."""
        body = await read_body(request, ConversationBody)
        turns = read_turns(body.items, _nothing, "items") if body.items else ()
        name = f"conv_{secrets.token_hex(16)}"
        told = {"id": name, "object": "conversation", "created_at": int(time.time()), "metadata": body.metadata or {}}
        kept = KeptResponse(owner_of(request), msgspec.json.encode(told), turns)
        self._kept.put(name, kept)
        return json_response(kept.body, body.warnings)

    async def get(self, request: Request) -> Response:
        """What is known of one."""
        return Response(self._found(request).body, media_type="application/json")

    async def remove(self, request: Request) -> Response:
        """Forget one; the responses in it stay."""
        name = _name(request)
        self._kept.remove(name, owner_of(request))
        return JSONResponse({"id": name, "object": "conversation.deleted", "deleted": True})

    async def items(self, request: Request) -> Response:
        """What was said and painted in it, a page of it."""
        turns = self._found(request).turns
        return JSONResponse(page_of(items_of(turns, _name(request).removeprefix("conv_")), request.query_params))

    def turns(self, name: str, owner: str) -> tuple[Turn, ...]:
        """All of one. HttpError 404 where it is not there for ``owner``."""
        return self._kept.get(name, owner).turns

    def add(self, name: str, owner: str, turns: tuple[Turn, ...]) -> bool:
        """Go on with one; False where that is too long to be kept. One that was forgotten meanwhile stays so."""
        if not self._kept.has(name, owner):
            return True
        before = self._kept.get(name, owner)
        return self._kept.put(name, before._replace(turns=(*before.turns, *turns)))

    def _found(self, request: Request) -> KeptResponse:
        return self._kept.get(_name(request), owner_of(request))


def _name(request: Request) -> str:
    return str(request.path_params["conversation_id"])


def _nothing(_: str) -> Turn | None:
    return None
