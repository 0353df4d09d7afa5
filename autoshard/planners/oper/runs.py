"""Row groups of one table on one rank, brought side by side: fewer shards, and lookups and bytes both even.

Shape suffixes: N groups of a table, in falling order of what varies, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from autoshard.core.access import FloatArray, IntArray
from autoshard.planners.oper.row_group import Owner, RowGroup

Measure: TypeAlias = Literal["num_bytes", "lookup_bytes"]
"""Of a row group."""


def in_runs(
    owners: Sequence[Owner], load_R: FloatArray, *, alike: Measure, tolerance: float, varying: Measure
) -> list[Owner]:
    """Deals the groups of each table to the ranks anew: to each rank one run of neighbours from either end.

    Every rank gets as many groups of a table as it has, so that what is alike about them stays as even as it is. What
    varies along the table then depends on how many of them are from the end that has most of it: as the number rises,
    so does the rank's share, and one number comes nearest to an even one. What a rank leaves is one stretch again,
    for the next rank.

    Args:
        owners: Groups and their ranks, placed so that what is alike is even.
        load_R: What varies, as far as each rank has it, from these groups and all others.
        alike: What the groups of a table have the same of.
        tolerance: Groups that have more or less of it than the usual amount, by more than this share, keep their ranks.
        varying: What they differ by along the table.

    Returns:
        The same groups, each with its rank, in the same order.
    """
    rank_of = dict(owners)
    load_R = load_R.copy()
    of_table = _alike_by_table(owners, alike, tolerance)
    weights = {table: np.array([float(getattr(group, varying)) for group in of_table[table]]) for table in of_table}
    # Large tables first: small ones level what these leave uneven.
    for table in sorted(of_table, key=lambda table: -float(weights[table].sum())):
        groups, weight_N = of_table[table], weights[table]
        if weight_N[0] < weight_N[-1]:
            groups, weight_N = groups[::-1], weight_N[::-1]
        before_N = np.array([rank_of[group] for group in groups])
        np.subtract.at(load_R, before_N, weight_N)
        after_N = _dealt(weight_N, np.bincount(before_N, minlength=len(load_R)), load_R)
        np.add.at(load_R, after_N, weight_N)
        rank_of.update(zip(groups, after_N.tolist(), strict=True))
    return [(group, rank_of[group]) for group, _ in owners]


def _alike_by_table(owners: Sequence[Owner], alike: Measure, tolerance: float) -> dict[str, list[RowGroup]]:
    """For each table the groups that may change ranks, by access rank."""
    tables: dict[str, list[RowGroup]] = {}
    for group, _ in owners:
        if group.is_cuttable:
            tables.setdefault(group.label, []).append(group)
    for table, groups in tables.items():
        amount_N = np.array([float(getattr(group, alike)) for group in groups])
        usual = np.median(amount_N)
        same_N = np.abs(amount_N - usual) <= tolerance * usual
        same = [group for group, is_same in zip(groups, same_N, strict=True) if is_same]
        tables[table] = sorted(same, key=lambda group: group.start)
    return {table: groups for table, groups in tables.items() if len(groups) > 1}


def _dealt(weight_N: FloatArray, counts_R: IntArray, load_R: FloatArray) -> IntArray:
    """A rank for each group of a table, with as many groups per rank as `counts_R` says."""
    level = (load_R[counts_R > 0].sum() + weight_N.sum()) / np.count_nonzero(counts_R)
    # Who needs a share far from the usual goes first, while both ends are still far from it, too.
    unusual_R = np.abs((level - load_R) / np.maximum(counts_R, 1) - weight_N.mean())
    order = [rank for rank in np.argsort(-unusual_R, kind="stable").tolist() if counts_R[rank]]
    below_N = np.concatenate([[0.0], np.cumsum(weight_N)])
    dealt_N = np.empty(len(weight_N), dtype=np.int64)
    first, last = 0, len(weight_N)
    for place, rank in enumerate(order):
        count = int(counts_R[rank])
        # Groups are whole, so that each rank gets a little more or less than it should: the others share that.
        left = below_N[last] - below_N[first]
        wanted = (load_R[order[place:]].sum() + left) / (len(order) - place) - load_R[rank]
        from_first = np.arange(count + 1)
        gets = below_N[first + from_first] - below_N[first] + below_N[last] - below_N[last - count + from_first]
        taken = int(np.abs(gets - wanted).argmin())
        dealt_N[first : first + taken] = rank
        dealt_N[last - (count - taken) : last] = rank
        first, last = first + taken, last - (count - taken)
    return dealt_N
