"""What was painted, and how, by key: rows that name files."""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from diffserve.store.database import Database
from diffserve.store.pages import PageAsked, read_page

MAX_WORDS: Final = 16
_COLUMNS: Final = ("id", "owner", "file", "words", "model", "recipe", "created_s")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One picture. ``file``: its name; ``words``: what it is found by; ``recipe``: how it was painted."""

    id: str
    owner: str
    file: str
    words: str
    model: str
    recipe: dict[str, Any]
    created_s: float


class Wanted(NamedTuple):
    """Which entries: with all these ``words`` in what was asked for, of this ``model``, from and until then."""

    words: tuple[str, ...] = ()
    model: str = ""
    since_s: float | None = None
    until_s: float | None = None


class History:
    """The entries in ``database``. ``clock``: seconds since 1970."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def add(self, name: str, owner: str, file: str, words: str, model: str, recipe: dict[str, Any]) -> Entry:
        """Note a picture under the id ``name``, a new one."""
        entry = Entry(
            id=name, owner=owner, file=file, words=words.casefold(), model=model,
            recipe=recipe, created_s=self._clock(),
        )  # fmt: skip
        told = msgspec.structs.asdict(entry) | {"recipe": msgspec.json.encode(recipe).decode()}
        with self._database.connected(at_once=False) as connection:
            said = f"INSERT INTO history ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
            connection.execute(said, [told[name] for name in _COLUMNS])
        return entry

    def page(self, owner: str, asked: PageAsked, wanted: Wanted) -> tuple[list[Entry], bool] | None:
        """(the entries of ``owner``, whether there are more); ``None`` where there is none to go on from."""
        which: list[tuple[str, str | float]] = [("instr(words, ?) > 0", word.casefold()) for word in wanted.words]
        if wanted.model:
            which.append(("model = ?", wanted.model))
        if wanted.since_s is not None:
            which.append(("created_s >= ?", wanted.since_s))
        if wanted.until_s is not None:
            which.append(("created_s < ?", wanted.until_s))
        where = "".join(f" AND {one}" for one, _ in which)
        with self._database.connected() as connection:
            found = read_page(connection, "history", owner, asked, where, [value for _, value in which])
        return None if found is None else ([_entry(row) for row in found[0]], found[1])

    def get(self, owner: str, name: str) -> Entry | None:
        """The entry of that id, where it is ``owner``'s."""
        with self._database.connected() as connection:
            row = connection.execute("SELECT * FROM history WHERE id = ? AND owner = ?", (name, owner)).fetchone()
        return None if row is None else _entry(row)

    def files(self, owner: str) -> list[str]:
        """Of all entries of ``owner``."""
        with self._database.connected() as connection:
            rows = connection.execute("SELECT file FROM history WHERE owner = ?", (owner,)).fetchall()
        return [row["file"] for row in rows]

    def forget(self, files: Sequence[str], *, for_good: bool = False) -> None:
        """Remove the entries of these files; ``for_good``: from what was written last, too."""
        with self._database.connected() as connection:
            connection.executemany("DELETE FROM history WHERE file = ?", [(file,) for file in files])
        if for_good:
            self._database.forget()

    def forget_before(self, created_s: float) -> None:
        """Remove those that are older."""
        with self._database.connected() as connection:
            connection.execute("DELETE FROM history WHERE created_s < ?", (created_s,))


def new_entry_id() -> str:
    """An id that says nothing."""
    return f"hist_{secrets.token_hex(16)}"


def _entry(row: sqlite3.Row) -> Entry:
    told = {name: row[name] for name in _COLUMNS}
    return Entry(**told | {"recipe": msgspec.json.decode(row["recipe"])})
