"""Teams: rows that were there before are of none.

Keys of tables cannot be changed in place everywhere, so that tables are made anew. Where 0001 has made them as they are
declared by now, nothing is left to do.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import inspect

from server.storage.schema import PLAN_DOCUMENTS, PLANS, RUNS, SCHEDULES

revision = "0002"
down_revision: str | None = "0001"

_TABLES = (PLANS, PLAN_DOCUMENTS, RUNS, SCHEDULES)


def upgrade() -> None:
    """Makes the tables anew whose keys have teams."""
    connection = op.get_bind()
    held = {table: inspect(connection).get_columns(table.name) for table in _TABLES}
    if any(column["name"] == "team" for column in held[PLANS]):
        return
    for table in _TABLES:
        for index in inspect(connection).get_indexes(table.name):
            op.drop_index(str(index["name"]), table.name)
        op.rename_table(table.name, f"before_{table.name}")
    for table in _TABLES:
        table.create(connection)
        names = ", ".join(column["name"] for column in held[table])
        op.execute(f"INSERT INTO {table.name} ({names}) SELECT {names} FROM before_{table.name}")
    op.drop_index("jobs_by_time", "jobs")  # made anew with its team, as columns are that tables lack
    for table in reversed(_TABLES):
        op.drop_table(f"before_{table.name}")
