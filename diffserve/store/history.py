"""Table of generated images with their parameters, by API key; the image files are stored elsewhere."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from diffserve.store.database import Database, PageSelection, find_row, insert_row

MAX_WORDS: Final = 16


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """Row of an image: its ``file`` name, searchable ``words``, parameters (``recipe``), and 1 for a ``favorite``."""

    id: str
    owner: str
    file: str
    words: str
    model: str
    recipe: dict[str, Any]
    created_s: float
    favorite: int = 0


class EntryFilter(NamedTuple):
    """Filter of history entries.

    Attributes:
        words: Words that must all occur.
        model: Name of the model; empty means any.
        since_s: Earliest time, in seconds since 1970.
        until_s: End of the period (exclusive), in seconds since 1970.
        favorite: Whether they are favorites; None means any.
    """

    words: tuple[str, ...] = ()
    model: str = ""
    since_s: float | None = None
    until_s: float | None = None
    favorite: bool | None = None


class History:
    """Table of history entries.

    Args:
        database: The database.
        clock: Returns seconds since 1970.
    """

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def add(self, name: str, owner: str, file: str, words: str, model: str, recipe: dict[str, Any]) -> Entry:
        """Insert an image with the new ID ``name``."""
        entry = Entry(
            id=name, owner=owner, file=file, words=words.casefold(), model=model,
            recipe=recipe, created_s=self._clock(),
        )  # fmt: skip
        with self._database.connected(at_once=False) as connection:
            insert_row(connection, "history", entry)
        return entry

    def page(self, owner: str, selection: PageSelection, entry_filter: EntryFilter) -> tuple[list[Entry], bool] | None:
        """Return a page of ``owner``'s entries and whether more follow; None if the entry ``after`` does not exist."""
        conditions: list[tuple[str, str | float]] = [
            ("instr(words, ?) > 0", word.casefold()) for word in entry_filter.words
        ]
        if entry_filter.model:
            conditions.append(("model = ?", entry_filter.model))
        if entry_filter.since_s is not None:
            conditions.append(("created_s >= ?", entry_filter.since_s))
        if entry_filter.until_s is not None:
            conditions.append(("created_s < ?", entry_filter.until_s))
        if entry_filter.favorite is not None:
            conditions.append(("favorite = ?", int(entry_filter.favorite)))
        where = "".join(f" AND {condition}" for condition, _ in conditions)
        values = [value for _, value in conditions]
        return self._database.page(Entry, "history", owner, selection, where, values)

    def get(self, owner: str, name: str) -> Entry | None:
        """Return the entry with the ID ``name`` if it belongs to ``owner``, else None."""
        with self._database.connected() as connection:
            return find_row(connection, Entry, "history", id=name, owner=owner)

    def set_favorite(self, owner: str, name: str, *, is_favorite: bool) -> Entry | None:
        """Mark or unmark the entry with the ID ``name`` and return it; None if it does not belong to ``owner``."""
        with self._database.connected() as connection:
            update = "UPDATE history SET favorite = ? WHERE id = ? AND owner = ?"
            connection.execute(update, (int(is_favorite), name, owner))
            return find_row(connection, Entry, "history", id=name, owner=owner)

    def files(self, owner: str) -> list[str]:
        """Return the file names of all entries of ``owner``."""
        with self._database.connected() as connection:
            rows = connection.execute("SELECT file FROM history WHERE owner = ?", (owner,)).fetchall()
        return [row["file"] for row in rows]

    def forget(self, files: Sequence[str], *, for_good: bool = False) -> None:
        """Delete the entries of ``files``; with ``for_good``, also from the write-ahead log."""
        with self._database.connected() as connection:
            connection.executemany("DELETE FROM history WHERE file = ?", [(file,) for file in files])
        if for_good:
            self._database.forget()


def new_entry_id() -> str:
    """Return a new random entry ID."""
    return f"hist_{secrets.token_hex(16)}"
