"""What clients ask for, and the bodies of its requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from autoshard.core import Payload, ShardingPlan, TableSet, Topology
from autoshard.core.choices import Lengths
from autoshard.core.costs import Risk
from autoshard.core.plan import GroupLayout
from autoshard.core.step import Overlap
from autoshard.formats import plan_to_json, tables_to_json, topology_to_json

Options = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTask:
    """A planning task.

    Attributes:
        tables: The tables, or the name of a set that the service has.
        topology: The ranks, likewise.
        planner: Name of the planner.
        options: Its own options.
        time_limit_s: Seconds that a planner which improves its plan may use, at most 3,600; more than 60 make a job.
        payload: Number formats in which embeddings and gradients travel.
        seed: Same seed, same plan, time limits aside.
        risk: The predicted time that is planned for.
        start: An older plan of the same tables to start from: the new one is no slower.
    """

    tables: TableSet | str
    topology: Topology | str
    planner: str = "auto"
    options: Options = field(default_factory=dict)
    time_limit_s: float = 1.0
    payload: Payload = field(default_factory=Payload)
    seed: int = 0
    risk: Risk = Risk.MEAN
    start: ShardingPlan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan:
    """Changes of a stored plan's task; None leaves what the plan has. Attributes as of `PlanTask`.

    Attributes:
        pooling_factors: Other mean ids per sample by feature, such as those of a run.
    """

    topology: Topology | str | None = None
    batch_size: int | None = None
    pooling_factors: Mapping[str, float] = field(default_factory=dict)
    planner: str | None = None
    options: Options | None = None
    time_limit_s: float = 1.0
    payload: Payload | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonTask:
    """A task for several planners; attributes as of `PlanTask`, `options` by planner."""

    tables: TableSet | str
    topology: Topology | str
    planners: Sequence[str]
    options: Mapping[str, Options] = field(default_factory=dict)
    time_limit_s: float = 1.0
    payload: Payload = field(default_factory=Payload)
    seed: int = 0
    risk: Risk = Risk.MEAN


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationTask:
    """Combinations of clusters and batch sizes; attributes as of `PlanTask` and `autoshard.whatif.sweep.Simulator`.

    Attributes:
        topologies: Machines, each made for each number of ranks.
        ranks: Numbers of ranks.
        batch_sizes: Samples per step; None for that of the tables.
        is_batch_per_rank: Whether batch sizes are those of each rank.
        groups: Numbers of replica groups.
        group_sizes: Ranks per replica group, instead of `groups`.
    """

    tables: TableSet | str
    topologies: Sequence[Topology | str]
    ranks: Sequence[int]
    batch_sizes: Sequence[int] | None = None
    is_batch_per_rank: bool = False
    groups: Sequence[int] = (1,)
    group_sizes: Sequence[int] | None = None
    layout: GroupLayout = GroupLayout.ACROSS_NODES
    sync_every: int = 1
    planner: str = "neo"
    options: Options = field(default_factory=dict)
    time_limit_s: float = 1.0
    payload: Payload = field(default_factory=Payload)
    seed: int = 0
    overlap: Overlap | None = None
    risk: Risk = Risk.MEAN
    num_batches: int = 0
    lengths: Lengths = Lengths.DECLARED


def body_of(task: PlanTask | Replan | ComparisonTask | SimulationTask) -> dict[str, Any]:
    """The body of the request for a task."""
    return {item.name: json_of(getattr(task, item.name)) for item in fields(task)}


def json_of(value: Any) -> Any:
    """A value of a task as JSON.

    Raises:
        InputError: If no document can hold it.
    """
    if isinstance(value, TableSet):
        return tables_to_json(value)
    if isinstance(value, Topology):
        return topology_to_json(value)
    if isinstance(value, ShardingPlan):
        return plan_to_json(value)
    if isinstance(value, Payload):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {name: json_of(inner) for name, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [json_of(inner) for inner in value]
    return value
