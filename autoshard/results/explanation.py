"""Why each table of a plan is held as it is, and single changes that would make its training faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.core.step import CollectiveTime, StepCollective


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another way to hold a table, with all others as they are.

    Attributes:
        option: What it is called.
        step_ms: The step at its best place; None if it is ruled out.
        hbm_bytes: What it takes of every rank that holds some of it, at most.
        ruled_out: The constraint or the lack of memory that rules it out; empty if nothing does.
    """

    option: str
    step_ms: float | None
    hbm_bytes: int
    ruled_out: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedTable:
    """Why a table is held as it is.

    Attributes:
        table: Its name, or those of all tables that must share its ranks.
        option: How it is held.
        ranks: Ranks that hold some of it.
        hbm_bytes: What it takes of every such rank, at most.
        without_ms: The step if nobody held it.
        binds: Parts of the step that it adds to at their slowest ranks.
        reason: One sentence.
        alternatives: The others, fastest first, those that are ruled out last.
    """

    table: str
    option: str
    ranks: tuple[int, ...]
    hbm_bytes: int
    without_ms: float
    binds: tuple[str, ...]
    reason: str
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why the tables of a plan are held as they are.

    Attributes:
        step_ms: The plan's predicted step.
        num_groups: Replica groups; with several, alternatives are those of one group, the others alike.
        tables: One by one.
        collectives: How long the step's collectives take, and how long it waits for them.
        fullest_rank: The rank with least device memory left, numbered within a replica group.
        used_bytes: Device memory that it needs: tables and what training takes beside them.
        capacity_bytes: Device memory that it has.
    """

    step_ms: float
    num_groups: int
    tables: tuple[ExplainedTable, ...]
    collectives: Mapping[StepCollective, CollectiveTime]
    fullest_rank: int
    used_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """A single change, and what a plan made with it is predicted to reach.

    Attributes:
        field: What changes: `plan`, `topology.memory_bytes.hbm`, `topology.levels.NAME`, `topology.world_size`,
            `tables.batch_size`, or `shards.NAME` for one table held otherwise.
        text: The change in words.
        step_ms: Predicted step with it.
        samples_per_s: Samples per second with it.
        gain: Samples per second with it over those of the plan, minus 1.
    """

    field: str
    text: str
    step_ms: float
    samples_per_s: float
    gain: float
