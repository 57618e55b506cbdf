"""Table of the bodies of jobs, and their prompts, so that jobs are listed and changed without the bodies."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

INTEGER: Final[sa.types.TypeEngine[Any]] = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
MAX_CHARS: Final = 10_000


def upgrade() -> None:
    """Move the bodies to their table, one at a time since they may be large, and copy the prompts."""
    op.create_table(
        "job_bodies",
        sa.Column("number", INTEGER, primary_key=True, nullable=False, autoincrement=False),
        sa.Column("body", sa.Text(), nullable=False),
        sqlite_strict=True,
    )
    op.add_column("jobs", sa.Column("prompt", sa.Text()))
    connection = op.get_bind()
    jobs = sa.table("jobs", sa.column("number"), sa.column("body"), sa.column("prompt"))
    bodies = sa.table("job_bodies", sa.column("number"), sa.column("body"))
    for number in connection.execute(sa.select(jobs.c.number)).scalars().all():
        is_job = jobs.c.number == number
        body = connection.execute(sa.select(jobs.c.body).where(is_job)).scalar_one()
        connection.execute(sa.insert(bodies), {"number": number, "body": body})
        prompt = msgspec.json.decode(body, type=dict[str, Any]).get("prompt")
        if isinstance(prompt, str):
            prompt = prompt[:MAX_CHARS].replace("\0", "")  # PostgreSQL has no NUL in texts
            connection.execute(sa.update(jobs).where(is_job).values(prompt=prompt))
    op.drop_column("jobs", "body")
