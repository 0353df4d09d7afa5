"""Single changes of a task, and how many samples per second the planner `auto` then reaches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autoshard.core import CostModels, Link, MemoryBytes, ShardingPlan, Topology
from autoshard.core.accepted import MAX_WORLD_SIZE
from autoshard.core.errors import InfeasiblePlanError, InputError, ModelError
from autoshard.formats.topology_scaling import scaled_topology
from autoshard.planners.hybrid.explanation import Explanation
from autoshard.planners.planner import PlanRequest
from autoshard.planning import make_plan

_PLANNER = "auto"
#: Options of a plan of `auto` that its changes keep.
_KEPT = ("sharding_types", "reserved_bytes", "count_activations")
#: Time limit of a trial: it searches from the plan itself, so that it ends at most as slow.
_TRIAL_LIMIT_S = 0.1
#: Shortest budget of trials.
_LEAST_BUDGET_S = 0.6
#: Shares below which a gain is rounding.
_LEAST_GAIN = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """A single change, and what a plan made with it is predicted to reach.

    Attributes:
        field: What changes: `plan`, `topology.memory_bytes.hbm`, `topology.levels.NAME`, `topology.world_size`,
            `tables.batch_size`, or `shards.NAME` for one table held otherwise.
        text: The change in words.
        step_ms: Predicted step with it.
        samples_per_s: Samples per second with it.
        gain: Samples per second with it over those of the plan, minus 1.
    """

    field: str
    text: str
    step_ms: float
    samples_per_s: float
    gain: float


@dataclass(frozen=True, slots=True)
class _Trial:
    """A change to plan with."""

    field: str
    text: str
    make: Callable[[], PlanRequest]


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
    started_s = time.perf_counter()
    now_per_s = _per_s(plan.tables.batch_size, explanation.step_ms)
    found = list(_one_table(plan, explanation))
    for trial in _trials(_request(plan, costs)):
        if time.perf_counter() - started_s > budget_s:
            break
        planned = _planned(trial)
        if planned is not None:
            step_ms, per_s = planned
            gain = per_s / now_per_s - 1
            found.append(
                Improvement(field=trial.field, text=trial.text, step_ms=step_ms, samples_per_s=per_s, gain=gain)
            )
    return tuple(sorted(found, key=lambda one: -one.gain))


def _request(plan: ShardingPlan, costs: CostModels) -> PlanRequest:
    made = plan.provenance
    options = made.options if made is not None and made.planner == _PLANNER else {}
    return PlanRequest(
        tables=plan.tables,
        topology=plan.topology,
        costs=costs,
        seed=made.seed if made is not None else 0,
        time_limit_s=_TRIAL_LIMIT_S,
        options={name: options[name] for name in _KEPT if name in options},
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
    step_ms, table, option = min(priced, default=(explanation.step_ms, "", ""))
    gain = explanation.step_ms / step_ms - 1 if step_ms > 0 else 0.0
    if gain > _LEAST_GAIN:
        yield Improvement(
            field=f"shards.{table}",
            text=f"{table} as {option}, all others as they are",
            step_ms=step_ms,
            samples_per_s=_per_s(plan.tables.batch_size, step_ms),
            gain=gain,
        )


def _trials(request: PlanRequest) -> Iterator[_Trial]:
    tables, topology = request.tables, request.topology
    yield _Trial("plan", "another plan, nothing else changed", lambda: request)
    for number, level in enumerate(topology.levels):

        def faster(number: int = number) -> PlanRequest:
            return replace(request, topology=_with_bandwidth(topology, number))

        yield _Trial(f"topology.levels.{level.name}", f"twice the bandwidth within a {level.name}", faster)
    yield _Trial(
        "topology.memory_bytes.hbm",
        "twice the device memory",
        lambda: replace(request, topology=_with_memory(topology)),
    )
    if 2 * topology.world_size <= MAX_WORLD_SIZE:
        text = f"{2 * topology.world_size:,} ranks, the same global batch"
        yield _Trial("topology.world_size", text, lambda: _with_ranks(request, 2 * topology.world_size))
    batch_size = 2 * tables.batch_size
    yield _Trial(
        "tables.batch_size",
        f"global batch {batch_size:,}",
        lambda: replace(request, tables=replace(tables, batch_size=batch_size)),
    )


def _planned(trial: _Trial) -> tuple[float, float] | None:
    """Predicted step with a change, and samples per second; None if there is no plan."""
    try:
        request = trial.make()
        plan = make_plan(_PLANNER, request)
    except (InfeasiblePlanError, InputError, ModelError):
        return None
    assert plan.predicted is not None
    step_ms = plan.predicted.step_ms.value
    return step_ms, _per_s(request.tables.batch_size, step_ms)


def _per_s(batch_size: int, step_ms: float) -> float:
    return batch_size / step_ms * 1e3 if step_ms > 0 else 0.0


def _with_bandwidth(topology: Topology, number: int) -> Topology:
    """The topology, links of one of its levels twice as fast."""

    def faster(link: Link) -> Link:
        return replace(link, bytes_per_s=2 * link.bytes_per_s)

    levels = list(topology.levels)
    level = levels[number]
    levels[number] = replace(level, all_to_all=faster(level.all_to_all), all_reduce=faster(level.all_reduce))
    return replace(topology, levels=tuple(levels))


def _with_memory(topology: Topology) -> Topology:
    """The topology, its ranks with twice the device memory."""

    def grown(memory: MemoryBytes) -> MemoryBytes:
        return replace(memory, hbm=2 * memory.hbm)

    overrides = tuple((rank, grown(memory)) for rank, memory in topology.overrides)
    return replace(topology, memory_bytes=grown(topology.memory_bytes), overrides=overrides)


def _with_ranks(request: PlanRequest, num_ranks: int) -> PlanRequest:
    return replace(request, topology=scaled_topology(request.topology, num_ranks), start=None)
