"""Ways to hold tables, and what tells them apart, as numbers without units: what a trained policy reads.

No number depends on a device's speed, on a size of memory or on the names of tables, so that one policy serves any
device, cost model and number of ranks.

Shape suffixes: I items, O options, W ways, R ranks, P `EMBEDDING_PARTS`, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.core import Collective, EmbeddingTable, Exchange, MemoryLevel, Pooling, Tier
from autoshard.core.access.reuse import hit_rows
from autoshard.core.costs import MsArray
from autoshard.core.step import EMBEDDING_PARTS, PART_INDEX, Overlap, StepPart
from autoshard.planners.space.cost_gradient import CostGradient, FlatOptions, shard_costs
from autoshard.planners.space.kinds import FloatArray
from autoshard.planners.space.options import ShardingOption, ShardingType, hot_rows
from autoshard.planners.space.planner_space import IndexArray, PlannerSpace
from autoshard.planners.space.tiers import is_everywhere

#: Shares of a table's lookups whose most accessed rows are counted, and shares of its rows whose lookups are.
_COVERAGES, _ROW_SHARES = (0.6, 0.9), (1e-3, 1e-2, 1e-1)
#: Shares of lookups are told apart up to this.
_COVERAGE_STEP = 0.1
#: Ratios below this count as this.
_LEAST = 1e-6
#: Logarithms of ratios are divided by this.
_LOG_SCALE = 1.5
_NUM_PARTS = len(EMBEDDING_PARTS)
#: Features of an item, of a task, of a way, and of an option that is priced.
NUM_ITEM, NUM_TASK = len(EMBEDDING_PARTS) + 1 + 11 + len(_COVERAGES) + len(_ROW_SHARES), len(EMBEDDING_PARTS) + 10
NUM_WAY, NUM_PRICES = len(ShardingType) + 6, 6

_TYPES = tuple(ShardingType)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How an option holds a table, whichever table it is.

    Attributes:
        name: Sharding type.
        count: Parts that have a place of their own.
        coverage: Share of the lookups of rows that all ranks hold, to a tenth.
        rest: How the last part is held.
        collective: How sums travel.
        by_rows: Whether owners of any part send rows, of a table that is pooled.
        is_cached: Whether rows are in another memory than the device's.
    """

    name: ShardingType
    count: int
    coverage: float
    rest: Tier
    collective: Collective
    by_rows: bool
    is_cached: bool

    @classmethod
    def of(cls, option: ShardingOption) -> Way:
        """The way of an option."""
        parts, is_tiered = option.parts, option.name is ShardingType.ROW_TIERS or option.is_uneven
        shared = [part for part in parts if is_everywhere(part.tier)]
        coverage = sum(part.shard.access()[1] for part in shared) if is_tiered and len(shared) < len(parts) else 0.0
        if is_tiered and len(shared) == len(parts):
            coverage = parts[0].shard.access()[1]
        is_sequence = option.table.pooling is Pooling.SEQUENCE
        return cls(
            name=option.name,
            count=len(parts) - len(shared),
            coverage=round(round(coverage / _COVERAGE_STEP) * _COVERAGE_STEP, 6),
            rest=parts[-1].tier,
            collective=option.collective,
            by_rows=not is_sequence and any(part.exchange is Exchange.ROWS for part in parts),
            is_cached=parts[0].memory.level is not MemoryLevel.HBM,
        )

    def features(self) -> list[float]:
        """Shape (F,), `NUM_WAY` of them."""
        kind = [0.0] * len(_TYPES)
        kind[_TYPES.index(self.name)] = 1.0
        return [
            *kind,
            float(np.log2(max(self.count, 1))) / 3,
            self.coverage,
            float(self.rest is Tier.ROW_WISE),
            float(self.collective is Collective.REDUCE_SCATTER),
            float(self.by_rows),
            float(self.is_cached),
        ]


def way_features(ways: Sequence[Way]) -> FloatArray:
    """What tells some ways apart, shape (W, F)."""
    return np.array([way.features() for way in ways], dtype=np.float64).reshape(-1, NUM_WAY)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskFeatures:
    """What tells a task and its items apart, read off the first option of each item: mostly the whole table.

    Attributes:
        unit_ms: Milliseconds that all of these options add to a rank in the mean.
        cost_I: What each adds to it, over that.
        task_F: Of the task, `NUM_TASK` of them.
        items_IF: Of the items, `NUM_ITEM` of them.
    """

    unit_ms: float
    cost_I: FloatArray
    task_F: FloatArray
    items_IF: FloatArray

    @classmethod
    def of(cls, space: PlannerSpace, flat: FlatOptions, rates: CostGradient) -> TaskFeatures:
        """Reads a space.

        Args:
            space: The space, with at least one option of each item.
            flat: Its options.
            rates: What shards add.
        """
        num_ranks = space.topology.world_size
        shard_I = flat.start_O[flat.first_I]
        kind_I, is_shared_I = flat.kind_E[shard_I], flat.is_shared_E[shard_I]
        alone_IP = np.where(is_shared_I[:, None], rates.shared_VP[kind_I], rates.served_VP[kind_I])
        cost_I = flat.sums(shard_costs(flat, rates, num_ranks))[flat.first_I]
        unit_ms = max(float(cost_I.sum()), 1e-30)
        of_tables = np.array([_table_features(item.like[0], space) for item in space.items])
        items_IF = np.concatenate(
            [
                _logs(alone_IP * len(cost_I) / num_ranks / unit_ms),
                _logs(alone_IP.sum(axis=1, keepdims=True) / unit_ms),
                of_tables,
            ],
            axis=1,
        )
        largest_ms = float(alone_IP.sum(axis=1).max())
        mean_P = (alone_IP * np.where(is_shared_I, 1.0, 1 / num_ranks)[:, None]).sum(axis=0)
        task_F = np.array(
            [*(mean_P / max(float(mean_P.sum()), 1e-30)).tolist(), *_topology_features(space, unit_ms, largest_ms)]
        )
        return cls(unit_ms=unit_ms, cost_I=cost_I / unit_ms, task_F=task_F, items_IF=items_IF)

    def order(self) -> IndexArray:
        """Items in falling price, shape (I,)."""
        return np.argsort(-self.cost_I, kind="stable")


def price_features(flat: FlatOptions, rates: CostGradient, space: PlannerSpace) -> FloatArray:
    """What options cost beside the cheapest of their item, as if all ranks were alike, and their memory; shape (O, F).

    Args:
        flat: The options.
        rates: What shards add.
        space: Theirs.
    """
    num_ranks = space.topology.world_size
    cost_O = np.maximum(flat.sums(shard_costs(flat, rates, num_ranks)), 1e-30)
    alone_E = rates.served_VP[flat.kind_E].sum(axis=1)
    lump_O = flat.largest(np.where(flat.is_shared_E, 0.0, alone_E))
    sync_O = flat.sums(np.where(flat.is_shared_E, rates.sync_V[flat.kind_E], 0.0))
    hbm_E = space.kinds.bytes_VM[flat.kind_E, 0]
    room = max(float(np.mean(space.topology.hbm_bytes)), 1.0)
    least_I = np.minimum.reduceat(cost_O, flat.first_I)
    unit_ms = max(float(least_I.sum()), 1e-30)
    return np.column_stack(
        [
            np.ones(len(cost_O)),
            np.minimum(_logs(cost_O / least_I[flat.item_O]), 4.0),
            _logs(cost_O * len(least_I) / unit_ms),
            _logs(lump_O / unit_ms),
            sync_O / cost_O,
            _logs(flat.largest(hbm_E) / room),
        ]
    )


def _table_features(table: EmbeddingTable, space: PlannerSpace) -> list[float]:
    """Of a table, without prices."""
    batch, num_ranks = space.tables.batch_size, space.topology.world_size
    access, rows = table.access, table.num_embeddings
    lookups = max(batch * table.pooling_factor, _LEAST)
    rows_I, lookups_I = np.diff(access.ranks_K), np.diff(access.cumulative_K)
    rates_I = lookups * lookups_I / rows_I
    all_hits, local_hits = (float(hit_rows(rows_I, rates_I / share).sum()) for share in (1, num_ranks))
    row_bytes = table.embedding_dim * table.dtype.num_bytes
    room = max(float(np.mean(space.topology.hbm_bytes)), 1.0)
    ratios = [
        table.storage_bytes / room,
        rows / batch,
        row_bytes / 512,
        table.pooling_factor,
        all_hits / lookups,
        local_hits / (lookups / num_ranks),
        all_hits / (batch * len(table.features)),
        len(table.features),
        *(max(hot_rows(table, coverage), 1) / batch for coverage in _COVERAGES),
    ]
    return [
        *_logs(np.array(ratios)).tolist(),
        *np.interp([share * rows for share in _ROW_SHARES], access.ranks_K, access.cumulative_K).tolist(),
        float(table.pooling is Pooling.SEQUENCE),
        float(table.row_order is not None),
        float(table.dtype.num_bytes == 4),
    ]


def _topology_features(space: PlannerSpace, unit_ms: float, largest_ms: float) -> list[float]:
    """Of the machine and the task's size: `largest_ms` is the largest item's time where it is alone."""
    topology = space.topology
    inner, outer = topology.levels[0], topology.levels[-1]
    fill = space.tables.storage_bytes / max(float(sum(topology.hbm_bytes)), 1.0)
    ratios = [
        outer.all_to_all.bytes_per_s / inner.all_to_all.bytes_per_s,
        outer.all_reduce.bytes_per_s / outer.all_to_all.bytes_per_s,
        1e3 * outer.all_to_all.latency_s / unit_ms,
        fill,
        largest_ms / unit_ms,
        len(space.items) / topology.world_size,
    ]
    return [
        float(np.log2(topology.world_size)) / 3,
        float(np.log2(topology.num_nodes)) / 3,
        float(np.log2(topology.local_world_size)) / 3,
        float(space.prices.overlap is not Overlap.NONE),
        *_logs(np.array(ratios)).tolist(),
    ]


def task_inputs(task_F: FloatArray | NDArray[np.float32]) -> dict[str, float]:
    """What people call some features of a task: numbers of ranks and tables, and shares of memory and of the step.

    Args:
        task_F: See `TaskFeatures`; tables that share their ranks count once.
    """
    share_P, of_machine_F = task_F[:_NUM_PARTS], task_F[_NUM_PARTS:]
    num_ranks = 2 ** (3 * float(of_machine_F[0]))
    fill, _, per_rank = (10 ** (_LOG_SCALE * of_machine_F[-3:].astype(np.float64))).tolist()
    exchanges = [PART_INDEX[part] for part in (StepPart.FORWARD_EXCHANGE, StepPart.BACKWARD_EXCHANGE)]
    return {
        "ranks": float(round(num_ranks)),
        "tables": float(round(per_rank * num_ranks)),
        "memory_fill": round(fill, 4),
        "exchange_share": round(float(share_P[exchanges].sum()), 4),
    }


def _logs(ratios: FloatArray | MsArray) -> FloatArray:
    """Logarithms of ratios, about -4 to 4."""
    return np.asarray(np.log10(np.maximum(ratios, _LEAST)) / _LOG_SCALE)
