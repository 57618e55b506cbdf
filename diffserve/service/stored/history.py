"""``/v1/history``: search, download and deletion of the images that a key generated."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import FastAPI, Query
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diffserve.api.errors import InvalidRequest
from diffserve.media.images import MEDIA_TYPES, SUFFIXES, thumbnail
from diffserve.service.http.bodies import show
from diffserve.service.http.errors import HttpError
from diffserve.service.http.routing import After, Order
from diffserve.service.http.streams import send_file
from diffserve.service.images.image_history import ImageHistory
from diffserve.service.stored.files import list_response
from diffserve.service.stored.owners import Owners
from diffserve.service.threads import ANSWERS
from diffserve.store.database import PageSelection
from diffserve.store.history import MAX_WORDS, Entry, EntryFilter

MAX_QUERY_CHARS: Final = 500
THUMBNAIL_PX: Final = 256

Words = Annotated[
    str, Query(max_length=MAX_QUERY_CHARS, description="Only images whose prompt contains all of these words.")
]
Since = Annotated[
    float | None, Query(allow_inf_nan=False, description="Only images from this time on, in seconds since 1970.")
]
Until = Annotated[
    float | None, Query(allow_inf_nan=False, description="Only images before this time, in seconds since 1970.")
]
Favorite = Annotated[bool | None, Query(description="Only favorites, or only others.")]


class HistoryRoutes:
    """Routes of ``history``."""

    def __init__(self, app: FastAPI, history: ImageHistory, owners: Owners) -> None:
        self._history = history
        self._owners = owners
        path = "/v1/history/{history_id}"
        app.get("/v1/history", summary="Search the history of images")(self.list_entries)
        app.delete("/v1/history", summary="Delete the whole history")(self.forget_all)
        app.get(path, summary="Describe an image and the request that repeats it")(self.retrieve)
        app.delete(path, summary="Delete an image from the history")(self.forget)
        favorite = f"{path}/favorite"
        app.post(favorite, summary="Mark an image as a favorite")(self.add_favorite)
        app.delete(favorite, summary="Unmark a favorite")(self.remove_favorite)
        file: dict[str, Any] = {"content": {kind: {} for kind in MEDIA_TYPES.values()}, "description": "The file."}
        download = app.get(
            f"{path}/content", summary="Download an image", responses={200: file}, response_class=Response
        )
        download(self.content)
        file = {"content": {"image/webp": {}}, "description": f"Thumbnail of at most {THUMBNAIL_PX} pixels per side."}
        preview = app.get(
            f"{path}/thumbnail", summary="Download a thumbnail", responses={200: file}, response_class=Response
        )
        preview(self.thumbnail)

    async def list_entries(
        self,
        request: Request,
        q: Words = "",
        model: Annotated[str, Query(description="Only images of this model.")] = "",
        since: Since = None,
        until: Until = None,
        favorite: Favorite = None,
        after: After = "",
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Order = "desc",
    ) -> Response:
        """Search the history of the key, page by page."""
        words = tuple(q.split())
        if len(words) > MAX_WORDS:
            raise InvalidRequest(f"q has {len(words)} words; at most {MAX_WORDS} are allowed.", param="q")
        owner, selection = self._owners.of(request), PageSelection(limit, after, order)
        entry_filter = EntryFilter(words, model, since, until, favorite)
        page = await self._history.do(self._history.rows.page, owner, selection, entry_filter)
        return list_response(page, entry_object)

    async def retrieve(self, request: Request, history_id: str) -> Response:
        """Describe an entry."""
        return JSONResponse(entry_object(await self._entry_of(request, history_id)))

    async def content(self, request: Request, history_id: str) -> Response:
        """Return the image file."""
        entry = await self._entry_of(request, history_id)
        picture = await self._history.do(self._history.open, entry)
        suffix = f".{entry.file.rpartition('.')[2]}"
        return send_file(picture.file, picture.num_bytes, MEDIA_TYPES[SUFFIXES[suffix]], _headers(entry, suffix))

    async def thumbnail(self, request: Request, history_id: str) -> Response:
        """Return a thumbnail, which is computed for each request."""
        entry = await self._entry_of(request, history_id)
        with (await self._history.do(self._history.open, entry)).file as file:
            small = await ANSWERS.run(lambda: thumbnail(file.read(), THUMBNAIL_PX))
        return Response(small, media_type="image/webp", headers=_headers(entry, ".webp"))

    async def forget(self, request: Request, history_id: str) -> Response:
        """Delete an entry."""
        entry = await self._entry_of(request, history_id)
        await self._history.do(self._history.forget, [entry.file])
        return JSONResponse({"id": entry.id, "object": "history.entry", "deleted": True})

    async def add_favorite(self, request: Request, history_id: str) -> Response:
        """Mark an entry as a favorite."""
        return await self._set_favorite(request, history_id, is_favorite=True)

    async def remove_favorite(self, request: Request, history_id: str) -> Response:
        """Unmark a favorite."""
        return await self._set_favorite(request, history_id, is_favorite=False)

    async def _set_favorite(self, request: Request, name: str, *, is_favorite: bool) -> Response:
        rows, owner = self._history.rows, self._owners.of(request)
        entry = await self._history.do(rows.set_favorite, owner, name, is_favorite=is_favorite)
        return JSONResponse(entry_object(_checked_entry(entry, name)))

    async def forget_all(self, request: Request) -> Response:
        """Delete all entries of the request's key."""
        files = await self._history.do(self._history.rows.files, self._owners.of(request))
        await self._history.do(self._history.forget, files)
        return JSONResponse({"object": "history", "deleted": True, "num_deleted": len(files)})

    async def _entry_of(self, request: Request, name: str) -> Entry:
        return _checked_entry(await self._history.do(self._history.rows.get, self._owners.of(request), name), name)


def _checked_entry(entry: Entry | None, name: str) -> Entry:
    """Return ``entry``. Raises HttpError if it is None."""
    if entry is None:
        raise HttpError(404, f"your history has no entry {show(name)}.", code="history_not_found")
    return entry


def entry_object(entry: Entry) -> dict[str, Any]:
    """Return the API's object for ``entry``."""
    path = f"/v1/history/{entry.id}"
    head = {"id": entry.id, "object": "history.entry", "created_at": int(entry.created_s), "model": entry.model}
    head["favorite"] = bool(entry.favorite)
    return head | entry.recipe | {"content": f"{path}/content", "thumbnail": f"{path}/thumbnail"}


def _headers(entry: Entry, suffix: str) -> dict[str, str]:
    return {
        "Content-Disposition": f'inline; filename="{entry.id}{suffix}"',
        "Cache-Control": "private, no-cache",  # a deleted image must not be served from a cache
    }
