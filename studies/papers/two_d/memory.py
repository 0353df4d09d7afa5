"""Device memory of a training step at its fullest: in the backward pass, while lookups are grouped by row.

Shape suffixes: R ranks of a replica group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from autoshard.core import ShardingPlan
from autoshard.core.costs import MsArray
from autoshard.evaluation.traffic import HELD_ID_BYTES, Stream, id_bytes, plan_traffic

#: Of an A100 with 80 GB. The paper does not name its GPU.
GPU_BYTES: Final = 80e9
#: Bytes per lookup that FBGEMM holds beside the ids while it groups a pooled batch's lookups by row, with ids of 8
#: bytes (`transpose_embedding_input`, fbgemm_gpu/src/split_embeddings_utils): linear ids, sorted and not (16), their
#: positions, sorted and not (8), the distinct ids with room for all (8), their counts and the counts' sums (8).
SORT_BYTES: Final = 16 + 8 + 8 + 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Bytes of each rank of a group, shapes (R,).

    Attributes:
        tables_R: Weights and moments.
        ids_R: Ids and lengths: of the rank's own samples, and those that it serves.
        sort_R: Buffers in which served lookups are grouped by row.
        exchanged_R: Embeddings of the rank's samples, their gradients, and the gradients that it receives.
    """

    tables_R: MsArray
    ids_R: MsArray
    sort_R: MsArray
    exchanged_R: MsArray

    @classmethod
    def of(cls, plan: ShardingPlan) -> StepMemory:
        """Of a plan without replicas within its groups."""
        group = plan.of_one_group()
        traffic = plan_traffic(group)
        tables_R = np.zeros(group.group_size)
        for shard in group.held_shards():
            tables_R[shard.ranks] += shard.local.memory_bytes
        # As they are held, which is wider than they travel where tables are short.
        held_per_sent = HELD_ID_BYTES / id_bytes(group.tables.tables)
        served_R = traffic.received_R(Stream.IDS) * held_per_sent
        own_R = traffic.sent_R(Stream.IDS) * held_per_sent
        return cls(
            tables_R=tables_R,
            ids_R=served_R + own_R + traffic.received_R(Stream.LENGTHS),
            sort_R=served_R / HELD_ID_BYTES * SORT_BYTES,
            exchanged_R=traffic.received_R(Stream.FORWARD)
            + traffic.sent_R(Stream.BACKWARD)
            + traffic.received_R(Stream.BACKWARD),
        )

    @property
    def lookups_R(self) -> MsArray:  # noqa: N802 - a shape suffix
        """All but the tables."""
        return np.asarray(self.ids_R + self.sort_R + self.exchanged_R)

    @property
    def total_R(self) -> MsArray:  # noqa: N802 - a shape suffix
        """Everything about tables."""
        return np.asarray(self.tables_R + self.lookups_R)
