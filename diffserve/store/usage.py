"""Table of the daily usage of each API key."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Final, NamedTuple

from sqlalchemy import select

from diffserve.store.database import Database, insert_for
from diffserve.store.schema import usage

MAX_DAYS: Final = 366
DAY_S: Final = 86400.0


class UsageCounts(NamedTuple):
    """Amounts of usage: requests, images, UNet evaluations by batch rows, tokens of texts, seconds of device time."""

    requests: int = 0
    pictures: int = 0
    evaluations: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    device_s: float = 0.0

    def plus(self, other: UsageCounts) -> UsageCounts:
        """Return the sum of both."""
        return UsageCounts._make(first + second for first, second in zip(self, other, strict=True))


class Usage:
    """Table of usage in ``database``."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, used: Mapping[tuple[str, str], UsageCounts]) -> None:
        """Add the amounts ``used`` by (owner, day)."""
        rows = [{"owner": owner, "day": day, **amounts._asdict()} for (owner, day), amounts in used.items()]
        if not rows:
            return
        with self._database.writing(at_once=False) as connection:
            insert = insert_for(connection, usage)
            sums = {name: usage.c[name] + insert.excluded[name] for name in UsageCounts._fields}
            connection.execute(insert.on_conflict_do_update(index_elements=["owner", "day"], set_=sums), rows)

    def days(self, since: str, owner: str | None = None) -> list[tuple[str, str, UsageCounts]]:
        """Return the usage from the day ``since`` on, the newest first.

        Args:
            since: The first day, such as 2026-01-31.
            owner: The ID of an API key; None returns all keys.

        Returns:
            Tuples of owner, day and amounts.
        """
        amounts = [usage.c[name] for name in UsageCounts._fields]
        query = select(usage.c.owner, usage.c.day, *amounts).where(usage.c.day >= since)
        if owner is not None:
            query = query.where(usage.c.owner == owner)
        with self._database.reading() as connection:
            rows = connection.execute(query.order_by(usage.c.day.desc(), usage.c.owner)).all()
        return [(row[0], row[1], UsageCounts(*row[2:])) for row in rows]


def renewal_s(seconds: float) -> float:
    """Return when the UTC day of a time ends; both are in seconds since 1970."""
    return (seconds // DAY_S + 1.0) * DAY_S


def day_of(seconds: float, days_before: int = 0) -> str:
    """Return the UTC day, such as 2026-01-31, of a time in seconds since 1970, or of ``days_before`` days earlier."""
    when = datetime.datetime.fromtimestamp(seconds, datetime.UTC) - datetime.timedelta(days=days_before)
    return when.strftime("%Y-%m-%d")
