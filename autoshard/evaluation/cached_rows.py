"""Rows in host memory or on a disk, behind a cache in the device's memory: what misses it, and what that costs.

Shape suffixes: N shards or their profiles, S sets of shards, H width of a code, I intervals of access curves with rows
of one probability.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np

from autoshard.core import AccessProfile, CostModel, KernelCosts, LocalShard, MemoryLevel, Topology, weight_row_bytes
from autoshard.core.access import FloatArray, ProfileBatch
from autoshard.core.costs import CodeArray, KernelFloor, MeasuredRange, MsArray, OutsideRange, kernel_floor
from autoshard.core.shard import MemoryPlacement
from autoshard.core.topology import MemoryBandwidth
from autoshard.evaluation.device_memory import SSD, DeviceMemory, SolidStateDisk, device_memory
from autoshard.evaluation.upper_end import UpperEndKernels

#: Cache policies by the names that plans use.
LRU, LFU = "lru", "lfu"
#: Newton steps that find Che's characteristic time; it takes some 10, and 40 for a cache that lacks a row in 10^15.
_MAX_STEPS = 200
_MAX_SHARDS_KNOWN = 1 << 14
#: Ends of a transfer's interval over its value, an assumption: published bandwidths are not reached by single rows,
#: and accesses that come in bursts miss less than independent ones.
_LOW_FACTOR, _HIGH_FACTOR = 0.5, 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTraffic:
    """What a batch finds in a cache.

    Attributes:
        hit_rate: Share of the lookups whose row is in the cache before the batch.
        num_distinct: Expected distinct rows of the batch.
        num_missed: Expected distinct rows of the batch that have to be fetched. Training changes every row that it
            looks up, so that as many are evicted dirty, and written back.
    """

    hit_rate: float
    num_distinct: float
    num_missed: float

    @classmethod
    def of(cls, access: AccessProfile, *, num_lookups: float, num_cached_rows: float, policy: str) -> CacheTraffic:
        """Expected traffic in the long run, for lookups that are independent of each other.

        - `lfu` holds the most accessed rows, so that the hit rate is the coverage of the access curve.
        - `lru` holds the rows of the last T lookups, where T is such that these are as many as fit: Che's
          approximation. A row is missing if it is in this batch and in none of the T lookups before it.

        Args:
            access: Profile of the rows.
            num_lookups: Lookups of the batch.
            num_cached_rows: Rows that the cache holds; may be more than there are.
            policy: `lru` or `lfu`.

        Source:
            Neo Sec. 5.2 for both policies, which it does not model. LRU: Che, Tung and Wang, Hierarchical web caching
            systems, IEEE JSAC 20(7), 2002. Differs: the cache is taken as fully associative (FBGEMM's has sets of
            32 rows), and rows are fetched once per batch.
        """
        rows_I = np.diff(access.ranks_K)
        masses_I = np.diff(access.cumulative_K)
        used_I = masses_I > 0
        rows_I, chance_I = rows_I[used_I], masses_I[used_I] / rows_I[used_I]
        hit_I = _held_share(rows_I, chance_I, num_cached_rows, policy)
        drawn_I = rows_I * -np.expm1(-chance_I * num_lookups)
        return cls(
            hit_rate=float(min(1.0, (rows_I * chance_I * hit_I).sum())),
            num_distinct=float(drawn_I.sum()),
            num_missed=float((drawn_I * (1 - hit_I)).sum()),
        )


def _held_share(rows_I: FloatArray, chance_I: FloatArray, num_cached_rows: float, policy: str) -> FloatArray:
    """Share of the rows of each interval that the cache holds, shape (I,)."""
    if num_cached_rows >= rows_I.sum():
        return np.ones_like(rows_I)
    if num_cached_rows <= 0:
        return np.zeros_like(rows_I)
    if policy == LFU:
        return _hottest_share(np.cumsum(rows_I) - rows_I, rows_I, np.array(num_cached_rows))
    return np.asarray(-np.expm1(-chance_I * _characteristic_lookups(rows_I, chance_I, num_cached_rows)))


def lfu_traffic(
    profiles: ProfileBatch, num_lookups_N: FloatArray, num_cached_rows_N: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """`hit_rate` and `num_missed` of `CacheTraffic` for `lfu` caches of many profiles, shapes (N,)."""
    hit_I = _hottest_share(profiles.before_I, profiles.rows_I, profiles.repeated(num_cached_rows_N))
    missed_I = profiles.hit_rows(num_lookups_N) * (1 - hit_I)
    return np.minimum(profiles.sums(profiles.shares_I * hit_I), 1.0), profiles.sums(missed_I)


def _hottest_share(before_I: FloatArray, rows_I: FloatArray, num_cached_rows_I: FloatArray) -> FloatArray:
    """Share of the rows of each interval, behind so many hotter ones, that a cache of the hottest rows holds."""
    return np.clip((num_cached_rows_I - before_I) / rows_I, 0.0, 1.0)


def _characteristic_lookups(rows_I: FloatArray, chance_I: FloatArray, num_cached_rows: float) -> float:
    """Che's T: the number of lookups with as many distinct rows as the cache holds.

    The distinct rows are concave in T and never more than T, so that Newton's steps from T = `num_cached_rows` rise
    towards the root and never pass it.
    """
    lookups = num_cached_rows
    for _ in range(_MAX_STEPS):
        left_I = rows_I * np.exp(-chance_I * lookups)
        missing = num_cached_rows - float((rows_I - left_I).sum())
        slope = float((chance_I * left_I).sum())
        if missing <= 1e-9 * num_cached_rows or slope <= 0:
            break
        lookups += missing / slope
    return lookups


#: Share of the published bandwidth of a link to the host at which rows cross it: those of 256 bytes took 1.6 times as
#: long on an H200 (PCIe 5.0, FBGEMM 1.6, LRU and LFU alike; docs/results/gpu.md).
ROW_SHARE_OF_LINK: Final = 0.62


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSpeeds:
    """How fast rows come from where they live to a rank's device, and back.

    Attributes:
        host_bytes_per_s: Link to the host's memory in one direction; 0 if the device works in the host's memory, so
            that nothing has to be transferred.
        access_bytes: Bytes that the smallest access over that link moves.
        disk: The rank's solid-state disk.
    """

    host_bytes_per_s: float
    access_bytes: int = 32
    disk: SolidStateDisk = SSD

    @classmethod
    def of_device(cls, memory: DeviceMemory) -> TransferSpeeds:
        """The published speeds of a device kind, as far as rows reach them."""
        return cls(host_bytes_per_s=ROW_SHARE_OF_LINK * memory.host_bytes_per_s, access_bytes=memory.access_bytes)

    @classmethod
    def of(cls, topology: Topology) -> TransferSpeeds:
        """The topology's own bandwidths; the published ones of its device kind where it has none."""
        known: MemoryBandwidth = topology.memory_bandwidth
        usual = cls.of_device(device_memory(topology.device))
        return cls(
            host_bytes_per_s=usual.host_bytes_per_s if known.ddr is None else known.ddr,
            access_bytes=usual.access_bytes,
            disk=usual.disk if known.ssd is None else _disk_of(known.ssd),
        )

    def fetch_s(self, level: MemoryLevel, num_bytes: float) -> float:
        """Seconds to read one row from a level."""
        if level is MemoryLevel.SSD:
            return self.disk.fetch_s * self._pages(num_bytes)
        return num_bytes / self.host_bytes_per_s if level is MemoryLevel.DDR and self.host_bytes_per_s else 0.0

    def store_s(self, level: MemoryLevel, num_bytes: float) -> float:
        """Seconds to write one row back."""
        if level is MemoryLevel.SSD:
            return self.disk.store_s * self._pages(num_bytes)
        return self.fetch_s(level, num_bytes)

    def _pages(self, num_bytes: float) -> int:
        return math.ceil(num_bytes / self.disk.page_bytes)


def _disk_of(bytes_per_s: float) -> SolidStateDisk:
    """A disk that moves whole pages at one bandwidth, whatever their number."""
    pages_per_s = bytes_per_s / SSD.page_bytes
    return replace(
        SSD,
        read_bytes_per_s=bytes_per_s,
        write_bytes_per_s=bytes_per_s,
        read_accesses_per_s=pages_per_s,
        write_accesses_per_s=pages_per_s,
        source="the topology",
    )


def behind_cache(shard: LocalShard, level: MemoryLevel, num_cached_rows: int, policy: str = LRU) -> MemoryPlacement:
    """A shard's rows on a level, behind a cache of so many of them, or of all if there are fewer."""
    cache_bytes = min(num_cached_rows, shard.num_embeddings) * shard.cached_row_bytes
    return MemoryPlacement(level=level, cache_bytes=cache_bytes, policy=policy, cache_dtype=shard.cache_dtype)


def cache_traffic(shard: LocalShard) -> CacheTraffic:
    """What a batch finds in a shard's cache; a shard of the device's memory misses nothing."""
    is_near = shard.level is MemoryLevel.HBM
    return _known_traffic(
        shard.access,
        shard.num_lookups,
        math.inf if is_near else shard.cache_bytes // shard.cached_row_bytes,
        shard.cache_policy,
    )


@lru_cache(maxsize=_MAX_SHARDS_KNOWN)
def _known_traffic(access: AccessProfile, num_lookups: float, num_cached_rows: float, policy: str) -> CacheTraffic:
    return CacheTraffic.of(access, num_lookups=num_lookups, num_cached_rows=num_cached_rows, policy=policy)


def transfer_seconds(shard: LocalShard, speeds: TransferSpeeds) -> tuple[float, float]:
    """Seconds that a shard's rows are on their way to the device before the forward kernel, and back after the update.

    Missing rows are read before the lookup; the rows that they push out, changed by training, are written back.
    Moments of which each row has one number are in the device's memory, as FBGEMM keeps them. Those of each weight stay
    in host memory, cached or not, so that every distinct row's cross the link both ways. On a disk all lie beside
    their row.

    Args:
        shard: Of any level; one in the device's memory transfers nothing.
        speeds: Those of the rank.
    """
    if shard.level is MemoryLevel.HBM:
        return 0.0, 0.0
    found = cache_traffic(shard)
    row_bytes = weight_row_bytes(shard.dtype, shard.optimizer, shard.embedding_dim)
    state_bytes = shard.optimizer.state_bytes_per_row(shard.embedding_dim)
    if shard.level is MemoryLevel.SSD:
        forward_s = found.num_missed * speeds.fetch_s(shard.level, row_bytes + state_bytes)
        return forward_s, found.num_missed * speeds.store_s(shard.level, row_bytes + state_bytes)
    far_bytes = state_bytes - shard.optimizer.row_moment_bytes
    accesses = -(-far_bytes // speeds.access_bytes) * speeds.access_bytes
    state_s = found.num_distinct * 2 * speeds.fetch_s(shard.level, accesses)
    return (
        found.num_missed * speeds.fetch_s(shard.level, row_bytes),
        found.num_missed * speeds.store_s(shard.level, row_bytes) + state_s,
    )


def transfers_seconds(shards: Sequence[LocalShard], speeds: TransferSpeeds) -> MsArray:
    """`transfer_seconds` of many shards, shape (N, 2)."""
    return np.array([transfer_seconds(shard, speeds) for shard in shards], dtype=np.float64).reshape(-1, 2)


def behind_caches(model: CostModel, topology: Topology) -> CostModel:
    """A model that also prices shards behind caches; one at the upper end of intervals stays there."""
    if isinstance(model, UpperEndKernels):
        return UpperEndKernels(behind_caches(model.model, topology))
    return model if isinstance(model, CachedRowsModel) else CachedRowsModel(model, TransferSpeeds.of(topology))


@dataclass(frozen=True, slots=True)
class CachedRowsModel:
    """Kernel times of shards wherever their rows live: the same kernel on rows in the device's memory, and transfers.

    Trained models were fitted to kernels that find all rows in the device's memory, so that a shard behind a cache is
    given to them as if it were there. Transfers neither hide behind kernels nor behind each other: a rank has one link
    to its host. A code is the model's, then forward and backward milliseconds of transfers.

    Attributes:
        model: Prices kernels.
        speeds: Prices transfers.
    """

    model: CostModel
    speeds: TransferSpeeds

    @property
    def name(self) -> str:
        """The kernel model's: it is what steps were calibrated with."""
        return self.model.name

    def notes(self, shards: Sequence[LocalShard]) -> tuple[OutsideRange, ...]:
        """Those of the model, if it has any."""
        near = [in_device_memory(shard) for shard in shards]
        return self.model.notes(near) if isinstance(self.model, MeasuredRange) else ()

    def encode(self, shards: Sequence[LocalShard]) -> CodeArray:
        """Codes of single shards, shape (N, H)."""
        codes = self.model.encode([in_device_memory(shard) for shard in shards])
        transfers_ms = transfers_seconds(shards, self.speeds) * 1e3
        return np.concatenate([codes, transfers_ms.astype(np.float32)], axis=1)

    def predict_ms(self, codes_SH: CodeArray) -> MsArray:
        """Kernels and transfers, forward plus backward, shape (S,)."""
        return np.asarray(self.model.predict_ms(codes_SH[:, :-2]) + _transfers(codes_SH).sum(axis=1))

    def predict_parts(self, codes_SH: CodeArray) -> KernelCosts:
        """Forward, backward and the interval."""
        kernels, transfers_SP = self.model.predict_parts(codes_SH[:, :-2]), _transfers(codes_SH)
        both_S = transfers_SP.sum(axis=1)
        return KernelCosts(
            forward_ms_S=kernels.forward_ms_S + transfers_SP[:, 0],
            backward_ms_S=kernels.backward_ms_S + transfers_SP[:, 1],
            low_ms_S=kernels.low_ms_S + _LOW_FACTOR * both_S,
            high_ms_S=kernels.high_ms_S + _HIGH_FACTOR * both_S,
        )

    def floor(self, codes_NH: CodeArray) -> KernelFloor:
        """The kernel model's, and the transfers, which add up."""
        kernels, transfers_NP = kernel_floor(self.model, codes_NH[:, :-2]), _transfers(codes_NH)
        return replace(
            kernels,
            forward_ms_N=kernels.forward_ms_N + transfers_NP[:, 0],
            backward_ms_N=kernels.backward_ms_N + transfers_NP[:, 1],
        )


def _transfers(codes_SH: CodeArray) -> MsArray:
    # Sums from which shards were taken off again may miss 0 by a little.
    return np.maximum(codes_SH[:, -2:].astype(np.float64), 0.0)


def in_device_memory(shard: LocalShard) -> LocalShard:
    """The shard as if its rows were all in the device's memory, without a cache."""
    return shard if shard.level is MemoryLevel.HBM else replace(shard, level=MemoryLevel.HBM, cache_bytes=0)
