"""What parts of tables cost the ranks that hold them: of the step, and by Neo's cost function.

Both are read off the rows of the planners' space: what a part adds to every rank that holds some of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from autoshard.core import MemoryLevel, Update
from autoshard.evaluation.cached_rows import TransferSpeeds, transfer_seconds
from autoshard.evaluation.device_memory import device_memory
from autoshard.evaluation.traffic import REDUCED_BYTES
from autoshard.planners.space.columns import Readers
from autoshard.planners.space.cost_gradient import CostGradient
from autoshard.planners.space.kinds import ShardKinds
from autoshard.planners.space.options import ShardingOption, ShardingType, UnplacedShard
from autoshard.planners.space.step_cost import StepPrices
from autoshard.planners.space.tiers import is_everywhere, num_holders

#: A looked-up row is read by the lookup, and read and written by the update.
_MOVES_PER_LOOKUP: Final = 3
#: A reduce-scatter, or an all-gather, moves half of what an all-reduce of as large a buffer does.
_HALF: Final = 0.5
#: The gradient of a replicated table is written before the all-reduce, and read after it.
_MOVES_PER_GRADIENT: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCost:
    """What a part costs in one step.

    Attributes:
        step_ms: What it adds to the predicted step, with its ranks' share of all ranks.
        lump_ms: What it adds to its ranks, which others wait for; nothing if these are all ranks.
        access_s: Rows moved in the device's memory, on every rank that holds some of it; so the following.
        exchange_s: Lengths, ids, vectors and gradients on the owner's links, or in collectives.
        reduce_s: All-reduce of replicated rows.
        transfer_s: Rows that its cache misses, both ways.
        weighted_s: The weighted sum by which parts are placed.
        num_holders: How many ranks that is.
        held_bytes: Memory on every level, caches included.
    """

    step_ms: float
    lump_ms: float
    access_s: float
    exchange_s: float
    reduce_s: float
    transfer_s: float
    weighted_s: float
    num_holders: int
    held_bytes: Mapping[MemoryLevel, int]


class CostFunction:
    """Prices parts.

    By the paper's function, `cost = communication_weight * (exchange + all-reduce) + access_weight * (accesses + cache
    misses)`, in seconds per rank that holds some of the part:

    - exchange: bytes between the owner and each other rank, over the all-to-all bandwidth of the innermost level that
      joins the two; what stays is free. Sums that travel by reduce-scatter, and gradients by all-gather: half the bytes
      of all ranks over the all-reduce's bandwidth;
    - all-reduce: bytes of gradients over the outermost level's bandwidth;
    - accesses: lookups x row bytes, three times (read, then read and written), and twice the gradients that are
      all-reduced, over the bandwidth at which rows are gathered;
    - cache misses: `transfer_seconds`.

    Args:
        prices: Prices steps of the task, and knows what parts move.
        communication_weight: Of message volumes.
        access_weight: Of access sizes.

    Source:
        Neo Sec. 4.1: communication by message volume, imbalance by access size (tables x batch x indices x dimension),
        scalar weights per system. Differs: bandwidths bring both to seconds, so that weights of 1 fit any machine;
        volumes are told apart by level; latencies are no part of it, since one collective serves all tables; memory
        levels are priced; sums of row-wise parts travel by reduce-scatter (Neo, Fig. 5b) or by all-to-all.
    """

    def __init__(self, prices: StepPrices, *, communication_weight: float = 1.0, access_weight: float = 1.0) -> None:
        self.prices, self.topology = prices, prices.topology
        self._communication_weight, self._access_weight = communication_weight, access_weight
        self._kinds = ShardKinds(prices)
        self._rates: CostGradient | None = None
        self._known: dict[int, PartCost] = {}
        memory = device_memory(self.topology.device, self.topology.memory_bandwidth.hbm)
        self._gather_bytes_per_s = memory.gather_bytes_per_s

    def learn(self, parts: Iterable[UnplacedShard]) -> None:
        """Works out what parts move, all at once."""
        self._kinds.learn([ShardingOption(name=ShardingType.TABLE_WISE, parts=tuple(parts))])
        nothing_C, nothing_H = np.zeros(len(self.prices.columns)), np.zeros(self._kinds.code_width)
        self._rates = CostGradient.around(self._kinds, self.prices, nothing_C, nothing_H)
        self._known.clear()

    def can_price(self, part: UnplacedShard) -> bool:
        """Whether the kernel model can price a part that has been learned."""
        return self._kinds.of_parts([part]) is not None

    def of(self, part: UnplacedShard) -> PartCost:
        """The cost of a part that has been learned."""
        kind = self._kinds.of_parts([part])
        assert kind is not None, "the model can price it"
        if kind not in self._known:
            self._known[kind] = self._priced(part, kind)
        return self._known[kind]

    def _priced(self, part: UnplacedShard, kind: int) -> PartCost:
        assert self._rates is not None, "it has been learned"
        topology, batch_size = self.topology, self.prices.tables.batch_size
        moved, local = self.prices.columns.of(self._kinds.moved_VC[kind]), part.local(topology, batch_size)
        last_bytes_per_s = topology.levels[-1].all_reduce.bytes_per_s
        exchange_s = _HALF * topology.world_size * float(moved["scattered_bytes"].sum()) / last_bytes_per_s
        bytes_per_reader, inner = float(moved["pair_bytes"][Readers.ALL].sum()), 1
        for level in topology.levels:
            exchange_s += (level.size - inner) * bytes_per_reader / level.all_to_all.bytes_per_s
            inner = level.size
        reduced, gathered = moved["synced_bytes"].tolist()
        reduce_s = (reduced + _HALF * gathered) / last_bytes_per_s
        moved_bytes = _MOVES_PER_LOOKUP * local.num_lookups * local.embedding_dim * local.dtype.num_bytes
        if local.update is Update.ALL_REDUCED:
            moved_bytes += _MOVES_PER_GRADIENT * local.num_gradient_rows * local.embedding_dim * REDUCED_BYTES
        access_s = moved_bytes / self._gather_bytes_per_s
        transfer_s = sum(transfer_seconds(local, TransferSpeeds.of(topology)))
        weighted_s = self._communication_weight * (exchange_s + reduce_s) + self._access_weight * (
            access_s + transfer_s
        )
        holders, is_shared = num_holders(part.tier, topology), is_everywhere(part.tier)
        alone_ms, shared_ms = float(self._rates.served_VP[kind].sum()), float(self._rates.shared_VP[kind].sum())
        return PartCost(
            step_ms=shared_ms + float(self._rates.sync_V[kind])
            if is_shared
            else alone_ms * holders / topology.world_size,
            lump_ms=0.0 if is_shared else alone_ms,
            access_s=access_s,
            exchange_s=exchange_s,
            reduce_s=reduce_s,
            transfer_s=transfer_s,
            weighted_s=weighted_s,
            num_holders=holders,
            held_bytes=local.held_bytes,
        )
