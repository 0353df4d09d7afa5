"""What a tier means on a topology: which ranks hold rows at a site, in how many replicas.

A site is what is left to choose once the tier is: a rank for `table_wise`, a node for `table_row_wise`. All other tiers
have one site, all ranks: rows split over them (`row_wise`), a replica on each (`data_parallel`) or one per node, split
within it (`flex`). `replicated`, copies on some of the ranks, has no sites.
"""

from __future__ import annotations

from autoshard.core import Tier, Topology

#: Tiers that have sites.
SITED_TIERS: tuple[Tier, ...] = tuple(tier for tier in Tier if tier is not Tier.REPLICATED)


def is_everywhere(tier: Tier) -> bool:
    """Whether all ranks hold some of the rows."""
    return tier not in (Tier.TABLE_WISE, Tier.TABLE_ROW_WISE)


def num_owners(tier: Tier, topology: Topology) -> int:
    """Ranks over which the rows of one replica are split."""
    if tier in (Tier.TABLE_WISE, Tier.DATA_PARALLEL):
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


def ranks_at(tier: Tier, site: int, topology: Topology) -> range:
    """Ranks that hold some of the rows at a site; they follow each other."""
    holders = num_holders(tier, topology)
    return range(site * holders, (site + 1) * holders)


def replicas_at(tier: Tier, site: int, topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Ranks over which the rows are split at a site, replica by replica."""
    ranks, owners = ranks_at(tier, site, topology), num_owners(tier, topology)
    return tuple(tuple(ranks[start : start + owners]) for start in range(0, len(ranks), owners))


def site_of(tier: Tier, rank: int, topology: Topology) -> int:
    """The site whose ranks one of them is."""
    return rank // num_holders(tier, topology)
