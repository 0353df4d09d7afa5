"""Replaying: measures what plans give each rank to run, on this machine.

Shape suffixes: R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoshard.core import LocalShard, ShardingPlan
from autoshard.formats.stores.drift import corrected_ms
from autoshard.results.comparison import MeasuredPlan
from bench.kernels.harness import Harness, Settings
from bench.measuring.devices import find_device

#: Largest number of sets that share their rounds, so that all ranks of all plans do where memory allows.
_MAX_GROUP_SETS = 4096
#: Spread above which a rank is marked as noisy; it is not measured again.
_MAX_SPREAD = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Plans as this machine ran them.

    Attributes:
        device: Key of the device, such as `cpu`.
        device_name: Full name of the processor.
        plans: For each plan, the kernel times of its ranks (those of one replica group).
        ceiling: As many ranks as the largest plan has, all with the same shards, measured in the same rounds: their
            balance is the best that this machine can tell from perfect.
        num_rounds: Runs of each rank that were measured.
        num_groups: Groups of ranks that had rounds of their own; above 1 where memory does not hold all at once.
    """

    device: str
    device_name: str
    plans: tuple[MeasuredPlan, ...]
    ceiling: MeasuredPlan
    num_rounds: int
    num_groups: int


def replay_plans(
    plans: Sequence[ShardingPlan],
    *,
    device: str = "auto",
    settings: Settings | None = None,
    advance: Callable[[float], None] = lambda _: None,
) -> Replay:
    """Measures each rank's kernels of several plans, all in the same interleaved rounds.

    Args:
        plans: At least one.
        device: `auto` (a GPU if there is one), `cpu` or `cuda`.
        settings: How to measure; the device's usual ones, with all ranks in the same rounds, when left out.
        advance: Told how many ranks' worth of `num_replayed(plans)` has just been done.

    Raises:
        InvalidTableError: If a shard is of a kind that the benchmark cannot measure.
        DeviceError: If the device is missing, or one rank's shards do not fit in its memory.
    """
    target = find_device(device)
    if settings is None:
        # No rank is measured again: what counts is that all ranks meet the machine in the same rounds.
        usual = Settings.for_device(target)
        settings = replace(usual, max_group_sets=_MAX_GROUP_SETS, max_attempts=1, max_spread=_MAX_SPREAD)
    harness = Harness(target, settings)
    ranks_of = [plan.local_shards() for plan in plans]
    num_ceiling = max(len(ranks) for ranks in ranks_of)
    sets = [shards for ranks in ranks_of for shards in ranks]
    measured = harness.measure([*sets, *[_typical(sets)] * num_ceiling], advance)
    # As if all groups had met the machine at the same speed.
    forward_ms, backward_ms = corrected_ms(measured)
    results, start = [], 0
    for num_ranks in [*map(len, ranks_of), num_ceiling]:
        stop = start + num_ranks
        results.append(
            MeasuredPlan(
                forward_ms_R=tuple(forward_ms[start:stop].tolist()),
                backward_ms_R=tuple(backward_ms[start:stop].tolist()),
            )
        )
        start = stop
    return Replay(
        device=target.key,
        device_name=target.name,
        plans=tuple(results[:-1]),
        ceiling=results[-1],
        num_rounds=settings.rounds.num_measured,
        num_groups=len({result.group for result in measured}),
    )


def num_replayed(plans: Sequence[ShardingPlan]) -> int:
    """Sets of shards that replaying the plans measures, those for the ceiling included."""
    sizes = [plan.group_size for plan in plans]
    return sum(sizes) + max(sizes)


def _typical(sets: Sequence[Sequence[LocalShard]]) -> Sequence[LocalShard]:
    """The set with the median number of lookups."""
    return sorted(sets, key=lambda shards: sum(shard.num_lookups for shard in shards))[len(sets) // 2]
