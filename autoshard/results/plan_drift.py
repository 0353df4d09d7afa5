"""What a plan costs on today's access beside what it was planned for (`autoshard.drift/1`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from autoshard.core import Estimate
from autoshard.core.accepted import FINITE, Range
from autoshard.core.declared import Meaning, Size
from autoshard.formats.documents.document import Document
from autoshard.formats.documents.kinds import fields_of
from autoshard.formats.documents.prediction_json import ESTIMATE

_CHANGE: Final = Range(at_least=-1, kind=FINITE)
_BYTES: Final = Range(at_least=-(2**62), kind=FINITE)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftedPart:
    """A part of the step, in ms at its slowest rank."""

    name: Annotated[str, Meaning("The part.")]
    planned_ms: Annotated[float, Meaning("On the access that the plan was made for.")]
    now_ms: Annotated[float, Meaning("On today's access.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftedTable:
    """How a table is looked up today."""

    table: Annotated[str, Meaning("Its name.")]
    distance: Annotated[
        float,
        Meaning(
            "Share of its lookups that go to other rows than planned, 0 to 1 (total variation); without both row "
            "orders, of the curves alone."
        ),
    ]
    is_by_rows: Annotated[bool, Meaning("Whether both row orders are known, so that the distance is that of rows.")]
    lookups_planned: Annotated[float, Meaning("Lookups per sample that were planned for.")]
    lookups_now: Annotated[float, Meaning("Lookups per sample today.")]
    hot_rows: Annotated[int | None, Meaning("Rows of the plan's hottest row group; null where it has no groups.")]
    hot_share_planned: Annotated[float | None, Meaning("Share of the lookups that these were planned to get.")]
    hot_share_now: Annotated[float | None, Meaning("Share of the lookups that the same rows get today.")]
    cache_hits_planned: Annotated[
        float | None, Meaning("Share of the lookups that were planned to hit a cache; null without one.")
    ]
    cache_hits_now: Annotated[float | None, Meaning("The same on today's access.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDrift:
    """A plan on today's access."""

    step_ms_planned: Annotated[Estimate, Meaning("Step on the access that the plan was made for, by today's models.")]
    step_ms_now: Annotated[Estimate, Meaning("Step on today's access.")]
    change: Annotated[float, _CHANGE, Meaning("Step now over planned step, minus 1.")]
    free_bytes_planned: Annotated[
        float, _BYTES, Meaning("Device memory that is left on the fullest rank, as planned; negative if it lacks.")
    ]
    free_bytes_now: Annotated[float, _BYTES, Meaning("The same on today's access.")]
    parts: Annotated[tuple[DriftedPart, ...], Size(), Meaning("Parts of the step.")]
    tables: Annotated[
        tuple[DriftedTable, ...], Meaning("All tables, those with the most lookups that go elsewhere first.")
    ]


#: What `autoshard drift --json` prints.
DRIFT: Final[Document[PlanDrift]] = Document(
    name="drift",
    meaning="What `autoshard drift --json` prints: what a plan costs on today's access.",
    make=PlanDrift,
    fields=lambda _: fields_of(PlanDrift, known={Estimate: ESTIMATE}),
)
