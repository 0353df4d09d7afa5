"""Why each table of a plan is held as it is: what every other way would make of the step.

Shape suffixes: S sites.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from autoshard.core import CostModels, ShardingPlan
from autoshard.core.errors import InvalidPlanError, InvalidTableError
from autoshard.core.quoting import shown
from autoshard.evaluation.evaluate import evaluate
from autoshard.planners.hybrid.layout import NOTHING, Change, Layout, Limits
from autoshard.planners.hybrid.neighbours import Neighbourhood
from autoshard.planners.hybrid.rates import FlatOptions, Rates
from autoshard.planners.hybrid.starts import layout_of
from autoshard.planners.hybrid.step_search import space_of
from autoshard.planners.planner import PlanRequest
from autoshard.planners.space.options import enumerate_options, why_not
from autoshard.planners.space.planner_space import ItemOption
from autoshard.planners.space.step_cost import PARTS
from autoshard.planners.space.tiers import ranks_at

#: p of the norm that tells which sites look best; only the true step is reported.
_EXPONENT = 32
#: Sites of a single shard that are priced.
_NUM_SITES = 8
#: Steps that differ by less, as a share, are taken to be alike.
_ALIKE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another way to hold a table, with all others as they are.

    Attributes:
        scheme: What it is called.
        step_ms: The step at its best place; None if it is ruled out.
        hbm_bytes: What it takes of every rank that holds some of it, at most.
        ruled_out: The constraint or the lack of memory that rules it out; empty if nothing does.
    """

    scheme: str
    step_ms: float | None
    hbm_bytes: int
    ruled_out: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedTable:
    """Why a table is held as it is.

    Attributes:
        table: Its name, or those of all tables that must share its ranks.
        scheme: How it is held.
        ranks: Ranks that hold some of it.
        hbm_bytes: What it takes of every such rank, at most.
        without_ms: The step if nobody held it.
        binds: Parts of the step that it adds to at their slowest ranks.
        reason: One sentence.
        alternatives: The others, fastest first, those that are ruled out last.
    """

    table: str
    scheme: str
    ranks: tuple[int, ...]
    hbm_bytes: int
    without_ms: float
    binds: tuple[str, ...]
    reason: str
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why the tables of a plan are held as they are.

    Attributes:
        step_ms: The plan's predicted step.
        num_groups: Replica groups; with several, alternatives are those of one group, the others alike.
        tables: One by one.
    """

    step_ms: float
    num_groups: int
    tables: tuple[ExplainedTable, ...]

    def to_json(self) -> dict[str, object]:
        """As a JSON object."""
        return asdict(self)


def explain(plan: ShardingPlan, costs: CostModels, names: Collection[str] = ()) -> Explanation:
    """Prices every other way to hold each table, at its best place and with all other tables as they are.

    Args:
        plan: A valid plan.
        costs: Models that price steps.
        names: Tables to explain; all if there are none.

    Raises:
        InvalidTableError: If a table is not there.
        InvalidPlanError: If tables are held by copies on some of the ranks only.
    """
    known = {table.name for table in plan.tables.tables}
    for name in names:
        if name not in known:
            raise InvalidTableError(f"no table of the plan is named {shown(name)}", field="table")
    group = plan.of_one_group()
    request = PlanRequest(tables=group.tables, topology=group.topology, costs=costs)
    space = space_of(request)
    limits = Limits.of(space)
    layout = layout_of(space, limits, group)
    if layout is None:
        raise InvalidPlanError(
            "must each be on one rank, one node or all ranks, or have copies on all ranks or nodes, to be explained; "
            "some have copies on some of the ranks",
            field="shards",
        )
    step_ms = evaluate(plan, costs).step_ms.value
    explainer = _Explainer(layout, step_ms - layout.step_ms())
    items = sorted({space.item_of[name] for name in names or known})
    return Explanation(
        step_ms=step_ms,
        num_groups=plan.replica_groups.num_groups,
        tables=tuple(explainer.explained(item) for item in items),
    )


class _Explainer:
    def __init__(self, layout: Layout, more_ms: float) -> None:
        self.layout, self.space, self.more_ms = layout, layout.space, more_ms
        self.step_ms = layout.step_ms() + more_ms
        flat, rates = FlatOptions.of(self.space), Rates.of(self.space, layout)
        self.near = Neighbourhood(layout, flat, rates, _EXPONENT)
        self.parts_PR = layout.parts_ms()

    def explained(self, item: int) -> ExplainedTable:
        chosen = self.layout.chosen[item]
        assert chosen is not None, "a plan holds all tables"
        tables, options = self.space.items[item].tables, self.space.items[item].options
        mine = options[chosen[0]]
        others = [
            self._alternative(item, option, number) for number, option in enumerate(options) if number != chosen[0]
        ]
        others += self._ruled_out(item)
        others.sort(key=lambda one: (one.step_ms is None, one.step_ms or 0.0, one.scheme))
        ranks = self._ranks(mine, chosen[1])
        without_ms = self._step_ms([((item, NOTHING, ()),)])
        return ExplainedTable(
            table="+".join(table.name for table in tables),
            scheme=_label(mine),
            ranks=ranks,
            hbm_bytes=self._bytes(mine),
            without_ms=without_ms,
            binds=self._binds(mine, ranks),
            reason=self._reason(others),
            alternatives=tuple(others),
        )

    def _alternative(self, item: int, option: ItemOption, number: int) -> Alternative:
        sites = self.near.sites_of(item, option)
        step_ms, ruled_out = None, ""
        if sites is None:
            short = self._bytes(option)
            ruled_out = f"takes {short:,} bytes of a rank, more than is free"
        else:
            step_ms = self._step_ms([((item, number, at),) for at in self._tried(option, sites)])
        return Alternative(scheme=_label(option), step_ms=step_ms, hbm_bytes=self._bytes(option), ruled_out=ruled_out)

    def _tried(self, option: ItemOption, sites: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Sites that are priced: those that look best, and of single shards some more."""
        if len(option.shards) > 1 or option.shards[0].is_everywhere:
            return [sites]
        allowed = np.flatnonzero(option.shards[0].allowed_S)
        cost_S = self.near.site_costs(option.shards[0])[allowed]
        best = allowed[np.argsort(cost_S, kind="stable")[:_NUM_SITES]]
        return list(dict.fromkeys([sites, *((int(site),) for site in best)]))

    def _step_ms(self, changes: Sequence[Change]) -> float:
        priced = self.layout.price(changes, _EXPONENT)
        fitting = np.isfinite(priced.energy_ms_B)
        step_ms_B = np.where(fitting, priced.step_ms_B, np.inf) if fitting.any() else priced.step_ms_B
        return float(step_ms_B.min()) + self.more_ms

    def _ruled_out(self, item: int) -> list[Alternative]:
        """Ways that the item has no option for."""
        one = self.space.items[item]
        found = []
        if len(one.tables) > 1:
            return [
                Alternative(
                    scheme="column_wise, grid, row_tiers",
                    step_ms=None,
                    hbm_bytes=0,
                    ruled_out="the tables must be on the same ranks",
                )
            ]
        for scheme in enumerate_options(one.tables[0], self.space.topology):
            reason = why_not(scheme, self.space.topology)
            if not reason and any(option.parts == (scheme.parts,) for option in one.options):
                continue
            locals_ = [part.local(self.space.topology, self.space.tables.batch_size) for part in scheme.parts]
            found.append(
                Alternative(
                    scheme=scheme.label,
                    step_ms=None,
                    hbm_bytes=max(local.memory_bytes for local in locals_),
                    ruled_out=reason or f"{self.space.costs.kernel.name} cannot price it",
                )
            )
        return found

    def _reason(self, others: Sequence[Alternative]) -> str:
        open_to = [one for one in others if one.step_ms is not None]
        if not open_to:
            first = next((one.ruled_out for one in others), "there is no other way with one rank")
            return f"nothing else is possible: {first}"
        best = open_to[0]
        assert best.step_ms is not None, "it is open"
        change = best.step_ms / self.step_ms - 1
        if change > _ALIKE:
            return f"fastest of {len(open_to) + 1}: {best.scheme} would make the step {change:.2%} longer"
        if change < -_ALIKE:
            return f"{best.scheme} would make the step {-change:.2%} shorter"
        return f"as fast as {best.scheme}: other tables decide the step"

    def _binds(self, option: ItemOption, ranks: tuple[int, ...]) -> tuple[str, ...]:
        """Parts that it adds to at their slowest ranks."""
        rates = self.near.rates
        added_P = np.zeros(len(PARTS))
        for shard in option.shards:
            is_placed = not shard.is_everywhere
            added_P += (rates.served_VP if is_placed else rates.shared_VP)[shard.kind]
        slowest_P = self.parts_PR.argmax(axis=1).tolist()
        return tuple(
            part.value
            for part, added, rank in zip(PARTS, added_P.tolist(), slowest_P, strict=True)
            if added > 0 and rank in ranks
        )

    def _bytes(self, option: ItemOption) -> int:
        return round(max(float(self.space.bytes_VM[shard.kind, 0]) for shard in option.shards))

    def _ranks(self, option: ItemOption, sites: tuple[int, ...]) -> tuple[int, ...]:
        topology = self.space.topology
        ranks = {
            rank
            for shard, site in zip(option.shards, sites, strict=True)
            for rank in ranks_at(shard.tier, site, topology)
        }
        return tuple(sorted(ranks))


def _label(option: ItemOption) -> str:
    memory = option.shards[0].parts[0].memory
    behind = "" if memory.cache_bytes == 0 else f", {memory.level} behind a cache of {memory.cache_bytes:,} bytes"
    return option.of_tables[0].label + behind
