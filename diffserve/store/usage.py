"""How much each key has used, by day."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Final, NamedTuple

from diffserve.store.database import Database

MAX_DAYS: Final = 366


class Used(NamedTuple):
    """Requests, pictures, evaluations of the UNet by rows, and tokens of language models."""

    requests: int = 0
    pictures: int = 0
    evaluations: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    def plus(self, other: Used) -> Used:
        """Both together."""
        return Used(*(one + more for one, more in zip(self, other, strict=True)))


class Usage:
    """The books in ``database``."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, used: Mapping[tuple[str, str], Used]) -> None:
        """Add what was used, by (owner, day)."""
        names = ", ".join(Used._fields)
        more = ", ".join(f"{name} = {name} + excluded.{name}" for name in Used._fields)
        said = f"INSERT INTO usage (owner, day, {names}) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET {more}"
        with self._database.connected(at_once=False) as connection:
            connection.executemany(said, [(*whose, *amounts) for whose, amounts in used.items()])

    def days(self, since: str, owner: str | None = None) -> list[tuple[str, str, Used]]:
        """(owner, day, what was used) from the day ``since`` on, the newest first; of everybody, or of ``owner``."""
        said = f"SELECT owner, day, {', '.join(Used._fields)} FROM usage WHERE day >= ? AND (? IS NULL OR owner = ?)"
        with self._database.connected() as connection:
            rows = connection.execute(f"{said} ORDER BY day DESC, owner", (since, owner, owner)).fetchall()
        return [(row[0], row[1], Used(*row[2:])) for row in rows]


def day_of(seconds: float, days_before: int = 0) -> str:
    """The day, by UTC, of a time in seconds since 1970, or so many days before it: 2026-01-31."""
    when = datetime.datetime.fromtimestamp(seconds, datetime.UTC) - datetime.timedelta(days=days_before)
    return when.strftime("%Y-%m-%d")
