"""What collectives take at least: affine functions of what is moved.

Shape suffixes: V kinds of shards, P parts of a step, Q parts and synchronisation, B rows of what is moved, R ranks, C
columns of what is moved, K views of a topology.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autoshard.core import DType, Topology
from autoshard.core.costs import MsArray, is_affine
from autoshard.core.topology import MAX_BANDWIDTH
from autoshard.evaluation.traffic import INT8_BLOCK, wire_bytes
from autoshard.planners.space.kinds import FloatArray
from autoshard.planners.space.step_cost import StepPrices

#: Bytes at which affine functions are read off: whole blocks of int8 messages.
_BYTES = INT8_BLOCK * wire_bytes(DType.INT8) * 2**14
#: Shares of these bytes at which the functions are looked at again, and what rounding may make of a price there.
_PROBES, _ROUNDING = (2.0**-14, 2.0**14), 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MovingFloor:
    """Affine functions of what ranks move that no part of a step is below; kernels' own times left out.

    Where all ranks hold the same row m of what is moved, part q takes `base_Q[q] + slope_KQC[k, q] @ m`, and latencies
    where anything is moved, in each of K views of the links. Times of ranks are convex in what they move, and ranks are
    alike, so no plan whose ranks hold m in the mean has a faster slowest rank.

    Attributes:
        base_Q: What every step takes.
        slope_KQC: Milliseconds per unit of each column, by view.
        lump_KQC: The same where a single rank has the column.
        lumps_hold_K: Whether a view's times also hold for what a single rank moves: bytes over shared links do not.
        is_proven: Whether the functions hold whatever is moved; else they are read off at one size of messages. The
            model of collectives has to say that its times are affine, and steps have to be so at other sizes, too.
    """

    base_Q: MsArray
    slope_KQC: MsArray
    lump_KQC: MsArray
    lumps_hold_K: tuple[bool, ...]
    is_proven: bool
    _prices: StepPrices

    @classmethod
    def of(cls, prices: StepPrices) -> MovingFloor:
        """Reads the functions off prices of steps."""
        views = [prices.on(view) for view in _views(prices.topology)]
        base_Q = _parts(views[0], np.zeros((1, len(prices.columns))))[:, 0]
        slope_KQC = np.stack([_slopes(view) for view in views])
        shares_links = any(level.shared_links for level in prices.topology.levels)
        return cls(
            base_Q=base_Q,
            slope_KQC=slope_KQC,
            lump_KQC=np.stack([_slopes(view, is_alone=True) for view in views]),
            lumps_hold_K=(True, not shares_links)[: len(views)],
            is_proven=is_affine(prices.costs.comm)
            and prices.has_rising_weights
            and all(_holds(view, base_Q, slope_QC) for view, slope_QC in zip(views, slope_KQC, strict=True)),
            _prices=views[0],
        )

    def latencies(self, moved_VC: FloatArray) -> MsArray:
        """What parts take besides, where ranks move anything in the columns that a kind of shard has; shape (V, Q)."""
        columns = self._prices.columns
        is_moved_VC = (moved_VC > 0) & columns.are("pair_bytes", "scattered_bytes", "synced_bytes")
        patterns, which_V = np.unique(is_moved_VC, axis=0, return_inverse=True)
        moved_BC = np.where(patterns, _BYTES, 0.0)
        affine_QB = self.base_Q[:, None] + self.slope_KQC[0] @ moved_BC.T
        return np.asarray(np.maximum(_parts(self._prices, moved_BC) - affine_QB, 0.0).T[which_V.reshape(-1)])


def _views(topology: Topology) -> list[Topology]:
    """The links within nodes, and those beyond, each as if the others took no time; latencies are the least of all."""
    latency_s = min(level.all_to_all.latency_s for level in topology.levels)

    def view(*, is_inner: bool) -> Topology:
        levels = []
        for index, level in enumerate(topology.levels):
            counts = (index == 0) is is_inner
            bytes_per_s = level.all_to_all.bytes_per_s if counts else MAX_BANDWIDTH
            link = replace(level.all_to_all, bytes_per_s=bytes_per_s, latency_s=latency_s)
            levels.append(replace(level, all_to_all=link))
        return replace(topology, levels=tuple(levels))

    return [view(is_inner=True)] if len(topology.levels) == 1 else [view(is_inner=True), view(is_inner=False)]


def _parts(prices: StepPrices, moved_BC: FloatArray, *, is_alone: bool = False) -> MsArray:
    """Times of parts and of synchronisation where all ranks move the same, or one rank alone does; shape (Q, B)."""
    moved_BRC = np.repeat(moved_BC[:, None], prices.topology.world_size, axis=1)
    if is_alone:
        moved_BRC[:, 1:] = 0.0
    parts_PB = prices.moving_ms(moved_BRC).max(axis=2)
    bytes_B2 = prices.synced_bytes(moved_BC)
    sync_B = prices.synced_ms(bytes_B2) - prices.synced_ms(0 * bytes_B2)
    return np.concatenate([parts_PB, sync_B[None]])


def _holds(prices: StepPrices, base_Q: MsArray, slope_QC: MsArray) -> bool:
    """Whether no part is below affine functions where ranks move far less or far more of a column."""
    for share in _PROBES:
        moved_BC = share * _large_amounts(prices)
        floor_QB = base_Q[:, None] + slope_QC @ moved_BC.T
        if (floor_QB > _parts(prices, moved_BC) * (1 + _ROUNDING)).any():
            return False
    return True


def _large_amounts(prices: StepPrices) -> FloatArray:
    """Rows of what is moved that have one column each; kernels are counted, not added up, and so have no rate."""
    is_rate_C = ~prices.columns.are("num_shards")
    return np.diag(np.where(is_rate_C, _BYTES, 0.0))


def _slopes(prices: StepPrices, *, is_alone: bool = False) -> MsArray:
    """Milliseconds per unit of each column, shape (Q, C), where all ranks have it, or one alone."""
    once_BC = _large_amounts(prices)
    grown_QC = _parts(prices, 2 * once_BC, is_alone=is_alone) - _parts(prices, once_BC, is_alone=is_alone)
    return np.asarray(np.maximum(grown_QC, 0.0) / _BYTES)
