"""What ranks do in a step beside their kernels: the amounts that a step is priced from.

Plans are added up here (`RankWork.of`), placements of a search in `planners.space.step_cost` (`StepPrices.work`): two
accounts of the same amounts, and one price of them (`step_price.StepPricer`).

Shape suffixes: B placements, R ranks of a replica group, L levels or layouts, E streams, X `EXCHANGE_PARTS`, N shards,
K kinds of shards, Q fused kernels, 2 kinds of bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Final

import numpy as np

from autoshard.core import ShardingPlan
from autoshard.core.costs import LinkBytes, MsArray
from autoshard.core.shard import FusedKernel, fused_kernel
from autoshard.core.step import EXCHANGE_PARTS, StepPart
from autoshard.evaluation.reader_work import needed_once, reader_ms
from autoshard.evaluation.traffic import Stream, Traffic

#: What travels in the all-to-all of each part: lengths and ids together, in messages with room for the ids of the batch
#: before (Neo Sec. 7.1 and TorchRec send ids after their lengths).
EXCHANGED: Final = {
    StepPart.INPUT: (Stream.LENGTHS, Stream.IDS),
    StepPart.FORWARD_EXCHANGE: (Stream.FORWARD,),
    StepPart.BACKWARD_EXCHANGE: (Stream.BACKWARD,),
}
#: Streams whose sums a reduce-scatter carries, and their gradients its all-gather.
SCATTERED: Final = (Stream.FORWARD, Stream.BACKWARD)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankWork:
    """Amounts of a step by rank, of one plan or of B placements; without an axis B for one.

    Attributes:
        links: Bytes of the all-to-all of each of `EXCHANGE_PARTS` by level, shapes (L, X, B, R).
        handled_EBR: Bytes that ranks send and receive, their own and those of other collectives included.
        served_lengths_BR: Bytes of lengths that they receive.
        scattered_2B: Bytes of the larger buffer of the reduce-scatter, and of the all-gather.
        synced_BR2: Bytes of gradients that all-reduces sum, and that all-gathers bring; R is 1 where ranks are alike.
        reading_ms_XBR: What they work on what they read, see `reader_ms`; R is 1 where ranks are alike.
        once_2BR: Whether they do what `needed_once` names; R is 1, since all ranks read alike.
        num_kernels_BR: Fused kernels that they run.
        num_features_BR: Features that these serve.
    """

    links: LinkBytes
    handled_EBR: MsArray
    served_lengths_BR: MsArray
    scattered_2B: MsArray
    synced_BR2: MsArray
    reading_ms_XBR: MsArray
    once_2BR: MsArray
    num_kernels_BR: MsArray
    num_features_BR: MsArray

    @classmethod
    def of(cls, group: ShardingPlan, traffic: Traffic) -> RankWork:
        """Adds up what the ranks of a replica group do.

        Args:
            group: The plan of one replica group.
            traffic: Of it.
        """
        by_stream = traffic.links(group.topology)
        by_part = [reduce(add, [by_stream[stream] for stream in EXCHANGED[part]]) for part in EXCHANGE_PARTS]
        num_kernels_R, num_features_R = _served(group)
        arrays = group.arrays
        local_batch = group.group_batch_size / group.group_size
        return cls(
            links=LinkBytes(
                leaving_LR=np.stack([one.leaving_LR for one in by_part], axis=1),
                arriving_LR=np.stack([one.arriving_LR for one in by_part], axis=1),
            ),
            handled_EBR=np.stack([traffic.sent_R(stream) + traffic.received_R(stream) for stream in Stream]),
            served_lengths_BR=traffic.received_R(Stream.LENGTHS),
            scattered_2B=np.array([traffic.scattered_bytes(stream) for stream in SCATTERED]),
            synced_BR2=np.stack([traffic.reduced_R, traffic.gathered_R], axis=1),
            # All ranks read as many samples of all tables, and so work alike.
            reading_ms_XBR=reader_ms(arrays.first_K, local_batch, group.topology)[arrays.kind_N].sum(axis=0)[:, None],
            once_2BR=needed_once(arrays.first_K, group.group_size).max(axis=0)[:, None],
            num_kernels_BR=num_kernels_R,
            num_features_BR=num_features_R,
        )


def _served(plan: ShardingPlan) -> tuple[MsArray, MsArray]:
    """Fused kernels of each rank, and features that they serve, shapes (R,)."""
    arrays = plan.arrays
    kernels: dict[FusedKernel, int] = {}
    kernel_K = np.array(
        [kernels.setdefault(fused_kernel(one.shard.table, one.update), len(kernels)) for one in arrays.first_K]
    )
    features_K = np.array([len(one.shard.table.features) for one in arrays.first_K], dtype=np.float64)
    features_L = np.bincount(arrays.layout_N, features_K[arrays.kind_N])
    runs_LQ = np.zeros((len(arrays.ranks_L), len(kernels)), dtype=np.bool_)
    runs_LQ[arrays.layout_N, kernel_K[arrays.kind_N]] = True
    num_features_R, runs_RQ = np.zeros(plan.group_size), np.zeros((plan.group_size, len(kernels)), dtype=np.bool_)
    for ranks, num_features, runs_Q in zip(arrays.ranks_L, features_L, runs_LQ, strict=True):
        num_features_R[ranks] += num_features
        runs_RQ[ranks] |= runs_Q
    return runs_RQ.sum(axis=1, dtype=np.float64), num_features_R
