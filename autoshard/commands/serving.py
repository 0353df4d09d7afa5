"""Commands that a service does the work of."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.core.errors import InvalidOptionError

if TYPE_CHECKING:
    from autoshard.client import Client
    from autoshard.core import TableSet, Topology

#: Holds the secret of a key of the service.
KEY_VARIABLE = "AUTOSHARD_API_KEY"

ServerOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help=f"Let a service (`autoshard serve`) do the work, with its models; ${KEY_VARIABLE} holds a key of it.",
    ),
]


def open_client(server: str) -> Client:
    """A client of the service at an address."""
    from autoshard.client import Client

    return Client(server, key=os.environ.get(KEY_VARIABLE))


def refuse_local(server: str | None, given: Mapping[str, object]) -> None:
    """Refuses options that only this machine can follow.

    Args:
        server: The service's address; None for this machine.
        given: Values by option; those that are not given are None or false.

    Raises:
        InvalidOptionError: If one is given beside a server.
    """
    for option, value in given.items():
        if server is not None and value not in (None, False):
            raise InvalidOptionError("cannot be given with --server", field=option)


def tables_to_send(tables: str) -> TableSet | str:
    """Tables of a file, or the name of bundled ones, which the service has too.

    Raises:
        InputError: If they are not there, or make no sense.
    """
    from autoshard.formats import bundled_table_sets, load_tables

    return tables if tables in bundled_table_sets() else load_tables(tables)


def topology_to_send(topology: str) -> Topology | str:
    """A topology of a file, or the name of a bundled one, alike.

    Raises:
        InputError: As `tables_to_send`.
    """
    from autoshard.formats import bundled_topology, load_topology

    found = load_topology(topology)
    return topology if bundled_topology(topology) == found else found
