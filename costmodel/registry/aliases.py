"""Aliases of a model's versions: each change makes a file of its own, which holds every version the alias ever named.

A line of the file is a JSON object: what was done, the version's id, when, by whom and, where it has a name, by which
request; the current version is the last.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from autoshard.core.choices import Alias as Alias
from autoshard.core.errors import ModelError
from autoshard.core.quoting import shortened, shown
from autoshard.formats.documents.json_document import parse_json
from autoshard.formats.files import read_bytes
from costmodel.registry.objects import NUMBER, VERSION_ID, RegistryObjects, model_errors

if TYPE_CHECKING:
    from autoshard.api import AliasChange

PRODUCTION = Alias.PRODUCTION
_MEND = "remove it, and name a version by `autoshard models promote`"
#: How long a request that is sent again is the same one.
_SAME_REQUEST = timedelta(days=1)


class Action(StrEnum):
    """How an alias came to name a version."""

    PUBLISH = "publish"
    PROMOTE = "promote"
    ROLL_BACK = "roll-back"


@dataclass(frozen=True, slots=True)
class AliasLog:
    """The versions that one alias of one model has named.

    Attributes:
        objects: Of the registry.
        model: Kind and name, with a slash between them.
        alias: An `Alias`.
    """

    objects: RegistryObjects
    model: str
    alias: str

    def __post_init__(self) -> None:
        if self.alias not in list(Alias):
            raise ModelError(f"must be one of {', '.join(Alias)}, got {shown(self.alias)}", field="alias")

    @property
    def _folder(self) -> Path:
        return self.objects.folder / self.model / self.alias

    def _number(self) -> int:
        """How often the alias was changed.

        Raises:
            ModelError: If that cannot be read.
        """
        try:
            return max((int(path.name) for path in self._folder.iterdir() if NUMBER.fullmatch(path.name)), default=0)
        except FileNotFoundError:
            return 0
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ModelError(f"cannot be read: {reason}; {_MEND}", source=str(self._folder)) from error

    def entries(self) -> tuple[AliasChange, ...]:
        """All changes, the latest last; empty if the alias was never given.

        Raises:
            ModelError: If the history cannot be read or is damaged; the text names it.
        """
        return self._entries(self._number())

    def _entries(self, number: int) -> tuple[AliasChange, ...]:
        if number == 0:
            return ()
        path = self._folder / f"{number:08}"
        try:
            with model_errors():
                text = read_bytes(path).decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"cannot be read: {error}", source=str(path)) from error
        entries = tuple(_entry(line, path) for line in text.splitlines())
        if not entries:
            raise ModelError(f"damaged: it is empty; {_MEND}", source=str(path))
        return entries

    def current(self) -> str | None:
        """Id of the version that the alias names; None if it was never given.

        Raises:
            ModelError: As `entries`.
        """
        entries = self.entries()
        return entries[-1].id if entries else None

    def point(
        self,
        version: str,
        action: Action,
        author: str | None = None,
        *,
        seen: tuple[AliasChange, ...] | None = None,
        request: str = "",
    ) -> bool:
        """Has the alias name a version from now on; nothing changes if it does already.

        A promotion also changes what was published alone, which counts for some machines; so does what is published on
        another host.

        Args:
            version: Id of a version that is there.
            action: Why.
            author: Who; this process's user and host if None.
            seen: The entries that the caller decided by, none if they are damaged: if others are there by now, nothing
                changes. None to take no notice of them.
            request: Name of the request that asks for it, which makes one change however often it is sent; empty if
                it is sent once.

        Returns:
            False if others than the seen entries are there.

        Raises:
            ModelError: If the file cannot be written.
        """
        request = request or uuid.uuid4().hex  # storages that were not heard say that another one was quicker
        while True:
            number = self._pulled()
            try:
                entries = self._entries(number)
            except ModelError:
                entries = ()  # damaged: this is how it is mended
            if _made_by(request, entries) is not None:
                return True
            if seen is not None and entries != seen:
                return False
            change = _change(version, action, author, request)
            if (entries and _says_as_much(entries[-1], change)) or self._write(entries, number + 1, change):
                return True

    def roll_back(
        self,
        author: str | None = None,
        *,
        first: str | None = None,
        seen: tuple[AliasChange, ...] | None = None,
        request: str = "",
    ) -> str | None:
        """Has the alias name the version that it named before; going back twice goes two versions back.

        Args:
            author: Who; this process's user and host if None.
            first: Id of the version that was used before the alias was ever given; None if there was none.
            seen: As of `point`.
            request: Likewise.

        Returns:
            The version's id; None if others than the seen entries are there.

        Raises:
            ModelError: If there is no earlier version, or the file is damaged or cannot be written.
        """
        request = request or uuid.uuid4().hex
        while True:
            number = self._pulled()
            entries = self._entries(number)
            if (made := _made_by(request, entries)) is not None:
                return made.id
            if seen is not None and entries != seen:
                return None
            named = [first] if first is not None and entries else []
            for entry in entries:
                if entry.action == Action.ROLL_BACK:
                    del named[-1:]
                elif named[-1:] != [entry.id]:
                    named.append(entry.id)
            if len(named) < 2:
                source = str(self.objects.folder / self.model)
                raise ModelError(f"{self.alias} has named no other version before", source=source)
            if self._write(entries, number + 1, _change(named[-2], Action.ROLL_BACK, author, request)):
                return named[-2]

    def was_changed_by(self, request: str) -> bool:
        """Whether a request has changed the alias already; not if the history is damaged."""
        try:
            return _made_by(request, self.entries()) is not None
        except ModelError:
            return False

    def _pulled(self) -> int:
        """How often the alias was changed, by others on other machines, too."""
        self.objects.pull(f"{self.model}/{self.alias}")
        return self._number()

    def _write(self, entries: tuple[AliasChange, ...], number: int, change: AliasChange) -> bool:
        """Makes the history after a change of that number; returns False if another process was quicker."""
        lines = (item.model_dump() | ({"request": item.request} if item.request else {}) for item in (*entries, change))
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        return self.objects.create(f"{self.model}/{self.alias}/{number:08}", text.encode())


def is_of_this_host(change: AliasChange) -> bool:
    """Whether a process of this host made a change."""
    return _host(change) == socket.gethostname()


def _host(change: AliasChange) -> str:
    return change.by.rpartition("@")[2]


def _says_as_much(entry: AliasChange, change: AliasChange) -> bool:
    """Whether an entry names the version of a change already, for all machines for which that would."""
    is_of_its_host = change.action == Action.PUBLISH and _host(entry) == _host(change)
    return entry.id == change.id and (entry.action != Action.PUBLISH or is_of_its_host)


def _made_by(request: str, entries: tuple[AliasChange, ...]) -> AliasChange | None:
    """The change that a request has made already; None if it has none, or no name."""
    since = _iso(datetime.now(UTC) - _SAME_REQUEST)
    return next((entry for entry in entries if request and entry.request == request and entry.at >= since), None)


def _change(version: str, action: Action, author: str | None, request: str) -> AliasChange:
    from autoshard.api import AliasChange

    return AliasChange(action=action, id=version, at=_iso(datetime.now(UTC)), by=author or _author(), request=request)


def _iso(time: datetime) -> str:
    return time.isoformat(timespec="milliseconds")


def _entry(line: str, path: Path) -> AliasChange:
    from autoshard.api import AliasChange

    try:
        data = parse_json(line)
        if not isinstance(data, dict):
            raise ValueError("a line is no object")
        if not VERSION_ID.fullmatch(data["id"]):
            raise ValueError(f"a version is 16 hexadecimal digits, got {shown(data['id'])}")
        request = str(data.get("request", ""))
        action = Action(data["action"])
        return AliasChange(action=action, id=data["id"], at=str(data["at"]), by=str(data["by"]), request=request)
    except KeyError as error:
        raise ModelError(f"damaged: a line lacks {error}; {_MEND}", source=str(path)) from error
    except (ValueError, TypeError) as error:
        raise ModelError(f"damaged: {shortened(str(error), 120)}; {_MEND}", source=str(path)) from error


def _author() -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
