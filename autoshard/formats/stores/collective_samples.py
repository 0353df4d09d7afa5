"""Samples of embedding collectives: one row per measured collective, stored as `sample_store` says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated

from autoshard.core import DType
from autoshard.core.accepted import ABOVE_0, AT_LEAST_0
from autoshard.core.errors import FormatError, InvalidOptionError
from autoshard.formats.stores.measured_samples import MACHINE_COLUMNS, MeasuredSample
from autoshard.formats.stores.sample_columns import Amount, Milliseconds
from autoshard.formats.stores.sample_store import SampleStore

_Number = Annotated[int, ABOVE_0]
_Bytes = Annotated[int, AT_LEAST_0]


class Operator(StrEnum):
    """A collective, by torch.distributed's name."""

    ALL_TO_ALL = "all_to_all"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_REDUCE = "all_reduce"

    @property
    def is_reduction(self) -> bool:
        """Whether it adds numbers up."""
        return self in (Operator.REDUCE_SCATTER, Operator.ALL_REDUCE)


class Splits(StrEnum):
    """Whether every pair of ranks exchanges as many bytes as any other.

    `one_way`: the first rank sends to each as many, the others send nothing, as where it holds all tables.
    """

    EQUAL = "equal"
    UNEQUAL = "unequal"
    ONE_WAY = "one_way"


class GroupLevel(StrEnum):
    """Which ranks take part together; groups of one level run at the same time, as they do in training.

    `node`: the ranks of one node. `across_nodes`: the ranks of one local index, one per node. `world`: all.
    """

    NODE = "node"
    ACROSS_NODES = "across_nodes"
    WORLD = "world"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollective:
    """What is measured.

    Attributes:
        level: Who takes part.
        operator: The operator.
        dtype: Format of the payload.
        bytes_per_rank: Bytes of a rank's larger buffer: the input of all-to-all (its mean over ranks, where splits
            are not equal), reduce-scatter and all-reduce, the output of all-gather. What stays on its rank counts.
        splits: Other than equal for all-to-all only.
        skew: Of unequal splits: standard deviation of the logarithm of the shares, 0 for others.
        split_seed: Of unequal splits, 0 for others.
    """

    level: GroupLevel
    operator: Operator
    dtype: DType
    bytes_per_rank: int
    splits: Splits = Splits.EQUAL
    skew: Amount = 0.0
    split_seed: Annotated[int, AT_LEAST_0] = 0

    def __post_init__(self) -> None:
        if self.bytes_per_rank < 1:
            raise InvalidOptionError(f"must be at least 1, got {self.bytes_per_rank}", field="bytes_per_rank")
        if self.splits is not Splits.EQUAL and self.operator is not Operator.ALL_TO_ALL:
            raise InvalidOptionError(f"must be equal for {self.operator}, got {self.splits}", field="splits")
        if not (0 <= self.skew < float("inf")) or (self.skew > 0) != (self.splits is Splits.UNEQUAL):
            raise InvalidOptionError(
                f"must be above 0 and finite for unequal splits and 0 for others, got {self.skew}", field="skew"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSample(MeasuredSample):
    """Measured latency of one collective.

    Attributes:
        backend: `gloo` or `nccl`.
        num_hosts: Machines that took part.
        nproc: Processes in all.
        node_size: Processes per declared node.
        group_size: Ranks that took part together.
        num_nodes: Declared nodes that they span.
        mean_sent_bytes: Mean over ranks of the bytes that have to leave a rank, whatever the algorithm:
            (n - 1) / n of `bytes_per_rank` for equal splits, twice that for an all-reduce.
        max_sent_bytes: As `mean_sent_bytes`, of the rank that sends most.
        max_received_bytes: Of the rank that receives most.
        latency_ms: Trimmed mean over rounds of the slowest rank's time.
        spread: Standard deviation of single rounds over the mean, drift divided out.
        reference_ms: The reference collective in the same rounds.
        num_rounds: Rounds measured, warm-ups left out.
        collective: What ran.
    """

    backend: str
    num_hosts: _Number
    nproc: _Number
    node_size: _Number
    group_size: int
    num_nodes: _Number
    mean_sent_bytes: Amount
    max_sent_bytes: _Bytes
    max_received_bytes: _Bytes
    latency_ms: Milliseconds
    spread: Amount
    reference_ms: Milliseconds
    num_rounds: _Number
    collective: MeasuredCollective

    def __post_init__(self) -> None:
        sizes = (self.group_size, self.node_size, self.num_nodes)
        if self.nproc % self.node_size or max(sizes) > self.nproc or self.group_size < 2:
            raise FormatError(
                f"is impossible: {self.group_size} ranks on {self.num_nodes} nodes, of {self.nproc} processes with "
                f"{self.node_size} to a node",
                field="group_size",
            )
        if self.max_sent_bytes < self.mean_sent_bytes * (1 - 1e-9):
            raise FormatError(
                f"is below the mean of {self.mean_sent_bytes:g}, got {self.max_sent_bytes}", field="max_sent_bytes"
            )

    def identified(self) -> CollectiveSample:
        """The same sample with its id filled in."""
        return replace(self, sample_id=COLLECTIVE_SAMPLES.content_id(self))


COLLECTIVE_SAMPLES = SampleStore(
    CollectiveSample,
    schema="autoshard.collective-samples/2",
    earlier={"autoshard.collective-samples/1": MACHINE_COLUMNS},
    folder="collectives",
    kind="samples of collectives",
    command="autoshard collect --kinds collectives",
)
