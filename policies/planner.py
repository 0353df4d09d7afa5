"""The trained policy as a planner.

Shape suffixes: N items, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from autoshard import __version__
from autoshard.core import Costs, Provenance, ShardingPlan
from autoshard.core.errors import InvalidOptionError
from autoshard.planners.placement import PlacementProblem, RankArray
from autoshard.planners.planner import PlanRequest, parse_options
from autoshard.planners.step_cost import StepCost
from costmodel.registry import PRODUCTION, Registry, find_registry
from policies.choices import Items
from policies.joined_parts import joined

if TYPE_CHECKING:
    from env import PlacementTask
    from policies.trained import TrainedPolicy

_MAX_SAMPLES = 4096
# Loaded policies are about half a megabyte each.
_CACHED_POLICIES = 8


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
            "help": "What is placed: tables, row_groups (equal ranges of their rows) or tiers (segments in falling "
            "access frequency, which all ranks may share). Each has a policy of its own: `autoshard train policy "
            "--items tiers`."
        },
    )

    def __post_init__(self) -> None:
        for name in ("num_samples", "beam_width"):
            value = getattr(self, name)
            if not 1 <= value <= _MAX_SAMPLES:
                raise InvalidOptionError(f"must be in [1, {_MAX_SAMPLES}], got {value}", field=f"options.{name}")
        if self.items not in list(Items):
            raise InvalidOptionError(f"must be any of {', '.join(Items)}, got {self.items!r}", field="options.items")


class PolicyPlanner:
    """Places tables, or parts of them, as the policy of the topology's device says, in one pass over the items.

    Where the user's registry has no policy of the device, the one that comes with this package is used, if any.

    Tables are cut as they were in training, and parts that end up side by side are put together again. The policy
    plays for the objective that it was trained for, and sees codes of the cost model that it was trained on, which is
    published with it. Candidates are compared by the request's cost models: by their steps if these are the
    objective, else by their slowest ranks. Masks keep to memory limits and constraints.

    Source:
        AutoShard Sec. 4.5. Differs: memory limits hold, and several placements may be drawn.
    """

    name: ClassVar[str] = "policy"
    summary: ClassVar[str] = "The trained policy of the device: one pass over the tables."
    options_type: ClassVar[type] = PolicyOptions

    def plan(self, request: PlanRequest) -> ShardingPlan:
        """Makes a plan, without prediction; its provenance names the policy.

        Raises:
            ModelError: If there is no policy of the device for such items, or a cost model cannot price them.
            InfeasiblePlanError: If no placement within the memory limits was found.
            InvalidOptionError: If an option is unknown or out of range.
        """
        # Imported here, for torch takes a second that listing planners does not have.
        from env import PlacementTask
        from policies.tasks import items_problem

        options = parse_options(PolicyOptions, request.options)
        items = Items(options.items)
        policy = _load(request.registry, request.topology.device, items)
        problem = items_problem(request.tables, request.topology, request.costs.kernel, items)
        seen = items_problem(request.tables, request.topology, policy.cost.model(), items)
        costs = replace(request.costs, kernel=seen.model)
        task = PlacementTask.of(seen, objective=policy.objective, costs=costs)
        candidates = _candidates(policy, task, options, request.seed)
        plan = joined(problem.to_plan(_best(problem, candidates, task, request.costs)))
        source = Provenance(planner=self.name, version=__version__, models={items.policy_kind: policy.name})
        return replace(plan, provenance=source)


def _candidates(policy: TrainedPolicy, task: PlacementTask, options: PolicyOptions, seed: int) -> tuple[RankArray, ...]:
    import torch

    from policies.decoding import decode, decode_beam

    candidates = decode(policy.network, [task]).ranks
    if options.num_samples > 1:
        generator = torch.Generator().manual_seed(seed)
        candidates += decode(policy.network, [task], num_samples=options.num_samples - 1, generator=generator).ranks
    if options.beam_width > 1:
        candidates += decode_beam(policy.network, [task], width=options.beam_width).ranks
    return candidates


def _best(problem: PlacementProblem, candidates: tuple[RankArray, ...], task: PlacementTask, costs: Costs) -> RankArray:
    """The candidate with the shortest step if that is the task's objective, else with the fastest slowest rank."""
    if len(candidates) == 1:
        return candidates[0]
    step_cost = StepCost(problem, costs) if task.step_cost is not None else None

    def cost_ms(ranks_N: RankArray) -> float:
        if step_cost is None:
            return float(problem.rank_ms(ranks_N).max())
        return float(step_cost.step_ms(step_cost.sums(ranks_N))[0])

    return min(candidates, key=cost_ms)


def _load(registry: Path | None, device: str, items: Items) -> TrainedPolicy:
    kind = items.policy_kind
    models = find_registry(kind, device, registry) or Registry(registry)
    return _load_version(models.root, device, models.production_id(kind, device), items)


@lru_cache(maxsize=_CACHED_POLICIES)
def _load_version(root: Path, device: str, version: str | None, items: Items) -> TrainedPolicy:
    from policies.trained import TrainedPolicy

    return TrainedPolicy.load(Registry(root), device, version or PRODUCTION, items=items)
