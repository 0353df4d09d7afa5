"""What collectives take on the links of a topology: the wire of virtual time.

Shape suffixes: N ranks of a process group, R ranks of the topology.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from typing import Final, cast

import numpy as np

from autoshard.core import CommModel, Topology
from autoshard.core.costs import EvenCollective, MsArray
from autoshard.core.replica_groups import part_of
from autoshard.evaluation.communication import link_bytes

#: By which bytes are multiplied for what is left of a collective's time.
_NEXT_TO_NOTHING = 1e-9


class Operation(StrEnum):
    """A kind of collective."""

    ALL_TO_ALL = "all_to_all"
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"


@dataclass(frozen=True, slots=True)
class ProcessorWork:
    """What a rank's processor computes for a collective: copies, sums, and the system's network.

    Attributes:
        each_s: For each collective.
        byte_s: For each byte that the rank sends.
    """

    each_s: float
    byte_s: float


#: Of gloo over TCP, the system's time among it, by `getrusage` of two processes over collectives of 8 KiB to 4 MiB. It
#: is the same on links of 1 and of 5 Gbit/s (virtual AMD EPYC, 28 November 2026).
GLOO_WORK: Final = {
    Operation.ALL_TO_ALL: ProcessorWork(each_s=0.45e-3, byte_s=2.1e-9),
    Operation.ALL_REDUCE: ProcessorWork(each_s=1.05e-3, byte_s=2.3e-9),
    Operation.REDUCE_SCATTER: ProcessorWork(each_s=1.4e-3, byte_s=6.2e-9),
    Operation.ALL_GATHER: ProcessorWork(each_s=0.83e-3, byte_s=3.1e-9),
}


class Wire:
    """The model of collectives that prices steps, given the bytes that ranks really exchange.

    Args:
        topology: The ranks, one for each process.
        comm: Prices collectives.
        work: What processors compute for them, beside what else they do; nothing where others carry them.
    """

    def __init__(
        self, topology: Topology, comm: CommModel, work: Mapping[Operation, ProcessorWork] | None = None
    ) -> None:
        self.topology, self.comm = topology, comm
        self._work = work or {}
        self._part = cache(partial(part_of, topology))

    @property
    def is_of_processors(self) -> bool:
        """Whether ranks' processors carry what is sent."""
        return bool(self._work)

    def work_s(self, operation: Operation, bytes_N: MsArray) -> float:
        """What the processor of a rank of a group computes for a collective, in seconds.

        Args:
            operation: The collective.
            bytes_N: The rank's row of `seconds`' bytes.
        """
        work, size, num_bytes = self._work.get(operation), len(bytes_N), float(bytes_N.sum())
        if work is None or size == 1 or not num_bytes:
            return 0.0
        match operation:
            case Operation.ALL_REDUCE:
                num_bytes *= 2 * (size - 1) / size
            case Operation.REDUCE_SCATTER:
                num_bytes *= (size - 1) / size
            case Operation.ALL_GATHER:
                num_bytes *= size - 1
        return work.each_s + num_bytes * work.byte_s

    def seconds(self, operation: Operation, bytes_NN: MsArray, ranks: tuple[int, ...]) -> MsArray:
        """Time of each rank of a group from the moment at which the last one comes, shape (N,).

        Args:
            operation: The collective.
            bytes_NN: What rank i sends to rank j in an all-to-all; else row i begins with the bytes that rank i puts
                in.
            ranks: The group's, in the topology.
        """
        if len(ranks) == 1:
            return np.zeros(1)
        if operation is Operation.ALL_TO_ALL:
            sent_RR = np.zeros((self.topology.world_size, self.topology.world_size))
            sent_RR[np.ix_(ranks, ranks)] = bytes_NN
            return self.comm.links_ms(link_bytes(sent_RR, self.topology), self.topology)[list(ranks)] / 1e3
        num_bytes = float(bytes_NN[:, 0].max())
        if operation is Operation.ALL_GATHER:
            num_bytes *= len(ranks)
        # Operations have the names of collectives.
        ms = self.comm.collective_ms(cast("EvenCollective", operation.value), num_bytes, self._part(ranks))
        return np.full(len(ranks), ms / 1e3)

    def in_use_s(self, operation: Operation, bytes_NN: MsArray, ranks: tuple[int, ...]) -> MsArray:
        """Time of that in which the link of each rank sends, and in which it receives, shape (2, N).

        In what the first byte takes, no link is in use. An all-to-all in which a rank mostly sends leaves its link free
        to receive.
        """
        first_byte_s_N = self.seconds(operation, bytes_NN * _NEXT_TO_NOTHING, ranks)
        in_use_s_N = np.maximum(0.0, self.seconds(operation, bytes_NN, ranks) - first_byte_s_N)
        if operation is not Operation.ALL_TO_ALL:
            return np.stack([in_use_s_N, in_use_s_N])
        moved_2N = np.stack([bytes_NN.sum(axis=1), bytes_NN.sum(axis=0)])
        most_N = moved_2N.max(axis=0)
        return np.asarray(in_use_s_N * np.divide(moved_2N, most_N, out=np.zeros_like(moved_2N), where=most_N > 0))

    def level(self, ranks: Sequence[int]) -> int:
        """The innermost level of the topology that holds some ranks."""
        levels = self.topology.levels
        return next(index for index, one in enumerate(levels) if len({rank // one.size for rank in ranks}) == 1)
