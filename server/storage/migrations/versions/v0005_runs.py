"""Runs of plans that were reported."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision: str | None = "0004"


def upgrade() -> None:
    """Makes the table."""
    op.create_table(
        "runs",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("plan_id", sa.String(71), sa.ForeignKey("plans.id", ondelete="CASCADE"), nullable=False),
        sa.Column("at_us", sa.BigInteger, nullable=False),
        sa.Column("measured_ms", sa.Float, nullable=False),
        sa.Column("predicted_ms", sa.Float, nullable=False),
        sa.Column("is_drifted", sa.Boolean, nullable=False),
    )
    op.create_index("runs_by_plan", "runs", ["plan_id", "id"])
