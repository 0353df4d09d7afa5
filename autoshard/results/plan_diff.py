"""The differences from one plan to another."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from autoshard.core import Estimate


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TableChange:
    """A table that the plans hold differently.

    Attributes:
        table: Its name.
        change: How it differs.
        before: How the first plan holds it, in words; empty without it.
        after: How the second one does.
        received_bytes: Bytes of weights and optimizer states that ranks hold after it and not before, all replicas
            together.
    """

    table: str
    change: Change
    before: str
    after: str
    received_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueChange:
    """A figure or a word that differs, as JSON values; None where a plan has none."""

    name: str
    before: object
    after: object


@dataclass(frozen=True, slots=True, kw_only=True)
class RankChange:
    """A rank whose predicted kernel time or memory differs; None where a plan has no such rank, or no prediction."""

    rank: int
    kernel_ms_before: float | None
    kernel_ms_after: float | None
    hbm_bytes_before: int | None
    hbm_bytes_after: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiff:
    """The differences from one plan to another.

    Attributes:
        task: What differs of the tasks and of how the plans were made: batch, ranks, device, planner, options.
        step_ms_before: Predicted step of the first plan; None without a prediction.
        step_ms_after: That of the second one.
        is_within_intervals: Whether both steps' 90% intervals overlap, so that the models cannot tell which is faster;
            None without both.
        parts: Predicted parts of the step, in ms, those that differ.
        tables: Tables that differ, those with the most bytes to receive first.
        num_alike: Tables that both hold alike.
        ranks: Ranks that differ, in their order; those of one replica group.
        received_bytes: Bytes that ranks would have to receive to get from the first plan to the second.
    """

    task: tuple[ValueChange, ...]
    step_ms_before: Estimate | None
    step_ms_after: Estimate | None
    is_within_intervals: bool | None
    parts: tuple[ValueChange, ...]
    tables: tuple[TableChange, ...]
    num_alike: int
    ranks: tuple[RankChange, ...]
    received_bytes: int

    @property
    def is_empty(self) -> bool:
        """Whether nothing differs."""
        return not (self.task or self.parts or self.tables or self.ranks)
