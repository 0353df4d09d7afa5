"""Plans, their documents, and requests with idempotency keys."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision: str | None = None


def upgrade() -> None:
    """Makes the tables."""
    op.create_table(
        "plans",
        sa.Column("id", sa.String(71), primary_key=True),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.Column("planner", sa.String(512), nullable=False),
        sa.Column("device", sa.String(512), nullable=False),
        sa.Column("num_tables", sa.Integer, nullable=False),
        sa.Column("num_ranks", sa.Integer, nullable=False),
        sa.Column("step_ms", sa.Float, nullable=False),
        sa.Column("search_text", sa.Text, nullable=False),
    )
    op.create_index("plans_by_time", "plans", ["created_us", "id"])
    for name in ("planner", "device", "num_ranks"):
        op.create_index(f"plans_by_{name}", "plans", [name, "created_us", "id"])
    op.create_table(
        "plan_documents",
        sa.Column("plan_id", sa.String(71), sa.ForeignKey("plans.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("answer", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "idempotent_requests",
        sa.Column("client", sa.String(128), primary_key=True),
        sa.Column("key", sa.String(128), primary_key=True),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(32), nullable=False),
        sa.Column("started_us", sa.BigInteger, nullable=False),
        sa.Column("status", sa.Integer),
        sa.Column("answer", sa.LargeBinary),
    )
    op.create_index("idempotent_requests_by_time", "idempotent_requests", ["started_us"])
