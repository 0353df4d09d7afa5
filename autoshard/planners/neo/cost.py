"""Neo's cost function: what a part of a table costs every rank that holds some of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from autoshard.core import Collective, MemoryLevel, PlacedShard, Tier, Topology, Update
from autoshard.core.plan import Payload
from autoshard.core.shard import fused_kernel
from autoshard.evaluation.cached_rows import TransferSpeeds, transfer_seconds
from autoshard.evaluation.device_memory import DeviceMemory, device_memory
from autoshard.evaluation.traffic import REDUCED_BYTES, PairTraffic, SyncBytes, id_bytes
from autoshard.planners.space.options import UnplacedShard
from autoshard.planners.space.tiers import num_holders, num_replicas

#: A looked-up row is read by the lookup, and read and written by the update.
_MOVES_PER_LOOKUP: Final = 3
#: Lengths and ids travel one after the other, and so do vectors and gradients.
_NUM_REQUESTS = _NUM_ANSWERS = 2
#: A reduce-scatter, or an all-gather, moves half of what an all-reduce of as large a buffer does.
_REDUCED_SHARE: Final = 0.5
#: The gradient of a replicated table is written before the all-reduce, and read after it.
_MOVES_PER_GRADIENT: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCost:
    """What a part costs every rank that holds some of it, in one step.

    Attributes:
        access_s: Rows moved in the device's memory.
        exchange_s: Lengths, ids, vectors and gradients on the owner's links, or in collectives.
        reduce_s: All-reduce of replicated rows.
        transfer_s: Rows that its cache misses, both ways.
        weighted_s: The sum by which sharding types are chosen and placed.
        num_holders: How many ranks that is.
        held_bytes: Memory on every level, caches included.
    """

    access_s: float
    exchange_s: float
    reduce_s: float
    transfer_s: float
    weighted_s: float
    num_holders: int
    held_bytes: Mapping[MemoryLevel, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFunction:
    """Prices parts by message volumes and access sizes.

    `cost = communication_weight * (exchange + all-reduce) + access_weight * (accesses + cache misses)`, in seconds per
    rank that holds some of the part:

    - exchange: bytes between the owner and each other rank (4 per length, 8 per id, vectors and gradients in the
      payload's formats), over the all-to-all bandwidth of the innermost level that joins the two; what stays is free.
      Sums that travel by reduce-scatter, and gradients by all-gather: half the bytes of all ranks over the all-reduce's
      bandwidth;
    - all-reduce: bytes of gradients over the outermost level's bandwidth;
    - accesses: lookups x row bytes, three times (read, then read and written), and twice the gradients that are
      all-reduced, over the bandwidth at which rows are gathered;
    - cache misses: `transfer_seconds`.

    Attributes:
        topology: Whose bandwidths.
        batch_size: Global batch.
        communication_weight: Of message volumes.
        access_weight: Of access sizes.
        payload: Number formats of vectors and gradients on the wire.

    Source:
        Neo Sec. 4.1: communication by message volume, imbalance by access size (tables x batch x indices x dimension),
        scalar weights per system. Differs: bandwidths bring both to seconds, so that weights of 1 fit any machine;
        volumes are told apart by level; latencies are no part of a part's cost, since one collective serves all tables
        (`fixed_s`); memory levels are priced; sums of row-wise parts travel by reduce-scatter (Neo, Fig. 5b) or by
        all-to-all.
    """

    topology: Topology
    batch_size: int
    communication_weight: float = 1.0
    access_weight: float = 1.0
    payload: Payload = field(default_factory=Payload)

    def of(self, part: UnplacedShard) -> PartCost:
        """The cost of a part on each of its ranks."""
        topology = self.topology
        placed, local = part.placed(0, topology), part.local(topology, self.batch_size)
        exchange_s = 0.0 if part.tier is Tier.DATA_PARALLEL else self._exchange_s(placed)
        reduce_s = 0.0
        moved_bytes = _MOVES_PER_LOOKUP * local.num_lookups * local.embedding_dim * local.dtype.num_bytes
        if local.update is Update.ALL_REDUCED:
            synced = SyncBytes.of(placed, self.batch_size)
            # An all-gather is half of an all-reduce.
            reduce_s = (synced.reduced + synced.gathered / 2) / topology.levels[-1].all_reduce.bytes_per_s
            moved_bytes += _MOVES_PER_GRADIENT * local.num_gradient_rows * local.embedding_dim * REDUCED_BYTES
        access_s = moved_bytes / self._device.gather_bytes_per_s
        transfer_s = sum(transfer_seconds(local, TransferSpeeds.of(topology)))
        weighted_s = self.communication_weight * (exchange_s + reduce_s) + self.access_weight * (access_s + transfer_s)
        return PartCost(
            access_s=access_s,
            exchange_s=exchange_s,
            reduce_s=reduce_s,
            transfer_s=transfer_s,
            weighted_s=weighted_s,
            num_holders=num_holders(part.tier, topology),
            held_bytes=local.held_bytes,
        )

    def fixed_s(self, parts: Iterable[UnplacedShard]) -> float:
        """Cost that a plan has whatever its volumes: latencies of its collectives, and launches of its fused kernels.

        Two all-to-alls where parts have owners to ask (lengths, ids), two more where these answer by all-to-all, a
        reduce-scatter and an all-gather where sums travel so, an all-reduce where rows are replicated, and the launches
        of each kind of kernel.

        Source:
            Neo Sec. 4.1: measured latencies are a fixed additive cost.
        """
        parts = list(parts)
        kernels = {fused_kernel(part.shard.table, self._update(part)) for part in parts}
        collectives = {part.collective for part in parts if self._update(part) is Update.FUSED}
        all_to_all_s = max(level.all_to_all.latency_s for level in self.topology.levels)
        all_reduce_s = self.topology.levels[-1].all_reduce.latency_s
        latency_s = bool(collectives) * _NUM_REQUESTS * all_to_all_s
        latency_s += (Collective.ALL_TO_ALL in collectives) * _NUM_ANSWERS * all_to_all_s
        latency_s += (Collective.REDUCE_SCATTER in collectives) * _NUM_ANSWERS * all_reduce_s
        latency_s += any(self._update(part) is Update.ALL_REDUCED for part in parts) * all_reduce_s
        launches_s = len(kernels) * (self._device.forward_launch_ms + self._device.backward_launch_ms) / 1e3
        return self.communication_weight * latency_s + self.access_weight * launches_s

    def _exchange_s(self, placed: PlacedShard) -> float:
        """Time on the links of one owner, whom every rank asks, and of the sums' collectives."""
        local_batch = self.batch_size / self.topology.world_size
        width = id_bytes([placed.shard.table])
        pair = PairTraffic.of(placed, local_batch, self.payload, id_bytes=width)
        bytes_per_reader = pair.lengths + pair.ids + pair.forward + pair.backward
        seconds, inner = 0.0, 1
        if placed.collective is Collective.REDUCE_SCATTER:
            bytes_per_reader = pair.lengths + pair.ids
            reduced_bytes = _REDUCED_SHARE * self.topology.world_size * (pair.forward + pair.backward)
            seconds = reduced_bytes / self.topology.levels[-1].all_reduce.bytes_per_s
        for level in self.topology.levels:
            seconds += (level.size - inner) * bytes_per_reader / level.all_to_all.bytes_per_s
            inner = level.size
        return seconds

    def _update(self, part: UnplacedShard) -> Update:
        return Update.ALL_REDUCED if num_replicas(part.tier, self.topology) > 1 else Update.FUSED

    @property
    def _device(self) -> DeviceMemory:
        return device_memory(self.topology.device, self.topology.memory_bandwidth.hbm)
