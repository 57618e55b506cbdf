"""Prompts of jobs, so that jobs are listed without reading the bodies of their requests."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

MAX_CHARS: Final = 10_000


def upgrade() -> None:
    """Add the column and fill it, one body at a time, since bodies may be large."""
    op.add_column("jobs", sa.Column("prompt", sa.Text()))
    connection = op.get_bind()
    jobs = sa.table("jobs", sa.column("number"), sa.column("body"), sa.column("prompt"))
    for number in connection.execute(sa.select(jobs.c.number)).scalars().all():
        is_job = jobs.c.number == number
        body = connection.execute(sa.select(jobs.c.body).where(is_job)).scalar_one()
        prompt = msgspec.json.decode(body, type=dict[str, Any]).get("prompt")
        if isinstance(prompt, str):
            prompt = prompt[:MAX_CHARS].replace("\0", "")  # PostgreSQL has no NUL in texts
            connection.execute(sa.update(jobs).where(is_job).values(prompt=prompt))
