"""Why each table of a plan is held as it is, and single changes that help (`autoshard.explanation/1`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Final

from autoshard.core.accepted import FINITE, WHOLE_AT_LEAST_1, Range
from autoshard.core.declared import Meaning, Size
from autoshard.core.step import CollectiveTime, StepCollective
from autoshard.formats.documents.document import Document
from autoshard.formats.documents.kinds import Field, fields_of, list_of, record
from autoshard.formats.documents.prediction_json import collective_times


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another way to hold a table, with all others as they are."""

    option: Annotated[str, Meaning("What it is called.")]
    step_ms: Annotated[float | None, Meaning("The step at its best place, in ms; null if it is ruled out.")]
    hbm_bytes: Annotated[int, Meaning("What it takes of every rank that holds some of it, at most.")]
    ruled_out: Annotated[
        str, Size(), Meaning("The constraint or the lack of memory that rules it out; empty if nothing does.")
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedTable:
    """Why a table is held as it is."""

    table: Annotated[str, Meaning("Its name, or those of all tables that must share its ranks.")]
    option: Annotated[str, Meaning("How it is held.")]
    ranks: Annotated[tuple[int, ...], Meaning("Ranks that hold some of it.")]
    hbm_bytes: Annotated[int, Meaning("What it takes of every such rank, at most.")]
    without_ms: Annotated[float, Meaning("The step if nobody held it, in ms.")]
    binds: Annotated[tuple[str, ...], Size(), Meaning("Parts of the step that it adds to at their slowest ranks.")]
    reason: Annotated[str, Meaning("One sentence.")]
    alternatives: Annotated[
        tuple[Alternative, ...], Size(), Meaning("The others, fastest first, those that are ruled out last.")
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why the tables of a plan are held as they are."""

    step_ms: Annotated[float, Meaning("The plan's predicted step, in ms.")]
    num_groups: Annotated[
        int, WHOLE_AT_LEAST_1, Meaning("Replica groups; with several, alternatives are those of one group.")
    ]
    tables: Annotated[tuple[ExplainedTable, ...], Meaning("The tables, one by one.")]
    collectives: Annotated[
        Mapping[StepCollective, CollectiveTime], Meaning("Collectives of the step, at their slowest ranks.")
    ]
    fullest_rank: Annotated[int, Meaning("The rank with least device memory left, within a replica group.")]
    used_bytes: Annotated[int, Meaning("Device memory that it needs: tables and what training takes beside them.")]
    capacity_bytes: Annotated[int, Meaning("Device memory that it has.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """A single change, and what a plan made with it is predicted to reach."""

    field: Annotated[
        str,
        Meaning(
            "What changes: plan, topology.memory_bytes.hbm, topology.levels.NAME, topology.world_size, "
            "tables.batch_size, or shards.TABLE for one table held otherwise."
        ),
    ]
    text: Annotated[str, Meaning("The change in words.")]
    step_ms: Annotated[float, Meaning("Predicted step with it, in ms.")]
    samples_per_s: Annotated[float, Meaning("Samples per second with it.")]
    gain: Annotated[
        float,
        Range(at_least=-1, kind=FINITE),
        Meaning("Samples per second with it over those of the plan, minus 1."),
    ]


def _parts(found: tuple[Explanation, Sequence[Improvement]]) -> dict[str, Any]:
    explanation, improvements = found
    parts = {one.name: getattr(explanation, one.name) for one in fields(explanation)}
    return {**parts, "improvements": improvements}


_IMPROVEMENTS: Final = list_of(record(Improvement, *fields_of(Improvement)), 0)
#: What `autoshard explain --json` prints, and the service answers: an explanation and its improvements.
EXPLANATION: Final[Document[Any]] = Document(
    name="explanation",
    meaning="What `autoshard explain --json` prints: why tables are held as they are, and what would help most.",
    make=dict,
    fields=lambda _: (
        *fields_of(Explanation, collectives=collective_times(Field)),
        Field("improvements", _IMPROVEMENTS, "Single changes, most samples per second first."),
    ),
    parts=_parts,
)
