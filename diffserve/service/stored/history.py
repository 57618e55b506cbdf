"""``/v1/history``: what was painted for a key, to be looked for, asked for again, and forgotten."""

from __future__ import annotations

import math
from typing import Any, Final

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diffserve.api.errors import InvalidRequest
from diffserve.media.images import MEDIA_TYPES, SUFFIXES, thumbnail
from diffserve.service.http.bodies import show
from diffserve.service.http.errors import HttpError
from diffserve.service.http.named import PAGE_PARAMETERS, named, page_asked, query, responses
from diffserve.service.http.sending import send_file
from diffserve.service.images.image_history import ImageHistory
from diffserve.service.stored.files import listed
from diffserve.service.stored.owners import Owners
from diffserve.service.threads import ANSWERS
from diffserve.store.history import MAX_WORDS, Entry, Wanted

MAX_QUERY_CHARS: Final = 500
THUMBNAIL_PX: Final = 256
SEARCH: Final = (
    ("q", {"type": "string", "maxLength": MAX_QUERY_CHARS}, "Words that all stand in the prompt."),
    ("model", {"type": "string"}, "Only pictures of that model."),
    ("since", {"type": "number"}, "Only what was painted then or later, in seconds since 1970."),
    ("until", {"type": "number"}, "Only what was painted before."),
)


class HistoryRoutes:
    """The routes of ``history``."""

    def __init__(self, app: FastAPI, history: ImageHistory, owners: Owners) -> None:
        self._history = history
        self._owners = owners
        told: dict[str, Any] = {"summary": "What was painted", "openapi_extra": query(*PAGE_PARAMETERS, *SEARCH)}
        named(app, "/v1/history", ["GET"], responses=responses(400), **told)(self.list)
        named(app, "/v1/history", ["DELETE"], summary="Forget all of it", responses=responses())(self.forget_all)
        one: dict[str, Any] = {"responses": responses(404)}
        path = "/v1/history/{history_id}"
        named(app, path, ["GET"], summary="One picture's recipe, and the request that repeats it", **one)(self.retrieve)
        named(app, path, ["DELETE"], summary="Forget one picture", **one)(self.forget)
        file: dict[str, Any] = {"content": {kind: {} for kind in MEDIA_TYPES.values()}, "description": "Its file."}
        told = {"summary": "The picture itself", "response_class": Response}
        named(app, f"{path}/content", ["GET"], responses=responses(404) | {200: file}, **told)(self.content)
        file = {"content": {"image/webp": {}}, "description": f"At most {THUMBNAIL_PX} pixels wide and high."}
        told = {"summary": "The picture in small", "response_class": Response}
        named(app, f"{path}/thumbnail", ["GET"], responses=responses(404) | {200: file}, **told)(self.thumbnail)

    async def list(self, request: Request) -> Response:
        """A page of it."""
        owner, asked, wanted = self._owners.of(request), page_asked(request, most=100, usual=20), _wanted(request)
        found = await self._history.do(self._history.rows.page, owner, asked, wanted)
        return listed(None if found is None else ([told_entry(one) for one in found[0]], found[1]))

    async def retrieve(self, request: Request, history_id: str) -> Response:
        """One entry."""
        return JSONResponse(told_entry(await self._found(request, history_id)))

    async def content(self, request: Request, history_id: str) -> Response:
        """Its file."""
        entry = await self._found(request, history_id)
        picture = await self._history.do(self._history.open, entry)
        suffix = f".{entry.file.rpartition('.')[2]}"
        return send_file(picture.file, picture.num_bytes, MEDIA_TYPES[SUFFIXES[suffix]], _headers(entry, suffix))

    async def thumbnail(self, request: Request, history_id: str) -> Response:
        """Its file in small, made anew each time."""
        entry = await self._found(request, history_id)
        with (await self._history.do(self._history.open, entry)).file as file:
            small = await ANSWERS.run(lambda: thumbnail(file.read(), THUMBNAIL_PX))
        return Response(small, media_type="image/webp", headers=_headers(entry, ".webp"))

    async def forget(self, request: Request, history_id: str) -> Response:
        """Remove one."""
        entry = await self._found(request, history_id)
        await self._history.do(self._history.forget, [entry.file])
        return JSONResponse({"id": entry.id, "object": "history.entry", "deleted": True})

    async def forget_all(self, request: Request) -> Response:
        """Remove all of whoever asks."""
        files = await self._history.do(self._history.rows.files, self._owners.of(request))
        await self._history.do(self._history.forget, files)
        return JSONResponse({"object": "history", "deleted": True, "num_deleted": len(files)})

    async def _found(self, request: Request, name: str) -> Entry:
        entry = await self._history.do(self._history.rows.get, self._owners.of(request), name)
        if entry is None:
            raise HttpError(404, f"there is no entry {show(name)} in your history.", code="history_not_found")
        return entry


def told_entry(entry: Entry) -> dict[str, Any]:
    """``entry`` as it is told."""
    path = f"/v1/history/{entry.id}"
    head = {"id": entry.id, "object": "history.entry", "created_at": int(entry.created_s), "model": entry.model}
    return head | entry.recipe | {"content": f"{path}/content", "thumbnail": f"{path}/thumbnail"}


def _headers(entry: Entry, suffix: str) -> dict[str, str]:
    return {
        "Content-Disposition": f'inline; filename="{entry.id}{suffix}"',
        "Cache-Control": "private, no-cache",  # forgotten is forgotten
    }


def _wanted(request: Request) -> Wanted:
    text = request.query_params.get("q", "")
    words = tuple(text.split())
    if len(text) > MAX_QUERY_CHARS or len(words) > MAX_WORDS:
        said = f"q has {len(text)} characters in {len(words)} words; at most {MAX_QUERY_CHARS} in {MAX_WORDS}."
        raise InvalidRequest(said, param="q")
    return Wanted(words, request.query_params.get("model", ""), _seconds(request, "since"), _seconds(request, "until"))


def _seconds(request: Request, name: str) -> float | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InvalidRequest(f"{name} is {show(text)}; it must be seconds since 1970.", param=name)
    return value
