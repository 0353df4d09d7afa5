"""Memory that ranks need for a batch, beside the tables: the one account that evaluation and planners share.

Shape suffixes: R ranks of a replica group.
"""

from __future__ import annotations

import math

import numpy as np

from autoshard.core import EmbeddingTable, Pooling, ShardingPlan
from autoshard.core.costs import MsArray
from autoshard.evaluation.traffic import HELD_ID_BYTES, Stream, Traffic, id_bytes, plan_traffic

#: Of the normal distribution: what a batch's sum exceeds once in a hundred steps.
_P99_DEVIATIONS = 2.3263
#: What a skewness of 1 moves that percentile by, in deviations (Cornish and Fisher's first term).
_P99_SKEW = (_P99_DEVIATIONS**2 - 1) / 6


def activation_bytes(plan: ShardingPlan, traffic: Traffic | None = None) -> MsArray:
    """Bytes that ranks hold beside weights and optimizer states, shape (R,).

    A rank's inputs, its outputs and what it receives in the forward exchange, and the gradients that it collects for
    rows which other ranks have copies of. Sequences count at the 99th percentile of a batch's lookups. Outputs of rows
    that every rank has a copy of are used where they are, and held once (FlexShard, Table 2).

    Args:
        plan: The plan, or that of one replica group.
        traffic: Of the plan, where it is known.
    """
    local_batch = plan.group_batch_size / plan.group_size
    if traffic is None or any(peak_factor(table, local_batch) > 1.0 for table in plan.tables.tables):
        traffic = plan_traffic(plan, peak_factor)
    held_ids_R = traffic.received_R(Stream.IDS) * (HELD_ID_BYTES / id_bytes(plan.tables.tables))
    bytes_R = traffic.received_R(Stream.LENGTHS) + held_ids_R
    bytes_R = bytes_R + traffic.sent_R(Stream.FORWARD) + traffic.received_R(Stream.FORWARD)
    forward = list(Stream).index(Stream.FORWARD)
    for layout in traffic.layouts:
        # No rank holds rows twice, whatever the number of replicas.
        bytes_R[layout.owners_O] += layout.gradient_bytes
        if layout.stays:
            bytes_R -= layout.pair_bytes_E[forward]
    return np.asarray(bytes_R)


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
