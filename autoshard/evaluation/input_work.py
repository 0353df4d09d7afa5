"""Time that ranks take to split the ids of a batch by the ranks that hold their rows, besides sending them.

Shape suffix: N shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from autoshard.core import Exchange, GradSync, PlacedShard, Split, Topology
from autoshard.core.costs import MsArray
from autoshard.core.machine import device_family


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpeed:
    """What the runtime takes to distribute a batch's ids besides sending them, in seconds.

    What a batch takes whatever is in it is the weight of `steps` (`core.step.ENGINE_WORK`).

    Attributes:
        lookup_s: Of a lookup, for every shard that it is sent to: checked, put in order, packed, unpacked.
        length_s: Of the length of a bag, for every owner that is asked for its sum.
        cut_s: Of a lookup in a table whose rows several ranks hold: lookups are put in the order of owners.
        dealt_s: As `cut_s`, added where rows are not in one block after the other: the place of each is worked out.
        row_s: Of a lookup that is answered with its row: it is matched to the rows that will come.
        repeat_s: Of such a lookup where rows are asked for once: ids are sorted.
        request_s: Of asking one owner for rows of one shard.
        told_s: Of a distinct row with several replicas that a rank tells their holders that it hits, on each of these:
            rows of all ranks are brought together.
    """

    lookup_s: float
    length_s: float
    cut_s: float
    dealt_s: float
    row_s: float
    repeat_s: float
    request_s: float
    told_s: float


#: By device family. Fitted to what threads computed in 64 plans in virtual time (2 and 8 ranks, 1,500 to 780,000
#: lookups a rank; virtual AMD EPYC with 32 MiB of last-level cache, 2 cores, torch 2.13, November 2026), which these
#: take 0.83 to 1.29 times (docs/results/virtual-time.md). Rows in blocks and ranges, and rows that are asked for once,
#: were not among the plans: `cut_s` is of `python -m studies input-work`, `dealt_s` what the plans leave for it. On
#: GPUs nobody has measured it.
INPUT_SPEED: Final = {
    "cpu": InputSpeed(
        lookup_s=1.5e-9,
        length_s=15e-9,
        cut_s=13e-9,
        dealt_s=12e-9,
        row_s=2e-9,
        repeat_s=25e-9,
        request_s=10e-6,
        told_s=120e-9,
    ),
}
_NOTHING: Final = InputSpeed(**dict.fromkeys((field.name for field in fields(InputSpeed)), 0.0))


def input_speed(device: str) -> InputSpeed:
    """What was measured on a kind of device; nothing takes time on those where nobody measured it."""
    return INPUT_SPEED.get(device_family(device), _NOTHING)


def input_work_ms(placed_N: Sequence[PlacedShard], local_batch: float, topology: Topology) -> MsArray:
    """What each rank that reads a shard takes to ask for its lookups, in ms; shape (N,).

    Ranks serve about as much as they ask for, and what serving takes is counted here.

    Args:
        placed_N: Shards in a plan over all ranks of the topology.
        local_batch: Samples of each rank.
        topology: Of the ranks.

    Source:
        What `autoshard.runtime.engine.ids` runs. Measured over predicted: docs/results/execution.md.
    """
    speed = input_speed(topology.device)
    if speed is _NOTHING:
        return np.zeros(len(placed_N))
    return np.array([_seconds(placed, local_batch, topology.world_size, speed) for placed in placed_N]) * 1e3


def _seconds(placed: PlacedShard, local_batch: float, num_ranks: int, speed: InputSpeed) -> float:
    table, num_owners = placed.shard.table, len(placed.replicas[0])
    profile, share = placed.shard.access()
    is_range = placed.shard.num_embeddings < table.num_embeddings
    lookup_s = speed.lookup_s + speed.cut_s * (is_range or num_owners > 1)
    if (num_owners > 1 and placed.split is not Split.BLOCK) or (is_range and len(placed.replicas) > 1):
        lookup_s += speed.dealt_s
    num_lookups = local_batch * table.pooling_factor * share
    run = placed.as_run(num_ranks)
    if run.exchange is Exchange.PARTIAL_SUMS:
        apart_s = speed.length_s * local_batch * len(table.features) * num_owners
    else:
        apart_s = speed.request_s * num_owners
        lookup_s += speed.row_s + speed.repeat_s * run.deduplicate
    if placed.grad_sync in (GradSync.SPARSE, GradSync.ALL_GATHER):
        # Each holder of a part of the rows hears of all ranks' rows in it.
        apart_s += speed.told_s * num_ranks / num_owners * float(profile.expected_distinct(num_lookups))
    return apart_s + lookup_s * num_lookups
