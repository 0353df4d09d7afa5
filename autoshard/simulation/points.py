"""Points of a sweep, before and after they are simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from autoshard.core.accepted import AT_LEAST_1
from autoshard.simulation.spread import StepSpread

#: Machine, groups (negative for ranks per group), batch and whose batch it is.
Series = tuple[str, int, int, bool]


class PointStatus(StrEnum):
    """What became of a point."""

    PRICED = "priced"
    DOES_NOT_FIT = "does not fit"
    """No plan within the ranks' memory was found."""
    IMPOSSIBLE = "impossible"
    """Ranks that the groups do not divide, and the like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One cluster and batch to simulate.

    Attributes:
        machine: Name or file of the topology.
        num_groups: Replica groups; 1 for full model parallelism.
        group_size: Ranks per group that a series keeps, so that larger clusters have more groups; None if it keeps the
            number of groups.
        batch_size: Samples per step, of all ranks or of each.
        is_batch_per_rank: Which of both.
        num_ranks: Ranks of the cluster.
    """

    machine: str
    num_ranks: int
    batch_size: int
    is_batch_per_rank: bool = False
    num_groups: int = 1
    group_size: int | None = None

    def __post_init__(self) -> None:
        AT_LEAST_1.check_fields(self, "num_groups", "batch_size", "num_ranks")

    @property
    def global_batch_size(self) -> int:
        """Samples per step of all ranks."""
        return self.batch_size * self.num_ranks if self.is_batch_per_rank else self.batch_size

    @property
    def series(self) -> Series:
        """All but the number of ranks: a curve of the sweep."""
        groups = self.num_groups if self.group_size is None else -self.group_size
        return self.machine, groups, self.batch_size, self.is_batch_per_rank

    @property
    def label(self) -> str:
        """The series, in words."""
        groups = f"{self.num_groups} groups" if self.num_groups > 1 else ""
        if self.group_size is not None:
            groups = f"{self.group_size} ranks a group"
        batch = f"batch {self.batch_size:,}{' a rank' if self.is_batch_per_rank else ''}"
        return ", ".join(part for part in (self.machine, groups, batch) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class PointMemory:
    """Memory of a point's fullest rank.

    Attributes:
        static_bytes: Weights and optimizer states in the device's memory.
        activation_bytes: Inputs and embeddings that it holds at the forward exchange.
        limit_bytes: What a rank has.
    """

    static_bytes: int
    activation_bytes: int
    limit_bytes: int

    @property
    def used_bytes(self) -> int:
        """Both together."""
        return self.static_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPoint:
    """A point and what it costs.

    Attributes:
        point: Which.
        status: What became of it; figures are there for `priced` only.
        reason: Why there are none, with the numbers that decide it.
        needed_bytes: Weights and optimizer states of all tables, once.
        available_bytes: Device memory of all ranks of a group.
        step_ms: One training step: value, and both ends of its interval.
        parts_ms: The step's parts at their slowest ranks.
        imbalance: Slowest rank's kernel time over the mean (2D).
        exchange_balance: Fastest rank's exchange over the slowest (OPER).
        memory: Of the fullest rank.
        num_shards: By tier.
        planned_groups: Replica groups of the plan: those of the point, unless the planner chooses them.
        spread: Over sampled batches; None if none were drawn.
        models: What priced it.
        planning_s: Time that planning and pricing took.
    """

    point: Point
    status: PointStatus
    reason: str = ""
    needed_bytes: int = 0
    available_bytes: int = 0
    step_ms: tuple[float, float, float] | None = None
    parts_ms: Mapping[str, float] = field(default_factory=dict)
    imbalance: float | None = None
    exchange_balance: float | None = None
    memory: PointMemory | None = None
    num_shards: Mapping[str, int] = field(default_factory=dict)
    planned_groups: int = 1
    spread: StepSpread | None = None
    models: Mapping[str, str] = field(default_factory=dict)
    planning_s: float = 0.0

    @property
    def samples_per_s(self) -> float | None:
        """Throughput of all ranks together."""
        return None if self.step_ms is None else self.point.global_batch_size / self.step_ms[0] * 1e3


def scaling_factors(points: Sequence[SimulatedPoint]) -> list[float | None]:
    """Throughput per rank over that of the smallest priced point of the same series.

    Returns:
        A factor for each point, in their order; None for points without figures.

    Source:
        2D, Table 2: the QPS scaling factor, whose base is the smallest cluster.
    """
    base: dict[Series, tuple[int, float]] = {}
    for simulated in points:
        found = _per_rank(simulated)
        known = base.get(simulated.point.series)
        if found is not None and (known is None or simulated.point.num_ranks < known[0]):
            base[simulated.point.series] = (simulated.point.num_ranks, found)
    factors: list[float | None] = []
    for simulated in points:
        found = _per_rank(simulated)
        factors.append(None if found is None else found / base[simulated.point.series][1])
    return factors


def _per_rank(simulated: SimulatedPoint) -> float | None:
    throughput = simulated.samples_per_s
    return None if throughput is None else throughput / simulated.point.num_ranks
