"""Ways to hold each table as arrays: what every rank adds to its sums that holds a piece of it.

Shape suffixes: V kinds of pieces, H width of a code, C columns of what is moved, M memory levels, S sites.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.core import (
    CostModels,
    EmbeddingTable,
    LocalShard,
    MemoryLevel,
    PlacedShard,
    Shard,
    TableSet,
    Tier,
    Topology,
    Update,
)
from autoshard.core.errors import InfeasiblePlanError, ModelError
from autoshard.core.shard import fused_kernel
from autoshard.evaluation.cached_rows import behind_caches
from autoshard.planners.space.constraints import allowed_sites, check_constraints, colocated
from autoshard.planners.space.options import ShardingOption, UnplacedShard, why_not
from autoshard.planners.space.step_cost import StepPrices

LEVELS = tuple(MemoryLevel)
#: Parts of a byte that bytes on the way are rounded to.
_GRID = 1024.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Parts of the tables of one unit that are held together.

    Attributes:
        parts: One for each table that has to be on the same ranks.
        tier: Which ranks take them.
        kind: Index of what it adds to the sums of every rank that holds it.
        sites: Where it may go, memory aside.
    """

    parts: tuple[UnplacedShard, ...]
    tier: Tier
    kind: int
    sites: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to hold a unit.

    Attributes:
        schemes: Of each of its tables.
        pieces: What is to be placed.
        in_one_node: Whether pieces on single ranks must be in one node.
    """

    schemes: tuple[ShardingOption, ...]
    pieces: tuple[Piece, ...]
    in_one_node: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Tables that have to be on the same ranks, mostly a single one.

    Attributes:
        tables: The tables.
        options: Ways to hold them, by number.
    """

    tables: tuple[EmbeddingTable, ...]
    options: list[Option]

    @property
    def label(self) -> str:
        """Names of its tables."""
        return "+".join(table.name for table in self.tables)


class Catalog:
    """What there is to choose from. Options may be added, none is ever removed.

    Args:
        tables: The task's tables.
        topology: The task's topology.
        costs: Models that price steps.
        schemes: Ways to hold a table, whatever its constraints.

    Attributes:
        units: The tables, in units that are placed together.
        codes_VH: What a kind of piece adds to the codes of a rank that holds it.
        moved_VC: What it adds to what is moved.
        bytes_VM: Bytes that it takes of such a rank, by memory level.
    """

    def __init__(
        self,
        tables: TableSet,
        topology: Topology,
        costs: CostModels,
        schemes: Callable[[EmbeddingTable], Sequence[ShardingOption]],
    ) -> None:
        # Rows behind caches are priced as `evaluate` prices them.
        has_caches = any(
            topology.memory_of(rank).ddr or topology.memory_of(rank).ssd for rank in range(topology.world_size)
        )
        kernel = behind_caches(costs.kernel, topology) if has_caches else costs.kernel
        costs = replace(costs, kernel=kernel)
        self.tables, self.topology, self.costs = tables, topology, costs
        kernels = {fused_kernel(table, update) for table in tables.tables for update in Update}
        self.prices = StepPrices(tables, topology, costs, kernels)
        self._kinds: dict[Hashable, int] = {}
        self._unpriced: set[Hashable] = set()
        self._twins = _twins(tables)
        some = UnplacedShard.of(Shard.whole(tables.tables[0]), Tier.TABLE_WISE, topology)
        width = self.costs.kernel.encode([some.local(topology, tables.batch_size)]).shape[1]
        self.codes_VH = np.zeros((0, width))
        self.moved_VC = np.zeros((0, self.prices.num_columns))
        self.bytes_VM = np.zeros((0, len(LEVELS)))
        check_constraints(tables, topology)
        self.units = [Unit(tables=group, options=[]) for group in colocated(tables)]
        self.unit_of = {table.name: index for index, unit in enumerate(self.units) for table in unit.tables}
        by_unit = [[schemes(table) for table in unit.tables] for unit in self.units]
        self._learn_kinds(
            part for of_unit in by_unit for of_table in of_unit for scheme in of_table for part in scheme.parts
        )
        for unit, of_tables in zip(self.units, by_unit, strict=True):
            for group in _alike(of_tables):
                self._add(unit, group)
            if not unit.options:
                raise InfeasiblePlanError(
                    f"{unit.label}: its constraints leave no rank that may hold any of it, so no bytes of it fit"
                )

    def add(self, schemes_U: Sequence[Sequence[ShardingOption]]) -> list[int | None]:
        """For each unit the number of the option that holds its tables so; None if something rules it out.

        Args:
            schemes_U: For each unit the schemes of its tables.
        """
        self._learn_kinds(part for schemes in schemes_U for scheme in schemes for part in scheme.parts)
        return [self._number(unit, tuple(schemes)) for unit, schemes in zip(self.units, schemes_U, strict=True)]

    def _number(self, unit: Unit, schemes: tuple[ShardingOption, ...]) -> int | None:
        parts = tuple(scheme.parts for scheme in schemes)
        for number, option in enumerate(unit.options):
            if tuple(scheme.parts for scheme in option.schemes) == parts:
                return number
        return len(unit.options) - 1 if self._add(unit, schemes) else None

    def placed(self, unit: int, option: int, sites: Sequence[int]) -> list[PlacedShard]:
        """The shards of a unit."""
        pieces = self.units[unit].options[option].pieces
        return [
            part.placed(site, self.topology) for piece, site in zip(pieces, sites, strict=True) for part in piece.parts
        ]

    def _add(self, unit: Unit, schemes: Sequence[ShardingOption]) -> bool:
        if any(why_not(scheme, self.topology) for scheme in schemes):
            return False
        pieces = []
        for parts in _together(schemes):
            kind = self._kind(parts)
            may_S = np.logical_and.reduce([allowed_sites(part.shard.table, part.tier, self.topology) for part in parts])
            if kind is None or not may_S.any():
                return False
            sites = tuple(np.flatnonzero(may_S).tolist())
            pieces.append(Piece(parts=parts, tier=parts[0].tier, kind=kind, sites=sites))
        unit.options.append(Option(schemes=tuple(schemes), pieces=tuple(pieces), in_one_node=schemes[0].in_one_node))
        return True

    def _kind(self, parts: Sequence[UnplacedShard]) -> int | None:
        keys = tuple(self._key(part) for part in parts)
        if any(key in self._unpriced for key in keys):
            return None
        if len(keys) == 1:
            return self._kinds[keys[0]]
        if keys not in self._kinds:
            kinds = [self._kinds[key] for key in keys]
            self._kinds[keys] = len(self.codes_VH)
            for name in ("codes_VH", "moved_VC", "bytes_VM"):
                known = getattr(self, name)
                setattr(self, name, np.concatenate([known, known[kinds].sum(axis=0, keepdims=True)]))
        return self._kinds[keys]

    def _key(self, part: UnplacedShard) -> Hashable:
        """Parts with the same key add the same to the sums of the ranks that hold them."""
        shard = part.shard
        rows = (shard.rows.start, shard.rows.stop, shard.rows.by)
        held = (part.tier, part.exchange, part.grad_sync, part.memory)
        return (self._twins[shard.table.name], rows, shard.embedding_dim, *held)

    def _learn_kinds(self, parts: Iterable[UnplacedShard]) -> None:
        new: dict[Hashable, UnplacedShard] = {}
        for part in parts:
            key = self._key(part)
            if key not in self._kinds and key not in self._unpriced:
                new.setdefault(key, part)
        if not new:
            return
        batch_size = self.tables.batch_size
        locals_ = [part.local(self.topology, batch_size) for part in new.values()]
        codes, is_priced = _encoded(self.costs, locals_)
        self._unpriced |= {key for key, priced in zip(new, is_priced, strict=True) if not priced}
        kept = [
            (key, part.placed(0, self.topology), local)
            for (key, part), local, priced in zip(new.items(), locals_, is_priced, strict=True)
            if priced
        ]
        if not kept:
            return
        self._kinds |= {key: len(self.codes_VH) + index for index, (key, _, _) in enumerate(kept)}
        # Sums of such numbers are exact, so that what has left a rank leaves nothing behind.
        moved = [np.rint(self.prices.moved(placed) * _GRID) / _GRID for _, placed, _ in kept]
        held = [[local.held_bytes[level] for level in LEVELS] for _, _, local in kept]
        self.codes_VH = np.concatenate([self.codes_VH, codes])
        self.moved_VC = np.concatenate([self.moved_VC, np.array(moved).reshape(-1, self.prices.num_columns)])
        self.bytes_VM = np.concatenate([self.bytes_VM, np.array(held).reshape(-1, len(LEVELS))])


def _together(schemes: Sequence[ShardingOption]) -> list[tuple[UnplacedShard, ...]]:
    """Parts of several tables that share a piece: what all ranks hold needs no company."""
    if all(scheme.is_everywhere for scheme in schemes):
        return [(part,) for scheme in schemes for part in scheme.parts]
    return list(zip(*(scheme.parts for scheme in schemes), strict=True))


def _alike(of_tables: Sequence[Sequence[ShardingOption]]) -> list[tuple[ShardingOption, ...]]:
    """Schemes of a unit's tables; of several tables only those that put all of them on the same ranks."""
    if len(of_tables) == 1:
        return [(scheme,) for scheme in of_tables[0]]
    by_tier = [{scheme.parts[0].tier: scheme for scheme in schemes if len(scheme.parts) == 1} for schemes in of_tables]
    shared = [tier for tier in by_tier[0] if all(tier in known for known in by_tier)]
    return [tuple(known[tier] for known in by_tier) for tier in shared]


def _twins(tables: TableSet) -> dict[str, int]:
    """For each table the first one that is like it in all that prices and bytes depend on."""
    first: dict[Hashable, int] = {}
    found = {}
    for index, table in enumerate(tables.tables):
        like = (
            (table.num_embeddings, table.embedding_dim, table.dtype, table.pooling, table.optimizer),
            tuple(feature.pooling_factor for feature in table.features),
            table.access,
        )
        found[table.name] = first.setdefault(like, index)
    return found


def _encoded(costs: CostModels, locals_: Sequence[LocalShard]) -> tuple[NDArray[np.float64], list[bool]]:
    """Codes of the shards that the kernel model can price, and which these are."""
    try:
        return costs.kernel.encode(locals_).astype(np.float64), [True] * len(locals_)
    except ModelError:
        pass
    by_kind: dict[Hashable, list[int]] = {}
    for index, local in enumerate(locals_):
        by_kind.setdefault((local.kernel_kind, local.level), []).append(index)
    codes: dict[int, NDArray[np.float64]] = {}
    for indices in by_kind.values():
        try:
            codes.update(
                zip(indices, costs.kernel.encode([locals_[index] for index in indices]).astype(np.float64), strict=True)
            )
        except ModelError:
            continue
    priced = [codes[index] for index in sorted(codes)]
    width = len(priced[0]) if priced else 0
    return np.array(priced).reshape(len(priced), width), [index in codes for index in range(len(locals_))]
