"""Single changes of a task, and how many samples per second the planner `auto` then reaches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from autoshard.core import CostModels, Link, ShardingPlan
from autoshard.core.accepted import MAX_WORLD_SIZE
from autoshard.formats.topology_scaling import scaled_topology
from autoshard.planners.auto_options import AUTO, AutoOptions
from autoshard.planners.planner import PlanRequest
from autoshard.results.explanation import Explanation, Improvement
from autoshard.whatif.changes import TaskChange, planned, with_hbm

#: Time limit of a trial: it searches from the plan itself, so that it ends at most as slow.
_TRIAL_LIMIT_S = 0.1
#: Shortest budget of trials.
_LEAST_BUDGET_S = 0.6
#: Shares below which a gain is rounding.
_LEAST_GAIN = 1e-6


def trials_budget_s(explaining_s: float) -> float:
    """Seconds for trials: as many as explaining the plan took, at least 0.6."""
    return max(_LEAST_BUDGET_S, explaining_s)


def find_improvements(
    plan: ShardingPlan, costs: CostModels, explanation: Explanation, *, budget_s: float
) -> tuple[Improvement, ...]:
    """Plans with twice the memory, bandwidth, ranks or batch, one at a time, and with nothing changed but the plan.

    The planner is `auto`, from the plan as its start where the ranks stay the same. One table held otherwise is a
    change, too: the best alternative of the explanation.

    Args:
        plan: A plan of one replica group; plans of several have no changes to try.
        costs: Models that price steps.
        explanation: Of the plan, by the same models.
        budget_s: Seconds after which no trial is begun.

    Returns:
        The changes that could be planned, most samples per second first.
    """
    if plan.replica_groups.num_groups > 1:
        return ()
    found = list(_one_table(plan, explanation))
    for change, other in planned(_changes(_request(plan, costs)), budget_s=budget_s):
        step_ms, batch_size = other.prices.step_ms.value, other.tables.batch_size
        found.append(_improvement(change.field, change.text, step_ms, batch_size, plan, explanation))
    return tuple(sorted(found, key=lambda one: -one.gain))


def _request(plan: ShardingPlan, costs: CostModels) -> PlanRequest:
    made = plan.provenance
    asked = AutoOptions.of_plan(plan)
    return PlanRequest(
        tables=plan.tables,
        topology=plan.topology,
        costs=costs,
        seed=made.seed if made is not None else 0,
        time_limit_s=_TRIAL_LIMIT_S,
        options={
            "sharding_types": asked.sharding_types,
            "reserved_bytes": asked.reserved_bytes,
            "count_activations": asked.counts_activations,
            "min_partition": asked.min_partition,
        },
        payload=plan.payload,
        start=plan,
    )


def _one_table(plan: ShardingPlan, explanation: Explanation) -> Iterator[Improvement]:
    """The best alternative of a single table, if it makes the step shorter."""
    priced = [
        (other.step_ms, one.table, other.option)
        for one in explanation.tables
        for other in one.alternatives
        if other.step_ms is not None
    ]
    best_ms, table, option = min(priced, default=(explanation.step_ms, "", ""))
    text = f"{table} as {option}, all others as they are"
    found = _improvement(f"shards.{table}", text, best_ms, plan.tables.batch_size, plan, explanation)
    if found.gain > _LEAST_GAIN:
        yield found


def _improvement(
    field: str, text: str, step_ms: float, batch_size: int, plan: ShardingPlan, explanation: Explanation
) -> Improvement:
    """A change with its step and its global batch, beside those of the plan."""
    per_s, now_per_s = _per_s(batch_size, step_ms), _per_s(plan.tables.batch_size, explanation.step_ms)
    gain = per_s / now_per_s - 1 if now_per_s > 0 else 0.0
    return Improvement(field=field, text=text, step_ms=step_ms, samples_per_s=per_s, gain=gain)


def _per_s(batch_size: int, step_ms: float) -> float:
    return batch_size / step_ms * 1e3 if step_ms > 0 else 0.0


def _changes(request: PlanRequest) -> Iterator[TaskChange]:
    tables, topology = request.tables, request.topology
    change = partial(TaskChange, planner=AUTO)
    yield change(field="plan", text="another plan, nothing else changed", make=lambda: request)
    for number, level in enumerate(topology.levels):
        yield change(
            field=f"topology.levels.{level.name}",
            text=f"twice the bandwidth within a {level.name}",
            make=partial(_with_bandwidth, request, number),
        )
    yield change(
        field="topology.memory_bytes.hbm",
        text="twice the device memory",
        make=lambda: replace(request, topology=with_hbm(topology, lambda hbm: 2 * hbm)),
    )
    if 2 * topology.world_size <= MAX_WORLD_SIZE:
        num_ranks = 2 * topology.world_size
        yield change(
            field="topology.world_size",
            text=f"{num_ranks:,} ranks, the same global batch",
            make=lambda: replace(request, topology=scaled_topology(topology, num_ranks), start=None),
        )
    batch_size = 2 * tables.batch_size
    yield change(
        field="tables.batch_size",
        text=f"global batch {batch_size:,}",
        make=lambda: replace(request, tables=replace(tables, batch_size=batch_size)),
    )


def _with_bandwidth(request: PlanRequest, number: int) -> PlanRequest:
    """The task, links of one of its topology's levels twice as fast."""

    def faster(link: Link) -> Link:
        return replace(link, bytes_per_s=2 * link.bytes_per_s)

    levels = list(request.topology.levels)
    level = levels[number]
    levels[number] = replace(level, all_to_all=faster(level.all_to_all), all_reduce=faster(level.all_reduce))
    return replace(request, topology=replace(request.topology, levels=tuple(levels)))
