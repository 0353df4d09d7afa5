"""Why each table of a plan is held as it is: what every other way would make of the step.

Shape suffixes: S sites.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import numpy as np

from autoshard.core import CostModels, MemoryLevel, ShardingPlan, TableSet
from autoshard.core.errors import InvalidPlanError, InvalidTableError
from autoshard.core.quoting import shown, write_bytes
from autoshard.core.step import EMBEDDING_PARTS
from autoshard.evaluation.batch_memory import rank_memory
from autoshard.evaluation.evaluate import evaluate
from autoshard.planners.auto_options import AutoOptions
from autoshard.planners.hybrid.neighbours import Neighbourhood
from autoshard.planners.hybrid.option_offers import looked_up_bytes, space_of
from autoshard.planners.hybrid.starts import layout_of
from autoshard.planners.planner import PlanRequest
from autoshard.planners.space.cost_gradient import CostGradient, FlatOptions
from autoshard.planners.space.layout import NOTHING, Change, Layout, Limits
from autoshard.planners.space.options import why_not
from autoshard.planners.space.planner_space import Item, ItemOption
from autoshard.results.explanation import Alternative, ExplainedTable, Explanation

#: p of the norm that tells which sites look best; only the true step is reported.
_EXPONENT = 32
#: Sites of a single shard that are priced.
_NUM_SITES = 8
#: Steps that differ by less, as a share, are taken to be alike.
_ALIKE = 1e-6


def explain(
    plan: ShardingPlan,
    costs: CostModels,
    names: Collection[str] = (),
    *,
    most: int = 0,
    on_explained: Callable[[float], None] = lambda _: None,
) -> Explanation:
    """Prices every other way to hold each table, at its best place and with all other tables as they are.

    Ways that fit the memory leave free what the plan was asked to. A plan that does not, as of planners that count
    tables alone, is explained by what its tables take.

    Args:
        plan: A valid plan.
        costs: Models that price steps.
        names: Tables to explain; all if there are none.
        most: Without names, as many of the tables: those of which a batch reads most bytes. 0 for all.
        on_explained: Called with the share of the tables that is done since the last call, for progress bars.

    Raises:
        InvalidTableError: If a table is not there.
        InvalidPlanError: If tables are held by copies on some of the ranks only.
    """
    known = {table.name for table in plan.tables.tables}
    for name in names:
        if name not in known:
            raise InvalidTableError(f"no table of the plan is named {shown(name)}", field="table")
    group = plan.of_one_group()
    request = PlanRequest(tables=group.tables, topology=group.topology, costs=costs, payload=group.payload)
    chosen = set(names) or _costliest(group.tables, most)
    asked = AutoOptions.of_plan(plan)
    only = None if len(chosen) == len(known) else _shared_with(chosen, group.tables)
    space = space_of(request, only=only, reserved_bytes=asked.reserved_bytes)
    limits = Limits.of(space)
    if asked.has_room(plan):
        limits = Limits.of(space, asked.reserved_bytes, with_activations=asked.counts_activations)
    layout = layout_of(space, limits, group)
    if layout is None:
        raise InvalidPlanError(
            "must each be on one rank, one node or all ranks, or have copies on all ranks or nodes, to be explained; "
            "some have copies on some of the ranks",
            field="shards",
        )
    predicted = evaluate(plan, costs)
    step_ms = predicted.step_ms.value
    fullest = min(rank_memory(plan, predicted), key=lambda one: one.free_bytes)
    explainer = _Explainer(layout, step_ms - layout.step_ms())
    items = sorted({space.item_of[name] for name in chosen})
    tables = []
    for item in items:
        tables.append(explainer.explained(item))
        on_explained(1 / len(items))
    return Explanation(
        step_ms=step_ms,
        num_groups=plan.replica_groups.num_groups,
        tables=tuple(tables),
        collectives=predicted.collectives,
        fullest_rank=fullest.rank,
        used_bytes=fullest.used_bytes,
        capacity_bytes=fullest.capacity_bytes,
    )


def _costliest(tables: TableSet, most: int) -> set[str]:
    by_bytes = sorted(tables.tables, key=looked_up_bytes, reverse=True)
    return {table.name for table in by_bytes[: most or None]}


def _shared_with(names: Collection[str], tables: TableSet) -> set[str]:
    """The tables whose options some tables have: the first that are like them."""
    return {tables.tables[tables.first_alike[name]].name for name in names}


class _Explainer:
    def __init__(self, layout: Layout, more_ms: float) -> None:
        self.layout, self.space, self.more_ms = layout, layout.space, more_ms
        self.step_ms = layout.step_ms() + more_ms
        flat, rates = FlatOptions.of(self.space), CostGradient.of(self.space, layout)
        self.near = Neighbourhood(layout, flat, rates, _EXPONENT)

    def explained(self, index: int) -> ExplainedTable:
        item, (chosen, _) = self.space.items[index], self.layout.choice(index)
        changes = {number: self._changes(index, number) for number in range(len(item.options)) if number != chosen}
        without_ms, steps_ms = self._steps_ms(index, list(filter(None, changes.values())))
        priced = iter(steps_ms)
        others = [
            self._alternative(item.options[number], next(priced) if changed else None)
            for number, changed in changes.items()
        ]
        others += self._ruled_out(item)
        others.sort(key=lambda one: (one.step_ms is None, one.step_ms or 0.0, one.option))
        ranks = self._ranks(index)
        return ExplainedTable(
            table=item.label,
            option=item.options[chosen].label,
            ranks=ranks,
            hbm_bytes=self.space.largest_bytes(item.options[chosen], MemoryLevel.HBM),
            without_ms=without_ms,
            binds=self._binds(item.options[chosen], ranks),
            reason=self._reason(others),
            alternatives=tuple(others),
        )

    def _alternative(self, option: ItemOption, step_ms: float | None) -> Alternative:
        hbm_bytes = self.space.largest_bytes(option, MemoryLevel.HBM)
        beside = " beside what training needs" if self.layout.limits.with_activations else ""
        ruled_out = (
            "" if step_ms is not None else f"takes {write_bytes(hbm_bytes)} of a rank{beside}, more than is free"
        )
        return Alternative(option=option.label, step_ms=step_ms, hbm_bytes=hbm_bytes, ruled_out=ruled_out)

    def _changes(self, index: int, number: int) -> list[Change]:
        """An option of an item at the sites that are priced; none without room."""
        option = self.space.items[index].options[number]
        sites = self.near.sites_of(index, option)
        return [] if sites is None else [((index, number, at),) for at in self._tried(option, sites)]

    def _tried(self, option: ItemOption, sites: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Sites that are priced: those that look best, and of single shards some more."""
        first = option.shards[0]
        if len(option.shards) > 1 or first.is_everywhere:
            return [sites]
        allowed = np.flatnonzero(first.allowed_S)
        best = allowed[np.argsort(self.near.site_costs(first)[allowed], kind="stable")[:_NUM_SITES]]
        return list(dict.fromkeys([sites, *((site,) for site in best.tolist())]))

    def _steps_ms(self, index: int, groups: Sequence[Sequence[Change]]) -> tuple[float, list[float | None]]:
        """The step without an item, and the shortest of each group of changes: None where none of them fits."""
        without: Change = ((index, NOTHING, ()),)
        priced = self.layout.price([without, *(change for group in groups for change in group)], _EXPONENT)
        fits_B = np.isfinite(priced.energy_ms_B)
        fits_B[0] = True
        firsts = np.cumsum([0, 1, *(len(group) for group in groups)])[: len(groups) + 1]
        best_ms = np.minimum.reduceat(np.where(fits_B, priced.step_ms_B, np.inf) + self.more_ms, firsts).tolist()
        return best_ms[0], [one if math.isfinite(one) else None for one in best_ms[1:]]

    def _ruled_out(self, item: Item) -> list[Alternative]:
        """Ways that the item has no option for."""
        if len(item.tables) > 1:
            reason = "the tables must be on the same ranks"
            return [Alternative(option="column_wise, grid, row_tiers", step_ms=None, hbm_bytes=0, ruled_out=reason)]
        topology, batch_size = self.space.topology, self.space.tables.batch_size
        not_cached = [option for (option,) in item.refused if option.parts[0].memory.cache_bytes == 0]
        return [
            Alternative(
                option=option.label,
                step_ms=None,
                hbm_bytes=max(part.local(topology, batch_size).memory_bytes for part in option.parts),
                ruled_out=why_not(option, topology) or f"{self.space.costs.kernel.name} cannot price it",
            )
            for option in not_cached
        ]

    def _reason(self, others: Sequence[Alternative]) -> str:
        open_to = [(one.step_ms, one.option) for one in others if one.step_ms is not None]
        if not open_to:
            first = next((one.ruled_out for one in others), "there is no other way with one rank")
            return f"nothing else is possible: {first}"
        best_ms, best = open_to[0]
        change = best_ms / self.step_ms - 1
        if change > _ALIKE:
            return f"fastest of {len(open_to) + 1}: {best} would make the step {change:.2%} longer"
        if change < -_ALIKE:
            return f"{best} would make the step {-change:.2%} shorter"
        return f"as fast as {best}: other tables decide the step"

    def _binds(self, option: ItemOption, ranks: tuple[int, ...]) -> tuple[str, ...]:
        """Parts that it adds to at their slowest ranks."""
        rates = self.near.rates
        added_P = np.zeros(len(EMBEDDING_PARTS))
        for shard in option.shards:
            added_P += (rates.shared_VP if shard.is_everywhere else rates.served_VP)[shard.kind]
        slowest_P = self.near.parts_PR.argmax(axis=1).tolist()
        return tuple(
            part.value
            for part, added, rank in zip(EMBEDDING_PARTS, added_P.tolist(), slowest_P, strict=True)
            if added > 0 and rank in ranks
        )

    def _ranks(self, index: int) -> tuple[int, ...]:
        ranks = np.arange(self.layout.num_ranks)
        held = [ranks[shard.ranks(site)] for shard, site in self.layout.held(index)]
        return tuple(np.unique(np.concatenate(held)).tolist())
