"""Tables of webhook endpoints and of deliveries, and where the result of a job goes."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

INTEGER: Final[sa.types.TypeEngine[Any]] = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
FLOAT: Final[sa.types.TypeEngine[Any]] = sa.Double().with_variant(sa.REAL(), "sqlite")


def upgrade() -> None:
    """Create the tables and the column ``output`` of jobs."""
    op.create_table(
        "webhook_endpoints",
        sa.Column("number", INTEGER, primary_key=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False, unique=True),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("owner", "name", "url", "event_types")),
        *(sa.Column(name, sa.LargeBinary(), nullable=False) for name in ("secret", "old_secret")),
        *(sa.Column(name, FLOAT, nullable=False) for name in ("old_secret_until_s", "created_s", "updated_s")),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("disabled", "last_error")),
        sqlite_strict=True,
        sqlite_autoincrement=True,
    )
    op.create_index("webhook_endpoints_by_owner", "webhook_endpoints", ["owner", "number"])
    op.create_table(
        "deliveries",
        sa.Column("number", INTEGER, primary_key=True, nullable=False),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("recipient", "event", "body")),
        *(sa.Column(name, INTEGER, nullable=False) for name in ("job", "attempts")),
        *(sa.Column(name, FLOAT, nullable=False) for name in ("created_s", "next_s")),
        sqlite_strict=True,
        sqlite_autoincrement=True,
    )
    op.create_index("deliveries_by_time", "deliveries", ["next_s"])
    op.create_index("deliveries_by_recipient", "deliveries", ["recipient"])
    op.add_column("jobs", sa.Column("output", sa.Text(), nullable=False, server_default=sa.text("'{}'")))
