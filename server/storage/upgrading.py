"""The schema of a database: made, upgraded, and checked before it is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import ScriptDirectory
from sqlalchemy import Column, Connection, inspect, text

from autoshard.core.errors import InvalidOptionError
from server.storage.database import Database
from server.storage.location import DATABASE_VARIABLE
from server.storage.schema import METADATA

#: Any number that nothing else locks: two upgrades at the same time wait for each other.
_UPGRADE_LOCK = 0x6175746F


def upgrade(database: Database) -> tuple[str | None, str]:
    """Makes the schema that this version uses, in one transaction; a newer one is left as it is.

    Returns:
        Revision before, None of an empty database, and after.

    Raises:
        StorageError: If the database does not answer.
    """
    config = _config()
    with database.writing(uses_reserve=True) as connection:
        if not database.is_sqlite:
            connection.execute(text(f"SELECT pg_advisory_xact_lock({_UPGRADE_LOCK})"))
        before = _revision(connection)
        if before is None or before in _known(config):
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            _add_missing(connection)
        after = _revision(connection)
    assert after is not None
    return before, after


def check_schema(database: Database) -> None:
    """Checks that the schema is that of this version, or of a newer one.

    Raises:
        InvalidOptionError: If it is older.
        StorageError: If the database does not answer.
    """
    config = _config()
    with database.reading() as connection:
        found = _revision(connection)
        lacks = found is not None and bool(_missing(connection))
    head = ScriptDirectory.from_config(config).get_current_head()
    if found is None or lacks or (found in _known(config) and found != head):
        state = "has no schema yet" if found is None else f"has the schema {found}, this version uses {head}"
        state = "lacks tables or columns of this version" if lacks and found == head else state
        raise InvalidOptionError(f"the database {state}: run `autoshard db upgrade`", field=DATABASE_VARIABLE)


def _missing(connection: Connection) -> list[Column[Any]]:
    """Columns that the database lacks, those of whole tables among them."""
    present = {
        (table, column["name"])
        for (_, table), columns in inspect(connection).get_multi_columns().items()
        for column in columns
    }
    declared = (column for table in METADATA.sorted_tables for column in table.columns)
    return [column for column in declared if (column.table.name, column.name) not in present]


def _add_missing(connection: Connection) -> None:
    """Adds tables and columns that were declared since the others were made; the columns are empty in their rows."""
    METADATA.create_all(connection)
    operations = Operations(MigrationContext.configure(connection))
    for column in _missing(connection):
        operations.add_column(column.table.name, column._copy())
    for table in METADATA.sorted_tables:
        for index in table.indexes:
            index.create(connection, checkfirst=True)


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _known(config: Config) -> set[str]:
    return {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
