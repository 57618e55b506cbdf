"""Types and calls for stored data: files, batches, history and usage."""

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
    """Metadata of a stored file; times are in seconds since 1970."""

    id: str
    num_bytes: int = msgspec.field(name="bytes")
    filename: str
    purpose: str
    created_at: int
    expires_at: int


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Line counts of a batch."""

    total: int
    completed: int
    failed: int


class StoredBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Batch of requests.

    When it is finished, its output file has one line of JSON per successful request, and its error file one per failed
    request. Times are in seconds since 1970.
    """

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
        """Whether the batch is finished."""
        return self.status in ("completed", "failed", "expired", "cancelled")


class Restore(msgspec.Struct, frozen=True, kw_only=True):
    """Request that reproduces an image: ``body`` for the path ``url``, after adding the files in ``needs``."""

    url: str
    body: dict[str, Any]
    needs: tuple[str, ...] = ()


class HistoryEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Image in the history of an API key."""

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
    """Usage of an API key on one day (UTC); ``evaluations`` counts UNet evaluations by batch rows."""

    day: str
    key_id: str
    requests: int
    pictures: int
    evaluations: int
    input_tokens: int
    output_tokens: int


class Listed(msgspec.Struct, Generic[AnyT], frozen=True, kw_only=True):
    """Page of a list; if it ``has_more``, pass the ID of its last entry as ``after`` to fetch the next page."""

    data: tuple[AnyT, ...]
    has_more: bool = False


class PageFields(TypedDict, total=False):
    """Page selection of a list.

    Attributes:
        after: The ID of the last entry of the previous page.
        limit: The largest number of entries.
        order: "desc" lists the newest first, "asc" the oldest.
    """

    after: str
    limit: int
    order: Literal["asc", "desc"]


class HistoryFields(PageFields, total=False):
    """Filter of the history.

    Attributes:
        q: Words that must all occur in the prompt.
        model: Name of the model.
        since: Earliest time, in seconds since 1970.
        until: End of the period (exclusive), in seconds since 1970.
    """

    q: str
    model: str
    since: float
    until: float


def upload(data: bytes, filename: str, purpose: str) -> Call[StoredFile]:
    """Build the call that stores a file."""
    body, headers = form_of({"purpose": purpose}, {"file": Upload(data, filename)})
    return Call("POST", FILES, body, _as(StoredFile), headers=headers)


def files(fields: PageFields) -> Call[Listed[StoredFile]]:
    """Build the call that lists a page of the stored files."""
    return Call("GET", _with(FILES, fields), None, _as(Listed[StoredFile]))


def file(file_id: str) -> Call[StoredFile]:
    """Build the call that fetches the metadata of a file."""
    return Call("GET", f"{FILES}/{quote(file_id, safe='')}", None, _as(StoredFile))


def file_content(file_id: str) -> Call[bytes]:
    """Build the call that downloads a file."""
    return Call("GET", f"{FILES}/{quote(file_id, safe='')}/content", None, bytes)


def delete_file(file_id: str) -> Call[bool]:
    """Build the call that deletes a file; False if it does not exist."""
    path = f"{FILES}/{quote(file_id, safe='')}"
    return Call("DELETE", path, None, lambda _: True, {"file_not_found": False})


def begin_batch(file_id: str, endpoint: str, metadata: Mapping[str, str]) -> Call[StoredBatch]:
    """Build the call that starts a batch."""
    body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h", "metadata": dict(metadata)}
    return Call("POST", BATCHES, msgspec.json.encode(body), _as(StoredBatch))


def batch(batch_id: str) -> Call[StoredBatch]:
    """Build the call that fetches a batch."""
    return Call("GET", f"{BATCHES}/{quote(batch_id, safe='')}", None, _as(StoredBatch))


def batches(fields: PageFields) -> Call[Listed[StoredBatch]]:
    """Build the call that lists a page of the batches."""
    return Call("GET", _with(BATCHES, fields), None, _as(Listed[StoredBatch]))


def cancel_batch(batch_id: str) -> Call[StoredBatch]:
    """Build the call that cancels a batch."""
    return Call("POST", f"{BATCHES}/{quote(batch_id, safe='')}/cancel", None, _as(StoredBatch))


def history(fields: HistoryFields) -> Call[Listed[HistoryEntry]]:
    """Build the call that lists a page of the history."""
    return Call("GET", _with(HISTORY, fields), None, _as(Listed[HistoryEntry]))


def history_entry(entry_id: str) -> Call[HistoryEntry]:
    """Build the call that fetches a history entry."""
    return Call("GET", f"{HISTORY}/{quote(entry_id, safe='')}", None, _as(HistoryEntry))


def history_picture(entry_id: str) -> Call[bytes]:
    """Build the call that downloads the image file of a history entry."""
    return Call("GET", f"{HISTORY}/{quote(entry_id, safe='')}/content", None, bytes)


def history_thumbnail(entry_id: str) -> Call[bytes]:
    """Build the call that downloads the thumbnail of a history entry."""
    return Call("GET", f"{HISTORY}/{quote(entry_id, safe='')}/thumbnail", None, bytes)


def forget(entry_id: str) -> Call[bool]:
    """Build the call that deletes a history entry; False if it does not exist."""
    path = f"{HISTORY}/{quote(entry_id, safe='')}"
    return Call("DELETE", path, None, lambda _: True, {"history_not_found": False})


def forget_all() -> Call[int]:
    """Build the call that deletes the history; the result is the number of entries."""
    return Call("DELETE", HISTORY, None, lambda data: msgspec.json.decode(data, type=_Forgotten).num_deleted)


def usage(days: int) -> Call[tuple[UsedDay, ...]]:
    """Build the call that fetches the usage of this API key."""
    return Call("GET", f"{USAGE}?days={days}", None, lambda data: _as(Listed[UsedDay])(data).data)


def usage_by_key(days: int) -> Call[tuple[UsedDay, ...]]:
    """Build the call that fetches the usage of all API keys."""
    return Call("GET", f"{USAGE}/keys?days={days}", None, lambda data: _as(Listed[UsedDay])(data).data)


def batch_lines(bodies: Iterable[Mapping[str, Any]], endpoint: str = GENERATIONS) -> bytes:
    """Return the contents of a batch's input file.

    Args:
        bodies: The bodies of the requests; the custom ID of each line is its number, from 0.
        endpoint: The path of the requests.

    Returns:
        One line of JSON per request.
    """
    shared = {"method": "POST", "url": endpoint}
    lines = ({"custom_id": str(number), **shared, "body": body} for number, body in enumerate(bodies))
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


class _Forgotten(msgspec.Struct):
    num_deleted: int


def _as(kind: type[AnyT]) -> Callable[[bytes], AnyT]:
    return lambda data: msgspec.json.decode(data, type=kind)


def _with(path: str, fields: PageFields) -> str:
    return f"{path}?{urlencode(fields)}" if fields else path
