"""Parts of an evaluation, kept as files, so that one that was stopped goes on where it was.

    FOLDER/evaluation.json            what is evaluated
    FOLDER/parts/<figure>/<part>.json a finished part

Two processes may fill one folder with different figures at the same time, once it has `fig8`: others use its policies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from autoshard.core.errors import FormatError, InvalidOptionError
from autoshard.formats.documents.json_document import format_json, parse_json
from autoshard.formats.files import atomic_write, read_bytes

SCHEMA: Final = "autoshard.policy_evaluation/1"

#: A JSON object.
Numbers = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PartStore:
    """The finished parts of one evaluation."""

    folder: Path

    def check_identity(self, identity: Numbers) -> None:
        """Notes what is evaluated here, or checks that it is what was noted.

        Raises:
            InvalidOptionError: If the folder has parts of another evaluation.
            FormatError: If the folder cannot be read or written.
        """
        path, ours = self.folder / "evaluation.json", {"schema": SCHEMA, **_as_json(identity)}
        if not path.exists():
            atomic_write(path, format_json(ours))
            return
        theirs = _read(path)
        for name, value in ours.items():
            if theirs.get(name) != value:
                raise InvalidOptionError(
                    f"the folder has an evaluation whose {name} is {theirs.get(name)}, not {value}; take another "
                    "folder, or the same options and models",
                    source=str(path),
                )

    def has(self, name: str) -> bool:
        """Whether a part is finished."""
        return self._path(name).exists()

    def read(self, name: str) -> dict[str, Any]:
        """A finished part's numbers.

        Raises:
            FormatError: If its file is missing or damaged.
        """
        path = self._path(name)
        result = _read(path).get("result")
        if not isinstance(result, dict):
            raise FormatError("must be an object", field="result", source=str(path))
        return result

    def find(self, name: str, make: Callable[[], Numbers]) -> dict[str, Any]:
        """A part's numbers, made and kept if it is not finished."""
        if not self.has(name):
            started_s = time.monotonic()
            result = make()
            elapsed_s = round(time.monotonic() - started_s, 3)
            atomic_write(self._path(name), format_json({"elapsed_s": elapsed_s, "result": _as_json(result)}))
        return self.read(name)

    def _path(self, name: str) -> Path:
        return self.folder / "parts" / f"{name}.json"


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
