"""Documents that hold every field of their schema."""

import pytest

TABLES = {
    "schema": "autoshard.tables/1",
    "batch_size": 4096,
    "tables": [
        {
            "name": "clicks",
            "num_embeddings": 1000,
            "embedding_dim": 16,
            "dtype": "fp16",
            "pooling": "mean",
            "optimizer": "adam",
            "features": [
                {"name": "f0", "pooling_factor": 3.5, "pooling_variance": 1.25, "pooling_p99": 9},
                {"name": "f1", "pooling_factor": 0},
            ],
            "access": {"kind": "zipf", "alpha": 1.05, "shift": 2.0},
            "constraints": {"pinned_ranks": [0, 1], "colocate_with": ["views"], "forbidden_tiers": ["row_wise"]},
        },
        {
            "name": "views",
            "num_embeddings": 8,
            "embedding_dim": 4,
            "dtype": "fp32",
            "pooling": "sum",
            "features": [{"name": "f2", "pooling_factor": 1}],
            "access": {"kind": "uniform", "accessed_fraction": 0.5},
        },
        {
            "name": "history",
            "num_embeddings": 100000,
            "embedding_dim": 8,
            "dtype": "bf16",
            "pooling": "sequence",
            "features": [{"name": "f3", "pooling_factor": 40}],
            "access": {"kind": "reuse_bins", "of": "rows", "batch_size": 65536, "bins": [0.5, 0.25, *[0.01] * 15]},
        },
        {
            "name": "users",
            "num_embeddings": 10,
            "embedding_dim": 8,
            "dtype": "int8",
            "pooling": "sum",
            "features": [{"name": "f4", "pooling_factor": 1}],
            "access": {"kind": "curve", "knots": [[0, 0], [1, 0.5], [10, 1]]},
        },
    ],
    "dense": {"num_dense_features": 13, "bottom_mlp": [64, 16], "top_mlp": [64, 1], "interaction": "dot"},
}

TOPOLOGY = {
    "schema": "autoshard.topology/1",
    "world_size": 4,
    "device": "a100",
    "memory_bytes": {"hbm": 2**30, "ddr": 2**32, "ssd": 0},
    "memory_bandwidth_bytes_per_s": {"ddr": 2.4e10, "ssd": 3e9},
    "levels": [
        {
            "name": "node",
            "size": 2,
            "all_to_all": {"bytes_per_s": 2.4e11, "latency_s": 1e-05},
            "all_reduce": {"bytes_per_s": 2.4e11, "latency_s": 0},
        },
        {
            "name": "cluster",
            "size": 4,
            "all_to_all": {"bytes_per_s": 7e9, "latency_s": 2e-05},
            "all_reduce": {"bytes_per_s": 6e10, "latency_s": 3e-05},
        },
    ],
    "overrides": [{"ranks": [0, 2], "memory_bytes": {"hbm": 2**29}}, {"ranks": [1], "memory_bytes": {"ssd": 5}}],
    "fetch_ms": [[0, 1, 2.5, 2.5], [1, 0, 2.5, 2.5], [2.5, 2.5, 0, 1], [2.5, 2.5, 1, 0]],
}

RANK = {
    "rank": 0,
    "input_ms": 0.1,
    "forward_kernel_ms": 0.3,
    "forward_exchange_ms": 0.1,
    "backward_exchange_ms": 0.1,
    "backward_kernel_ms": 0.6,
    "kernel_ms": 0.9,
    "sync_ms": 0,
    "hbm_bytes": 1000,
    "ddr_bytes": 0,
    "ssd_bytes": 0,
    "activation_bytes": 10,
}

PLAN = {
    "schema": "autoshard.plan/1",
    "tables": TABLES,
    "topology": TOPOLOGY,
    "replica_groups": {"num_groups": 1, "layout": "across_nodes", "sync_every": 1, "moment_scale": 1.0},
    "payload": {"forward": "fp16", "backward": "bf16"},
    "row_orders": {"history": {"file": "plan.history.parquet", "digest": "sha256:" + "0f" * 32, "num_ordered": 500}},
    "shards": [
        {
            "table": "clicks",
            "rows": {"by": "index", "start": 0, "stop": 1000},
            "columns": [0, 16],
            "tier": "table_wise",
            "replicas": [[1]],
            "split": "block",
            "exchange": "partial_sums",
            "deduplicate": False,
            "grad_sync": "none",
            "memory": {"level": "ddr", "cache_bytes": 4096, "policy": "lfu", "cache_dtype": "fp16"},
        },
        {
            "table": "views",
            "rows": {"by": "index", "start": 0, "stop": 8},
            "columns": [0, 4],
            "tier": "table_wise",
            "replicas": [[1]],
            "deduplicate": False,
        },
        {
            "table": "history",
            "rows": {"by": "access_rank", "start": 0, "stop": 500},
            "columns": [0, 8],
            "tier": "data_parallel",
            "replicas": "each",
            "exchange": "rows",
            "deduplicate": True,
            "grad_sync": "sparse",
        },
        {
            "table": "history",
            "rows": {"by": "access_rank", "start": 500, "stop": 2000},
            "columns": [0, 8],
            "tier": "flex",
            "replicas": "each_node",
            "deduplicate": False,
        },
        {
            "table": "history",
            "rows": {"by": "access_rank", "start": 2000, "stop": 100000},
            "columns": [0, 8],
            "tier": "row_wise",
            "replicas": "all",
            "split": "hash",
            "deduplicate": False,
        },
        {
            "table": "users",
            "rows": {"by": "index", "start": 0, "stop": 10},
            "columns": [0, 8],
            "tier": "replicated",
            "replicas": [[0], [3]],
            "deduplicate": False,
            "fetch": [0, 0, 1, 1],
        },
    ],
    "predicted": {
        "step_ms": {"value": 1.0, "low": 0.9, "high": 1.1},
        "max_kernel_ms": 0.9,
        "balance": 1,
        "exchange_balance": 0.99,
        "imbalance": 1.0,
        "floor_kernel_ms": 0.5,
        "binding_rank": 2,
        "binding_shard": "history",
        "cost_model": "learned:cpu",
        "overlap": "neo",
        "models": {"kernel": "learned:cpu", "communication": "alpha-beta", "dense": "analytic:cpu"},
        "dense_ms": 0.25,
        "sync_ms": 0,
        "parts": {
            "input": {"value": 0.1, "low": 0.05, "high": 0.4},
            "forward_kernel": {"value": 0.3, "low": 0.2, "high": 0.5},
            "forward_exchange": {"value": 0.1, "low": 0.1, "high": 0.1},
            "backward_exchange": {"value": 0.1, "low": 0, "high": 1},
            "backward_kernel": {"value": 0.6, "low": 0.5, "high": 0.7},
            "dense": {"value": 0.25, "low": 0.2, "high": 0.5},
        },
        "ranks": [{**RANK, "rank": rank} for rank in range(4)],
    },
    "provenance": {
        "planner": "auto",
        "options": {"tiers": 3, "deep": {"list": [1.5, None, True]}},
        "seed": 7,
        "models": {"kernel": "sha256:00"},
        "version": "0.1.0",
    },
}


@pytest.fixture
def documents():
    """Whole documents by schema name; tests copy before they change them."""
    return {"autoshard.tables/1": TABLES, "autoshard.topology/1": TOPOLOGY, "autoshard.plan/1": PLAN}
