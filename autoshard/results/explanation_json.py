"""Explained plans (`autoshard.explanation/1`): what `autoshard explain --json` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final

from autoshard.formats.documents.document import Document
from autoshard.formats.documents.kinds import (
    ANY_TEXT,
    TEXT,
    Field,
    list_of,
    number_in,
    or_null,
    record,
    whole_number,
)
from autoshard.formats.documents.prediction_json import collective_times
from autoshard.results.explanation import Alternative, ExplainedTable, Explanation, Improvement

_MS: Final = number_in()
_BYTES: Final = whole_number()
_ALTERNATIVE: Final = record(
    Alternative,
    Field("option", TEXT, "What it is called."),
    Field("step_ms", or_null(_MS), "The step at its best place, in ms; null if it is ruled out."),
    Field("hbm_bytes", _BYTES, "What it takes of every rank that holds some of it, at most."),
    Field("ruled_out", ANY_TEXT, "The constraint or the lack of memory that rules it out; empty if nothing does."),
)
_TABLE: Final = record(
    ExplainedTable,
    Field("table", TEXT, "Its name, or those of all tables that must share its ranks."),
    Field("option", TEXT, "How it is held."),
    Field("ranks", list_of(_BYTES), "Ranks that hold some of it."),
    Field("hbm_bytes", _BYTES, "What it takes of every such rank, at most."),
    Field("without_ms", _MS, "The step if nobody held it, in ms."),
    Field("binds", list_of(TEXT, 0), "Parts of the step that it adds to at their slowest ranks."),
    Field("reason", TEXT, "One sentence."),
    Field("alternatives", list_of(_ALTERNATIVE, 0), "The others, fastest first, those that are ruled out last."),
)
_IMPROVEMENT: Final = record(
    Improvement,
    Field("field", TEXT, "What changes: plan, a field of the topology or of the tables, or shards.TABLE."),
    Field("text", TEXT, "The change in words."),
    Field("step_ms", _MS, "Predicted step with it, in ms."),
    Field("samples_per_s", _MS, "Samples per second with it."),
    Field("gain", number_in(-1), "Samples per second with it over those of the plan, minus 1."),
)


def _parts(found: tuple[Explanation, Sequence[Improvement]]) -> dict[str, Any]:
    explanation, improvements = found
    parts = {one.name: getattr(explanation, one.name) for one in fields(explanation)}
    return {**parts, "improvements": improvements}


#: Written from an explanation and its improvements.
EXPLANATION: Final[Document[Any]] = Document(
    name="explanation",
    meaning="What `autoshard explain --json` prints: why tables are held as they are, and what would help most.",
    make=dict,
    fields=lambda _: (
        Field("step_ms", _MS, "The plan's predicted step, in ms."),
        Field("num_groups", whole_number(1), "Replica groups; with several, alternatives are those of one group."),
        Field("tables", list_of(_TABLE), "The tables, one by one."),
        Field("collectives", collective_times(Field), "Collectives of the step, at their slowest ranks."),
        Field("fullest_rank", whole_number(), "The rank with least device memory left, within a replica group."),
        Field("used_bytes", _BYTES, "Device memory that it needs: tables and what training takes beside them."),
        Field("capacity_bytes", _BYTES, "Device memory that it has."),
        Field("improvements", list_of(_IMPROVEMENT, 0), "Single changes, most samples per second first."),
    ),
    parts=_parts,
)
