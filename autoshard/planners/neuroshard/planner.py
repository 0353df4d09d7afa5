"""The planner `neuroshard`."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from autoshard import __version__
from autoshard.core import EmbeddingTable, Provenance, Shard, ShardingPlan, Tier
from autoshard.core.accepted import AT_LEAST_0, AT_LEAST_1
from autoshard.planners.heuristics.greedy import CostGreedyPlanner
from autoshard.planners.neuroshard.beam import BeamResult, BeamSearch
from autoshard.planners.neuroshard.capped_greedy import CappedGreedy
from autoshard.planners.planner import PlanRequest, parse_options
from autoshard.planners.space.options import ShardingOption, ShardingType, UnplacedShard
from autoshard.planners.space.planner_space import PlannerSpace

#: Largest cap on the sum of dimensions of a rank, over the mean.
LARGEST_CAP = 1.5

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NeuroShardOptions:
    """Options of the `neuroshard` planner; the defaults are those of the paper's code."""

    beam_width: int = field(default=3, metadata={"help": "Candidates that each step of the beam search keeps."})
    candidates: int = field(
        default=10, metadata={"help": "Shards that a step halves: so many by cost, and so many by memory."}
    )
    steps: int = field(default=10, metadata={"help": "Most halvings of columns in a plan; 0 for whole tables."})
    caps: int = field(
        default=11,
        metadata={"help": "Caps on the sum of dimensions per rank, evenly spaced from 1 to 1.5 times the mean."},
    )

    min_partition: int = field(
        default=0,
        metadata={"help": "Least columns of a column shard, at least 4; 0 for 4."},
    )

    def __post_init__(self) -> None:
        AT_LEAST_1.check_fields(self, "beam_width", "candidates", "caps", within="options.")
        AT_LEAST_0.check_fields(self, "steps", "min_partition", within="options.")


class NeuroShardPlanner:
    """Halves columns by beam search, and packs every candidate greedily under a grid of caps on dimensions.

    Where no candidate fits under any cap, whole tables are placed greedily by cost and repaired.

    Source:
        NeuroShard: Zha et al., Pre-train and Search: Efficient Embedding Table Sharding with Pre-trained Neural Cost
        Models (MLSys 2023), its online search; defaults as in its published code. Differs: candidates are compared by
        the whole predicted step of this project's models, where the paper adds the slowest rank's kernels and
        exchanges; constraints and the memory of each rank hold; and see `BeamSearch`.
    """

    name: ClassVar[str] = "neuroshard"
    summary: ClassVar[str] = "Halves columns by beam search; packs greedily under caps on dimensions (NeuroShard)."
    when: ClassVar[str] = "whole tables and columns in little time; comparisons"
    cuts_tables: ClassVar[bool] = True
    options_type: ClassVar[type] = NeuroShardOptions

    def plan(self, request: PlanRequest) -> ShardingPlan:
        """Makes a plan, without prediction; its provenance says how the search ended.

        Raises:
            InfeasiblePlanError: If no plan within the memory limits was found.
            InvalidOptionError: If an option is unknown or out of range.
            InvalidPlanError: If a constraint names a table or rank that is not there.
        """
        deadline_s = request.deadline_s()
        options = parse_options(NeuroShardOptions, request.options)
        space = whole_tables(request)
        search = BeamSearch(
            space,
            CappedGreedy(
                space,
                np.array(request.topology.hbm_bytes, dtype=np.float64),
                np.linspace(1.0, LARGEST_CAP, options.caps),
            ),
            beam_width=options.beam_width,
            num_candidates=options.candidates,
            max_steps=options.steps,
            min_partition=options.min_partition,
        )
        found = search.run(deadline_s, request.is_stopped)
        if found is None:
            _log.info("neuroshard: nothing fits under the caps, so whole tables are placed by cost")
            return CostGreedyPlanner().plan(replace(request, options={}))
        status = _describe(found, len(space.items))
        _log.info("neuroshard: %s", status)
        provenance = Provenance(planner=self.name, version=__version__, seed=request.seed, models={"search": status})
        shards = zip(search.shards(found.pieces), found.packed.ranks_P.tolist(), strict=True)
        plan = space.plan(part.placed(rank, space.topology) for shard, rank in shards for part in shard.parts)
        return replace(plan, provenance=provenance)


def whole_tables(request: PlanRequest) -> PlannerSpace:
    """Every table whole on one rank; halves of columns are added as the search meets them."""
    topology = request.topology

    def options_of(table: EmbeddingTable) -> list[ShardingOption]:
        part = UnplacedShard.of(Shard.whole(table), Tier.TABLE_WISE, topology)
        return [ShardingOption(name=ShardingType.TABLE_WISE, parts=(part,))]

    return PlannerSpace(request.tables, topology, request.costs, options_of, request.payload)


def _describe(found: BeamResult, num_items: int) -> str:
    first = "no plan" if found.first_ms is None else f"{found.first_ms:.6g} ms"
    return (
        f"{found.num_steps} steps, {len(found.pieces) - num_items} halvings: {first} (whole tables) -> "
        f"{found.step_ms:.6g} ms"
    )
