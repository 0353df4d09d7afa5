"""What ranks have to send each other to get from one plan to another, and how long that takes.

Shape suffixes: R ranks of the world, L levels of links.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.core import CommModel, GroupLayout, PlacedShard, RowsBy, ShardingPlan, Split
from autoshard.core.access import IntArray
from autoshard.core.access.orders import BY_ID, Reordering
from autoshard.core.costs import LinkBytes, MsArray
from autoshard.core.declared import Role, values
from autoshard.evaluation.communication import link_levels
from autoshard.evaluation.stages import all_to_alls_ms

#: How rows are dealt, among how many ranks, over which range if that decides where they lie, and to which rank.
_Dealing = tuple[Split, int, tuple[float, float] | None, int]


@dataclass(frozen=True, slots=True)
class HeldPiece:
    """What one rank holds of a shard: rows [start, stop), or one of several shares of them, and columns.

    Attributes:
        by: What the rows are counted by.
        start: First row.
        stop: Row after the last.
        columns: First column, and the column after the last.
        num_rows: Rows of the table.
        bytes_per_cell: Of weights and optimizer states.
        dealing: How the rows are dealt; None for all rows of the range.
    """

    by: RowsBy
    start: float
    stop: float
    columns: tuple[int, int]
    num_rows: int
    bytes_per_cell: float
    dealing: _Dealing | None = None

    @property
    def num_bytes(self) -> float:
        """Bytes of it."""
        return self._bytes(self.stop - self.start, self.columns[1] - self.columns[0]) / self._num_shares

    def shared_bytes(self, earlier: HeldPiece, orders: Reordering | None = None) -> float:
        """Bytes of this piece that an earlier one has, too.

        Args:
            earlier: A piece of the same table.
            orders: From the earlier piece's row order to this one's, by which rows by id are in the order of their
                ids; None for one order of both, and for rows by id that lie anywhere in it.
        """
        columns = min(self.columns[1], earlier.columns[1]) - max(self.columns[0], earlier.columns[0])
        if columns <= 0:
            return 0.0
        strewn = 0.0
        if orders is not None:
            strewn, rows = orders.shared_rows((earlier.start, earlier.stop), (self.start, self.stop))
        elif self.by is earlier.by:
            rows = max(0.0, min(self.stop, earlier.stop) - max(self.start, earlier.start))
        else:
            rows = (self.stop - self.start) * (earlier.stop - earlier.start) / self.num_rows
        shares = self._num_shares * earlier._num_shares
        if self.dealing == earlier.dealing:
            rows *= earlier._num_shares
        elif self.dealing is not None and earlier.dealing is not None and self.dealing[:3] == earlier.dealing[:3]:
            rows = 0.0  # different shares of one dealing
        return self._bytes(rows + strewn, columns) / shares

    @property
    def _num_shares(self) -> int:
        return 1 if self.dealing is None else self.dealing[1]

    def _bytes(self, rows: float, columns: int) -> float:
        return rows * columns * self.bytes_per_cell


def held_pieces(held: Sequence[PlacedShard], plan: ShardingPlan) -> dict[int, list[HeldPiece]]:
    """What the ranks of the world hold of a table.

    Args:
        held: Its shards.
        plan: Their plan.
    """
    found: dict[int, list[HeldPiece]] = {}
    for placed in held:
        for ranks in placed.replicas:
            for position, rank in enumerate(ranks):
                piece = _piece(placed, position, len(ranks))
                for world_rank in plan.replica_groups.world_ranks(rank, plan.topology):
                    found.setdefault(world_rank, []).append(piece)
    return found


def _piece(placed: PlacedShard, position: int, num_ranks: int) -> HeldPiece:
    shard = placed.shard
    start, stop = float(shard.rows.start), float(shard.rows.stop)
    dealing: _Dealing | None = None
    if num_ranks > 1 and placed.split is Split.BLOCK:
        size = -(-shard.num_embeddings // num_ranks)
        start, stop = min(start + position * size, stop), min(start + (position + 1) * size, stop)
    elif num_ranks > 1 and placed.split is Split.CYCLIC:
        # Ranges that begin a whole number of turns apart are dealt alike.
        dealing = (placed.split, num_ranks, None, (position + shard.rows.start) % num_ranks)
    elif num_ranks > 1:
        dealing = (placed.split, num_ranks, (start, stop), position)
    return HeldPiece(
        shard.rows.by,
        start,
        stop,
        shard.columns,
        shard.table.num_embeddings,
        shard.storage_bytes / (shard.num_embeddings * shard.embedding_dim),
        dealing,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Migration:
    """Bytes of weights and optimizer states that ranks receive to get from one plan to another.

    Attributes:
        bytes_of: By table; tables of which nothing moves are left out.
        links_of: What leaves and reaches ranks for each of these tables.
        num_levels: L.
        num_ranks: R.
    """

    bytes_of: Mapping[str, float]
    links_of: Mapping[str, LinkBytes]
    num_levels: int
    num_ranks: int

    @property
    def num_bytes(self) -> float:
        """Bytes of all tables."""
        return sum(self.bytes_of.values())

    def without(self, kept: Collection[str]) -> Migration:
        """The same without some tables."""
        return replace(
            self,
            bytes_of={name: one for name, one in self.bytes_of.items() if name not in kept},
            links_of={name: one for name, one in self.links_of.items() if name not in kept},
        )

    def ms(self, plan: ShardingPlan, comm: CommModel) -> float:
        """Time until the last rank has what it needs, by the links of the plan's topology: that of one all-to-all.

        Args:
            plan: Either plan.
            comm: Prices collectives.
        """
        shape = (self.num_levels, self.num_ranks)
        leaving_LR: MsArray = sum((one.leaving_LR for one in self.links_of.values()), np.zeros(shape))
        arriving_LR: MsArray = sum((one.arriving_LR for one in self.links_of.values()), np.zeros(shape))
        if not arriving_LR.any():
            return 0.0
        links = LinkBytes(leaving_LR=leaving_LR, arriving_LR=arriving_LR)
        return float(all_to_alls_ms(links, comm, plan.topology).max())


def migration(
    before: ShardingPlan,
    after: ShardingPlan,
    orders_before: Mapping[str, IntArray] | None = None,
    orders_after: Mapping[str, IntArray] | None = None,
) -> Migration:
    """What ranks receive to get from one plan to another of the same tables and ranks.

    A rank receives what it holds after and not before, from the nearest ranks that hold it: first over the innermost
    links, from each as much as it has of it. Rows that are dealt in two different ways stay where independent dealing
    has them twice.

    Args:
        before: A valid plan.
        after: Another one.
        orders_before: Row orders of its tables that list ids; tables that are left out are in the order of their ids.
        orders_after: Those of the second plan.
    """
    held_before, held_after = by_table(before), by_table(after)
    levels_RR = link_levels(after.topology)
    num_levels = len(after.topology.levels)
    # Ranks of layouts are numbered within a group.
    are_same_ranks = _group_places(before) == _group_places(after)
    links = {}
    for name, held in held_after.items():
        orders = reordering(name, held_before[name], held, orders_before or {}, orders_after or {})
        if are_same_ranks and orders is None and layouts(held_before[name]) == layouts(held):
            continue
        kept, wanted = held_pieces(held_before[name], before), held_pieces(held, after)
        found = _table_links(kept, wanted, orders, levels_RR, num_levels)
        if found.arriving_LR.any():
            links[name] = found
    return Migration(
        bytes_of={name: float(one.arriving_LR.sum()) for name, one in links.items()},
        links_of=links,
        num_levels=num_levels,
        num_ranks=after.topology.world_size,
    )


def _group_places(plan: ShardingPlan) -> tuple[int, GroupLayout | None]:
    """What decides which ranks are of a replica group."""
    groups = plan.replica_groups
    return groups.num_groups, groups.layout if groups.num_groups > 1 else None


def renumbered(
    before: ShardingPlan,
    after: ShardingPlan,
    orders_before: Mapping[str, IntArray],
    orders_after: Mapping[str, IntArray],
) -> ShardingPlan:
    """The second plan with its ranks in the places, among ranks that are alike, where most stays from the first.

    Ranks of a unit of one level stay together, so that links carry what they did. Plans of several replica groups, with
    ranks that differ in memory, links or the tables that they may hold, stay as they are.

    Args:
        before: A valid plan.
        after: Another one of the same tables and ranks.
        orders_before: As `migration` takes them.
        orders_after: Alike.
    """
    topology, tables = after.topology, after.tables.tables
    are_alike = not topology.overrides and topology.fetch_ms is None and after.replica_groups.num_groups == 1
    if not are_alike or before.replica_groups.num_groups > 1 or any(one.constraints.pinned_ranks for one in tables):
        return after
    held_before, stays_RR = by_table(before), np.zeros((topology.world_size, topology.world_size))
    for name, held in by_table(after).items():
        orders = reordering(name, held_before[name], held, orders_before, orders_after)
        kept, wanted = _holders(held_pieces(held_before[name], before)), _holders(held_pieces(held, after))
        for piece, new_ranks in wanted.items():
            for earlier, ranks in kept.items():
                stays_RR[np.ix_(ranks, new_ranks)] += piece.shared_bytes(earlier, orders)
    places = _best_places(stays_RR, [level.size for level in topology.levels])
    return replace(after, shards=tuple(_moved(placed, places) for placed in after.shards), predicted=None)


def _best_places(stays_RR: MsArray, sizes: Sequence[int]) -> list[int]:
    """The new rank of each rank, by what would stay: the rows of the matrix are places, the columns ranks."""
    from scipy.optimize import linear_sum_assignment

    # For units of ever larger levels: what stays if one is put in the place of another, and how its ranks are put then.
    gains_UU, inner = stays_RR, {(place, rank): [(place, rank)] for place, rank in np.ndindex(stays_RR.shape)}
    units = 1
    for size in sizes:
        ratio, units = size // units, size
        num_units = len(gains_UU) // ratio
        more_UU, joined = np.zeros((num_units, num_units)), {}
        for place, unit in np.ndindex(num_units, num_units):
            part = gains_UU[place * ratio : (place + 1) * ratio, unit * ratio : (unit + 1) * ratio]
            rows, columns = linear_sum_assignment(part, maximize=True)
            more_UU[place, unit] = part[rows, columns].sum()
            pairs = zip((rows + place * ratio).tolist(), (columns + unit * ratio).tolist(), strict=True)
            joined[place, unit] = [one for pair in pairs for one in inner[pair]]
        gains_UU, inner = more_UU, joined
    places = {rank: place for place, rank in inner[0, 0]}
    return [places[rank] for rank in range(len(stays_RR))]


def _moved(placed: PlacedShard, places: Sequence[int]) -> PlacedShard:
    """A shard whose ranks are in other places."""
    replicas = [tuple(places[rank] for rank in ranks) for ranks in placed.replicas]
    if placed.fetch is None:
        return replace(placed, replicas=tuple(sorted(replicas, key=min)))
    by_place = sorted(range(len(places)), key=places.__getitem__)
    return replace(placed, replicas=tuple(replicas), fetch=tuple(placed.fetch[rank] for rank in by_place))


def _holders(pieces_of: Mapping[int, Sequence[HeldPiece]]) -> dict[HeldPiece, list[int]]:
    """The ranks that hold each piece."""
    ranks_of: dict[HeldPiece, list[int]] = {}
    for rank, pieces in pieces_of.items():
        for piece in pieces:
            ranks_of.setdefault(piece, []).append(rank)
    return ranks_of


def by_table(plan: ShardingPlan) -> dict[str, list[PlacedShard]]:
    """A plan's shards by table."""
    found: dict[str, list[PlacedShard]] = {table.name: [] for table in plan.tables.tables}
    for placed in plan.shards:
        found[placed.shard.table.name].append(placed)
    return found


def layouts(held: Sequence[PlacedShard]) -> list[tuple[object, ...]]:
    """All of a table's shards with their ranks, and its size: where these are equal, ranks hold the same."""
    return [(*cut(placed), placed.replicas, placed.fetch, *values(placed.shard.table, Role.MEMORY)) for placed in held]


def cut(placed: PlacedShard) -> tuple[object, ...]:
    """All of a shard's layout but its ranks."""
    return (
        *(placed.shard.rows, placed.shard.columns, placed.tier, tuple(map(len, placed.replicas))),
        *(placed.split, placed.exchange, placed.collective, placed.deduplicate, placed.grad_sync, placed.memory),
    )


def reordering(
    name: str,
    before: Sequence[PlacedShard],
    after: Sequence[PlacedShard],
    orders_before: Mapping[str, IntArray],
    orders_after: Mapping[str, IntArray],
) -> Reordering | None:
    """From the order in which a table's rows are counted before to that after; None where they are counted alike.

    Args:
        name: The table's name.
        before: Its shards in a plan.
        after: Those in another one.
        orders_before: As `migration` takes them.
        orders_after: Alike.
    """
    was_by_rank, is_by_rank = _is_by_rank(before), _is_by_rank(after)
    order_before = orders_before.get(name, BY_ID) if was_by_rank else BY_ID
    order_after = orders_after.get(name, BY_ID) if is_by_rank else BY_ID
    if was_by_rank is is_by_rank and np.array_equal(order_before, order_after):
        return None
    return Reordering.of(order_before, order_after, after[0].shard.table.num_embeddings)


def _is_by_rank(held: Sequence[PlacedShard]) -> bool:
    return any(placed.shard.rows.by is RowsBy.ACCESS_RANK for placed in held)


def _table_links(
    before: Mapping[int, Sequence[HeldPiece]],
    after: Mapping[int, Sequence[HeldPiece]],
    orders: Reordering | None,
    levels_RR: np.ndarray[tuple[int, int], np.dtype[np.int64]],
    num_levels: int,
) -> LinkBytes:
    leaving_LR, arriving_LR = (np.zeros((num_levels, len(levels_RR))) for _ in range(2))
    ranks_of = _holders(before)
    shared: dict[HeldPiece, MsArray] = {}
    for rank, pieces in after.items():
        for piece in pieces:
            if piece not in shared:
                shared[piece] = np.zeros(len(levels_RR))
                for earlier, ranks in ranks_of.items():
                    shared[piece][ranks] += piece.shared_bytes(earlier, orders)
            has_R = shared[piece]
            missing = max(0.0, piece.num_bytes - float(has_R[rank]))
            for level in range(num_levels):
                there_R = np.where(levels_RR[rank] == level, has_R, 0.0)
                taken = min(missing, float(there_R.sum()))
                if taken > 0:
                    leaving_LR[level] += there_R * (taken / there_R.sum())
                    arriving_LR[level, rank] += taken
                    missing -= taken
    return LinkBytes(leaving_LR=leaving_LR, arriving_LR=arriving_LR)
