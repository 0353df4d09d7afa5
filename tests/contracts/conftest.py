"""A sharding policy for planners that need one, and what every prediction promises.

Shape suffixes: R ranks.
"""

import math
from dataclasses import fields
from itertools import product

import numpy as np
import pytest

from autoshard.core import DType, MemoryLevel, Optimizer, Pooling, RankCost, Update
from costmodel import (
    FEATURE_NAMES,
    CostModelCard,
    FeatureScaling,
    HeldOutMetrics,
    Registry,
    TrainedCoverage,
    weight_shapes,
)
from costmodel.kernel.card import Interval
from costmodel.kernel.learned import LearnedCostModel
from policies.network import first_weights
from policies.planning.trained import TrainedPolicy
from tests.costmodel.conftest import dataset, samples, short_options, store, trained  # noqa: F401

#: Widths of the untrained encoder.
HIDDEN = (16,)
#: Kinds of kernels that it says it has seen: all there are.
KINDS = tuple(map("/".join, product(Update, MemoryLevel, DType, Optimizer, [*Pooling, "rows"])))


@pytest.fixture(scope="session")
def registry(tmp_path_factory):
    """A policy as it is before training: what it promises does not depend on how well it plans."""
    folder = Registry(tmp_path_factory.mktemp("registry"))
    for device in ("cpu", "a100"):
        rng = np.random.default_rng(0)
        card = CostModelCard(
            device=device,
            coverage=TrainedCoverage(
                kinds=KINDS,
                num_tables=(1, 100),
                ranges=dict.fromkeys(("num_bags", "embedding_dim", "num_embeddings", "pooling_factor"), (0.0, 1e12)),
            ),
            encoder_hidden=HIDDEN,
            scaling=FeatureScaling.fit(rng.normal(size=(100, len(FEATURE_NAMES)))),
            scale_ms=1.0,
            metrics=HeldOutMetrics(num_samples=1, mae_ms=1, mse_ms2=1, relative_error=1, kendall_tau=0),
            interval=Interval(low=-1.0, high=1.0),
            training={},
        )
        weights = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in weight_shapes(HIDDEN).items()}
        LearnedCostModel(weights, card).publish(folder)
    TrainedPolicy(weights=first_weights(0), training={}).publish(folder)
    return folder.root


@pytest.fixture(scope="session")
def check_prediction():
    """Checks a plan's prediction: its parts are numbers of at least 0, its bytes those of the shards."""
    return _check_prediction


def _check_prediction(plan, predicted):
    for item in fields(RankCost):
        values = [getattr(cost, item.name) for cost in predicted.ranks]
        assert all(math.isfinite(value) and value >= 0 for value in values), f"{item.name}: {values}"
    assert [cost.rank for cost in predicted.ranks] == list(range(plan.group_size))
    step = predicted.step_ms
    assert 0 <= step.low <= step.value <= step.high < math.inf
    for name in ("max_kernel_ms", "floor_kernel_ms", "dense_ms", "sync_ms"):
        value = getattr(predicted, name)
        assert math.isfinite(value), name
        assert value >= 0, name
    assert 0 <= predicted.balance <= 1
    assert 0 <= predicted.exchange_balance <= 1
    assert 1 - 1e-9 <= predicted.imbalance <= len(predicted.ranks) * (1 + 1e-9)
    assert 0 <= predicted.binding_rank < len(predicted.ranks)
    assert predicted.binding_shard in {table.name for table in plan.tables.tables}
    for level in MemoryLevel:
        held = [getattr(cost, f"{level}_bytes") for cost in predicted.ranks]
        assert held == _recounted_bytes(plan, level), level


def _recounted_bytes(plan, level):
    """Weights, optimizer state and caches with what they know of rows, of each rank, from the plan's plain data."""
    state = {
        Optimizer.SGD: (0, 0),
        Optimizer.ROWWISE_ADAGRAD: (4, 0),
        Optimizer.ADAGRAD: (0, 4),
        Optimizer.ADAM: (0, 8),
        Optimizer.PARTIAL_ROWWISE_ADAM: (4, 4),
        Optimizer.LAMB: (0, 8),
        Optimizer.PARTIAL_ROWWISE_LAMB: (4, 4),
    }
    width = {DType.FP32: 4, DType.FP16: 2, DType.BF16: 2, DType.INT8: 1}
    held_R = [0] * plan.group_size
    for placed in plan.shards:
        table, columns = placed.shard.table, placed.shard.columns[1] - placed.shard.columns[0]
        per_row, per_value = state[table.optimizer]
        scale_and_offset = 8 if table.dtype is DType.INT8 else 0
        weight_bytes = columns * width[table.dtype] + scale_and_offset
        memory, is_in_host = placed.memory, placed.memory.level is MemoryLevel.DDR
        row_bytes = weight_bytes + columns * per_value + (0 if is_in_host else per_row)
        for replica in placed.replicas:
            num_rows = math.ceil((placed.shard.rows.stop - placed.shard.rows.start) / len(replica))
            for rank in replica:
                held_R[rank] += num_rows * row_bytes if memory.level is level else 0
                if level is not MemoryLevel.HBM:
                    continue
                held_R[rank] += memory.cache_bytes + (per_row * num_rows if is_in_host else 0)
                if memory.cache_bytes and is_in_host:
                    index_bytes, slot_bytes = {"lru": (4, 8 + 8 + 4), "lfu": (4 + 8, 8)}[memory.policy]
                    held_R[rank] += index_bytes * num_rows + slot_bytes * (memory.cache_bytes // weight_bytes)
    return held_R
