"""Files that were written: what `autoshard init`, `import` and `export` print with `--json`."""

from __future__ import annotations

from typing import Any, Final

from autoshard.formats.documents.document import Document
from autoshard.formats.documents.kinds import (
    ANY_TEXT,
    ANYTHING,
    TEXT,
    Field,
    by_name,
    list_of,
    or_null,
    record,
    whole_number,
)

_COUNT: Final = whole_number()
INIT: Final[Document[dict[str, Any]]] = Document(
    name="init",
    meaning="What `autoshard init --json` prints: the files that were written.",
    make=dict,
    fields=lambda _: (
        Field("tables", ANY_TEXT, "File of the tables."),
        Field("topology", ANY_TEXT, "File of the topology."),
    ),
    parts=dict,
)
IMPORTED: Final[Document[dict[str, Any]]] = Document(
    name="imported",
    meaning="What `autoshard import --json` prints: the tables that were written.",
    make=dict,
    fields=lambda _: (
        Field("output", ANY_TEXT, "File that was written."),
        Field("num_tables", _COUNT, "Tables in it."),
        Field("num_tables_in_source", _COUNT, "Tables of the source."),
        Field("part", or_null(TEXT), "K/N of --part; null without."),
        Field("num_tables_in_part", _COUNT, "Tables of that part, of which --num-tables draws."),
        Field("batch_size", whole_number(1), "Samples per step over all ranks."),
        Field("bytes", _COUNT, "Weights and optimizer states of all tables."),
        Field("seed", or_null(_COUNT), "Seed by which tables were drawn; null if all were taken."),
        Field("scale", whole_number(1), "By what rows and batch were divided."),
        Field(
            "columns",
            or_null(by_name(ANY_TEXT)),
            "Fields that a table list's columns were read as, empty for ignored ones; null for other sources.",
        ),
        Field("notes", list_of(ANY_TEXT, 0), "What a table list leaves open, and what was taken for it."),
    ),
    parts=dict,
)
_CHANGE: Final = record(
    dict,
    Field("field", TEXT, "Field of the plan."),
    Field("table", ANY_TEXT, "Table that it is about."),
    Field("planned", ANYTHING, "What the plan says."),
    Field("executed", ANYTHING, "What TorchRec does instead."),
    parts=dict,
)
EXPORTED: Final[Document[dict[str, Any]]] = Document(
    name="exported",
    meaning="What `autoshard export --json` prints: the file that was written, and what it says otherwise.",
    make=dict,
    fields=lambda _: (
        Field("output", ANY_TEXT, "File that was written."),
        Field("format", TEXT, "Its format."),
        Field("num_tables", _COUNT, "Tables of the plan."),
        Field("changes", list_of(_CHANGE, 0), "What TorchRec does otherwise than the plan says."),
    ),
    parts=dict,
)
