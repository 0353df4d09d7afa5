"""DBOS's tables in the service's database: made, upgraded, and checked before they are used."""

from __future__ import annotations

import logging

from dbos import DBOS
from dbos._migration import get_migration_versions  # DBOS's public check only comes with its launch
from sqlalchemy import create_engine
from sqlalchemy.exc import OperationalError

from autoshard.core.errors import InvalidOptionError
from server.problems import StorageError
from server.storage.database import Database
from server.storage.location import DATABASE_VARIABLE

_SCHEMA = "dbos"


def upgrade_job_tables(database: Database) -> None:
    """Makes the tables that this version of DBOS uses, or brings them up to it; newer ones are left as they are.

    Raises:
        StorageError: If the database does not answer.
    """
    logging.getLogger("dbos").setLevel(logging.CRITICAL)
    try:
        DBOS.migrate(database.url.render_as_string(hide_password=False), schema=_SCHEMA)
    except OperationalError as error:
        raise StorageError("the database does not answer") from error


def check_job_tables(database: Database) -> None:
    """Checks that the tables are those of this version, or newer; a file of SQLite is upgraded when jobs start.

    Raises:
        InvalidOptionError: If they are older, or not there.
        StorageError: If the database does not answer.
    """
    if database.is_sqlite:
        return
    engine = create_engine(database.url)
    try:
        found, needed = get_migration_versions(engine, _SCHEMA, use_listen_notify=True)
    except OperationalError as error:
        raise StorageError("the database does not answer") from error
    finally:
        engine.dispose()
    if found < needed:
        raise InvalidOptionError(
            f"the database's tables of jobs have version {found}, this version uses {needed}: run `autoshard db "
            "upgrade`",
            field=DATABASE_VARIABLE,
        )
