"""What is trained, in which ways, and what a training found."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from autoshard.core import Optimizer, TableSet, Topology
from autoshard.formats import load_tables
from autoshard.whatif.trials import local_topology

_DEVICE = "cpu"
_RANK_BYTES = 4 << 30


class Way(StrEnum):
    """How the model is sharded, and what runs it."""

    TORCHREC = "torchrec"
    """TorchRec's planner, and its DistributedModelParallel."""
    OUR_PLAN = "torchrec-our-plan"
    """`autoshard.torchrec.Planner`, and TorchRec's DistributedModelParallel."""
    OUR_ENGINE = "engine"
    """`autoshard.torchrec.shard` with the plan of `OUR_PLAN`."""
    FREE_PLAN = "engine-free-plan"
    """`autoshard.torchrec.shard` with a plan of `auto`, which may hold tables as TorchRec cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DlrmSetting:
    """A DLRM and its training.

    Attributes:
        tables: Bundled tables, of one feature each; ids follow their access profiles.
        scale: Divides the rows of each table, so that the model fits into memory.
        batch_size: Samples of all processes.
        num_processes: Processes, one per rank.
        num_dense: Dense features.
        dense_layers: Outputs of the bottom perceptron's layers, before that of the tables' dimension.
        over_layers: Outputs of the top perceptron's layers.
        learning_rate: Of SGD, for tables and dense layers.
        warmup: Steps before the clock starts.
        steps: Measured steps.
        plan_s: Time limit of autoshard's planners, in seconds.
        seed: Of weights, batches and plans.
    """

    tables: str = "criteo-kaggle"
    scale: int = 16
    batch_size: int = 2048
    num_processes: int = 4
    num_dense: int = 13
    dense_layers: tuple[int, ...] = (512, 256, 64)
    over_layers: tuple[int, ...] = (512, 256, 1)
    learning_rate: float = 0.1
    warmup: int = 5
    steps: int = 50
    plan_s: float = 5.0
    seed: int = 0

    @property
    def local_batch_size(self) -> int:
        """Samples of a process."""
        return self.batch_size // self.num_processes

    def table_set(self) -> TableSet:
        """The tables, trained by SGD."""
        scaled = load_tables(self.tables).scaled(self.scale)
        tables = tuple(replace(table, optimizer=Optimizer.SGD) for table in scaled.tables)
        return replace(scaled, tables=tables, batch_size=self.batch_size, dense=None)

    def topology(self) -> Topology:
        """The processes as ranks of one machine."""
        return local_topology(_DEVICE, self.num_processes, _RANK_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedWay:
    """What one training found.

    Attributes:
        way: How it was trained.
        layout: Sharding types of the plan, with the number of tables of each.
        plan_s: Time of planning, in seconds.
        samples_per_s: Samples of all processes per second, over the measured steps.
        losses: Loss of every step, warm-up included; means over processes.
    """

    way: Way
    layout: str
    plan_s: float
    samples_per_s: float
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Each way trained once, on the same processes and batches.

    Attributes:
        number: Of the round; it decides which way comes first.
        ways: What they found, in the order in which they ran.
    """

    number: int
    ways: tuple[TrainedWay, ...]
