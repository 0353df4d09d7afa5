"""Points of a sweep, before and after they are simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final

from autoshard.core import Estimate
from autoshard.core.accepted import AT_LEAST_1, MAX_WORLD_SIZE, WHOLE, Range
from autoshard.core.declared import Meaning, Written

#: All ranks of the largest cluster together have more than a double counts exactly.
BYTES: Final = Range(at_least=0, at_most=MAX_WORLD_SIZE * 2**60, kind=WHOLE)
#: Machine, groups (negative for ranks per group), batch and whose batch it is.
Series = tuple[str, int, int, bool]


class PointStatus(StrEnum):
    """Outcome of a point."""

    PRICED = "priced"
    DOES_NOT_FIT = "does not fit"
    """No plan within the ranks' memory was found."""
    IMPOSSIBLE = "impossible"
    """Ranks that the groups do not divide, and the like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
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
        return f"{self.groups_label}, batch {self.batch_size:,}{' a rank' if self.is_batch_per_rank else ''}"

    @property
    def groups_label(self) -> str:
        """Machine and groups of the series, in words."""
        groups = f", {self.num_groups} groups" if self.num_groups > 1 else ""
        return self.machine + (groups if self.group_size is None else f", {self.group_size} ranks a group")


@dataclass(frozen=True, slots=True, kw_only=True)
class PointMemory:
    """Memory of a point's fullest rank."""

    static_bytes: Annotated[int, BYTES, Meaning("Weights and optimizer states in device memory.")]
    activation_bytes: Annotated[int, BYTES, Meaning("Inputs and embeddings of the rank at the forward exchange.")]
    limit_bytes: Annotated[int, BYTES, Meaning("Device memory of the rank.")]
    training_bytes: Annotated[
        int, BYTES, Meaning("What training needs of the rank beside its tables.", written=Written.ALWAYS)
    ] = 0

    @property
    def used_bytes(self) -> int:
        """Weights and optimizer states, and what a batch or training needs beside them, whichever is more."""
        return self.static_bytes + max(self.activation_bytes, self.training_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpread:
    """A step over sampled batches, in milliseconds."""

    num_batches: Annotated[int, AT_LEAST_1, Meaning("Batches drawn.")]
    mean_ms: Annotated[float, Meaning("Mean step.")]
    p50_ms: Annotated[float, Meaning("Median step.")]
    p90_ms: Annotated[float, Meaning("90th percentile over batches.")]
    p99_ms: Annotated[float, Meaning("99th percentile over batches.")]
    expected_max_kernel_ms: Annotated[float, Meaning("Mean over batches of the slowest rank's kernel time.")]
    max_expected_kernel_ms: Annotated[
        float,
        Meaning(
            "Slowest rank's kernel time at mean lookups; below the other, for with many ranks another one is slow "
            "in each batch."
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPoint:
    """A point with a plan, and what it costs.

    Attributes:
        point: Which.
        needed_bytes: Weights and optimizer states of all tables, once.
        available_bytes: Device memory of all ranks of a group.
        step_ms: One training step.
        parts_ms: The step's parts at their slowest ranks.
        imbalance: Slowest rank's kernel time over the mean (2D).
        exchange_balance: Fastest rank's exchange over the slowest (OPER).
        memory: Of the fullest rank.
        num_shards: By tier.
        planned_groups: Replica groups of the plan: those of the point, unless the planner chooses them.
        models: Names of the models that price it.
        planning_s: Time that planning and pricing took.
        basis: Digest of what it was simulated on: the cluster, and the models.
        spread: Over sampled batches; None if none were drawn.
    """

    point: SweepPoint
    needed_bytes: int
    available_bytes: int
    step_ms: Estimate
    parts_ms: Mapping[str, float]
    imbalance: float
    exchange_balance: float
    memory: PointMemory
    num_shards: Mapping[str, int]
    planned_groups: int
    models: Mapping[str, str]
    planning_s: float
    basis: str = ""
    spread: StepSpread | None = None

    @property
    def samples_per_s(self) -> float:
        """Throughput of all ranks together."""
        return self.point.global_batch_size / self.step_ms.value * 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpricedPoint:
    """A point without a plan.

    Attributes:
        point: Which.
        needed_bytes: As of `PricedPoint`.
        available_bytes: As of `PricedPoint`.
        status: Why it has none: `does not fit` or `impossible`.
        reason: The same with the numbers that decide it.
        planning_s: Time until that was known.
        basis: As of `PricedPoint`.
    """

    point: SweepPoint
    needed_bytes: int
    available_bytes: int
    status: PointStatus
    reason: str
    planning_s: float
    basis: str = ""


SimulatedPoint = PricedPoint | UnpricedPoint


def scaling_factors(points: Sequence[SimulatedPoint]) -> list[float | None]:
    """Throughput per rank over that of the smallest priced point of the same series.

    Returns:
        A factor for each point, in their order; None for points without a plan.

    Source:
        2D, Table 2: the QPS scaling factor, whose base is the smallest cluster.
    """
    base: dict[Series, PricedPoint] = {}
    for one in points:
        if isinstance(one, PricedPoint):
            known = base.setdefault(one.point.series, one)
            if one.point.num_ranks < known.point.num_ranks:
                base[one.point.series] = one
    return [
        _per_rank(one) / _per_rank(base[one.point.series]) if isinstance(one, PricedPoint) else None for one in points
    ]


def _per_rank(priced: PricedPoint) -> float:
    return priced.samples_per_s / priced.point.num_ranks
