"""Table of durable jobs. Earlier releases refuse a database with it."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

USER_VERSION: Final = 7
"""SQLite's ``user_version`` from this revision on, so that releases before Alembic refuse the database."""

INTEGER: Final[sa.types.TypeEngine[Any]] = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
FLOAT: Final[sa.types.TypeEngine[Any]] = sa.Double().with_variant(sa.REAL(), "sqlite")


def upgrade() -> None:
    """Create the table of jobs."""
    op.create_table(
        "jobs",
        sa.Column("number", INTEGER, primary_key=True, nullable=False),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("id", "owner", "endpoint", "body", "status")),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("error", "events", "holder")),
        *(sa.Column(name, INTEGER, nullable=False) for name in ("token", "attempts", "losses")),
        *(sa.Column(name, FLOAT, nullable=False) for name in ("created_s", "expires_s")),
        *(sa.Column(name, INTEGER, nullable=False) for name in ("result_status", "result_bytes")),
        sa.UniqueConstraint("owner", "id"),
        sqlite_strict=True,
        sqlite_autoincrement=True,
    )
    op.create_index("jobs_by_owner", "jobs", ["owner", "number"])
    op.create_index("jobs_by_status", "jobs", ["status", "owner", "number"])
    if op.get_context().dialect.name == "sqlite":
        op.execute(f"PRAGMA user_version = {USER_VERSION}")
