"""The planner `replica-groups`: how many copies of the tables, and over which ranks each is sharded.

Shape suffixes: R ranks of a replica group.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from autoshard import __version__
from autoshard.core import (
    CostBreakdown,
    GroupLayout,
    MemoryBytes,
    MemoryLevel,
    Provenance,
    ReplicaGroups,
    ShardingPlan,
    Topology,
)
from autoshard.core.accepted import AT_LEAST_0, AT_LEAST_1, check_choice, listed
from autoshard.core.errors import InfeasiblePlanError, InvalidOptionError, InvalidPlanError
from autoshard.core.quoting import shown
from autoshard.evaluation.evaluate import evaluate
from autoshard.planners.planner import PlanRequest, parse_options
from autoshard.planners.registry import get_planner

#: Option value for what the planner decides.
_ANY = "auto"
#: Characters that a text of `plan.json` has.
_MAX_CHARACTERS = 512

#: Plans that are made anew, with less room for tables where a batch's inputs and outputs did not fit, to no avail.
_MAX_IDLE = 2
#: Ranks may hold this much more than the mean, or than the largest shard, where they are levelled by memory.
_LEVEL = 1.1

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaGroupsOptions:
    """Options of the `replica-groups` planner."""

    base: str = field(default="cost-greedy", metadata={"help": "Planner that shards the tables over one group."})
    base_options: str = field(default="", metadata={"help": "Its options: KEY=VALUE, several parted by commas."})
    num_groups: int = field(default=0, metadata={"help": "Groups; 0 for the fastest number that fits the memory."})
    layout: str = field(
        default=_ANY,
        metadata={
            "help": "across_nodes: copies of a row sit side by side; within_nodes: the ranks of a group do; auto: the "
            "faster one."
        },
    )
    sync_every: int = field(
        default=1,
        metadata={"help": "Steps from one synchronisation of groups to the next; above 1 changes training."},
    )
    moment_scale: float = field(
        default=0.0, metadata={"help": "Divides the second moment of row-wise AdaGrad; 0 for the number of groups."}
    )
    count_activations: bool = field(
        default=True, metadata={"help": "Whether inputs and outputs of a batch have to fit beside the tables."}
    )

    def __post_init__(self) -> None:
        if self.base == ReplicaGroupsPlanner.name:
            raise InvalidOptionError("must be another planner, got this one", field="options.base")
        AT_LEAST_0.check_fields(self, "num_groups", "moment_scale", within="options.")
        AT_LEAST_1.check_fields(self, "sync_every", within="options.")
        check_choice(self.layout, (_ANY, *GroupLayout), "options.layout")

    def of_base(self) -> dict[str, object]:
        """The base planner's options by name."""
        pairs = [pair.partition("=") for pair in listed(self.base_options) if pair]
        if bad := [key for key, equals, _ in pairs if not equals]:
            raise InvalidOptionError(f"must be KEY=VALUE, got {shown(bad[0])}", field="options.base_options")
        return {key.strip(): value.strip() for key, _, value in pairs}


class ReplicaGroupsPlanner:
    """Tries every number of groups that divides the ranks, with another planner for one group; the fastest step wins.

    Candidates that cannot be are dropped before they are planned: groups without an equal share of the nodes, tables
    that exceed a group's memory, and synchronisation that alone takes longer than the best step found.

    Source:
        2D Sec. 3.1 and 5. Differs: the number of groups and their layout are chosen by predicted time, where the paper
        tunes them by hand.
    """

    name: ClassVar[str] = "replica-groups"
    summary: ClassVar[str] = "As many copies of the tables, each on a group of ranks, as make the fastest step (2D)."
    options_type: ClassVar[type] = ReplicaGroupsOptions

    def plan(self, request: PlanRequest) -> ShardingPlan:
        """Makes a plan, without prediction; its provenance says what each number of groups costs, or why it is out.

        Raises:
            InfeasiblePlanError: If no number of groups fits the memory.
            InvalidOptionError: If the groups asked for do not divide the ranks, or have no equal share of the nodes.
        """
        options = parse_options(ReplicaGroupsOptions, request.options)
        trials = _Trials(request, options)
        for groups in trials.candidates():
            trials.add(groups)
        return trials.best()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    plan: ShardingPlan
    priced: CostBreakdown


class _Trials:
    """What was tried for one request."""

    def __init__(self, request: PlanRequest, options: ReplicaGroupsOptions) -> None:
        self.request, self.options = request, options
        self.base = get_planner(options.base)
        self.base_options = options.of_base()
        self.total_bytes = sum(table.storage_bytes for table in request.tables.tables)
        self.fastest: _Trial | None = None
        self.notes: dict[str, str] = {}
        self.failures: list[InfeasiblePlanError] = []
        self._num_candidates = 1

    def candidates(self) -> list[ReplicaGroups]:
        """Numbers of groups and layouts with an equal share of the nodes, fewest groups first."""
        found: list[ReplicaGroups] = []
        views: set[object] = set()
        refused: InvalidPlanError | None = None
        for groups in self._all():
            topology = self.request.topology
            try:
                group, copies = groups.group_topology(topology), groups.replica_topology(topology)
            except InvalidPlanError as error:
                refused = refused or error
                self.notes[_label(groups)] = f"dropped: {error.message}"
                continue
            view = (groups.num_groups, group.levels, copies.levels, group.overrides, group.fetch_ms)
            if view not in views:
                views.add(view)
                found.append(groups)
        if not found and refused is not None:
            raise InvalidOptionError(refused.message, field="options.num_groups")
        self._num_candidates = len(found)
        return found

    def add(self, groups: ReplicaGroups) -> None:
        """Plans and prices one candidate."""
        label = _label(groups)
        try:
            trial = self._trial(groups)
        except InfeasiblePlanError as error:
            self.failures.append(error)
            self.notes[label] = f"dropped, out of memory: {error.message}"
            _log.info("%s: %s", label, self.notes[label])
            return
        if trial is None:
            return
        step_ms, sync_ms = trial.priced.step_ms.value, trial.priced.group_sync_ms or 0.0
        self.notes[label] = f"step {step_ms:.4g} ms, of which synchronisation {sync_ms:.4g} ms"
        _log.info("%s: %s", label, self.notes[label])
        if self.fastest is None or step_ms < self.fastest.priced.step_ms.value:
            self.fastest = trial

    def best(self) -> ShardingPlan:
        """The fastest plan, with what is known of the others.

        Raises:
            InfeasiblePlanError: If there is none.
        """
        if self.fastest is None:
            raise (
                self.failures[0]
                if len(self.failures) == 1
                else InfeasiblePlanError(f"no number of groups fits; with the fewest, {self.failures[0].message}")
            )
        plan = self.fastest.plan
        of_base = dict(plan.provenance.models) if plan.provenance is not None else {}
        notes = {label: text[:_MAX_CHARACTERS] for label, text in self.notes.items()}
        models = {**of_base, "group_planner": self.options.base, **notes}
        return replace(
            plan, provenance=Provenance(planner=ReplicaGroupsPlanner.name, version=__version__, models=models)
        )

    def _all(self) -> Iterator[ReplicaGroups]:
        options, world = self.options, self.request.topology.world_size
        numbers = [options.num_groups] if options.num_groups else _divisors(world)
        if not options.num_groups and any(table.constraints.pinned_ranks for table in self.request.tables.tables):
            self.notes["other numbers of groups"] = "dropped: tables are pinned to ranks of the world"
            numbers = [1]
        layouts = list(GroupLayout) if options.layout == _ANY else [GroupLayout(options.layout)]
        for number in numbers:
            for layout in layouts if number > 1 else layouts[:1]:
                yield ReplicaGroups(
                    num_groups=number,
                    layout=layout,
                    sync_every=options.sync_every,
                    moment_scale=options.moment_scale or float(number),
                )

    def _trial(self, groups: ReplicaGroups) -> _Trial | None:
        """A plan of the candidate that fits; None if it cannot be the fastest."""
        topology, costs = self.request.topology, self.request.costs
        group = groups.group_topology(topology)
        room = sum(group.memory_of(rank)[level] for rank in range(group.world_size) for level in MemoryLevel)
        if self.total_bytes > room:
            raise InfeasiblePlanError(
                f"all tables need {self.total_bytes:,} bytes, {self.total_bytes - room:,} bytes more than a group of "
                f"{group.world_size} has"
            )
        mean_bytes = self.total_bytes / group.world_size
        least_ms = costs.comm.all_reduce_ms(mean_bytes, groups.replica_topology(topology)) / groups.sync_every
        if self.fastest is not None and least_ms >= self.fastest.priced.step_ms.value:
            self.notes[_label(groups)] = f"dropped, too slow: synchronisation alone takes {least_ms:.4g} ms or more"
            return None
        return self._fastest(groups, group)

    def _fastest(self, groups: ReplicaGroups, group: Topology) -> _Trial:
        """The base planner's plan, or one whose ranks hold more alike, since the fullest synchronises the longest."""
        memory_R = np.array([group.memory_of(rank).hbm for rank in range(group.world_size)], dtype=np.float64)
        trials: list[_Trial] = []
        failure: InfeasiblePlanError | None = None
        try:
            trials.append(self._fitting(groups, group, memory_R))
        except InfeasiblePlanError as error:
            failure = error
        level = _LEVEL * max(self.total_bytes / group.world_size, *self._shard_bytes(trials))
        fullest = max((rank.hbm_bytes for trial in trials for rank in trial.priced.ranks), default=memory_R.max())
        if level < fullest and (groups.num_groups > 1 or failure is not None):
            try:
                trials.append(self._fitting(groups, group, np.minimum(memory_R, level)))
            except InfeasiblePlanError as error:
                failure = failure or error
        if not trials:
            assert failure is not None, "what did not fit has said so"
            raise failure
        return min(trials, key=lambda one: one.priced.step_ms.value)

    def _shard_bytes(self, trials: list[_Trial]) -> list[int]:
        """Bytes of what ranks hold in a plan; of whole tables, if there is none yet."""
        if not trials:
            return [table.storage_bytes for table in self.request.tables.tables]
        return [shard.local.memory_bytes for shard in trials[0].plan.of_one_group().held_shards()]

    def _fitting(self, groups: ReplicaGroups, group: Topology, memory_R: NDArray[np.float64]) -> _Trial:
        """A plan whose weights and activations fit: the latter are known once there is a plan.

        A rank that they overfill may hold that many bytes of tables less in the next one.

        Args:
            groups: The candidate.
            group: Its group's ranks.
            memory_R: Device memory that each rank may give to tables; activations may use what else it has.
        """
        request = replace(
            self.request,
            tables=replace(self.request.tables, batch_size=max(1, self.request.tables.batch_size // groups.num_groups)),
            options=self.base_options,
            time_limit_s=self.request.time_limit_s / self._num_candidates,
        )
        limit_R = np.array([group.memory_of(rank).hbm for rank in range(group.world_size)], dtype=np.float64)
        room_R, failure, least_over, num_idle = memory_R, None, math.inf, 0
        while num_idle < _MAX_IDLE:
            try:
                made = self.base.plan(replace(request, topology=_with_memory(group, room_R)))
            except InfeasiblePlanError as error:
                raise failure or error from None
            plan = replace(made, tables=self.request.tables, topology=self.request.topology, replica_groups=groups)
            trial = _Trial(plan=plan, priced=evaluate(plan, self.request.costs))
            held_R, needed_R = _held_and_needed(trial.priced)
            over_R = np.maximum(needed_R - limit_R, 0.0)
            if not self.options.count_activations or not over_R.any():
                return trial
            failure = failure or _out_of_memory(held_R, needed_R, limit_R)
            # What is too large for one rank is so for the next one.
            num_idle = 0 if over_R.sum() < least_over else num_idle + 1
            least_over = min(least_over, float(over_R.sum()))
            room_R = np.where(over_R > 0, np.maximum(held_R - over_R, 0.0), room_R)
        assert failure is not None, "the last attempt did not fit"
        raise failure


def _held_and_needed(priced: CostBreakdown) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Bytes of each rank's tables, and of a batch's inputs and outputs as well; shapes (R,)."""
    held_R = np.array([rank.hbm_bytes for rank in priced.ranks], dtype=np.float64)
    return held_R, held_R + np.array([rank.activation_bytes for rank in priced.ranks], dtype=np.float64)


def _out_of_memory(
    held_R: NDArray[np.float64], needed_R: NDArray[np.float64], limit_R: NDArray[np.float64]
) -> InfeasiblePlanError:
    worst = int((needed_R - limit_R).argmax())
    return InfeasiblePlanError(
        f"rank {worst} of a group of {len(limit_R)} would hold {int(held_R[worst]):,} bytes of tables and "
        f"{int(needed_R[worst] - held_R[worst]):,} bytes of a batch's inputs and outputs, "
        f"{int(needed_R[worst] - limit_R[worst]):,} bytes more than its {int(limit_R[worst]):,}"
    )


def _with_memory(group: Topology, room_R: NDArray[np.float64]) -> Topology:
    """The ranks with that much device memory."""
    overrides = []
    for rank, room in enumerate(room_R.tolist()):
        memory = group.memory_of(rank)
        if int(room) != memory.hbm:
            overrides.append((rank, MemoryBytes(hbm=int(room), ddr=memory.ddr, ssd=memory.ssd)))
    return replace(group, overrides=(*group.overrides, *overrides)) if overrides else group


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _label(groups: ReplicaGroups) -> str:
    if groups.num_groups == 1:
        return "1 group"
    return f"{groups.num_groups} groups {groups.layout}"
