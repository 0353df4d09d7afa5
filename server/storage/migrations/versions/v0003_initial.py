"""All tables, as they are declared: no release has had others.

From the first release on, each change is a module of its own, and this one lists the tables as that release had them.
Databases that were made in development have this number.
"""

from __future__ import annotations

from alembic import op

from server.storage.schema import METADATA

revision = "0003"
down_revision: str | None = None


def upgrade() -> None:
    """Makes the tables."""
    METADATA.create_all(op.get_bind())
