"""What shards cost the ranks that hold them by Neo's cost function, read off the rows of the planners' space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from autoshard.core import LocalShard, PlacedShard, Update
from autoshard.evaluation.cached_rows import TransferSpeeds, transfer_seconds
from autoshard.evaluation.device_memory import device_memory
from autoshard.evaluation.traffic import REDUCED_BYTES
from autoshard.planners.space.columns import MovedArray, Readers
from autoshard.planners.space.options import locals_of
from autoshard.planners.space.step_cost import StepPrices

#: A looked-up row is read by the lookup, and read and written by the update.
_MOVES_PER_LOOKUP: Final = 3
#: A reduce-scatter, or an all-gather, moves half of what an all-reduce of as large a buffer does.
_HALF: Final = 0.5
#: The gradient of a replicated table is written before the all-reduce, and read after it.
_MOVES_PER_GRADIENT: Final = 2


class CostFunction:
    """Prices shards by the paper's function, wherever they are.

    `cost = communication_weight * (exchange + all-reduce) + access_weight * (accesses + cache misses)`, in seconds per
    rank that holds some of the shard:

    - exchange: bytes between the owner and each other rank, over the all-to-all bandwidth of the innermost level that
      joins the two; what stays is free. Sums that travel by reduce-scatter, and gradients by all-gather: half the bytes
      of all ranks over the all-reduce's bandwidth;
    - all-reduce: bytes of gradients over the outermost level's bandwidth;
    - accesses: lookups x row bytes, three times (read, then read and written), and twice the gradients that are
      all-reduced, over the bandwidth at which rows are gathered;
    - cache misses: `transfer_seconds`.

    Args:
        prices: Prices steps of the task, and knows what shards move.
        communication_weight: Of message volumes.
        access_weight: Of access sizes.

    Source:
        Neo Sec. 4.1: communication by message volume, imbalance by access size (tables x batch x indices x dimension),
        scalar weights per system. Differs: bandwidths bring both to seconds, so that weights of 1 fit any machine;
        volumes are told apart by level; latencies are no part of it, since one collective serves all tables; memory
        levels are priced; sums of row-wise parts travel by reduce-scatter (Neo, Fig. 5b) or by all-to-all.
    """

    def __init__(self, prices: StepPrices, *, communication_weight: float = 1.0, access_weight: float = 1.0) -> None:
        self._prices = prices
        self._communication_weight, self._access_weight = communication_weight, access_weight
        memory = device_memory(prices.topology.device, prices.topology.memory_bandwidth.hbm)
        self._gather_bytes_per_s = memory.gather_bytes_per_s

    def of(self, placed_U: Sequence[PlacedShard]) -> list[float]:
        """Seconds of each shard on every rank that holds some of it; where its replicas are makes no difference."""
        locals_U, moved_UC = locals_of(placed_U, self._prices.tables.batch_size), self._prices.moved(placed_U)
        return [self._cost_s(moved_C, local) for moved_C, local in zip(moved_UC, locals_U, strict=True)]

    def _cost_s(self, moved_C: MovedArray, local: LocalShard) -> float:
        moving_s, accessed_s = self._moving_s(moved_C), self._accessed_s(local)
        return self._communication_weight * moving_s + self._access_weight * accessed_s

    def _moving_s(self, moved_C: MovedArray) -> float:
        """Exchanges and the all-reduce."""
        topology, moved = self._prices.topology, self._prices.columns.of(moved_C)
        last_bytes_per_s = topology.levels[-1].all_reduce.bytes_per_s
        exchange_s = _HALF * topology.world_size * float(moved["scattered_bytes"].sum()) / last_bytes_per_s
        bytes_per_reader, inner = float(moved["pair_bytes"][Readers.ALL].sum()), 1
        for level in topology.levels:
            exchange_s += (level.size - inner) * bytes_per_reader / level.all_to_all.bytes_per_s
            inner = level.size
        reduced, gathered = moved["synced_bytes"].tolist()
        return exchange_s + float(reduced + _HALF * gathered) / last_bytes_per_s

    def _accessed_s(self, local: LocalShard) -> float:
        """Accesses of the device's memory, and what caches miss."""
        moved_bytes = _MOVES_PER_LOOKUP * local.num_lookups * local.embedding_dim * local.dtype.num_bytes
        if local.update is Update.ALL_REDUCED:
            moved_bytes += _MOVES_PER_GRADIENT * local.num_gradient_rows * local.embedding_dim * REDUCED_BYTES
        transfer_s = sum(transfer_seconds(local, TransferSpeeds.of(self._prices.topology)))
        return moved_bytes / self._gather_bytes_per_s + transfer_s
