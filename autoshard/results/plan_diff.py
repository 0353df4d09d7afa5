"""The differences from one plan to another (`autoshard.diff/1`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final

from autoshard.core import Estimate
from autoshard.core.declared import Meaning, Size
from autoshard.formats.documents.document import Document
from autoshard.formats.documents.kinds import fields_of, in_context
from autoshard.formats.documents.prediction_json import ESTIMATE

#: A figure, a word or a flag: options of planners are of any of these kinds.
_ANY_VALUE: Final = in_context({"oneOf": [{"type": kind} for kind in ("string", "number", "boolean", "null")]})


class Change(StrEnum):
    """How a table differs."""

    ADDED = "added"
    """Only the second plan has it."""
    REMOVED = "removed"
    """Only the first plan has it."""
    RESIZED = "resized"
    """It has other rows, columns, number format or optimizer: nothing that ranks hold of it can stay."""
    RESHARDED = "resharded"
    """It is cut or dealt otherwise, or its vectors travel otherwise."""
    MOVED = "moved"
    """It is cut alike, on other ranks."""
    REORDERED = "reordered"
    """It is cut alike, on the same ranks, by another row order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableChange:
    """A table that the plans hold differently."""

    table: Annotated[str, Meaning("Its name.")]
    change: Annotated[Change, Meaning("How it differs.")]
    before: Annotated[str, Size(), Meaning("How the first plan holds it, in words; empty without it.")]
    after: Annotated[str, Size(), Meaning("How the second plan holds it, likewise.")]
    received_bytes: Annotated[
        float | None,
        Meaning(
            "Bytes of weights and optimizer states that ranks hold after it and not before, of all replicas; null if "
            "both plans cut it by access rank and their row orders differ and are not at hand."
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueChange:
    """A figure or a word that differs."""

    name: Annotated[str, Meaning("What differs.")]
    before: Annotated[object, Meaning("In the first plan; null where it has none.")]
    after: Annotated[object, Meaning("In the second plan, likewise.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankChange:
    """A rank whose predicted kernel time or memory differs; None where a plan has no such rank, or no prediction."""

    rank: Annotated[int, Meaning("Rank of a replica group.")]
    kernel_ms_before: Annotated[
        float | None, Meaning("Predicted kernel time in the first plan, in ms; null without one.")
    ]
    kernel_ms_after: Annotated[float | None, Meaning("The same in the second plan.")]
    hbm_bytes_before: Annotated[
        int | None, Meaning("Device memory for weights and states in the first plan; null without a prediction.")
    ]
    hbm_bytes_after: Annotated[int | None, Meaning("The same in the second plan.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiff:
    """The differences from one plan to another."""

    task: Annotated[
        tuple[ValueChange, ...],
        Size(),
        Meaning("What differs of tasks and of how plans were made: batch, ranks, device, planner, options."),
    ]
    step_ms_before: Annotated[Estimate | None, Meaning("Predicted step of the first plan; null without a prediction.")]
    step_ms_after: Annotated[Estimate | None, Meaning("That of the second plan.")]
    is_within_intervals: Annotated[
        bool | None,
        Meaning(
            "Whether the 90% intervals of both steps overlap, so that the models cannot tell which is faster; null "
            "without both."
        ),
    ]
    parts: Annotated[
        tuple[ValueChange, ...], Size(), Meaning("Parts of the step that differ, at their slowest ranks, in ms.")
    ]
    tables: Annotated[
        tuple[TableChange, ...], Size(), Meaning("Tables that differ, those with the most bytes to receive first.")
    ]
    num_alike: Annotated[int, Meaning("Tables that both plans hold alike.")]
    ranks: Annotated[tuple[RankChange, ...], Size(), Meaning("Ranks that differ; those of one replica group.")]
    received_bytes: Annotated[
        float | None,
        Meaning(
            "Bytes that ranks would have to receive to get from the first plan to the second; null if those of a table "
            "are unknown."
        ),
    ]

    @property
    def is_empty(self) -> bool:
        """Whether nothing differs."""
        return not (self.task or self.parts or self.tables or self.ranks)


#: What `autoshard diff --json` prints, and the service answers.
DIFF: Final[Document[PlanDiff]] = Document(
    name="diff",
    meaning="What `autoshard diff --json` prints: how two plans differ.",
    make=PlanDiff,
    fields=lambda _: fields_of(PlanDiff, known={Estimate: ESTIMATE, object: _ANY_VALUE}),
)
