"""Which collectives are measured, on which processes, and in which order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from autoshard.core import DType
from autoshard.core.accepted import AT_LEAST_1, FINITE_ABOVE_0
from autoshard.core.errors import InvalidOptionError
from autoshard.formats.stores.collective_samples import (
    COLLECTIVE_SAMPLES,
    GroupLevel,
    MeasuredCollective,
    Operator,
    Splits,
)
from bench.collectives.operators import Movement
from bench.measuring.timing import RoundSettings

MIN_BYTES = 2**10
MAX_BYTES = 2**28
OPERATORS = (
    (Operator.ALL_TO_ALL, Splits.EQUAL),
    (Operator.ALL_TO_ALL, Splits.UNEQUAL),
    (Operator.ALL_TO_ALL, Splits.ONE_WAY),
    (Operator.REDUCE_SCATTER, Splits.EQUAL),
    (Operator.ALL_GATHER, Splits.EQUAL),
    (Operator.ALL_REDUCE, Splits.EQUAL),
)


def powers_of_four(smallest: int = MIN_BYTES, largest: int = MAX_BYTES) -> tuple[int, ...]:
    """Sizes from the smallest to the largest, each four times the one before."""
    return tuple(smallest * 4**power for power in range(int(math.log(largest / smallest, 4) + 1e-9) + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSettings:
    """Which collectives are measured, and how.

    Attributes:
        sizes: Bytes per rank, see `MeasuredCollective.bytes_per_rank`.
        dtypes: Formats of the payload.
        skew: Of unequal splits, see `split_matrix`.
        rounds: Rounds of a chunk. Every collective of a chunk runs once per round, beside the reference.
        chunk_bytes: Bytes per rank that a chunk may move in a round, so that it takes seconds, not minutes.
        min_chunk: Collectives of a chunk, whatever their size: rounds are compared over them.
        max_chunk: Most collectives of a chunk.
        reference_bytes: Of the reference, an fp32 all-to-all with equal splits over all ranks.
        seconds_per_file: Samples are written this often: what a killed run can lose, beside the chunk in hand.
        stall_timeout_s: A process that is silent for this long is taken to hang; a single collective must be quicker.
    """

    sizes: tuple[int, ...] = field(default_factory=powers_of_four)
    dtypes: tuple[DType, ...] = (DType.FP32, DType.FP16, DType.INT8)
    skew: float = 0.5
    rounds: RoundSettings = field(
        default_factory=lambda: RoundSettings(num_warmup=1, num_measured=9, num_dropped=2, flush_every_run=False)
    )
    chunk_bytes: int = 2**27
    min_chunk: int = 4
    max_chunk: int = 40
    reference_bytes: int = 2**20
    seconds_per_file: float = 5.0
    stall_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise InvalidOptionError("must be at least one size of at least 1 byte", field="sizes")
        FINITE_ABOVE_0.check_fields(self, "skew", "stall_timeout_s")
        AT_LEAST_1.check_fields(self, "chunk_bytes", "min_chunk", "max_chunk", "reference_bytes")
        if self.rounds.num_warmup < 1:
            raise InvalidOptionError("must be at least 1: it tells how long the rest takes", field="num_warmup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """Processes of one machine that run collectives.

    Attributes:
        nproc: How many, at least 2; on CUDA each has a GPU of its own.
        node_size: Processes that count as one node; divides `nproc`.

    Raises:
        InvalidOptionError: If they cannot form nodes of this size.
    """

    nproc: int = 4
    node_size: int = 2

    def __post_init__(self) -> None:
        nproc, node_size = self.nproc, self.node_size
        if nproc < 2:
            raise InvalidOptionError(f"must be at least 2: one process exchanges nothing; got {nproc}", field="nproc")
        if node_size < 1 or nproc % node_size:
            raise InvalidOptionError(f"must divide the {nproc} processes, got {node_size}", field="node_size")

    @property
    def levels(self) -> tuple[GroupLevel, ...]:
        """Levels with groups of their own: one node is its world, and so are nodes of one rank each."""
        if self.node_size == self.nproc:
            return (GroupLevel.NODE,)
        if self.node_size == 1:
            return (GroupLevel.ACROSS_NODES,)
        return (GroupLevel.NODE, GroupLevel.ACROSS_NODES, GroupLevel.WORLD)

    def group_shape(self, level: GroupLevel) -> tuple[int, int]:
        """Ranks of one group of a level, and the nodes that it spans."""
        num_nodes = self.nproc // self.node_size
        return {
            GroupLevel.NODE: (self.node_size, 1),
            GroupLevel.ACROSS_NODES: (num_nodes, num_nodes),
            GroupLevel.WORLD: (self.nproc, num_nodes),
        }[level]

    def movement(self, collective: MeasuredCollective) -> Movement:
        """What a collective moves in one group of its level."""
        return Movement.of(collective, self.group_shape(collective.level)[0])


def choose_collectives(
    processes: Processes, settings: CollectiveSettings, seed: int = 0
) -> tuple[MeasuredCollective, ...]:
    """Everything that settings name, from small to large, for the levels that the processes have."""
    return tuple(
        MeasuredCollective(
            level=level,
            operator=operator,
            dtype=dtype,
            bytes_per_rank=size,
            splits=splits,
            skew=settings.skew if splits is Splits.UNEQUAL else 0.0,
            split_seed=seed if splits is Splits.UNEQUAL else 0,
        )
        for size in settings.sizes
        for level in processes.levels
        for operator, splits in OPERATORS
        for dtype in settings.dtypes
    )


def fewest_first(
    chosen: Sequence[MeasuredCollective], store: Path, device: str, processes: Processes
) -> tuple[MeasuredCollective, ...]:
    """Puts first what a store has fewest samples of from such processes; otherwise keeps the order.

    Raises:
        SampleStoreError: If a file of the store cannot be read.
        FormatError: If one is not a sample file of this version.
    """
    if device not in COLLECTIVE_SAMPLES.devices(store):
        return tuple(chosen)
    counts = Counter(
        _kind(sample.collective, sample.group_size)
        for sample in COLLECTIVE_SAMPLES.read(store, device)
        if (sample.nproc, sample.node_size) == (processes.nproc, processes.node_size)
    )

    def num_samples(one: MeasuredCollective) -> int:
        movement = processes.movement(one)
        return counts[_kind(replace(one, bytes_per_rank=movement.bytes_per_rank), movement.num_ranks)]

    return tuple(sorted(chosen, key=num_samples))


def chunks_of(chosen: Sequence[MeasuredCollective], settings: CollectiveSettings) -> Iterator[list[MeasuredCollective]]:
    """Collectives that share their rounds."""
    chunk: list[MeasuredCollective] = []
    for one in chosen:
        is_full = sum(held.bytes_per_rank for held in chunk) + one.bytes_per_rank > settings.chunk_bytes
        if len(chunk) >= settings.max_chunk or (is_full and len(chunk) >= settings.min_chunk):
            yield chunk
            chunk = []
        chunk.append(one)
    if chunk:
        yield chunk


def _kind(one: MeasuredCollective, group_size: int) -> tuple[object, ...]:
    return one.level, one.operator, one.splits, one.dtype, one.bytes_per_rank, group_size
