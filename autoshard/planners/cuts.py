"""Cuts shards that alone decide how fast the slowest rank can be.

Shape suffix: N items.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autoshard.core import RowRange, Shard, local_shard
from autoshard.planners.placement import PlacementProblem, alone

#: How shards may be cut; `none` for not at all.
CUTS: tuple[str, ...] = ("none", "columns", "rows")
#: Kernels move four floats at a time.
_COLUMN_STEP = 4
#: Times that a shard may be halved.
_MAX_CUTS = 10
#: What the costlier half may cost of the whole for the cut to be made.
_MAX_PART_COST = 0.9


def halves(shard: Shard, cut: str) -> tuple[Shard, Shard] | None:
    """The shard as two of about equal size, or None if it is too small: widths are multiples of four columns.

    Source:
        Neo (Mudigere et al., ISCA 2022), Sec. 4: column-wise shards see every lookup, row-wise ones their share.
    """
    if cut == "columns":
        start, stop = shard.columns
        middle = start + -(-(stop - start) // (2 * _COLUMN_STEP)) * _COLUMN_STEP
        if middle >= stop:
            return None
        return replace(shard, columns=(start, middle)), replace(shard, columns=(middle, stop))
    rows = shard.rows
    middle = (rows.start + rows.stop) // 2
    if middle == rows.start:
        return None
    lower = RowRange(start=rows.start, stop=middle, by=rows.by)
    upper = RowRange(start=middle, stop=rows.stop, by=rows.by)
    return replace(shard, rows=lower), replace(shard, rows=upper)


def with_costly_cut(problem: PlacementProblem, limit_ms: float, cut: str) -> PlacementProblem | None:
    """The problem with shards in halves, and these in halves again, until each alone costs at most `limit_ms`.

    Shards that must share a rank with others stay whole, and so do those that are too small to be cut, or whose halves
    are hardly cheaper: kernels take as long for narrow rows as for those of a cache line.

    Returns:
        None if nothing was cut.
    """
    finer = problem
    for _ in range(_MAX_CUTS):
        parts = _parts(finer, limit_ms, cut)
        if not parts:
            break
        shards = [part for index, shard in enumerate(finer.shards) for part in parts.get(index, (shard,))]
        finer = PlacementProblem.of(finer.tables, finer.topology, finer.model, shards)
    return None if finer is problem else finer


def _parts(problem: PlacementProblem, limit_ms: float, cut: str) -> dict[int, tuple[Shard, Shard]]:
    """Halves of the shards that cost more than the limit, by index, where they pay."""
    wholes: list[tuple[int, float]] = []
    parts: list[tuple[Shard, Shard]] = []
    for item in np.flatnonzero(problem.kernel_ms_N > limit_ms):
        members = problem.members[item]
        both = halves(problem.shards[members[0]], cut) if len(members) == 1 else None
        if both is not None:
            wholes.append((members[0], float(problem.kernel_ms_N[item])))
            parts.append(both)
    if not parts:
        return {}
    batch_size = problem.tables.batch_size
    locals_ = [local_shard(alone(part), group_batch_size=batch_size) for both in parts for part in both]
    slower_ms = problem.model.price(problem.model.encode(locals_)).reshape(-1, 2).max(axis=1)
    return {
        index: both
        for (index, whole_ms), both, part_ms in zip(wholes, parts, slower_ms, strict=True)
        if part_ms <= _MAX_PART_COST * whole_ms
    }
