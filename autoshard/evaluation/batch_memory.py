"""Memory that ranks need for a batch, beside the tables: the one account that evaluation and planners share.

Shape suffixes: R ranks of a replica group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from autoshard.core import (
    CostBreakdown,
    EmbeddingTable,
    MemoryLevel,
    Payload,
    Pooling,
    RowOrder,
    RowsBy,
    ShardingPlan,
    TableSet,
)
from autoshard.core.costs import MsArray
from autoshard.core.held import sums_by_rank
from autoshard.evaluation.dense_time import dense_parts
from autoshard.evaluation.traffic import Stream, Traffic, held_id_bytes, id_bytes, plan_traffic, wire_bytes

#: Dense layers compute in fp32.
_DENSE_BYTES = 4

#: Of the normal distribution: what a batch's sum exceeds once in a hundred steps.
_P99_DEVIATIONS = 2.3263
#: What a skewness of 1 moves that percentile by, in deviations (Cornish and Fisher's first term).
_P99_SKEW = (_P99_DEVIATIONS**2 - 1) / 6
#: Slots behind the last one of a hash table, for keys that are pushed there: 8 were the most among 2 million keys.
_PUSHED_SLOTS = 16


def activation_bytes(plan: ShardingPlan, traffic: Traffic | None = None) -> MsArray:
    """Bytes that ranks hold at the forward exchange beside weights and optimizer states, shape (R,).

    A rank's inputs, its outputs and what it receives in the forward exchange, and the gradients that it collects for
    rows which other ranks have copies of. Sequences count at the 99th percentile of a batch's lookups. Outputs of rows
    that every rank has a copy of are used where they are, and held once (FlexShard, Table 2).

    Args:
        plan: The plan, or that of one replica group.
        traffic: Of the plan, where it is known.
    """
    return BatchMemory.of(plan, traffic).activation_R


def training_bytes(plan: ShardingPlan, traffic: Traffic | None = None) -> MsArray:
    """Bytes that ranks need for training beside weights and optimizer states of tables, shape (R,).

    As `activation_bytes`, but in the backward pass: with the gradients of all that a rank got and of all that it sent,
    while its own outputs are gone. And the dense layers, where the tables describe them, see `dense_bytes`, and row
    orders, see `row_order_bytes`.

    Args:
        plan: The plan, or that of one replica group.
        traffic: Of the plan, where it is known.

    Raises:
        InvalidPlanError: If the dense layers make no model.
    """
    return BatchMemory.of(plan, traffic).training_R


def has_room(plan: ShardingPlan, reserved_bytes: int = 0, *, count_activations: bool = True) -> bool:
    """Whether the device memory of every rank holds its shards and leaves what training needs, and a reserve.

    Args:
        plan: The plan; of several replica groups, each is looked at by the least memory of its places.
        reserved_bytes: Of every device, to stay free besides.
        count_activations: Whether what training needs for a batch counts, see `training_bytes`.
    """
    group = plan.of_one_group()
    arrays = group.arrays
    bytes_U = np.array([local.held_bytes[MemoryLevel.HBM] for local in arrays.locals_U], dtype=np.float64)
    held_R = sums_by_rank(bytes_U[arrays.local_M], arrays.ranks_M, group.group_size)
    if count_activations:
        held_R += training_bytes(group)
    room_R = np.array(group.topology.hbm_bytes, dtype=np.float64)
    return bool((held_R + reserved_bytes <= room_R).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Device memory of a rank.

    Attributes:
        rank: The rank, numbered within a replica group.
        used_bytes: What a plan needs of it: tables, and what training takes beside them.
        capacity_bytes: What it has.
    """

    rank: int
    used_bytes: int
    capacity_bytes: int

    @property
    def share(self) -> float:
        """Used over there; 0 where there is none."""
        return self.used_bytes / self.capacity_bytes if self.capacity_bytes else 0.0

    @property
    def free_bytes(self) -> int:
        """What is left; negative where it is too little."""
        return self.capacity_bytes - self.used_bytes


def rank_memory(plan: ShardingPlan, predicted: CostBreakdown | None = None) -> tuple[RankMemory, ...]:
    """Device memory of every rank of a replica group, in the order of the prediction.

    Args:
        plan: A plan.
        predicted: Its prediction; that which the plan carries when left out.

    Returns:
        Nothing for a plan without a prediction.
    """
    predicted, topology = predicted or plan.predicted, plan.of_one_group().topology
    return tuple(
        RankMemory(rank=one.rank, used_bytes=one.used_bytes, capacity_bytes=topology.memory_of(one.rank).hbm)
        for one in (predicted.ranks if predicted else ())
    )


def row_order_bytes(plan: ShardingPlan) -> int:
    """Bytes of row orders on every rank: of tables that are cut by access rank, see `listed_order_bytes`."""
    cut = {one.shard.table.name: one.shard.table for one in plan.shards if one.shard.rows.by is RowsBy.ACCESS_RANK}
    return sum(listed_order_bytes(table, plan.row_orders.get(name)) for name, table in cut.items())


def listed_order_bytes(table: EmbeddingTable, order: RowOrder | None = None) -> int:
    """Bytes of a table's row order on every rank, where a file lists its rows; 0 where none does.

    The runtime keeps the place of each listed row in both directions, 16 bytes, and of those whose id is beyond the
    list's length as many again, and a key with its place in a hash table at most half full; at worst all are.

    Args:
        table: The table.
        order: That of a plan; left out, the table's own.
    """
    listed = order or table.row_order
    if not isinstance(listed, RowOrder):
        return 0
    beyond = min(listed.num_ordered, table.num_embeddings - listed.num_ordered)
    slots = (1 << (2 * beyond).bit_length()) + _PUSHED_SLOTS if beyond else 0
    return 16 * (listed.num_ordered + beyond + slots)


def gradient_ratio(payload: Payload) -> float:
    """Bytes of a gradient over those of the number that it is of, in the formats that they travel in."""
    return wire_bytes(payload.backward) / wire_bytes(payload.forward)


def dense_bytes(tables: TableSet, local_batch: float) -> float:
    """Bytes that the dense layers take of every rank while they train; 0 where the tables describe none.

    Parameters with their gradients, in fp32, updated by stochastic gradient descent, which keeps no state; and of the
    local batch the inputs, and with their gradients all layers' outputs and what dot products are computed of
    (`DenseShape.num_outputs`).

    Raises:
        InvalidPlanError: If the layers make no model.
    """
    shapes = dense_parts(tables, local_batch)
    if not shapes:
        return 0.0
    outputs, num_parameters = sum(one.num_outputs for one in shapes), sum(one.num_parameters for one in shapes)
    numbers = 2 * num_parameters + shapes[0].batch_size * (shapes[0].widths[0] + 2 * outputs)
    return float(_DENSE_BYTES * numbers)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchMemory:
    """Bytes that ranks need for a batch beside weights and optimizer states, shapes (R,).

    Attributes:
        activation_R: At the forward exchange, see `activation_bytes`.
        training_R: While they train, see `training_bytes`.
    """

    activation_R: MsArray
    training_R: MsArray

    @classmethod
    def of(cls, plan: ShardingPlan, traffic: Traffic | None = None) -> BatchMemory:
        """Counts for a plan, or that of one replica group, from its traffic where that is known."""
        local_batch = plan.group_batch_size / plan.group_size
        if traffic is None or any(peak_factor(table, local_batch) > 1.0 for table in plan.tables.tables):
            traffic = plan_traffic(plan, peak_factor)
        outputs_R, received_R = traffic.sent_R(Stream.FORWARD), traffic.received_R(Stream.FORWARD)
        tables = plan.tables.tables
        held_ids_R = traffic.received_R(Stream.IDS) * (held_id_bytes(tables) / id_bytes(tables))
        inputs_R = traffic.received_R(Stream.LENGTHS) + held_ids_R
        forward = list(Stream).index(Stream.FORWARD)
        for layout in traffic.layouts:
            inputs_R[layout.owners_O] += layout.gradient_bytes
            # No rank holds rows twice, whatever the number of replicas.
            if layout.stays:
                outputs_R = outputs_R - layout.pair_bytes_E[forward]
        kept = dense_bytes(plan.tables, local_batch) + row_order_bytes(plan)
        return cls.of_batch(inputs_R, outputs_R, received_R, kept, plan.payload)

    @classmethod
    def of_batch(
        cls, inputs_R: MsArray, outputs_R: MsArray, returned_R: MsArray, kept_R: MsArray | float, payload: Payload
    ) -> BatchMemory:
        """Counts from amounts of a batch, in bytes; any axes may stand before the ranks'.

        Args:
            inputs_R: What ranks are asked for, with the gradients that they collect for rows that others hold, too.
            outputs_R: What they send in the forward exchange, but for what is used where it is.
            returned_R: What they receive.
            kept_R: What training needs whatever the batch.
            payload: Number formats of what is sent.
        """
        # In the backward pass, gradients of outputs and of what came back; the outputs themselves are gone.
        gradients_R = gradient_ratio(payload) * (outputs_R + returned_R)
        return cls(
            activation_R=inputs_R + outputs_R + returned_R,
            training_R=inputs_R + returned_R + np.maximum(gradients_R, outputs_R) + kept_R,
        )


def largest_share(tables: TableSet, num_ranks: int) -> float:
    """Lookups of the rank that asks for most of them over the mean, expected; samples are dealt at random.

    Prices are of means, as balanced batches are. Lengths of features are taken as independent.

    Source:
        The largest of R normal numbers, by Blom, Statistical Estimates and Transformed Beta-Variables, 1958: their
        quantile (R - 3/8) / (R + 1/4), 0.01 above the mean that was drawn for R = 8.
    """
    features = [feature for table in tables.tables for feature in table.features]
    variance = sum(feature.pooling_variance for feature in features) * num_ranks / tables.batch_size
    mean = sum(feature.pooling_factor for feature in features)
    deviations = NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))
    return 1.0 + deviations * math.sqrt(variance) / mean if mean else 1.0


def peak_factor(table: EmbeddingTable, local_batch: float) -> float:
    """99th percentile over mean of the lookups of a rank's batch in a sequence table; 1 for pooled tables.

    Samples are independent, so that the batch's sum is close to normal, the more the larger the batch; what skewness
    is left is taken from how far the features' own 99th percentiles are out (Cornish and Fisher's expansion, to its
    first term). One sample of one feature is at that percentile. A feature without a variance takes that of a normal
    distribution with its 99th percentile, one without a percentile is not skewed.
    """
    if table.pooling is not Pooling.SEQUENCE or not table.pooling_factor or not local_batch:
        return 1.0
    variance = third_moment = 0.0
    for feature in table.features:
        beyond = max(0.0, (feature.pooling_p99 or 0.0) - feature.pooling_factor)
        deviation = math.sqrt(feature.pooling_variance) or beyond / _P99_DEVIATIONS
        variance += deviation * deviation
        if feature.pooling_p99 is not None and deviation:
            third_moment += deviation * deviation * deviation * (beyond / deviation - _P99_DEVIATIONS) / _P99_SKEW
    if not variance:
        return 1.0
    skewness = third_moment / (variance * math.sqrt(variance)) / math.sqrt(local_batch)
    deviations = max(0.0, _P99_DEVIATIONS + skewness * _P99_SKEW)
    return 1.0 + deviations * math.sqrt(variance / local_batch) / table.pooling_factor
