"""What collectives take on the links of a topology: the wire of virtual time.

Shape suffixes: N ranks of a process group, R ranks of the topology.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from functools import cache

import numpy as np

from autoshard.core import CommModel, Level, Topology
from autoshard.core.costs import MsArray
from autoshard.core.replica_groups import levels_of_part

#: By which bytes are multiplied for what is left of a collective's time.
_NEXT_TO_NOTHING = 1e-9


class Operation(StrEnum):
    """A kind of collective."""

    ALL_TO_ALL = "all_to_all"
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"


class Wire:
    """The model of collectives that prices steps, given the bytes that ranks really exchange.

    Args:
        topology: The ranks, one for each process.
        comm: Prices collectives.
    """

    def __init__(self, topology: Topology, comm: CommModel) -> None:
        self.topology, self.comm = topology, comm
        self._part = cache(self._topology_of)

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
            return self.comm.all_to_all_ms(sent_RR, self.topology)[list(ranks)] / 1e3
        put_in, part = float(bytes_NN[:, 0].max()), self._part(ranks)
        match operation:
            case Operation.ALL_REDUCE:
                ms = self.comm.all_reduce_ms(put_in, part)
            case Operation.REDUCE_SCATTER:
                ms = self.comm.reduce_scatter_ms(put_in, part)
            case Operation.ALL_GATHER:
                ms = self.comm.all_gather_ms(put_in * len(ranks), part)
        return np.full(len(ranks), ms / 1e3)

    def latency_s(self, operation: Operation, bytes_NN: MsArray, ranks: tuple[int, ...]) -> MsArray:
        """What of that its first byte takes, in which no link is in use."""
        return self.seconds(operation, bytes_NN * _NEXT_TO_NOTHING, ranks)

    def level(self, ranks: Sequence[int]) -> int:
        """The innermost level of the topology that holds some ranks."""
        levels = self.topology.levels
        return next(index for index, one in enumerate(levels) if len({rank // one.size for rank in ranks}) == 1)

    def _topology_of(self, ranks: Sequence[int]) -> Topology:
        """Some of the ranks as a cluster of their own, over the links that they have."""
        whole, members = self.topology, np.array(ranks)
        if len(ranks) == whole.world_size:
            return whole
        shares = {level.size: int(np.bincount(members // level.size).max()) for level in whole.levels}
        if any(len(set(np.bincount(members // size).tolist()) - {0}) > 1 for size in shares):
            # Not as many in each unit: the links of the first level that holds them all.
            within = next(level for level in whole.levels if shares[level.size] == len(ranks))
            parts: tuple[Level, ...] = (replace(within, size=len(ranks), shared_links=False),)
        else:
            parts = levels_of_part(whole, lambda level: shares[level.size])
        return replace(whole, world_size=len(ranks), levels=parts, overrides=(), fetch_ms=None)
