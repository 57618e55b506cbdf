"""Sizes of the bodies of jobs, and the beginning of the image URLs in the output of batches."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

INTEGER: Final[sa.types.TypeEngine[Any]] = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add the columns, fill the sizes, and add them to the index from which they are summed."""
    op.add_column("batches", sa.Column("base_url", sa.Text(), nullable=False, server_default=sa.text("''")))
    op.add_column("jobs", sa.Column("body_bytes", INTEGER, nullable=False, server_default=sa.text("0")))
    is_postgresql = op.get_bind().dialect.name == "postgresql"
    size = "octet_length(body)" if is_postgresql else "length(CAST(body AS BLOB))"
    op.execute(f"UPDATE jobs SET body_bytes = {size}")
    op.drop_index("jobs_by_status", "jobs")
    op.create_index("jobs_by_status", "jobs", ["status", "owner", "number", "body_bytes"])
