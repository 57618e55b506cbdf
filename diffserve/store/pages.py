"""One page of a list: what comes after an entry, so many at most, in either order."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

Order = Literal["asc", "desc"]
NEWEST_FIRST: Final[Order] = "desc"


class PageAsked(NamedTuple):
    """``after``: the id of the last entry of the page before; "": from the beginning."""

    limit: int
    after: str = ""
    order: Order = NEWEST_FIRST


def read_page(
    connection: sqlite3.Connection,
    table: str,
    owner: str,
    asked: PageAsked,
    where: str = "",
    values: Sequence[str | float] = (),
) -> tuple[list[sqlite3.Row], bool] | None:
    """(rows of ``owner`` in ``table``, whether there are more); ``None`` where there is no such entry to go on from.
    ``where`` and its ``values`` say which rows are meant."""
    wanted, given = [f"owner = ?{where}"], [owner, *values]
    if asked.after:
        found = connection.execute(f"SELECT number FROM {table} WHERE owner = ? AND id = ?", (owner, asked.after))
        after = found.fetchone()
        if after is None:
            return None
        wanted.append(f"number {'<' if asked.order == 'desc' else '>'} {after['number']}")
    order = "DESC" if asked.order == "desc" else "ASC"
    said = f"SELECT * FROM {table} WHERE {' AND '.join(wanted)} ORDER BY number {order} LIMIT {asked.limit + 1}"
    rows = connection.execute(said, given).fetchall()
    return rows[: asked.limit], len(rows) > asked.limit
