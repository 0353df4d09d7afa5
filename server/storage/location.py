"""Where the database is."""

from __future__ import annotations

import os
from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from autoshard.core.errors import InvalidOptionError

DATABASE_VARIABLE = "AUTOSHARD_DATABASE_URL"
_ACCEPTED = "must be sqlite:///FILE or postgresql://USER:PASSWORD@HOST:PORT/DATABASE"


def database_url() -> URL:
    """The address that AUTOSHARD_DATABASE_URL has, else `~/.local/share/autoshard/service.sqlite`.

    Raises:
        InvalidOptionError: If it is neither a file of SQLite nor a PostgreSQL database; passwords are not repeated.
    """
    named = os.environ.get(DATABASE_VARIABLE)
    if not named:
        file = Path.home() / ".local" / "share" / "autoshard" / "service.sqlite"
        return URL.create("sqlite", database=str(file))
    return parsed_url(named)


def parsed_url(named: str) -> URL:
    """A database's address, as AUTOSHARD_DATABASE_URL may have it.

    Raises:
        InvalidOptionError: As `database_url`.
    """
    try:
        url = make_url(named)
    except (ArgumentError, ValueError):
        raise InvalidOptionError(_ACCEPTED, field=DATABASE_VARIABLE) from None
    if url.drivername == "sqlite" and url.database and url.database != ":memory:" and not url.query:
        return url
    if url.drivername in ("postgresql", "postgres", "postgresql+psycopg") and url.database:
        return url.set(drivername="postgresql+psycopg")
    raise InvalidOptionError(_ACCEPTED, field=DATABASE_VARIABLE)
