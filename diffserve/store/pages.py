"""Pagination of tables with the columns ``number``, ``id`` and ``owner``."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

Order = Literal["asc", "desc"]
NEWEST_FIRST: Final[Order] = "desc"


class PageAsked(NamedTuple):
    """Selection of a page; ``after`` is the ID of the last entry of the previous page, empty for the first page."""

    limit: int
    after: str = ""
    order: Order = NEWEST_FIRST


def read_page(
    connection: sqlite3.Connection,
    table: str,
    owner: str,
    selection: PageAsked,
    where: str = "",
    values: Sequence[str | float] = (),
) -> tuple[list[sqlite3.Row], bool] | None:
    """Read a page of ``owner``'s rows of a table.

    Args:
        connection: The connection.
        table: The name of the table.
        owner: The ID of the API key.
        selection: Which page.
        where: Further SQL conditions, each with a leading " AND ".
        values: The parameters of ``where``.

    Returns:
        The rows and whether more follow, or None if ``owner`` has no entry ``selection.after``.
    """
    conditions, parameters = [f"owner = ?{where}"], [owner, *values]
    if selection.after:
        query = f"SELECT number FROM {table} WHERE owner = ? AND id = ?"
        after = connection.execute(query, (owner, selection.after)).fetchone()
        if after is None:
            return None
        conditions.append(f"number {'<' if selection.order == 'desc' else '>'} {after['number']}")
    order = "DESC" if selection.order == "desc" else "ASC"
    limit = selection.limit + 1  # one more, to see whether more rows follow
    query = f"SELECT * FROM {table} WHERE {' AND '.join(conditions)} ORDER BY number {order} LIMIT {limit}"
    rows = connection.execute(query, parameters).fetchall()
    return rows[: selection.limit], len(rows) > selection.limit
