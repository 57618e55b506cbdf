"""Stored data (files, batches, history and usage): types of answers, and the methods of the client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Generic, Literal, TypedDict, TypeVar, Unpack
from urllib.parse import urlencode

import msgspec

from diffserve.client.images import GENERATIONS
from diffserve.client.transport import HttpClient, Upload, encode_json, form_of, resource

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
    """Image in the history of an API key; ``favorite`` says whether it was marked as one.

    An upscaled image has the name of the upscaler as its ``model``, and no seed if its file has no parameters.
    """

    id: str
    created_at: int
    favorite: bool = False
    model: str
    prompt: str
    original_prompt: str | None = None
    width: int
    height: int
    seed: int | None = None
    variation_seed: int | None = None
    restore: Restore


class UsedDay(msgspec.Struct, frozen=True, kw_only=True):
    """Usage of an API key on one day (UTC): UNet ``evaluations`` by batch rows, and seconds of device time."""

    day: str
    key_id: str
    requests: int
    pictures: int
    evaluations: int
    input_tokens: int
    output_tokens: int
    device_s: float = 0.0


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
        favorite: Only favorites, or only others.
    """

    q: str
    model: str
    since: float
    until: float
    favorite: bool


def batch_lines(bodies: Iterable[Mapping[str, Any]], endpoint: str = GENERATIONS) -> bytes:
    """Return the contents of a batch's input file.

    Args:
        bodies: The bodies of the requests; the custom ID of each line is its number, from 0.
        endpoint: The path of the requests.

    Returns:
        One line of JSON per request.

    Raises:
        InvalidRequest: A number is not finite.
    """
    shared = {"method": "POST", "url": endpoint}
    lines = ({"custom_id": str(number), **shared, "body": body} for number, body in enumerate(bodies))
    return b"".join(encode_json(line) + b"\n" for line in lines)


class _Forgotten(msgspec.Struct):
    num_deleted: int


def paged(path: str, fields: PageFields) -> str:
    """Return ``path`` with the page selection as its query."""
    values = {name: str(value).lower() if isinstance(value, bool) else value for name, value in fields.items()}
    return f"{path}?{urlencode(values)}" if values else path


class StoredDataMethods(HttpClient):
    """Methods of the client for files, batches, history and usage."""

    async def upload(self, data: bytes, filename: str = "batch.jsonl", purpose: str = "batch") -> StoredFile:
        """Store a file on the server, usually the input of a batch.

        Args:
            data: The contents of the file; ``batch_lines`` builds those of a batch.
            filename: The name to list it by.
            purpose: What the file is for, such as "batch" or "vision".

        Returns:
            The stored file.

        Raises:
            InvalidRequest: The file is too large, or the storage limit of this key is reached.
        """
        body, headers = form_of({"purpose": purpose}, {"file": Upload(data, filename)})
        return await self._call("POST", FILES, StoredFile, body, headers)

    async def files(self, **fields: Unpack[PageFields]) -> Listed[StoredFile]:
        """List one page of the stored files.

        Args:
            **fields: Optional request fields, see ``PageFields``.

        Returns:
            The files, the newest first unless ``order`` says otherwise.
        """
        return await self._call("GET", paged(FILES, fields), Listed[StoredFile])

    async def file(self, file_id: str) -> StoredFile:
        """Fetch the metadata of a stored file.

        Args:
            file_id: The ID of the file.

        Returns:
            The file's name, size in bytes and times.

        Raises:
            InvalidRequest: No file has this ID.
        """
        return await self._call("GET", resource(FILES, file_id), StoredFile)

    async def file_content(self, file_id: str) -> bytes:
        """Download the contents of a stored file.

        Args:
            file_id: The ID of the file.

        Returns:
            The contents.

        Raises:
            InvalidRequest: No file has this ID.
        """
        return await self._fetch("GET", resource(FILES, file_id, "content"))

    async def delete_file(self, file_id: str) -> bool:
        """Delete a stored file.

        Args:
            file_id: The ID of the file.

        Returns:
            True if it was deleted, False if it does not exist.
        """
        return await self._succeeds("DELETE", resource(FILES, file_id), "file_not_found")

    async def begin_batch(
        self, file_id: str, endpoint: str = GENERATIONS, metadata: Mapping[str, str] | None = None
    ) -> StoredBatch:
        """Start a batch: the server runs every request of an uploaded file when it is idle.

        Args:
            file_id: The ID of the input file, see ``upload``.
            endpoint: The path that every line is a request for.
            metadata: Strings to store with the batch.

        Returns:
            The new batch.

        Raises:
            InvalidRequest: The input file is missing or wrong, or too many batches are unfinished.
        """
        body = {
            "input_file_id": file_id,
            "endpoint": endpoint,
            "completion_window": "24h",
            "metadata": dict(metadata or {}),
        }
        return await self._call("POST", BATCHES, StoredBatch, {**body, "metadata": dict(metadata or {})})

    async def batch(self, batch_id: str) -> StoredBatch:
        """Fetch the current state of a batch.

        Args:
            batch_id: The ID of the batch.

        Returns:
            The batch with its progress.

        Raises:
            InvalidRequest: No batch has this ID.
        """
        return await self._call("GET", resource(BATCHES, batch_id), StoredBatch)

    async def batches(self, **fields: Unpack[PageFields]) -> Listed[StoredBatch]:
        """List one page of the batches.

        Args:
            **fields: Optional request fields, see ``PageFields``.

        Returns:
            The batches, the newest first unless ``order`` says otherwise.
        """
        return await self._call("GET", paged(BATCHES, fields), Listed[StoredBatch])

    async def cancel_batch(self, batch_id: str) -> StoredBatch:
        """Cancel a batch; lines that are already done stay in its output file.

        Args:
            batch_id: The ID of the batch.

        Returns:
            The batch in its new state.

        Raises:
            InvalidRequest: The batch is already finished.
        """
        return await self._call("POST", resource(BATCHES, batch_id, "cancel"), StoredBatch)

    async def history(self, **fields: Unpack[HistoryFields]) -> Listed[HistoryEntry]:
        """List one page of the images that were generated with this API key.

        Args:
            **fields: Optional request fields, see ``HistoryFields``.

        Returns:
            The entries, the newest first unless ``order`` says otherwise.
        """
        return await self._call("GET", paged(HISTORY, fields), Listed[HistoryEntry])

    async def history_entry(self, entry_id: str) -> HistoryEntry:
        """Fetch one history entry.

        Args:
            entry_id: The ID of the entry, as in ``ImageFile.history_id``.

        Returns:
            The entry, with the request that reproduces the image.

        Raises:
            InvalidRequest: No history entry has this ID.
        """
        return await self._call("GET", resource(HISTORY, entry_id), HistoryEntry)

    async def add_favorite(self, entry_id: str) -> HistoryEntry:
        """Mark an image of the history as a favorite.

        Args:
            entry_id: The ID of the entry.

        Returns:
            The changed entry.

        Raises:
            InvalidRequest: No history entry has this ID.
        """
        return await self._call("POST", resource(HISTORY, entry_id, "favorite"), HistoryEntry)

    async def remove_favorite(self, entry_id: str) -> HistoryEntry:
        """Unmark a favorite of the history.

        Args:
            entry_id: The ID of the entry.

        Returns:
            The changed entry.

        Raises:
            InvalidRequest: No history entry has this ID.
        """
        return await self._call("DELETE", resource(HISTORY, entry_id, "favorite"), HistoryEntry)

    async def history_picture(self, entry_id: str) -> bytes:
        """Download the image file of a history entry.

        Args:
            entry_id: The ID of the entry.

        Returns:
            The bytes of the file.

        Raises:
            InvalidRequest: No history entry has this ID.
        """
        return await self._fetch("GET", resource(HISTORY, entry_id, "content"))

    async def history_thumbnail(self, entry_id: str) -> bytes:
        """Download the thumbnail of a history entry.

        Args:
            entry_id: The ID of the entry.

        Returns:
            The bytes of a WebP file, at most 256 pixels wide and high.

        Raises:
            InvalidRequest: No history entry has this ID.
        """
        return await self._fetch("GET", resource(HISTORY, entry_id, "thumbnail"))

    async def forget(self, entry_id: str) -> bool:
        """Delete a history entry and its image file.

        Args:
            entry_id: The ID of the entry.

        Returns:
            True if it was deleted, False if it does not exist.
        """
        return await self._succeeds("DELETE", resource(HISTORY, entry_id), "history_not_found")

    async def forget_all(self) -> int:
        """Delete the whole history of this API key, with the image files.

        Returns:
            How many entries were deleted.
        """
        return (await self._call("DELETE", HISTORY, _Forgotten)).num_deleted

    async def usage(self, days: int = 30) -> tuple[UsedDay, ...]:
        """Fetch the daily usage of this API key.

        Args:
            days: How many days to report, including today (UTC).

        Returns:
            One entry per day with any usage, the newest first.

        Raises:
            InvalidRequest: ``days`` is not between 1 and 366.
        """
        return (await self._call("GET", f"{USAGE}?days={days}", Listed[UsedDay])).data

    async def usage_by_key(self, days: int = 30) -> tuple[UsedDay, ...]:
        """Fetch the daily usage of all API keys; requires the scope ``admin``.

        Args:
            days: How many days to report, including today (UTC).

        Returns:
            One entry per day and key with any usage, the newest first.

        Raises:
            InvalidRequest: ``days`` is not between 1 and 366.
            DiffserveError: This key does not have the scope.
        """
        return (await self._call("GET", f"{USAGE}/keys?days={days}", Listed[UsedDay])).data
