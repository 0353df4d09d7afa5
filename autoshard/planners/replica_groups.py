"""The planner `replica-groups`: how many copies of the tables, and over which ranks each is sharded.

Shape suffixes: R ranks of a replica group.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import ClassVar

import numpy as np

from autoshard import __version__
from autoshard.core import (
    CostBreakdown,
    GroupLayout,
    MemoryLevel,
    Provenance,
    ReplicaGroups,
    ShardingPlan,
    SyncRows,
    Topology,
)
from autoshard.core.accepted import AT_LEAST_0, AT_LEAST_1, check_choice
from autoshard.core.access import FloatArray
from autoshard.core.errors import InfeasiblePlanError, InvalidOptionError, InvalidPlanError
from autoshard.core.quoting import shown, write_bytes
from autoshard.evaluation.evaluate import evaluate
from autoshard.evaluation.group_sync import least_sync_ms, with_cheaper_sync
from autoshard.formats.documents.fields import MAX_TEXT
from autoshard.planners.auto_options import AUTO, AutoOptions
from autoshard.planners.planner import PlanRequest, parse_options
from autoshard.planners.registry import get_planner
from autoshard.planners.space.placement import exceeds_total

#: Option value for what the planner decides.
_ANY = "auto"

#: Plans that are made anew, with less room for tables where a batch's inputs and outputs did not fit, to no avail.
_MAX_IDLE = 2
#: Ranks may hold this much more than the mean, or than the largest shard, where they are levelled by memory.
_LEVEL = 1.1

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaGroupsOptions:
    """Options of the `replica-groups` planner."""

    base: str = field(default="cost-greedy", metadata={"help": "Planner that shards the tables over one group."})
    base_options: str = field(
        default="",
        metadata={"help": "Its options: KEY=VALUE, several parted by commas; a value may have commas, too."},
    )
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
    sync_rows: str = field(
        default=_ANY,
        metadata={
            "help": "all: a synchronisation averages all rows; touched: those updated since the last one; auto: the "
            "faster one."
        },
    )
    moment_scale: float = field(
        default=0.0,
        metadata={
            "help": "Divides the second moment of row-wise AdaGrad; at most, and with 0, the number of groups. 1 with "
            "tables of Adam or LAMB."
        },
    )
    count_activations: bool = field(
        default=True, metadata={"help": "Whether what training needs for a batch has to fit beside the tables."}
    )

    def __post_init__(self) -> None:
        if self.base == ReplicaGroupsPlanner.name:
            raise InvalidOptionError("must be another planner, got this one", field="options.base")
        AT_LEAST_0.check_fields(self, "num_groups", "moment_scale", within="options.")
        AT_LEAST_1.check_fields(self, "sync_every", within="options.")
        check_choice(self.layout, (_ANY, *GroupLayout), "options.layout")
        check_choice(self.sync_rows, (_ANY, *SyncRows), "options.sync_rows")

    def of_base(self) -> dict[str, object]:
        """The base planner's options by name."""
        texts = [text.strip(" ,") for text in re.split(r",(?=[^,=]*=)", self.base_options)]
        pairs = [text.partition("=") for text in texts if text]
        if bad := [key for key, equals, _ in pairs if not equals]:
            raise InvalidOptionError(f"must be KEY=VALUE, got {shown(bad[0])}", field="options.base_options")
        given: dict[str, object] = {key.strip(): value.strip() for key, _, value in pairs}
        return asdict(parse_options(AutoOptions, given).in_one_group()) if self.base == AUTO else given


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
    when: ClassVar[str] = "hundreds of ranks and more"
    options_type: ClassVar[type] = ReplicaGroupsOptions

    def plan(self, request: PlanRequest) -> ShardingPlan:
        """Makes a plan; its provenance says what each number of groups costs, or why it is out.

        Raises:
            InfeasiblePlanError: If no number of groups fits the memory.
            InvalidOptionError: If the groups asked for do not divide the ranks, or have no equal share of the nodes.
        """
        return _Search(request, parse_options(ReplicaGroupsOptions, request.options)).plan()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """A plan of a candidate, and what it costs."""

    plan: ShardingPlan
    priced: CostBreakdown

    @property
    def step_ms(self) -> float:
        """The predicted step."""
        return self.priced.step_ms.value


class _Search:
    """The search over groups for one request."""

    def __init__(self, request: PlanRequest, options: ReplicaGroupsOptions) -> None:
        self.request, self.options = request, options
        self.base, self.base_options = get_planner(options.base), options.of_base()
        self.total_bytes = request.tables.storage_bytes
        self.fastest: _Trial | None = None
        self.failures: list[InfeasiblePlanError] = []
        self.notes: dict[str, str] = {}
        """What came of each candidate."""

    def plan(self) -> ShardingPlan:
        """The fastest plan, with what is known of the others.

        Raises:
            InfeasiblePlanError: If there is none.
        """
        candidates = self._candidates()
        for groups in candidates:
            note = self.notes[_label(groups)] = self._tried(groups, self.request.time_limit_s / len(candidates))
            _log.info("%s: %s", _label(groups), note)
        if self.fastest is None:
            first = self.failures[0]
            if len(self.failures) == 1:
                raise first
            raise InfeasiblePlanError(f"no number of groups fits; with the fewest, {first.message}")
        plan = self.fastest.plan
        of_base = dict(plan.provenance.models) if plan.provenance is not None else {}
        notes = {label: text[:MAX_TEXT] for label, text in self.notes.items()}
        models = {**of_base, "group_planner": self.options.base, **notes}
        provenance = Provenance(planner=ReplicaGroupsPlanner.name, version=__version__, models=models)
        return replace(plan, predicted=self.fastest.priced, provenance=provenance)

    def _candidates(self) -> list[ReplicaGroups]:
        """Numbers of groups and layouts with an equal share of the nodes, fewest groups first, each kind once."""
        topology = self.request.topology
        found: dict[object, ReplicaGroups] = {}
        refused: list[InvalidPlanError] = []
        for groups in self._all():
            try:
                group, copies = groups.group_topology(topology), groups.replica_topology(topology)
            except InvalidPlanError as error:
                refused.append(error)
                self.notes[_label(groups)] = f"dropped: {error.message}"
                continue
            view = (groups.num_groups, group.levels, copies.levels, group.overrides, group.fetch_ms)
            found.setdefault(view, groups)
        if not found and refused:
            raise InvalidOptionError(refused[0].message, field="options.num_groups")
        return list(found.values())

    def _all(self) -> Iterator[ReplicaGroups]:
        options, world = self.options, self.request.topology.world_size
        numbers = [number for number in range(1, world + 1) if world % number == 0]
        if options.num_groups:
            numbers = [options.num_groups]
        elif any(table.constraints.pinned_ranks for table in self.request.tables.tables):
            self.notes["other numbers of groups"] = "dropped: tables are pinned to ranks of the world"
            numbers = [1]
        if numbers[-1] < options.moment_scale:
            raise InvalidOptionError(
                f"must be at most the number of groups, {numbers[-1]}, got {options.moment_scale:g}",
                field="options.moment_scale",
            )
        # Means are not divided, as sums of squares are.
        means = [table.optimizer for table in self.request.tables.tables if table.optimizer.has_decaying_moments]
        moment_scale = options.moment_scale or float(bool(means))
        if means and moment_scale != 1.0:
            raise InvalidOptionError(
                f"must be 1 with tables of {means[0]}, whose moments are means, got {moment_scale:g}",
                field="options.moment_scale",
            )
        layouts = list(GroupLayout) if options.layout == _ANY else [GroupLayout(options.layout)]
        for number in numbers:
            if number < options.moment_scale:
                self.notes[f"groups {number}"] = f"dropped: fewer groups than moment_scale, {options.moment_scale:g}"
                continue
            for layout in layouts if number > 1 else layouts[:1]:
                rows = SyncRows.ALL if options.sync_rows == _ANY or number == 1 else SyncRows(options.sync_rows)
                groups = ReplicaGroups(num_groups=number, layout=layout, sync_every=options.sync_every, sync_rows=rows)
                yield replace(groups, moment_scale=moment_scale) if moment_scale else groups

    def _tried(self, groups: ReplicaGroups, time_limit_s: float) -> str:
        """Plans and prices one candidate, unless it cannot be the fastest; what came of it."""
        topology = self.request.topology
        group = groups.group_topology(topology)
        least_ms = self._least_sync_ms(groups)
        try:
            self._check_room(group)
            if self.fastest is not None and least_ms >= self.fastest.step_ms:
                return f"dropped, too slow: synchronisation alone takes {least_ms:.4g} ms or more"
            trial = self._fastest(groups, group, time_limit_s)
        except InfeasiblePlanError as error:
            self.failures.append(error)
            return f"dropped, out of memory: {error.message}"
        if self.fastest is None or trial.step_ms < self.fastest.step_ms:
            self.fastest = trial
        sync_ms = trial.priced.group_sync_ms or 0.0
        return f"step {trial.step_ms:.4g} ms, of which synchronisation {sync_ms:.4g} ms"

    def _least_sync_ms(self, groups: ReplicaGroups) -> float:
        """Time that synchronisation takes at least, with the rows that the options allow."""
        ways = SyncRows if self.options.sync_rows == _ANY else (groups.sync_rows,)
        tables, topology, comm = self.request.tables, self.request.topology, self.request.costs.comm
        return min(least_sync_ms(tables, replace(groups, sync_rows=rows), topology, comm) for rows in ways)

    def _check_room(self, group: Topology) -> None:
        ranks = range(group.world_size)
        room_M = {level: sum(group.memory_of(rank)[level] for rank in ranks) for level in MemoryLevel}
        if self.total_bytes > sum(room_M.values()):
            raise exceeds_total(self.total_bytes, room_M, group.world_size)

    def _fastest(self, groups: ReplicaGroups, group: Topology, time_limit_s: float) -> _Trial:
        """The base planner's plan, or one whose ranks hold more alike, since the fullest synchronises the longest."""
        trials: list[_Trial] = []
        failures: list[InfeasiblePlanError] = []

        def attempt(room_R: FloatArray) -> None:
            try:
                trials.append(self._fitting(groups, group, room_R, time_limit_s))
            except InfeasiblePlanError as error:
                failures.append(error)

        memory_R = _memory(group)
        attempt(memory_R)
        held = [local.memory_bytes for trial in trials for local in trial.plan.of_one_group().arrays.locals_U]
        whole = [table.storage_bytes for table in self.request.tables.tables]
        level = _LEVEL * max(self.total_bytes / group.world_size, *(held if trials else whole))
        fullest = max((rank.hbm_bytes for trial in trials for rank in trial.priced.ranks), default=memory_R.max())
        if level < fullest and (groups.num_groups > 1 or failures):
            attempt(np.minimum(memory_R, level))
        if not trials:
            raise failures[0]
        return min(trials, key=lambda trial: trial.step_ms)

    def _fitting(self, groups: ReplicaGroups, group: Topology, room_R: FloatArray, time_limit_s: float) -> _Trial:
        """A plan whose weights and activations fit: the latter are known once there is a plan.

        A rank that they overfill may hold that many bytes of tables less in the next one.

        Args:
            groups: The candidate.
            group: Its group's ranks.
            room_R: Device memory that each rank may give to tables; activations may use what else it has.
            time_limit_s: Of each plan.
        """
        tables = self.request.tables
        tables = replace(tables, batch_size=max(1, tables.batch_size // groups.num_groups))
        request = replace(
            self.request,
            tables=tables,
            options=self.base_options,
            time_limit_s=time_limit_s,
            started_s=None,
            start=None,
        )
        memory_R, failure, least_over, num_idle = _memory(group), None, math.inf, 0
        while num_idle < _MAX_IDLE:
            try:
                made = self.base.plan(replace(request, topology=_with_memory(group, room_R)))
            except InfeasiblePlanError as error:
                raise failure or error from None
            if (num_groups := made.replica_groups.num_groups) > 1:
                raise InvalidOptionError(
                    f"must shard the tables over one group, {self.base.name} made {num_groups}", field="options.base"
                )
            whole = ShardingPlan(
                tables=self.request.tables,
                topology=self.request.topology,
                shards=made.shards,
                payload=made.payload,
                replica_groups=groups,
                provenance=made.provenance,
            )
            if self.options.sync_rows == _ANY:
                whole = with_cheaper_sync(whole, self.request.costs.comm)
            trial = _Trial(plan=whole, priced=evaluate(whole, self.request.costs))
            held_R = np.array([rank.hbm_bytes for rank in trial.priced.ranks], dtype=np.float64)
            active_R = np.array([rank.training_bytes for rank in trial.priced.ranks], dtype=np.float64)
            over_R = np.maximum(held_R + active_R - memory_R, 0.0)
            if not self.options.count_activations or not over_R.any():
                return trial
            failure = failure or _out_of_memory(held_R, active_R, memory_R)
            # What is too large for one rank is so for the next one.
            num_idle = 0 if over_R.sum() < least_over else num_idle + 1
            least_over = min(least_over, float(over_R.sum()))
            room_R = np.where(over_R > 0, np.maximum(held_R - over_R, 0.0), room_R)
        assert failure is not None, "the last attempt did not fit"
        raise failure


def _memory(group: Topology) -> FloatArray:
    """Device memory of each rank, shape (R,)."""
    return np.array(group.hbm_bytes, dtype=np.float64)


def _out_of_memory(held_R: FloatArray, active_R: FloatArray, memory_R: FloatArray) -> InfeasiblePlanError:
    worst = int((held_R + active_R - memory_R).argmax())
    held, active, memory = held_R[worst], active_R[worst], memory_R[worst]
    return InfeasiblePlanError(
        f"rank {worst} of a group of {len(held_R)} would hold {write_bytes(held)} of tables and {write_bytes(active)} "
        f"for training on a batch, {write_bytes(held + active - memory)} more than its {write_bytes(memory)}"
    )


def _with_memory(group: Topology, room_R: FloatArray) -> Topology:
    """The ranks with that much device memory."""
    if (room_R == _memory(group)).all():
        return group
    rooms = enumerate(room_R.tolist())
    return replace(
        group, overrides=tuple((rank, replace(group.memory_of(rank), hbm=int(room))) for rank, room in rooms)
    )


def _label(groups: ReplicaGroups) -> str:
    return "1 group" if groups.num_groups == 1 else f"{groups.num_groups} groups {groups.layout}"
