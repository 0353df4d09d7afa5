"""What is trained, and the runs of it that are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autoshard.core import PlacedShard, ReplicaGroups, Shard, ShardingPlan
from autoshard.whatif.trials import local_topology
from studies.runtime.clicks import ClickModel

_HBM_BYTES = 1 << 30
#: Seed of the learning rate's search: none that runs are compared with.
TUNING_SEED = 1_000_003


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all runs have in common.

    Attributes:
        model: The trained model and the clicks.
        num_processes: Processes, of which replica groups are made.
        batch_size: Samples per step over all processes.
        num_steps: Training steps.
        num_evaluations: Times that the held-out samples are predicted, evenly spread over the steps.
        num_held_out: Held-out samples, a multiple of the batch.
        dense_rate: Learning rate of the dense layers.
        eps: Added to the root of the moments.
    """

    model: ClickModel = field(default_factory=ClickModel)
    num_processes: int = 8
    batch_size: int = 512
    num_steps: int = 1000
    num_evaluations: int = 5
    num_held_out: int = 32_768
    dense_rate: float = 0.1
    eps: float = 1e-8

    @property
    def local_batch_size(self) -> int:
        """Samples per step and process."""
        return self.batch_size // self.num_processes

    @property
    def evaluated_steps(self) -> tuple[int, ...]:
        """Numbers of steps after which the held-out samples are predicted."""
        count = self.num_evaluations
        return tuple(self.num_steps * (index + 1) // count for index in range(count))

    def plan(self, num_groups: int, moment_scale: float, *, sync_every: int = 1) -> ShardingPlan:
        """Whole tables, dealt in turn to the ranks of a replica group."""
        tables = self.model.tables(self.batch_size)
        group_size = self.num_processes // num_groups
        shards = (
            PlacedShard.table_wise(Shard.whole(table), index % group_size) for index, table in enumerate(tables.tables)
        )
        return ShardingPlan(
            tables=tables,
            topology=local_topology("cpu", self.num_processes, _HBM_BYTES),
            shards=tuple(shards),
            replica_groups=ReplicaGroups(num_groups=num_groups, moment_scale=moment_scale, sync_every=sync_every),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training.

    Attributes:
        seed: Of the planted model, the initial weights and the samples: runs of one seed are paired.
        num_groups: Replica groups, M.
        moment_scale: By which moments are divided under the root, c.
        learning_rate: Of the tables.
    """

    seed: int
    num_groups: int
    moment_scale: int
    learning_rate: float

    @property
    def name(self) -> str:
        """Name of its part."""
        return f"seed-{self.seed}-groups-{self.num_groups}-scale-{self.moment_scale}-rate-{self.learning_rate:g}"


def compared_runs(
    seeds: Sequence[int], groups: Sequence[int], learning_rate: float, *, all_scales: bool = False
) -> tuple[Run, ...]:
    """All runs, seed by seed: each number of groups with c = 1 and c = M.

    Args:
        seeds: Seeds.
        groups: Numbers of replica groups.
        learning_rate: Of the tables.
        all_scales: Whether also with the powers of 2 in between (2D Fig. 4b).
    """
    return tuple(
        Run(seed=seed, num_groups=num_groups, moment_scale=scale, learning_rate=learning_rate)
        for seed in seeds
        for num_groups in groups
        for scale in (1 << power for power in range(num_groups.bit_length()))
        if all_scales or scale in (1, num_groups)
    )


def tuning_runs(rates: Sequence[float]) -> tuple[Run, ...]:
    """One group with each learning rate."""
    return tuple(Run(seed=TUNING_SEED, num_groups=1, moment_scale=1, learning_rate=rate) for rate in rates)
