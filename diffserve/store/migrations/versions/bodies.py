"""Table of the bodies of jobs, and their prompts and digests, so that jobs are read and changed without the bodies."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec
import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

INTEGER: Final[sa.types.TypeEngine[Any]] = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
MAX_CHARS: Final = 10_000


def upgrade() -> None:
    """Move the bodies that are needed to their table, one at a time since they may be large."""
    op.create_table(
        "job_bodies",
        sa.Column("number", INTEGER, primary_key=True, nullable=False, autoincrement=False),
        sa.Column("body", sa.Text(), nullable=False),
        sqlite_strict=True,
    )
    op.add_column("jobs", sa.Column("prompt", sa.Text()))
    op.add_column("jobs", sa.Column("digest", sa.Text(), nullable=False, server_default=sa.text("''")))
    connection = op.get_bind()
    jobs = sa.table("jobs", *map(sa.column, ("number", "status", "body", "body_bytes", "prompt", "digest")))
    bodies = sa.table("job_bodies", sa.column("number"), sa.column("body"))
    for number in connection.execute(sa.select(jobs.c.number)).scalars().all():
        is_job = jobs.c.number == number
        status, body = connection.execute(sa.select(jobs.c.status, jobs.c.body).where(is_job)).one()
        fields = msgspec.json.decode(body, type=dict[str, Any])
        values: dict[str, Any] = {
            "digest": hashlib.sha256(msgspec.json.encode(fields, order="deterministic")).hexdigest()
        }
        if isinstance(prompt := fields.get("prompt"), str):
            values["prompt"] = prompt[:MAX_CHARS].replace("\0", "")  # PostgreSQL has no NUL in texts
        if status == "succeeded":  # it does not run again
            values["body_bytes"] = 0
        else:
            connection.execute(sa.insert(bodies), {"number": number, "body": body})
        connection.execute(sa.update(jobs).where(is_job).values(values))
    op.drop_column("jobs", "body")
