"""Table of generated images with their parameters, by API key; the image files are stored elsewhere."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, delete, select, update

from diffserve.store.database import Database, PageSelection, find_row, insert_row
from diffserve.store.schema import history

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
        with self._database.writing(at_once=False) as connection:
            insert_row(connection, history, entry)
        return entry

    def page(self, owner: str, selection: PageSelection, entry_filter: EntryFilter) -> tuple[list[Entry], bool] | None:
        """Return a page of ``owner``'s entries and whether more follow; None if the entry ``after`` does not exist."""
        conditions: list[ColumnElement[bool]] = [
            history.c.words.contains(word.casefold(), autoescape=True) for word in entry_filter.words
        ]
        if entry_filter.model:
            conditions.append(history.c.model == entry_filter.model)
        if entry_filter.since_s is not None:
            conditions.append(history.c.created_s >= entry_filter.since_s)
        if entry_filter.until_s is not None:
            conditions.append(history.c.created_s < entry_filter.until_s)
        if entry_filter.favorite is not None:
            conditions.append(history.c.favorite == int(entry_filter.favorite))
        return self._database.page(Entry, history, owner, selection, *conditions)

    def get(self, owner: str, name: str) -> Entry | None:
        """Return the entry with the ID ``name`` if it belongs to ``owner``, else None."""
        with self._database.reading() as connection:
            return find_row(connection, Entry, history, id=name, owner=owner)

    def set_favorite(self, owner: str, name: str, *, is_favorite: bool) -> Entry | None:
        """Mark or unmark the entry with the ID ``name`` and return it; None if it does not belong to ``owner``."""
        is_entry = (history.c.id == name) & (history.c.owner == owner)
        with self._database.writing() as connection:
            connection.execute(update(history).where(is_entry).values(favorite=int(is_favorite)))
            return find_row(connection, Entry, history, id=name, owner=owner)

    def files(self, owner: str) -> list[str]:
        """Return the file names of all entries of ``owner``."""
        with self._database.reading() as connection:
            return list(connection.execute(select(history.c.file).where(history.c.owner == owner)).scalars())

    def forget(self, files: Sequence[str], *, for_good: bool = False) -> None:
        """Delete the entries of ``files``; with ``for_good``, also from the write-ahead log."""
        with self._database.writing() as connection:
            for file in files:
                connection.execute(delete(history).where(history.c.file == file))
        if for_good:
            self._database.forget()


def new_entry_id() -> str:
    """Return a new random entry ID."""
    return f"hist_{secrets.token_hex(16)}"
