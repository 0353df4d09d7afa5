"""Plain, immutable data: tables, access profiles, shards, topology, plans, cost protocols, errors."""

from typing import TYPE_CHECKING

from autoshard.core.deferred import deferred

if TYPE_CHECKING:
    from autoshard.core.access import NUM_REUSE_BINS, REUSE_BIN_EDGES, REUSE_BIN_MIDDLES, AccessProfile
    from autoshard.core.costs import CommModel, CostModel, CostModels, KernelCosts, set_costs
    from autoshard.core.optimizers import Optimizer
    from autoshard.core.plan import (
        CostBreakdown,
        Estimate,
        GroupLayout,
        LowerBound,
        Payload,
        Provenance,
        RankCost,
        ReplicaGroups,
        ShardingPlan,
        SyncRows,
    )
    from autoshard.core.shard import (
        Collective,
        Exchange,
        GradSync,
        LocalShard,
        MemoryPlacement,
        PlacedShard,
        RowRange,
        RowsBy,
        Shard,
        Split,
        Update,
        local_shard,
        local_shards,
    )
    from autoshard.core.tables import (
        Constraints,
        DenseLayers,
        DType,
        EmbeddingTable,
        Feature,
        ImpliedOrder,
        Pooling,
        RowOrder,
        TableSet,
        Tier,
        weight_row_bytes,
    )
    from autoshard.core.topology import Level, Link, MemoryBandwidth, MemoryBytes, MemoryLevel, Topology

__all__ = [
    "NUM_REUSE_BINS",
    "REUSE_BIN_EDGES",
    "REUSE_BIN_MIDDLES",
    "AccessProfile",
    "Collective",
    "CommModel",
    "Constraints",
    "CostBreakdown",
    "CostModel",
    "CostModels",
    "DType",
    "DenseLayers",
    "EmbeddingTable",
    "Estimate",
    "Exchange",
    "Feature",
    "GradSync",
    "GroupLayout",
    "ImpliedOrder",
    "KernelCosts",
    "Level",
    "Link",
    "LocalShard",
    "LowerBound",
    "MemoryBandwidth",
    "MemoryBytes",
    "MemoryLevel",
    "MemoryPlacement",
    "Optimizer",
    "Payload",
    "PlacedShard",
    "Pooling",
    "Provenance",
    "RankCost",
    "ReplicaGroups",
    "RowOrder",
    "RowRange",
    "RowsBy",
    "Shard",
    "ShardingPlan",
    "Split",
    "SyncRows",
    "TableSet",
    "Tier",
    "Topology",
    "Update",
    "local_shard",
    "local_shards",
    "set_costs",
    "weight_row_bytes",
]

if not TYPE_CHECKING:
    __getattr__ = deferred(__name__, __all__, ("access", "costs", "optimizers", "plan", "shard", "tables", "topology"))
