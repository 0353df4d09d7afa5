"""The trained policy as a planner."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from autoshard import __version__
from autoshard.core import Provenance, ShardingPlan
from autoshard.core.accepted import Range
from autoshard.core.errors import InfeasiblePlanError
from autoshard.planners.hybrid.balanced import placed_options
from autoshard.planners.hybrid.compiled.library import Mode
from autoshard.planners.hybrid.compiled.linear import LinearEffort
from autoshard.planners.hybrid.option_offers import OfferedOptions, ScoreWays
from autoshard.planners.planner import PlanRequest, parse_options
from autoshard.planners.space.layout import Layout, Limits
from costmodel.registry.versions import find_model
from env.game import GameTask
from policies.network import PolicyNetwork
from policies.planning.decoding import decoded
from policies.planning.trained import ANY_DEVICE, POLICY_KIND, TrainedPolicy

_log = logging.getLogger(__name__)

_MAX_SAMPLES, _MAX_BURSTS = 4096, 1 << 20
#: Share of the tables whose options are drawn where placements are drawn to choose the best from; the others are held
#: as in the best start. Over the best plans known, 64 of these are at 2.5% (80 tables on 8 A100) and 1.7% (CPU), the
#: start at 2.9% and 2.4%, and none of 64 with all options drawn is shorter on A100 (five draws each, November 2026).
_DRAWN_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """Options of the planner `policy`."""

    num_samples: int = field(
        default=1,
        metadata={
            "help": "Placements to choose the best from: the likeliest one, and others with options drawn for some. "
            "--set num_samples=64"
        },
    )
    bursts: int = field(
        default=1,
        metadata={
            "help": "Bursts of the compiled search from the best placement, each a few milliseconds. 0 for none: the "
            "policy alone."
        },
    )
    count_activations: bool = field(
        default=True,
        metadata={
            "help": "Whether what training needs has to fit beside the tables: inputs, outputs and gradients of a long "
            "batch, and the dense layers."
        },
    )

    def __post_init__(self) -> None:
        Range(at_least=1, at_most=_MAX_SAMPLES).check_fields(self, "num_samples", within="options.")
        Range(at_least=0, at_most=_MAX_BURSTS).check_fields(self, "bursts", within="options.")


class PolicyPlanner:
    """Holds each table as the trained policy says, and where: one episode of the game.

    The policy names a few ways to hold each table before any of them is priced; these alone are made and played with.
    What comes of the episodes is compared with the best balanced start of the same options, which masks begin with.
    Where the user's registry has no policy of the device, nor one for any device, the one that comes with this package
    is used. Masks keep to memory limits and constraints, with what training needs for a batch. Placements are compared
    by their predicted steps. Plans have one replica group; `replica-groups` with `base=policy` tries others first.

    Source:
        AutoShard Sec. 4.5. Differs: options of tables are chosen beside places, memory limits hold, and several
        placements may be drawn.
    """

    name: ClassVar[str] = "policy"
    summary: ClassVar[str] = "The trained policy: an option and a place for each table, in one pass."
    when: ClassVar[str] = "many plans in little time"
    options_type: ClassVar[type] = PolicyOptions
    cuts_tables: ClassVar[bool] = True

    def plan(self, request: PlanRequest) -> ShardingPlan:
        """Makes a plan, without prediction; its provenance names the policy.

        Raises:
            ModelError: If there is no policy.
            InfeasiblePlanError: If no placement within the memory limits was found.
            InvalidOptionError: If an option is unknown or out of range.
        """
        options = parse_options(PolicyOptions, request.options)
        policy = TrainedPolicy.for_device(request.registry, request.topology.device)
        layout, outside = planned(policy, request, options)
        models = {POLICY_KIND: policy.name}
        if outside:
            models["policy_range"] = f"outside of what the policy was trained on: {outside}"
            _log.warning("%s: %s", policy.name, models["policy_range"])
        provenance = Provenance(planner=self.name, version=__version__, models=models)
        return replace(layout.plan(), provenance=provenance)

    def score_ways(self, request: PlanRequest) -> tuple[ScoreWays, str] | None:
        """The policy of a request's device as `OfferedOptions` asks it, and its name; None if there is none."""
        if not any(find_model(POLICY_KIND, name, request.registry) for name in (request.topology.device, ANY_DEVICE)):
            return None
        policy = TrainedPolicy.for_device(request.registry, request.topology.device)
        return policy.score_ways, policy.name


def planned(policy: TrainedPolicy, request: PlanRequest, options: PolicyOptions | None = None) -> tuple[Layout, str]:
    """The best layout of a request that a policy plays, or that the options it names are placed in one after the other.

    With it, how far the request lies outside of the policy's training, see `TrainedPolicy.outside`.

    Raises:
        InfeasiblePlanError: If no placement within the memory limits was found.
    """
    options = options or PolicyOptions()
    task = named_task(policy, request, with_activations=options.count_activations)
    best = best_of(policy.network, task, options.num_samples, request.seed)
    return improved(task, best, options.bursts, request.seed), policy.outside(task.features)


def named_task(policy: TrainedPolicy, request: PlanRequest, *, with_activations: bool = True) -> GameTask:
    """The game of a request with the options that a policy names.

    With all options where these do not fit, and where these do not, too, with rows behind caches.

    Args:
        policy: The policy.
        request: The task.
        with_activations: Whether what training needs for a batch has to fit beside the tables.

    Raises:
        InfeasiblePlanError: If no placement within the memory limits was found.
    """
    offers = OfferedOptions(request)
    offers.offer_likely(policy.score_ways)
    limits = Limits.of(offers.space, with_activations=with_activations)
    try:
        return GameTask(offers.space, limits)
    except InfeasiblePlanError:
        # The few ways of each table may be too large for the memory.
        offers.complete()
    try:
        return GameTask(offers.space, limits)
    except InfeasiblePlanError:
        if not offers.offer_caches():
            raise
        return GameTask(offers.space, limits)


def best_of(network: PolicyNetwork, task: GameTask, num_samples: int, seed: int) -> Layout:
    """The shortest of some placements: the best start, the network's likeliest one, and others that are drawn.

    Of these, a few tables are held as the network draws it, and the others as in the best start; all are placed anew.
    """
    found = decoded(network, task, num_samples, seed=seed)
    layouts, rng = [task.witness, found.layout(0)], np.random.default_rng(seed)
    start_I = task.witness.numbers_I
    for drawn_I in (found.option_EI[1:] - task.flat.first_I).astype(np.int64):
        number_I = np.where(rng.random(len(start_I)) < _DRAWN_SHARE, drawn_I, start_I)
        layout = placed_options(task.space, task.flat, task.linear.rates, task.limits, number_I)
        layouts += [] if layout is None else [layout]
    return min(layouts, key=lambda layout: layout.step_ms())


def improved(task: GameTask, layout: Layout, num_bursts: int, seed: int) -> Layout:
    """The best layout that some bursts of the compiled search find from one, each from the best so far.

    The first is a descent of all items.

    Args:
        task: What is played.
        layout: Where the search begins.
        num_bursts: How many.
        seed: Source of all chance.
    """
    rng, best_ms = np.random.default_rng(seed), layout.step_ms()
    may_O = np.ones(len(task.flat.item_O), dtype=np.bool_)
    if num_bursts:
        task.linear.relinearise(layout)
    for number in range(num_bursts):
        effort = LinearEffort(mode=Mode.DESCEND if number == 0 else Mode.RUIN)
        found = task.linear.improved(layout, effort, may_O=may_O, seed=int(rng.integers(2**62)), deadline_s=math.inf)
        if found.fits() and (found_ms := found.step_ms()) < best_ms:
            layout, best_ms = found, found_ms
    return layout
