"""The keys that a service has when it starts: none is needed where only this machine can reach it, or beside OIDC."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autoshard.core.errors import InvalidOptionError
from server.access import ALL_SCOPES, COMMAND_LINE
from server.settings import ServerSettings
from server.storage.keys import KeyStore

KEY_VARIABLE, KEY_FILE_VARIABLE = "AUTOSHARD_KEY", "AUTOSHARD_KEY_FILE"


def provide_keys(settings: ServerSettings, listener: socket.socket, keys: KeyStore) -> str | None:
    """Adds the key of the environment, makes the first one if that is asked for, and checks that there is one.

    Args:
        settings: Whether a first key is made.
        listener: Where the service listens.
        keys: Of the service.

    Returns:
        The secret of a first key, which is to be logged this once; None if none was made.

    Raises:
        InvalidOptionError: If a key of the environment is none, or other machines can reach a service without keys.
        StorageError: If the database does not answer.
    """
    for variable, secret in _given():
        with _named(variable):
            keys.add(secret, variable, ALL_SCOPES, COMMAND_LINE)
    if keys.exist() or settings.oidc_issuer is not None:
        return None
    if settings.first_key:
        return keys.create("first key", ALL_SCOPES, COMMAND_LINE)[1]
    if not ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback:
        raise InvalidOptionError(
            f"{settings.host} can be reached from other machines, which needs keys: make one with `autoshard keys "
            f"create`, set {KEY_VARIABLE} or {KEY_FILE_VARIABLE}, or let --first-key make one",
            field="--host",
        )
    return None


def _given() -> Iterator[tuple[str, str]]:
    if secret := os.environ.get(KEY_VARIABLE):
        yield KEY_VARIABLE, secret.strip()
    if file := os.environ.get(KEY_FILE_VARIABLE):
        try:
            yield KEY_FILE_VARIABLE, Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "is not UTF-8"
            raise InvalidOptionError(f"{file}: {reason.lower()}", field=KEY_FILE_VARIABLE) from None


@contextmanager
def _named(variable: str) -> Iterator[None]:
    try:
        yield
    except InvalidOptionError as error:
        raise InvalidOptionError(error.message, field=variable) from None
