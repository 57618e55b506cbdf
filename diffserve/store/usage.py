"""Table of the daily usage of each API key."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Final, NamedTuple

from diffserve.store.database import Database

MAX_DAYS: Final = 366


class UsageCounts(NamedTuple):
    """Amounts of usage: requests, images, UNet evaluations by batch rows, and language model tokens."""

    requests: int = 0
    pictures: int = 0
    evaluations: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    def plus(self, other: UsageCounts) -> UsageCounts:
        """Return the sum of both."""
        return UsageCounts(*(first + second for first, second in zip(self, other, strict=True)))


class Usage:
    """Table of usage in ``database``."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, used: Mapping[tuple[str, str], UsageCounts]) -> None:
        """Add the amounts ``used`` by (owner, day)."""
        names = ", ".join(UsageCounts._fields)
        sums = ", ".join(f"{name} = {name} + excluded.{name}" for name in UsageCounts._fields)
        query = f"INSERT INTO usage (owner, day, {names}) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET {sums}"
        with self._database.connected(at_once=False) as connection:
            connection.executemany(query, [(*owner_and_day, *amounts) for owner_and_day, amounts in used.items()])

    def days(self, since: str, owner: str | None = None) -> list[tuple[str, str, UsageCounts]]:
        """Return the usage from the day ``since`` on, the newest first.

        Args:
            since: The first day, such as 2026-01-31.
            owner: The ID of an API key; None returns all keys.

        Returns:
            Tuples of owner, day and amounts.
        """
        columns = ", ".join(UsageCounts._fields)
        query = f"SELECT owner, day, {columns} FROM usage WHERE day >= ? AND (? IS NULL OR owner = ?)"
        with self._database.connected() as connection:
            rows = connection.execute(f"{query} ORDER BY day DESC, owner", (since, owner, owner)).fetchall()
        return [(row[0], row[1], UsageCounts(*row[2:])) for row in rows]


def day_of(seconds: float, days_before: int = 0) -> str:
    """Return the UTC day, such as 2026-01-31, of a time in seconds since 1970, or of ``days_before`` days earlier."""
    when = datetime.datetime.fromtimestamp(seconds, datetime.UTC) - datetime.timedelta(days=days_before)
    return when.strftime("%Y-%m-%d")
