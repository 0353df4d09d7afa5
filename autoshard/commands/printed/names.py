"""Names that are there (`autoshard.catalogue/1`): what `autoshard list --json` prints."""

from __future__ import annotations

from typing import Any, Final

from autoshard.formats.documents.document import Document
from autoshard.formats.documents.kinds import ANY_TEXT, ANYTHING, TEXT, Field, list_of, optional, record

_BUNDLED: Final = record(
    dict,
    Field("name", TEXT, "Name, as commands take it."),
    Field("description", ANY_TEXT, "What it is."),
    parts=dict,
)
_OPTION: Final = record(
    dict,
    Field("name", TEXT, "KEY of `--set KEY=VALUE`."),
    Field("default", ANYTHING, "Its value where none is given."),
    Field("help", ANY_TEXT, "What it does."),
    parts=dict,
)
_PLANNER: Final = record(
    dict,
    Field("name", TEXT, "Name, as `--planner` takes it."),
    Field("summary", ANY_TEXT, "What it does."),
    Field("options", list_of(_OPTION, 0), "Its own options."),
    parts=dict,
)
CATALOGUE: Final[Document[dict[str, Any]]] = Document(
    name="catalogue",
    meaning="What `autoshard list --json` prints: one of the three lists.",
    make=dict,
    fields=lambda _: (
        optional("tables", list_of(_BUNDLED), "Bundled tables."),
        optional("topologies", list_of(_BUNDLED), "Bundled topologies."),
        optional("planners", list_of(_PLANNER), "Planners."),
    ),
    parts=dict,
)
