"""Aliases of a model's versions: a file per alias that holds every version it ever named, the current one last.

A line of the file is a JSON object: what was done, the version's id, when and by whom. Writers take turns by a lock of
the kernel, which a killed one loses, and replace the file as a whole; readers need no lock.
"""

from __future__ import annotations

import fcntl
import getpass
import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from autoshard.core.choices import Alias as Alias
from autoshard.core.errors import FormatError, ModelError
from autoshard.core.quoting import shortened, shown
from autoshard.formats.documents.json_document import parse_json
from autoshard.formats.files import atomic_write, read_bytes, remove_leftovers

PRODUCTION = Alias.PRODUCTION
VERSION_ID = re.compile(r"[0-9a-f]{16}")
_LOCK = ".lock"
_MEND = "remove it, and name a version by `autoshard models promote`"
#: Age from which what a writer left under a temporary name is a killed one's: no write takes that long.
LEFTOVER_SECONDS = 3600.0


class Action(StrEnum):
    """How an alias came to name a version."""

    PUBLISH = "publish"
    PROMOTE = "promote"
    ROLL_BACK = "roll-back"


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasEntry:
    """One change of an alias.

    Attributes:
        id: The version it named from then on.
        at: When, in UTC, as ISO 8601.
        by: User and host.
    """

    action: Action
    id: str
    at: str
    by: str


@dataclass(frozen=True, slots=True)
class AliasFile:
    """The file of one alias of one model.

    Attributes:
        folder: Folder of the model's versions.
        alias: An `Alias`.
    """

    folder: Path
    alias: str

    @property
    def path(self) -> Path:
        """Where it is."""
        return self.folder / self.alias

    def num_lines(self) -> int:
        """Lines of it, 0 if it is not there.

        Raises:
            FormatError: If it cannot be read.
        """
        return len(read_bytes(self.path).splitlines()) if os.path.lexists(self.path) else 0


class SharedAliases(Protocol):
    """Where those of other machines change the same aliases."""

    def pull_alias(self, file: AliasFile) -> int:
        """Brings a file up to date, and returns how often it was changed."""

    def add_alias(self, file: AliasFile, number: int, lines: str) -> bool:
        """Makes a change of that number, unless somebody else did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasLog:
    """The versions that one alias of one model has named.

    Attributes:
        folder: Folder of the model's versions.
        alias: An `Alias`.
        shared: Where others change it, too; None if the folder is all there is.
    """

    folder: Path
    alias: str
    shared: SharedAliases | None = None

    def __post_init__(self) -> None:
        if self.alias not in list(Alias):
            raise ModelError(f"must be one of {', '.join(Alias)}, got {shown(self.alias)}", field="alias")

    def entries(self) -> tuple[AliasEntry, ...]:
        """All changes, the latest last; empty if the alias was never given.

        Raises:
            ModelError: If the file cannot be read or is damaged; the text names it.
        """
        path = self.folder / self.alias
        try:
            if not os.path.lexists(path):
                return ()
            text = read_bytes(path).decode()
        except FormatError as error:
            raise ModelError(error.message, source=str(path)) from error
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
        seen: tuple[AliasEntry, ...] | None = None,
    ) -> bool:
        """Has the alias name a version from now on; nothing changes if it does already.

        Args:
            version: Id of a version that is there.
            action: Why.
            author: Who; this process's user and host if None.
            seen: The entries that the caller decided by, none if they are damaged: if others are there by now, nothing
                changes. None to take no notice of them.

        Returns:
            Whether the alias names the version now.

        Raises:
            ModelError: If the file cannot be written.
        """
        with self._locked():
            while True:
                number = self._pulled()
                try:
                    entries = self.entries()
                except ModelError:
                    entries = ()  # damaged: this is how it is mended
                if seen is not None and entries != seen:
                    return False
                if entries and entries[-1].id == version:
                    return True
                if self._write(entries, number + 1, version, action, author):
                    return True

    def roll_back(self, author: str | None = None, *, first: str | None = None) -> str:
        """Has the alias name the version that it named before; going back twice goes two versions back.

        Args:
            author: Who; this process's user and host if None.
            first: Id of the version that was used before the alias was ever given; None if there was none.

        Returns:
            The version's id.

        Raises:
            ModelError: If there is no earlier version, or the file is damaged or cannot be written.
        """
        with self._locked():
            while True:
                number = self._pulled()
                entries = self.entries()
                named = [first] if first is not None and entries and entries[0].id != first else []
                for entry in entries:
                    if entry.action is Action.ROLL_BACK:
                        del named[-1:]
                    else:
                        named.append(entry.id)
                if len(named) < 2:
                    raise ModelError(f"{self.alias} has named no other version before", source=str(self.folder))
                if self._write(entries, number + 1, named[-2], Action.ROLL_BACK, author):
                    return named[-2]

    def _pulled(self) -> int:
        """Brings the file up to date with what others did; returns how often it was changed, 0 if nobody else can."""
        return 0 if self.shared is None else self.shared.pull_alias(AliasFile(self.folder, self.alias))

    def _write(
        self, entries: tuple[AliasEntry, ...], number: int, version: str, action: Action, author: str | None
    ) -> bool:
        """Adds an entry; returns False if one of another machine's was quicker."""
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        entry = AliasEntry(action=action, id=version, at=at, by=author or _author())
        text = "".join(json.dumps(asdict(item), ensure_ascii=False) + "\n" for item in (*entries, entry))
        if self.shared is not None and not self.shared.add_alias(AliasFile(self.folder, self.alias), number, text):
            return False
        try:
            atomic_write(self.folder / self.alias, text)
            remove_leftovers(self.folder, older_than_s=LEFTOVER_SECONDS)
        except FormatError as error:
            raise ModelError(error.message, source=error.source) from error
        return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            descriptor = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ModelError(f"cannot be written: {error.strerror}", source=str(self.folder)) from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError as error:
                raise ModelError(f"cannot be locked: {error.strerror}", source=str(self.folder)) from error
            yield
        finally:
            os.close(descriptor)


def _entry(line: str, path: Path) -> AliasEntry:
    try:
        data = parse_json(line)
        if not isinstance(data, dict):
            raise ValueError("a line is no object")
        entry = AliasEntry(action=Action(data["action"]), id=data["id"], at=str(data["at"]), by=str(data["by"]))
        if not VERSION_ID.fullmatch(entry.id):
            raise ValueError(f"a version is 16 hexadecimal digits, got {shown(entry.id)}")
    except KeyError as error:
        raise ModelError(f"damaged: a line lacks {error}; {_MEND}", source=str(path)) from error
    except (ValueError, TypeError) as error:
        raise ModelError(f"damaged: {shortened(str(error), 120)}; {_MEND}", source=str(path)) from error
    return entry


def _author() -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
