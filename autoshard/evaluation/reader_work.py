"""What ranks work on what they read, by part of a step: they ask for it, pool rows that came, and spread gradients.

Shape suffixes: N shards, X `EXCHANGE_PARTS`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.core import CostModels, PlacedShard, Topology
from autoshard.core.costs import MsArray
from autoshard.core.step import EXCHANGE_PARTS, model_basis
from autoshard.evaluation.input_work import input_speed, input_work_ms
from autoshard.evaluation.pooling import pooling_ms


def reader_ms(placed_N: Sequence[PlacedShard], local_batch: float, topology: Topology) -> MsArray:
    """What each rank that reads a shard works on it, in ms; shape (N, X).

    Args:
        placed_N: Shards in a plan over all ranks of the topology.
        local_batch: Samples of each rank.
        topology: Of the ranks.
    """
    asked_N1 = input_work_ms(placed_N, local_batch, topology)[:, None]
    return np.hstack([asked_N1, pooling_ms(placed_N, local_batch, topology)])


def batch_ms(topology: Topology) -> MsArray:
    """What a rank works on a batch, whatever it reads, in ms; shape (X,)."""
    return np.array([input_speed(topology.device).batch_s * 1e3, 0.0, 0.0])


def counted_parts(costs: CostModels) -> tuple[bool, ...]:
    """Whether it is added to each of `EXCHANGE_PARTS`: a calibrated step has it among the features of the part."""
    step, basis = costs.step, model_basis(costs.comm.name)
    return tuple(step is None or step.coefficients(part, basis) is None for part in EXCHANGE_PARTS)
