"""Bytes of plans, by which clients' shares of the storage are counted."""

from __future__ import annotations

from alembic import op
from sqlalchemy import func, inspect, select, update

from server.storage.schema import PLAN_DOCUMENTS, PLANS

revision = "0003"
down_revision: str | None = "0002"


def upgrade() -> None:
    """Adds the column, and counts the plans that were stored without it."""
    columns = {column["name"] for column in inspect(op.get_bind()).get_columns(PLANS.name)}
    if PLANS.c.num_bytes.name not in columns:
        op.add_column(PLANS.name, PLANS.c.num_bytes._copy())
    document = PLAN_DOCUMENTS.c
    is_its = (document.team == PLANS.c.team) & (document.plan_id == PLANS.c.id)
    num_bytes = select(func.length(document.answer)).where(is_its).scalar_subquery()
    op.execute(update(PLANS).where(PLANS.c.num_bytes == 0).values(num_bytes=func.coalesce(num_bytes, 0)))
