"""Finished parts of a study, kept as files, so that a study that was stopped continues where it was.

    FOLDER/study.json         options and models that the parts depend on
    FOLDER/parts/<part>.json  a finished part

Two processes may fill one folder with different parts at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter

from autoshard.console import log, progress
from autoshard.core.errors import FormatError, InvalidOptionError
from autoshard.formats.documents.json_document import format_json, parse_json
from autoshard.formats.files import atomic_write, read_bytes
from studies.frame.documents import read_as

SCHEMA: Final = "autoshard.study_parts/1"

#: A JSON object.
Numbers = Mapping[str, Any]

_Data = TypeVar("_Data")


@dataclass(frozen=True, slots=True)
class PartStore:
    """The finished parts of one study.

    Attributes:
        folder: Where they are kept; None to keep nothing.
    """

    folder: Path | None

    @classmethod
    def of(cls, folder: Path | None, identity: Numbers) -> PartStore:
        """Those of a study with these options and models.

        Raises:
            InvalidOptionError: As `check_identity`.
            FormatError: As `check_identity`.
        """
        store = cls(folder)
        store.check_identity(identity)
        return store

    def check_identity(self, identity: Numbers) -> None:
        """Notes the options and models of the study, or checks that they are those of the parts in the folder.

        Raises:
            InvalidOptionError: If the folder has parts of another study.
            FormatError: If the folder cannot be read or written.
        """
        if self.folder is None:
            return
        path, ours = self.folder / "study.json", {"schema": SCHEMA, **_as_json(identity)}
        if not path.exists():
            atomic_write(path, format_json(ours))
            return
        theirs = _read(path)
        for name, value in ours.items():
            if theirs.get(name) != value:
                raise InvalidOptionError(
                    f"the folder has parts whose {name} is {theirs.get(name)}, not {value}; take another folder, or "
                    "the same options and models",
                    source=str(path),
                )

    def has(self, name: str) -> bool:
        """Whether a part is finished."""
        return self.folder is not None and self._path(self.folder, name).exists()

    def read(self, name: str) -> dict[str, Any]:
        """A finished part's numbers.

        Raises:
            FormatError: If its file is missing or damaged.
        """
        assert self.folder is not None, "nothing is kept without a folder"
        path = self._path(self.folder, name)
        result = _read(path).get("result")
        if not isinstance(result, dict):
            raise FormatError("must be an object", field="result", source=str(path))
        return result

    def find(self, name: str, make: Callable[[], Numbers]) -> dict[str, Any]:
        """A part's numbers, made and kept if it is not finished."""
        if self.folder is None:
            return _as_json(make())
        if not self.has(name):
            started_s = time.monotonic()
            result = make()
            elapsed_s = round(time.monotonic() - started_s, 3)
            path = self._path(self.folder, name)
            atomic_write(path, format_json({"elapsed_s": elapsed_s, "result": _as_json(result)}))
        return self.read(name)

    def find_data(self, name: str, kind: type[_Data], make: Callable[[], _Data]) -> _Data:
        """As `find`, of a dataclass."""
        found = self.find(name, lambda: TypeAdapter(kind).dump_python(make(), mode="json"))
        return read_as(kind, found, "" if self.folder is None else str(self._path(self.folder, name)))

    def find_all(
        self,
        title: str,
        kind: type[_Data],
        makers: Mapping[str, Callable[[], _Data]],
        line: Callable[[_Data], str] | None = None,
    ) -> list[_Data]:
        """As `find_data`, of many parts by their names, with a bar of progress.

        Args:
            title: Of the bar.
            kind: Class of the parts.
            makers: Make those that are not finished.
            line: Logged of each part; None to log nothing.
        """
        found = []
        with progress(title, len(makers)) as advance:
            for name, make in makers.items():
                found.append(self.find_data(name, kind, make))
                if line is not None:
                    log(line(found[-1]))
                advance(1)
        return found

    @staticmethod
    def _path(folder: Path, name: str) -> Path:
        return folder / "parts" / f"{name}.json"


def _read(path: Path) -> dict[str, Any]:
    document = parse_json(read_bytes(path), str(path))
    if not isinstance(document, dict):
        raise FormatError("must be an object", source=str(path))
    return document


def _as_json(values: Numbers) -> dict[str, Any]:
    """As a file gives it back: tuples as lists."""
    document = parse_json(format_json(values))
    assert isinstance(document, dict)
    return document
