"""The trained policy as a planner.

Shape suffixes: N items, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from autoshard import __version__
from autoshard.core import Provenance, ShardingPlan
from autoshard.core.errors import InvalidOptionError
from autoshard.planners.feasibility import repair
from autoshard.planners.placement import PlacementProblem, RankArray
from autoshard.planners.planner import PlanRequest, parse_options
from costmodel.registry import PRODUCTION, Registry, find_registry
from policies import POLICY_KIND

if TYPE_CHECKING:
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

    def __post_init__(self) -> None:
        if not 1 <= self.num_samples <= _MAX_SAMPLES:
            raise InvalidOptionError(
                f"must be in [1, {_MAX_SAMPLES}], got {self.num_samples}", field="options.num_samples"
            )


class PolicyPlanner:
    """Places tables as the policy of the topology's device says, in one pass over the tables.

    Where the user's registry has no policy of the device, the one that comes with this package is used, if any.

    The policy sees codes of the cost model that it was trained on, which is published with it; candidates are
    compared by the request's cost model. Masks keep to memory limits and constraints; where they lead into a dead
    end, as little as possible is moved.

    Source:
        AutoShard Sec. 4.5. Differs: memory limits hold, and several placements may be drawn.
    """

    name: ClassVar[str] = "policy"
    summary: ClassVar[str] = "The trained policy of the device: one pass over the tables."
    options_type: ClassVar[type] = PolicyOptions

    def plan(self, request: PlanRequest) -> ShardingPlan:
        """Makes a plan, without prediction; its provenance names the policy.

        Raises:
            ModelError: If there is no policy of the device, or one whose cost model cannot price the tables.
            InfeasiblePlanError: If no placement within the memory limits was found.
            InvalidOptionError: If an option is unknown or out of range.
        """
        options = parse_options(PolicyOptions, request.options)
        policy = _load(request.registry, request.topology.device)
        problem = PlacementProblem.table_wise(request.tables, request.topology, request.costs.kernel)
        seen = PlacementProblem.table_wise(request.tables, request.topology, policy.cost.model())
        ranks_N = _best(problem, _candidates(policy, seen, options.num_samples, request.seed))
        plan = problem.to_plan(repair(problem, ranks_N, request.seed))
        source = Provenance(planner=self.name, version=__version__, models={POLICY_KIND: policy.name})
        return replace(plan, provenance=source)


def _candidates(policy: TrainedPolicy, problem: PlacementProblem, num_samples: int, seed: int) -> tuple[RankArray, ...]:
    # Imported here, for torch takes a second that listing planners does not have.
    import torch

    from env import PlacementTask
    from policies.decoding import decode

    task = PlacementTask.of(problem)
    candidates = decode(policy.network, [task]).ranks
    if num_samples > 1:
        generator = torch.Generator().manual_seed(seed)
        candidates += decode(policy.network, [task], num_samples=num_samples - 1, generator=generator).ranks
    return candidates


def _best(problem: PlacementProblem, candidates: tuple[RankArray, ...]) -> RankArray:
    """The fastest candidate within the limits; the first if there is none."""
    feasible = [ranks_N for ranks_N in candidates if problem.is_feasible(ranks_N)]
    return min(feasible, key=lambda ranks_N: float(problem.rank_ms(ranks_N).max()), default=candidates[0])


def _load(registry: Path | None, device: str) -> TrainedPolicy:
    models = find_registry(POLICY_KIND, device, registry) or Registry(registry)
    return _load_version(models.root, device, models.production_id(POLICY_KIND, device))


@lru_cache(maxsize=_CACHED_POLICIES)
def _load_version(root: Path, device: str, version: str | None) -> TrainedPolicy:
    from policies.trained import TrainedPolicy

    return TrainedPolicy.load(Registry(root), device, version or PRODUCTION)
