"""What ranks work on what they read, by part of a step: they ask for it, pool rows that came, and spread gradients.

Shape suffixes: N shards, P parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from autoshard.core import CostModels, PlacedShard, ShardingPlan, Topology
from autoshard.core.costs import MsArray
from autoshard.core.step import StepPart, model_basis
from autoshard.evaluation.input_work import input_speed, input_work_ms
from autoshard.evaluation.pooling import pooling_ms

#: Parts of a step in which readers work, in the order of axis P.
READER_PARTS: Final = (StepPart.INPUT, StepPart.FORWARD_EXCHANGE, StepPart.BACKWARD_EXCHANGE)


def reader_ms(placed_N: Sequence[PlacedShard], local_batch: float, topology: Topology) -> MsArray:
    """What each rank that reads a shard works on it, in ms; shape (N, P).

    Args:
        placed_N: Shards in a plan over all ranks of the topology.
        local_batch: Samples of each rank.
        topology: Of the ranks.
    """
    asked_N1 = input_work_ms(placed_N, local_batch, topology)[:, None]
    return np.hstack([asked_N1, pooling_ms(placed_N, local_batch, topology)])


def batch_ms(topology: Topology) -> MsArray:
    """What a rank works on a batch, whatever it reads, in ms; shape (P,)."""
    return np.array([input_speed(topology.device).batch_s * 1e3, 0.0, 0.0])


def counted_parts(costs: CostModels) -> tuple[bool, ...]:
    """Whether it is added to each of `READER_PARTS`: a calibrated step has it among the features of the part."""
    step, basis = costs.step, model_basis(costs.comm.name)
    return tuple(step is None or step.coefficients(part, basis) is None for part in READER_PARTS)


def plan_reader_ms(group: ShardingPlan, costs: CostModels) -> tuple[float, ...]:
    """What every rank of a plan of one replica group works, by part, as far as the models of the parts count it.

    All ranks read as many samples of all tables, and so work alike.

    Args:
        group: The plan.
        costs: Models that price it.
    """
    counted = np.array(counted_parts(costs))
    if not counted.any():
        return (0.0,) * len(READER_PARTS)
    local_batch = group.group_batch_size / group.group_size
    works = reader_ms(group.shards, local_batch, group.topology).sum(axis=0) + batch_ms(group.topology)
    return tuple((counted * works).tolist())
