"""What a server keeps for its clients, typed: files, batches, history, usage; and the calls that ask for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Generic, Literal, TypedDict, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from diffserve.client.calls import GENERATIONS, Call
from diffserve.client.forms import Upload, form_of

FILES: Final = "/v1/files"
BATCHES: Final = "/v1/batches"
HISTORY: Final = "/v1/history"
USAGE: Final = "/v1/usage"
AnyT = TypeVar("AnyT")


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that the server keeps. Times in seconds since 1970."""

    id: str
    num_bytes: int = msgspec.field(name="bytes")
    filename: str
    purpose: str
    created_at: int
    expires_at: int


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of a batch."""

    total: int
    completed: int
    failed: int


class StoredBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. Once it is over, its two files hold a line of JSON for each line that went well, and badly."""

    id: str
    endpoint: str
    status: str
    input_file_id: str
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    expires_at: int
    request_counts: RequestCounts
    metadata: dict[str, str] | None = None
    errors: dict[str, Any] | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes of it."""
        return self.status in ("completed", "failed", "expired", "cancelled")


class Restore(msgspec.Struct, frozen=True, kw_only=True):
    """How to ask for a picture again: ``body`` for ``url``, with what it ``needs`` added."""

    url: str
    body: dict[str, Any]
    needs: tuple[str, ...] = ()


class HistoryEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A picture that was painted for the key that asks."""

    id: str
    created_at: int
    model: str
    prompt: str
    original_prompt: str | None = None
    width: int
    height: int
    seed: int
    variation_seed: int | None = None
    restore: Restore


class UsedDay(msgspec.Struct, frozen=True, kw_only=True):
    """What a key has used in a day (by UTC)."""

    day: str
    key_id: str
    requests: int
    pictures: int
    evaluations: int
    input_tokens: int
    output_tokens: int


class Listed(msgspec.Struct, Generic[AnyT], frozen=True, kw_only=True):
    """A page of a list; where it ``has_more``, the id of its last entry goes on, as ``after``."""

    data: tuple[AnyT, ...]
    has_more: bool = False


class PageFields(TypedDict, total=False):
    """Which page of a list."""

    after: str
    limit: int
    order: Literal["asc", "desc"]


class HistoryFields(PageFields, total=False):
    """Which pictures: with all the words of ``q`` in their prompts, painted from ``since`` on, before ``until``."""

    q: str
    model: str
    since: float
    until: float


def upload(data: bytes, filename: str, purpose: str) -> Call[StoredFile]:
    """Keep a file."""
    body, headers = form_of({"purpose": purpose}, {"file": Upload(data, filename)})
    return Call("POST", FILES, body, _as(StoredFile), headers=headers)


def files(fields: PageFields) -> Call[Listed[StoredFile]]:
    """A page of them."""
    return Call("GET", _with(FILES, fields), None, _as(Listed[StoredFile]))


def file(file_id: str) -> Call[StoredFile]:
    """What is known of one."""
    return Call("GET", f"{FILES}/{quote(file_id, safe='')}", None, _as(StoredFile))


def file_content(file_id: str) -> Call[bytes]:
    """The bytes of one."""
    return Call("GET", f"{FILES}/{quote(file_id, safe='')}/content", None, bytes)


def delete_file(file_id: str) -> Call[bool]:
    """Forget one; False where it is not there."""
    path = f"{FILES}/{quote(file_id, safe='')}"
    return Call("DELETE", path, None, lambda _: True, {"file_not_found": False})


def begin_batch(file_id: str, endpoint: str, metadata: Mapping[str, str]) -> Call[StoredBatch]:
    """Have the lines of a file worked on."""
    asked = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h", "metadata": dict(metadata)}
    return Call("POST", BATCHES, msgspec.json.encode(asked), _as(StoredBatch))


def batch(batch_id: str) -> Call[StoredBatch]:
    """How far one is."""
    return Call("GET", f"{BATCHES}/{quote(batch_id, safe='')}", None, _as(StoredBatch))


def batches(fields: PageFields) -> Call[Listed[StoredBatch]]:
    """A page of them."""
    return Call("GET", _with(BATCHES, fields), None, _as(Listed[StoredBatch]))


def cancel_batch(batch_id: str) -> Call[StoredBatch]:
    """Stop one."""
    return Call("POST", f"{BATCHES}/{quote(batch_id, safe='')}/cancel", None, _as(StoredBatch))


def history(fields: HistoryFields) -> Call[Listed[HistoryEntry]]:
    """A page of what was painted."""
    return Call("GET", _with(HISTORY, fields), None, _as(Listed[HistoryEntry]))


def history_entry(entry_id: str) -> Call[HistoryEntry]:
    """One picture's recipe."""
    return Call("GET", f"{HISTORY}/{quote(entry_id, safe='')}", None, _as(HistoryEntry))


def history_picture(entry_id: str) -> Call[bytes]:
    """One picture's file."""
    return Call("GET", f"{HISTORY}/{quote(entry_id, safe='')}/content", None, bytes)


def history_thumbnail(entry_id: str) -> Call[bytes]:
    """One picture in small."""
    return Call("GET", f"{HISTORY}/{quote(entry_id, safe='')}/thumbnail", None, bytes)


def forget(entry_id: str) -> Call[bool]:
    """Forget one picture; False where it is not there."""
    path = f"{HISTORY}/{quote(entry_id, safe='')}"
    return Call("DELETE", path, None, lambda _: True, {"history_not_found": False})


def forget_all() -> Call[int]:
    """Forget all; how many there were."""
    return Call("DELETE", HISTORY, None, lambda data: msgspec.json.decode(data, type=_Forgotten).num_deleted)


def usage(days: int) -> Call[tuple[UsedDay, ...]]:
    """What the key that asks has used."""
    return Call("GET", f"{USAGE}?days={days}", None, lambda data: _as(Listed[UsedDay])(data).data)


def usage_by_key(days: int) -> Call[tuple[UsedDay, ...]]:
    """What all keys have used."""
    return Call("GET", f"{USAGE}/keys?days={days}", None, lambda data: _as(Listed[UsedDay])(data).data)


def batch_lines(bodies: Iterable[Mapping[str, Any]], endpoint: str = GENERATIONS) -> bytes:
    """A file for a batch: ``bodies`` of requests for ``endpoint``, called by their numbers from 0."""
    shared = {"method": "POST", "url": endpoint}
    lines = ({"custom_id": str(number), **shared, "body": body} for number, body in enumerate(bodies))
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


class _Forgotten(msgspec.Struct):
    num_deleted: int


def _as(kind: type[AnyT]) -> Callable[[bytes], AnyT]:
    return lambda data: msgspec.json.decode(data, type=kind)


def _with(path: str, fields: PageFields) -> str:
    return f"{path}?{urlencode(fields)}" if fields else path
