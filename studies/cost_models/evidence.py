"""Samples that methods learn from and are tested on, and how they are parted into the two.

Shape suffixes: S samples, N shards of all samples, U distinct shards.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from autoshard.core.costs import MsArray
from autoshard.formats.stores.samples import MeasuredShard, Sample, SampleTable
from costmodel.kernel.dataset import CostDataset, IndexArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """The samples that can be learned from, as arrays and as they were measured; index for index."""

    dataset: CostDataset
    samples: tuple[Sample, ...]
    num_left_out: int
    """Noisy samples and empty sets."""

    @classmethod
    def of(cls, table: SampleTable) -> Evidence:
        """What `CostDataset.from_samples` keeps of a table of samples."""
        dataset = CostDataset.from_samples(table)
        kept = tuple(sample for sample in table.samples if sample.shards and not sample.is_noisy)
        assert len(kept) == len(dataset)
        return cls(dataset=dataset, samples=kept, num_left_out=len(table) - len(kept))


#: What `autoshard collect` measures parts of tables for.
_SLICES = "slices"


def plain_sets(table: SampleTable) -> SampleTable:
    """Sets of whole tables that are all of one kind of kernel and one batch, those which are most frequent.

    AutoShard's features say nothing about either, so its network can tell apart only sets such as these.
    """
    kinds = Counter(_kind(measured) for sample in table.samples for measured in sample.shards)
    if not kinds:
        return table
    plain = kinds.most_common(1)[0][0]
    kept = (
        sample
        for sample in table.samples
        if sample.source != _SLICES and all(_kind(measured) == plain for measured in sample.shards)
    )
    return replace(table, samples=tuple(kept))


def _kind(measured: MeasuredShard) -> tuple[str, int]:
    return measured.shard.kernel_kind, measured.shard.num_bags


class SplitKind(StrEnum):
    """How samples are parted into those that methods learn from and those that they are tested on."""

    RANDOM = "random"
    """A share of the sets is kept from training; their tables are in other sets."""
    HALF = "half"
    """Half of the tables are unseen (AutoShard, Table 3): training has the sets of seen tables alone, the test sets
    of unseen ones alone. Few sets of random tables are either, and these are small, so samples should come from
    several files of tables (`autoshard import metasyn --part 1/4`): files are kept whole then."""
    MIXED = "mixed"
    """A tenth of the tables are unseen: training has the sets without any of them, the test all sets that hold one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """Which samples are for what.

    Attributes:
        kind: How they were parted.
        seed: Of the tables that are unseen, and of which of the pool's sets are held out.
        pool: Samples that the kernel model is given; it holds some out itself, by the seed.
        unseen: Samples with unseen tables.
    """

    kind: SplitKind
    seed: int
    pool: IndexArray
    unseen: IndexArray

    @classmethod
    def of(cls, dataset: CostDataset, kind: SplitKind, seed: int, unseen_share: float) -> Split:
        """Parts samples; tables are told apart by their names, slices of a table belong to it."""
        everything = np.arange(len(dataset))
        if kind is SplitKind.RANDOM:
            return cls(kind=kind, seed=seed, pool=everything, unseen=everything[:0])
        is_half = kind is SplitKind.HALF
        share_S = unseen_shares(
            dataset, half_of_tables(dataset, seed) if is_half else some_tables(dataset, unseen_share, seed)
        )
        is_unseen_S = share_S == 1 if is_half else share_S > 0
        return cls(kind=kind, seed=seed, pool=np.flatnonzero(share_S == 0), unseen=np.flatnonzero(is_unseen_S))


def some_tables(dataset: CostDataset, share: float, seed: int) -> frozenset[str]:
    """Names of a random share of the tables."""
    names = sorted({shard.table for shard in dataset.shards_U})
    order = np.random.default_rng([seed, len(names)]).permutation(len(names))
    return frozenset(names[index] for index in order[: round(len(names) * share)])


def half_of_tables(dataset: CostDataset, seed: int) -> frozenset[str]:
    """Names of about half of the tables, such that as few sets as possible hold tables of both halves.

    Tables that were measured together stay together, unless that leaves no two halves.
    """
    groups = _measured_together(dataset)
    num_tables = sum(map(len, groups))
    if max(map(len, groups)) > 0.6 * num_tables:
        return some_tables(dataset, 0.5, seed)
    chosen: set[str] = set()
    for index in np.random.default_rng([seed, num_tables]).permutation(len(groups)):
        if len(chosen) + len(groups[index]) / 2 <= num_tables / 2:  # nearer to half with it than without
            chosen |= groups[index]
    return frozenset(chosen)


def _measured_together(dataset: CostDataset) -> list[set[str]]:
    """Names of tables, in groups that share no set."""
    group_of: dict[str, set[str]] = {}
    shard_N, starts_S = dataset.shards_of(np.arange(len(dataset)))
    for shards in np.split(shard_N, starts_S[1:]):
        names = {dataset.shards_U[index].table for index in shards}
        merged = set().union(names, *(group_of.get(name, ()) for name in names))
        if any(group_of.get(name) is None or len(group_of[name]) < len(merged) for name in names):
            group_of |= dict.fromkeys(merged, merged)
    unique = {id(group): group for group in group_of.values()}
    return sorted(unique.values(), key=min)


def unseen_shares(dataset: CostDataset, unseen: frozenset[str]) -> MsArray:
    """Share of each sample's shards that are of unseen tables; shape (S,)."""
    is_unseen_U = np.array([shard.table in unseen for shard in dataset.shards_U], dtype=np.float64)
    shard_N, starts_S = dataset.shards_of(np.arange(len(dataset)))
    shares_S: MsArray = np.add.reduceat(is_unseen_U[shard_N], starts_S) / dataset.num_shards_S
    return shares_S
