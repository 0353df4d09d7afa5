"""Commands of the service."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard import console
from autoshard.api import Scope
from autoshard.table import Column, Table
from server.access import COMMAND_LINE
from server.settings import ServerSettings

if TYPE_CHECKING:
    from server.storage.keys import KeyStore


def serve(settings: ServerSettings) -> None:
    """Serves plans over REST until SIGTERM or SIGINT; logs go to standard error.

    POST /v1/plans makes a plan, /docs describes the service, /livez and /readyz report its state.

    Example:
        autoshard serve --registry registry
        curl -sH 'content-type: application/json' localhost:8000/v1/plans -d @request.json
    """
    from server.service import run_service

    run_service(settings)


def upgrade_database(as_json: console.JsonOption = False) -> None:
    """Makes the service's tables in its database, or brings them to the state that this version uses.

    AUTOSHARD_DATABASE_URL names the database: sqlite:///FILE or postgresql://USER:PASSWORD@HOST:PORT/DATABASE. Without
    it, the file is ~/.local/share/autoshard/service.sqlite, which `autoshard serve` upgrades by itself.

    Example:
        autoshard db upgrade
    """
    from server.storage.database import Database
    from server.storage.location import database_url
    from server.storage.upgrading import upgrade

    with closing(Database(database_url())) as database:
        before, after = upgrade(database)
    text = f"The schema is {after}." if before == after else f"The schema is {after}; it was {before or 'not there'}."
    console.emit({"before": before, "after": after}, text, as_json=as_json, kind="database")


def create_key(
    name: Annotated[str, typer.Argument(help="Whom or what the key is for.")],
    scope: Annotated[
        list[Scope] | None,
        typer.Option(
            help="What it may do: `admin` holds the others, `plan` holds `read`; may be repeated.", show_default="plan"
        ),
    ] = None,
    team: Annotated[
        str, typer.Option(metavar="NAME", help="Whose plans, jobs and samples it sees.", show_default="none")
    ] = "",
    as_json: console.JsonOption = False,
) -> None:
    """Makes a key for the REST service and prints its secret, which is not stored and cannot be printed again.

    Clients send it as `Authorization: Bearer SECRET`. Once there is a key, every request needs one.

    Example:
        autoshard keys create nightly-training --scope plan --scope train
    """
    with _keys() as keys:
        key, secret = keys.create(name, scope or [Scope.PLAN], COMMAND_LINE, team)
    text = f"Key {key.id} for {key.name} ({', '.join(sorted(key.scopes))}):\n{secret}"
    console.emit({"key": key.model_dump(mode="json"), "secret": secret}, text, as_json=as_json, kind="key")


def list_keys(as_json: console.JsonOption = False) -> None:
    """Lists the keys of the REST service, also those that were revoked.

    Example:
        autoshard keys list
    """
    with _keys() as keys:
        found = keys.list(COMMAND_LINE)
    table = Table.of(
        found,
        [
            ("key", lambda key: key.id),
            (Column("for"), lambda key: key.name),
            (Column("scopes"), lambda key: ", ".join(sorted(key.scopes))),
            (Column("team"), lambda key: key.team),
            (Column("created"), lambda key: key.created_at),
            (Column("revoked"), lambda key: key.revoked_at),
        ],
        is_boxed=True,
    )
    rendered = table if found else "No keys; `autoshard keys create` makes one."
    console.emit({"keys": [key.model_dump(mode="json") for key in found]}, rendered, as_json=as_json, kind="keys")


def revoke_key(
    key: Annotated[str, typer.Argument(help="The key's id, as `autoshard keys list` prints it.")],
    as_json: console.JsonOption = False,
) -> None:
    """Ends a key of the REST service: its next request is refused.

    Example:
        autoshard keys revoke 4f1c22ab90de
    """
    with _keys() as keys:
        revoked = keys.revoke(key, COMMAND_LINE)
    text = f"Key {revoked.id} for {revoked.name} is revoked."
    console.emit({"key": revoked.model_dump(mode="json")}, text, as_json=as_json, kind="key")


@contextmanager
def _keys() -> Iterator[KeyStore]:
    from server.storage.storage import open_storage

    with closing(open_storage()) as storage:
        yield storage.keys
