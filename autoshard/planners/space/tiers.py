"""What a tier means on a topology: which ranks hold rows at a site, in how many replicas.

A site is what is left to choose once the tier is: a rank for `table_wise`, a node for `table_row_wise`. All other tiers
have one site, all ranks: rows split over them (`row_wise`), a replica on each (`data_parallel`) or one per node, split
within it (`flex`). `replicated`, copies on some of the ranks, has no sites.
"""

from __future__ import annotations

from functools import lru_cache

from autoshard.core import Tier, Topology

#: Tiers that have sites.
SITED_TIERS: tuple[Tier, ...] = tuple(tier for tier in Tier if tier is not Tier.REPLICATED)

#: Tiers whose rows no site splits over ranks.
_ON_SINGLE_RANKS = frozenset({Tier.TABLE_WISE, Tier.DATA_PARALLEL})
#: Tiers that leave other ranks without the rows.
_AT_ONE_SITE = frozenset({Tier.TABLE_WISE, Tier.TABLE_ROW_WISE})


def is_everywhere(tier: Tier) -> bool:
    """Whether all ranks hold some of the rows."""
    return tier not in _AT_ONE_SITE


def num_owners(tier: Tier, topology: Topology) -> int:
    """Ranks over which the rows of one replica are split."""
    if tier in _ON_SINGLE_RANKS:
        return 1
    return topology.world_size if tier is Tier.ROW_WISE else topology.local_world_size


def num_holders(tier: Tier, topology: Topology) -> int:
    """Ranks that hold some of the rows."""
    return topology.world_size if is_everywhere(tier) else num_owners(tier, topology)


def num_replicas(tier: Tier, topology: Topology) -> int:
    """Copies of the rows."""
    return num_holders(tier, topology) // num_owners(tier, topology)


def num_sites(tier: Tier, topology: Topology) -> int:
    """Places to choose from."""
    return topology.world_size // num_holders(tier, topology)


def replicas_at(tier: Tier, site: int, topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Ranks over which the rows are split at a site, replica by replica."""
    holders = num_holders(tier, topology)
    return _replicas(site * holders, (site + 1) * holders, num_owners(tier, topology))


# Thousands of shards share a handful of sites, each of up to thousands of ranks.
@lru_cache(maxsize=1 << 14)
def _replicas(start: int, stop: int, owners: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(first, first + owners)) for first in range(start, stop, owners))


def site_of(tier: Tier, rank: int, topology: Topology) -> int:
    """The site whose ranks one of them is."""
    return rank // num_holders(tier, topology)
