"""Runs a user's model factory in a process of its own, and reads the tables of the model that it makes.

The process gets `MODULE:FACTORY` and settings, calls the factory under the meta device, and writes one JSON document.
"""

from __future__ import annotations

import importlib
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoshard.core import TableSet
from autoshard.core.errors import ExecutionError, FormatError, InputError, InvalidTableError
from autoshard.core.quoting import shortened, shown
from autoshard.formats.documents.json_document import parse_json
from autoshard.formats.documents.tables_json import tables_from_json, tables_to_json
from autoshard.formats.files import read_bytes
from autoshard.formats.torchrec.places import Place, Places

_log = logging.getLogger(__name__)

#: Bytes of the document, beyond those of tables.json's limit: 5,000 tables take 2 MB.
_MAX_BYTES = 1 << 27


@dataclass(frozen=True, slots=True, eq=False)
class FactoryTables:
    """What a factory's model holds.

    Attributes:
        tables: Its tables.
        places: Where they are in the model.
        notes: What the tables leave open.
    """

    tables: TableSet
    places: Places
    notes: tuple[str, ...]


def read_factory(factory: str, **settings: Any) -> FactoryTables:
    """The tables of the model that a factory makes.

    Args:
        factory: `MODULE:FACTORY`: a callable without arguments that returns a model, or a model and TorchRec's
            constraints by table. MODULE is looked up from the working directory on.
        settings: As `read_model` takes them.

    Raises:
        FormatError: If the text is no such name.
        InvalidTableError: If there is no such factory, it fails, or its model holds what plans cannot.
        ExecutionError: If the process died.
    """
    module, colon, name = factory.partition(":")
    if not (colon and module and name):
        raise FormatError(f"must be MODULE:FACTORY, got {shown(factory)}")
    with tempfile.TemporaryDirectory(prefix="autoshard-model-") as folder:
        output = Path(folder) / "model.json"
        command = [sys.executable, "-m", "autoshard.formats.torchrec.child", factory, str(output), json.dumps(settings)]
        # What the user's code prints is no result of ours: it goes to standard error.
        code = subprocess.run(command, stdout=2, check=False).returncode
        if not output.exists():
            raise ExecutionError(f"the process that made the model ended with code {code}", source=factory)
        document: Any = parse_json(read_bytes(output, max_bytes=_MAX_BYTES).decode())
    if "error" in document:
        raise InvalidTableError(document["error"]["message"], field=document["error"]["field"])
    places = {name: Place(*place) for name, place in document["places"].items()}
    return FactoryTables(tables=tables_from_json(document["tables"]), places=places, notes=tuple(document["notes"]))


def read_factory_tables(factory: str | Path, *, advance: Any, **settings: Any) -> TableSet:
    """As `read_factory`, tables alone: the import format `torchrec`. Notes on the tables go to the log."""
    found = read_factory(str(factory), **settings)
    for note in found.notes:
        _log.warning("%s: %s", factory, note)
    advance(1.0)
    return found.tables


def main(arguments: Sequence[str]) -> None:
    """Writes the document of a factory's model: the factory, the file to write and the settings are its arguments."""
    factory, output, settings = arguments

    def write(document: dict[str, Any]) -> None:
        Path(output).write_text(json.dumps(document), encoding="utf-8")

    try:
        made = _make(factory)
    except Exception as error:
        is_torchrec = isinstance(error, ModuleNotFoundError) and error.name == "torchrec"
        hint = "; `autoshard doctor` says how it is installed" if is_torchrec else ""
        write(_error(f"failed: {type(error).__name__}: {shortened(str(error), 500)}{hint}", None))
        raise
    write(_document(made, json.loads(settings)))


def _make(factory: str) -> object:
    """What the user's factory returns."""
    import torch

    module, _, name = factory.partition(":")
    make = getattr(importlib.import_module(module), name)
    with torch.device("meta"):
        return make()


def _document(made: object, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The document of what a factory returned."""
    import torch

    from autoshard.formats.torchrec.modules import read_model

    model, constraints = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, torch.nn.Module):
        return _error(f"must return a torch module, got {type(model).__name__}", None)
    try:
        found = read_model(model, constraints=constraints, **settings)
    except InputError as error:
        return _error(error.message, error.field)
    return {
        "tables": tables_to_json(found.tables),
        "places": {name: [place.path, place.name] for name, place in found.places.items()},
        "notes": list(found.notes),
    }


def _error(message: str, field: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "field": field}}


if __name__ == "__main__":
    main(sys.argv[1:])
