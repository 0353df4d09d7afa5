"""The trained policy as a planner.

Shape suffixes: N items, R ranks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from autoshard import __version__
from autoshard.core import Provenance, ShardingPlan
from autoshard.core.accepted import Range, check_choice
from autoshard.core.errors import InfeasiblePlanError
from autoshard.evaluation.evaluate import evaluate
from autoshard.planners.planner import PlanRequest, parse_options
from autoshard.planners.space.placement import PlacementProblem, RankArray
from autoshard.planners.space.step_cost import StepCost
from costmodel.registry.versions import PRODUCTION, Registry, find_model
from policies.choices import Items
from policies.planning.joined_parts import joined

if TYPE_CHECKING:
    from env import PlacementTask
    from policies.planning.trained import TrainedPolicy

_MAX_SAMPLES = 4096
# Loaded policies are about half a megabyte each.
_CACHED_POLICIES = 8
#: Candidates that split tables whose plans are priced, the best by the policy's own model.
_MOST_PRICED = 8

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """Options of the planner `policy`."""

    num_samples: int = field(
        default=1,
        metadata={
            "help": "Placements to choose the best from: the likeliest one, and others drawn from the policy. "
            "--set num_samples=64"
        },
    )
    beam_width: int = field(
        default=1,
        metadata={
            "help": "Likeliest beginnings that are kept at every step; the best of what they end in is a candidate, "
            "too. 1 for no beam search."
        },
    )
    items: str = field(
        default=Items.TABLES.value,
        metadata={
            "help": "What is placed: tables, row_groups (equal ranges of their rows) or tiers (tables whose hot rows "
            "may be cut off and shared by all ranks). Each has a policy of its own: `autoshard train policy --items "
            "tiers`."
        },
    )

    def __post_init__(self) -> None:
        Range(at_least=1, at_most=_MAX_SAMPLES).check_fields(self, "num_samples", "beam_width", within="options.")
        check_choice(self.items, Items, "options.items")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Candidate:
    """A placement, and its objective by the policy's cost model."""

    problem: PlacementProblem
    ranks_N: RankArray
    objective_ms: float

    @property
    def plan(self) -> ShardingPlan:
        return joined(self.problem.to_plan(self.ranks_N))


class PolicyPlanner:
    """Places tables, or parts of them, as the policy of the topology's device says, in one pass over the items.

    Where the user's registry has no policy of the device, the one that comes with this package is used, if any.

    Tables are cut as they were in training, and parts that end up side by side are put together again. The policy
    plays for the objective that it was trained for, and sees codes of the cost model that it was trained on, which is
    published with it; tables in kernels that this model has not seen look like those in the nearest one that it has.
    Candidates are compared by the request's cost models: by their steps if these are the objective, else by their
    slowest ranks. Masks keep to memory limits and constraints.

    Source:
        AutoShard Sec. 4.5. Differs: memory limits hold, and several placements may be drawn.
    """

    name: ClassVar[str] = "policy"
    summary: ClassVar[str] = "The trained policy of the device: one pass over the tables."
    when: ClassVar[str] = "many plans in little time"
    options_type: ClassVar[type] = PolicyOptions

    def plan(self, request: PlanRequest) -> ShardingPlan:
        """Makes a plan, without prediction; its provenance names the policy.

        Raises:
            ModelError: If there is no policy of the device for such items.
            InfeasiblePlanError: If no placement within the memory limits was found.
            InvalidOptionError: If an option is unknown or out of range.
        """
        # Imported here, for torch takes a second that listing planners does not have.
        from policies.planning.tasks import items_problem, items_task

        options = parse_options(PolicyOptions, request.options)
        items = Items(options.items)
        policy = _load(request.registry, request.topology.device, items)
        model = policy.cost.with_nearest_kernels()
        seen = items_problem(request.tables, request.topology, model, items, request.payload)
        costs = replace(request.costs, kernel=seen.model)
        task = items_task(seen, items, objective=policy.card.objective, costs=costs)
        plan = _best(_candidates(policy, task, options, request.seed), task, request, items)
        models = {items.policy_kind: policy.name}
        if note := _model_note(policy, request):
            _log.warning("%s", note)
            models["policy_notes"] = note
        return replace(plan, provenance=Provenance(planner=self.name, version=__version__, models=models))


def _candidates(
    policy: TrainedPolicy, task: PlacementTask, options: PolicyOptions, seed: int
) -> tuple[_Candidate, ...]:
    import torch

    from policies.planning.decoding import decode, decode_beam

    found = [decode(policy.network, [task])]
    if options.num_samples > 1:
        generator = torch.Generator().manual_seed(seed)
        found.append(decode(policy.network, [task], num_samples=options.num_samples - 1, generator=generator))
    if options.beam_width > 1:
        found.append(decode_beam(policy.network, [task], width=options.beam_width))
    candidates = tuple(
        _Candidate(problem=problem, ranks_N=ranks_N, objective_ms=float(objective_ms))
        for placements in found
        for problem, ranks_N, objective_ms, is_feasible in zip(
            *(placements.problems, placements.ranks, placements.objective_ms_D, placements.is_feasible_D), strict=True
        )
        if is_feasible
    )
    if not candidates:
        raise InfeasiblePlanError("the policy found no placement within the memory limits and constraints")
    return candidates


def _best(candidates: tuple[_Candidate, ...], task: PlacementTask, request: PlanRequest, items: Items) -> ShardingPlan:
    """The plan with the shortest step if that is the task's objective, else with the fastest slowest rank."""
    if len(candidates) == 1:
        return candidates[0].plan
    for_steps = task.step_cost is not None
    if task.may_split:
        # What is split differs from candidate to candidate, so there are no sums to price all of them by.
        likely = sorted(candidates, key=lambda candidate: candidate.objective_ms)[:_MOST_PRICED]
        return min((candidate.plan for candidate in likely), key=lambda plan: _priced_ms(plan, request, for_steps))
    from policies.planning.tasks import items_problem

    problem = items_problem(request.tables, request.topology, request.costs.kernel, items, request.payload)
    step_cost = StepCost(problem, request.costs) if for_steps else None

    def cost_ms(candidate: _Candidate) -> float:
        if step_cost is None:
            return float(problem.rank_ms(candidate.ranks_N).max())
        return float(step_cost.step_ms(step_cost.sums(candidate.ranks_N))[0])

    return min(candidates, key=cost_ms).plan


def _priced_ms(plan: ShardingPlan, request: PlanRequest, for_steps: bool) -> float:
    predicted = evaluate(plan, request.costs)
    return predicted.step_ms.value if for_steps else predicted.max_kernel_ms


def _model_note(policy: TrainedPolicy, request: PlanRequest) -> str:
    """Says that a policy was trained on another cost model than the one that prices the request's plans."""
    trained_on, priced_by = policy.cost.name, request.costs.kernel.name
    if priced_by.startswith(trained_on):  # what follows says whether it was shipped, or that upper ends are taken
        return ""
    return f"{policy.name} was trained on {trained_on}; its plan is priced by {priced_by}"


def _load(registry: Path | None, device: str, items: Items) -> TrainedPolicy:
    kind = items.policy_kind
    models, name, version = find_model(kind, device, registry) or (Registry(registry), device, PRODUCTION)
    return _load_version(models.root, name, version, items)


@lru_cache(maxsize=_CACHED_POLICIES)
def _load_version(root: Path, device: str, version: str, items: Items) -> TrainedPolicy:
    from policies.planning.trained import TrainedPolicy

    return TrainedPolicy.load(Registry(root), device, version, items=items)
