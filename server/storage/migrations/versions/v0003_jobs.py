"""Jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision: str | None = "0002"


def upgrade() -> None:
    """Makes the table."""
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("client", sa.String(128), nullable=False),
        sa.Column("owner", sa.String(32)),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.Column("started_us", sa.BigInteger),
        sa.Column("seen_us", sa.BigInteger, nullable=False),
        sa.Column("finished_us", sa.BigInteger),
        sa.Column("cancelled_us", sa.BigInteger),
        sa.Column("request", sa.LargeBinary, nullable=False),
        sa.Column("progress", sa.String(512), nullable=False),
        sa.Column("log", sa.Text, nullable=False),
        sa.Column("plan_id", sa.String(71)),
        sa.Column("result", sa.LargeBinary),
        sa.Column("problem", sa.Text),
    )
    op.create_index("jobs_by_time", "jobs", ["created_us", "id"])
    op.create_index("jobs_by_state", "jobs", ["state", "seen_us"])
