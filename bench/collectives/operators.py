"""Collectives of torch.distributed: what each rank sends and receives, how one is run, whether it moved the data.

Shape suffixes: R ranks of the group; [i, j] is what rank i sends to rank j.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from autoshard.core import DType
from autoshard.core.errors import ExecutionError, InvalidOptionError
from autoshard.formats.stores.collective_samples import GroupLevel, MeasuredCollective, Operator, Splits
from autoshard.runtime.engine.staging import TORCH_DTYPES
from autoshard.runtime.releases import all_gather, reduce_scatter

#: fp16 numbers whose bits, two at a time, are ordinary fp32 numbers as well: sums of them are neither infinite nor
#: denormal, on which processors are slow.
_HALVES = (1.0, 1.5, 2.0, 3.0)
#: Of one block: that many fp32 numbers are unlike those of any other block.
_VERIFIED_BYTES = 480


def refusal(collective: MeasuredCollective) -> str | None:
    """Why a collective is not measured on any backend; None if it is."""
    if collective.operator.is_reduction and collective.dtype is DType.INT8:
        return f"{collective.operator} of int8: sums of quantised values overflow, so nobody reduces them"
    return None


def collective_from_json(document: dict[str, Any]) -> MeasuredCollective:
    """The collective that `dataclasses.asdict` made a JSON object of."""
    kinds = {"level": GroupLevel, "operator": Operator, "dtype": DType, "splits": Splits}
    return MeasuredCollective(**document | {name: kind(document[name]) for name, kind in kinds.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Movement:
    """What a collective moves in a group of R ranks, in elements of its dtype.

    Attributes:
        operator: The operator.
        dtype: Of the elements.
        count_RR: Elements from rank to rank, for all-to-all; for the others the R blocks that a buffer consists of.
    """

    operator: Operator
    dtype: DType
    count_RR: NDArray[np.int64]

    @classmethod
    def of(cls, collective: MeasuredCollective, num_ranks: int) -> Movement:
        """Cuts a collective's bytes into as many blocks as there are ranks, at least one element each."""
        elements = collective.bytes_per_rank // collective.dtype.num_bytes
        if collective.splits is Splits.ONE_WAY:
            count_RR = np.zeros((num_ranks, num_ranks), dtype=np.int64)
            count_RR[0] = max(1, elements)
        elif collective.splits is Splits.UNEQUAL:
            count_RR = split_matrix(num_ranks, max(elements, num_ranks), collective.skew, collective.split_seed)
        else:
            count_RR = np.full((num_ranks, num_ranks), max(1, elements // num_ranks), dtype=np.int64)
        return cls(operator=collective.operator, dtype=collective.dtype, count_RR=count_RR)

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.count_RR)

    @property
    def bytes_per_rank(self) -> int:
        """Bytes of a rank's larger buffer, the mean where ranks differ."""
        return int(self.count_RR.sum()) * self.dtype.num_bytes // self.num_ranks

    def sent_bytes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Bytes that have to leave and to reach each rank whatever the algorithm, both (R,)."""
        away_RR = self.count_RR * self.dtype.num_bytes
        np.fill_diagonal(away_RR, 0)
        if self.operator is Operator.ALL_REDUCE:  # reduce-scatter, then all-gather
            away_RR *= 2
        return away_RR.sum(axis=1), away_RR.sum(axis=0)

    def num_inputs(self, rank: int) -> int:
        """Elements of a rank's input."""
        blocks = self.count_RR[rank]
        return int(blocks[rank] if self.operator is Operator.ALL_GATHER else blocks.sum())

    def num_outputs(self, rank: int) -> int:
        """Elements of a rank's output."""
        blocks = self.count_RR[:, rank]
        return int(blocks[rank] if self.operator is Operator.REDUCE_SCATTER else blocks.sum())

    def buffer_bytes(self, rank: int) -> tuple[int, int]:
        """Bytes of a rank's input and output."""
        return self.num_inputs(rank) * self.dtype.num_bytes, self.num_outputs(rank) * self.dtype.num_bytes


def split_matrix(num_ranks: int, elements_per_rank: int, skew: float, seed: int) -> NDArray[np.int64]:
    """Elements that each rank sends to each, shape (R, R), for a batch whose embeddings are spread unevenly.

    Shares are log-normal: one factor per sender (a plan gives ranks unlike widths) times one per pair. They add up
    to `num_ranks * elements_per_rank` exactly, by the largest remainders.

    Args:
        num_ranks: R.
        elements_per_rank: Mean number of elements that a rank sends, its own included.
        skew: Standard deviation of each factor's logarithm.
        seed: Of the factors.

    Raises:
        InvalidOptionError: If the skew is so large that a share is not finite.
    """
    rng = np.random.default_rng(seed)
    exponent_RR = skew * (rng.standard_normal((num_ranks, 1)) + rng.standard_normal((num_ranks, num_ranks)))
    with np.errstate(over="ignore", invalid="ignore"):
        share_RR = np.exp(exponent_RR - exponent_RR.max())
        exact_RR = share_RR / share_RR.sum() * (num_ranks * elements_per_rank)
    if not np.isfinite(exact_RR).all():
        raise InvalidOptionError(f"must leave finite shares, got {skew}", field="skew")
    count_RR = np.floor(exact_RR).astype(np.int64)
    missing = num_ranks * elements_per_rank - int(count_RR.sum())
    largest = np.argsort((count_RR - exact_RR).ravel(), kind="stable")[:missing]
    count_RR.ravel()[largest] += 1
    return count_RR


class Buffers:
    """A rank's input and output memory, shared by the collectives that run one after the other.

    Args of the constructor:
        device: Where.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory: dict[str, torch.Tensor] = {}

    def reserve(self, num_bytes: int) -> None:
        """Makes both at least this large; new ones hold ordinary numbers, whatever the dtype they are read as."""
        if all(name in self._memory and self._memory[name].numel() >= num_bytes for name in ("input", "output")):
            return
        self._memory.clear()
        halves = torch.tensor(_HALVES, dtype=torch.float16)
        chosen = torch.randint(0, len(_HALVES), (8191,), generator=torch.Generator().manual_seed(0))
        block = halves[chosen].view(torch.uint8).to(self.device)
        for name in ("input", "output"):
            memory = torch.empty(-(-num_bytes // len(block)) * len(block), dtype=torch.uint8, device=self.device)
            memory.view(-1, len(block)).copy_(block)
            self._memory[name] = memory

    @property
    def num_bytes(self) -> int:
        """Bytes of both together."""
        return sum(memory.numel() for memory in self._memory.values())

    def view(self, name: str, num_elements: int, dtype: DType) -> torch.Tensor:
        """The first elements of `input` or `output`."""
        return self._memory[name][: num_elements * dtype.num_bytes].view(TORCH_DTYPES[dtype])


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundCollective:
    """A collective with its memory, ready to run.

    Attributes:
        movement: What it moves.
        group: Who takes part.
        inputs: This rank's input.
        outputs: This rank's output.
    """

    movement: Movement
    group: dist.ProcessGroup
    inputs: torch.Tensor
    outputs: torch.Tensor

    @classmethod
    def bind(cls, movement: Movement, group: dist.ProcessGroup, buffers: Buffers) -> BoundCollective:
        """Takes memory from buffers that were reserved for it."""
        rank = dist.get_rank(group)
        return cls(
            movement=movement,
            group=group,
            inputs=buffers.view("input", movement.num_inputs(rank), movement.dtype),
            outputs=buffers.view("output", movement.num_outputs(rank), movement.dtype),
        )

    def prepare(self) -> None:
        """Fills what the last run changed: all-reduce works in place, and its sums would grow without end."""
        if self.movement.operator is Operator.ALL_REDUCE:
            self.outputs.copy_(self.inputs)

    def run(self) -> None:
        """Runs it once; on a GPU the current stream waits for it, the host does not.

        Raises:
            RuntimeError: If the backend refuses it or a peer is gone.
        """
        operator, group = self.movement.operator, self.group
        if operator is Operator.ALL_TO_ALL:
            rank, count_RR = dist.get_rank(group), self.movement.count_RR
            if (count_RR == count_RR[0, 0]).all():  # the backend's path for equal splits
                dist.all_to_all_single(self.outputs, self.inputs, group=group)
            else:
                received, sent = count_RR[:, rank].tolist(), count_RR[rank].tolist()
                dist.all_to_all_single(self.outputs, self.inputs, received, sent, group=group)
        elif operator is Operator.REDUCE_SCATTER:
            reduce_scatter(self.outputs, self.inputs, group=group)
        elif operator is Operator.ALL_GATHER:
            all_gather(self.outputs, self.inputs, group=group)
        else:
            dist.all_reduce(self.outputs, group=group)


def verify(
    collective: MeasuredCollective,
    group: dist.ProcessGroup,
    device: torch.device,
    run: Callable[[BoundCollective], None] = BoundCollective.run,
) -> None:
    """Runs a small collective of the same kind and compares what this rank received with what was sent.

    Raises:
        ExecutionError: If anything else than the right data arrived.
        RuntimeError: If the backend refuses it or a peer is gone.
    """
    rank, dtype = dist.get_rank(group), TORCH_DTYPES[collective.dtype]
    small = MeasuredCollective(
        level=collective.level,
        operator=collective.operator,
        dtype=collective.dtype,
        bytes_per_rank=_VERIFIED_BYTES * dist.get_world_size(group),
        splits=collective.splits,
        skew=collective.skew,
        split_seed=collective.split_seed,
    )
    movement = Movement.of(small, dist.get_world_size(group))
    bound = BoundCollective(
        movement=movement,
        group=group,
        inputs=rank_content(movement, rank).to(dtype).to(device),
        outputs=torch.full((movement.num_outputs(rank),), 101, dtype=dtype, device=device),
    )
    bound.prepare()
    run(bound)
    received = bound.outputs.to("cpu", torch.int64)
    if not torch.equal(received, expected_output(movement, rank)):
        raise ExecutionError(
            f"{collective.operator} with {collective.splits} splits of {collective.dtype} over {collective.level} "
            f"brought wrong data to rank {rank} of its group"
        )


def rank_content(movement: Movement, rank: int) -> torch.Tensor:
    """What a rank sends when a collective is verified: whole numbers in [-6, 6], exact in every dtype, int64.

    They are drawn, so that no two ranks or blocks are alike.
    """
    return torch.randint(-6, 7, (movement.num_inputs(rank),), generator=torch.Generator().manual_seed(rank))


def expected_output(movement: Movement, rank: int) -> torch.Tensor:
    """What a rank has to receive then, int64."""
    contents = [rank_content(movement, sender) for sender in range(movement.num_ranks)]
    if movement.operator is Operator.ALL_TO_ALL:
        blocks_RR = [
            torch.split(content, counts) for content, counts in zip(contents, movement.count_RR.tolist(), strict=True)
        ]
        return torch.cat([blocks[rank] for blocks in blocks_RR])
    if movement.operator is Operator.ALL_GATHER:
        return torch.cat(contents)
    total = torch.stack(contents).sum(dim=0)
    if movement.operator is Operator.ALL_REDUCE:
        return total
    return torch.chunk(total, movement.num_ranks)[rank]
