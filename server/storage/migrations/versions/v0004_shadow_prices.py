"""Prices of candidate models."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision: str | None = "0003"


def upgrade() -> None:
    """Makes the table."""
    op.create_table(
        "shadow_prices",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("at_us", sa.BigInteger, nullable=False),
        sa.Column("name", sa.String(201), nullable=False),
        sa.Column("candidate", sa.String(16), nullable=False),
        sa.Column("production", sa.String(512), nullable=False),
        sa.Column("plan_id", sa.String(71), nullable=False),
        sa.Column("production_ms", sa.Float, nullable=False),
        sa.Column("candidate_ms", sa.Float, nullable=False),
    )
    op.create_index("shadow_prices_by_candidate", "shadow_prices", ["name", "candidate"])
