"""Quotas of API keys, and the device time that each key used. Earlier releases refuse a database with them."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

INTEGER: Final[sa.types.TypeEngine[Any]] = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
FLOAT: Final[sa.types.TypeEngine[Any]] = sa.Double().with_variant(sa.REAL(), "sqlite")


def upgrade() -> None:
    """Add the columns."""
    op.add_column("keys", sa.Column("images_per_day", INTEGER))
    op.add_column("keys", sa.Column("device_seconds_per_day", FLOAT))
    op.add_column("keys", sa.Column("num_changes", INTEGER, nullable=False, server_default=sa.text("0")))
    op.add_column("usage", sa.Column("device_s", FLOAT, nullable=False, server_default=sa.text("0.0")))
