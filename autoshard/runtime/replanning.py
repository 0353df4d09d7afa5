"""A running job's plan made anew, beside training: what `autoshard replan` says of the accesses that were counted."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from autoshard.core import ShardingPlan
from autoshard.core.errors import DeviceError, InputError
from autoshard.core.quoting import shortened
from autoshard.evaluation.drift import AccessedPlan, moved_share, planned_rows
from autoshard.formats import read_plan, write_plan
from autoshard.formats.row_orders import read_row_orders, with_row_orders
from autoshard.results.replanned import REPLAN, Replanning
from autoshard.runtime.access_counts import AccessCounter, AccessCounts
from autoshard.runtime.results import PlanChange

if TYPE_CHECKING:
    from autoshard.runtime.embeddings import ShardedEmbeddings

#: How often between two decisions all processes hear whether one was made.
_HEARD_PER_DECISION: Final = 20
#: Rows whose counts process 0 gets for a decision, 16 bytes each: for each table, and at most.
_ROWS_OF_A_TABLE, _ROWS_OF_A_DECISION = 1 << 13, 1 << 17
#: And at least so many of each process.
_LEAST_ROWS: Final = 1 << 10
#: Runs a command of autoshard behind training, where both want the processor, and only as long as the process lives
#: whose id is its first argument: the system kills it when that one ends (PR_SET_PDEATHSIG).
_COMMAND: Final = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit(1)
os.nice(10)
from autoshard.cli import main
raise SystemExit(main())
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanSettings:
    """How often a job plans again, and what a change has to bring.

    Attributes:
        every: Steps from one decision to the next; those that find the one before under way are left out.
        horizon: Steps within which moving rows has to pay off.
        least_gain: Share by which the step has to become shorter.
        least_drift: Share of the lookups that have to go to other rows than planned; up to that nothing is searched.
        time_limit_s: Seconds for the search.
        seed: Seed of the search.
    """

    every: int
    horizon: float
    least_gain: float = 0.02
    least_drift: float = 0.1
    time_limit_s: float = 5.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDecision:
    """Whether a job changes its plan.

    Attributes:
        step: Steps that the job had made when accesses were counted.
        figures: What was said of it; None if nothing was searched.
        reason: Why nothing was; empty if something was.
        plan: The new plan; None if the older one stays.
        row_orders: Row ids in falling access frequency, of the new plan's tables that list them.
    """

    step: int
    figures: Replanning | None = None
    reason: str = ""
    plan: ShardingPlan | None = None
    row_orders: Mapping[str, torch.Tensor]


class Replanner:
    """Plans again in a child process while training goes on; of one process of the job.

    Args:
        plan: The plan that is executed.
        row_orders: Its row orders that list ids, by table.
        settings: How.
    """

    def __init__(self, plan: ShardingPlan, row_orders: Mapping[str, torch.Tensor], settings: ReplanSettings) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="autoshard-replan-")
        self._settings = settings
        self._child: subprocess.Popen[bytes] | None = None
        self._told: PlanDecision | None = None
        self._step = 0
        self._plan = plan
        self._plan_file = self._path("plan.json")
        ids = {name: ids_N.numpy() for name, ids_N in row_orders.items()}
        self._planned = planned_rows(plan, ids)
        write_plan(with_row_orders(plan, ids, self._plan_file), self._plan_file)

    @property
    def is_planning(self) -> bool:
        """Whether a decision is under way."""
        return self._child is not None or self._told is not None

    def begin(self, step: int, counts: AccessCounts, steps_left: int | None) -> None:
        """Starts planning for the accesses that were counted.

        Args:
            step: Steps that the job has made.
            counts: Of all processes.
            steps_left: Steps that it will make, if that is known: a change has to pay within these.
        """
        assert not self.is_planning, "one decision follows the other"
        self._step = step
        horizon = self._settings.horizon if steps_left is None else min(self._settings.horizon, steps_left)
        options = {
            "--access": self._path("access.json"),
            "--output": self._path(f"plan-{step}.json"),
            "--horizon": max(1.0, horizon),
            "--least-gain": self._settings.least_gain,
            "--time-limit": self._settings.time_limit_s,
            "--seed": self._settings.seed,
        }
        words = [str(word) for option in options.items() for word in option]
        command = [sys.executable, "-c", _COMMAND, str(os.getpid()), "replan", str(self._plan_file), "--json", *words]
        now, rows_now = counts.tables(self._plan.tables)
        accessed = AccessedPlan(plan=self._plan, now=now, planned=self._planned, rows_now=rows_now)
        if (moved := moved_share(accessed)) <= self._settings.least_drift:
            reason = f"{moved:.1%} of the lookups go to other rows than planned, {self._settings.least_drift:.1%} may"
            self._told = PlanDecision(step=step, reason=reason, row_orders={})
            return
        try:
            counts.write(self._path("access.json"), self._plan.tables)
            # Files: nobody reads a pipe while it plans, and it would wait once that is full.
            with self._path("out").open("wb") as out, self._path("err").open("wb") as err:
                self._child = subprocess.Popen(command, stdout=out, stderr=err)
        except (InputError, OSError) as error:  # nothing was looked up, the disk is full, or there is no memory
            self._told = PlanDecision(step=step, reason=f"planning failed: {error}", row_orders={})

    def decision(self, *, waits: bool = False) -> PlanDecision | None:
        """What was decided; None while it is not.

        Args:
            waits: Whether to wait for it.
        """
        if self._told is not None:
            told, self._told = self._told, None
            return told
        assert self._child is not None, "it was begun"
        if not waits and self._child.poll() is None:
            return None
        code, self._child = self._child.wait(), None
        if code:
            said = self._path("err").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:] or [
                f"ended by signal {-code}" if code < 0 else f"ended with {code}"
            ]
            return PlanDecision(step=self._step, reason=f"planning failed: {shortened(said[0])}", row_orders={})
        figures = REPLAN.from_json(json.loads(self._path("out").read_text(encoding="utf-8")))
        if not figures.is_changed:
            return PlanDecision(step=self._step, figures=figures, row_orders={})
        file = self._path(f"plan-{self._step}.json")
        plan = read_plan(file)
        orders = {name: torch.tensor(ids_N) for name, ids_N in read_row_orders(plan, file).items()}
        return PlanDecision(step=self._step, figures=figures, plan=plan, row_orders=orders)

    def adopted(self, decision: PlanDecision) -> None:
        """From now on, the plan of a decision is executed."""
        assert decision.plan is not None, "it changes the plan"
        self._plan, self._plan_file = decision.plan, self._path(f"plan-{decision.step}.json")
        self._planned = planned_rows(self._plan, {name: ids_N.numpy() for name, ids_N in decision.row_orders.items()})

    def close(self) -> None:
        """Ends what is under way."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None
        self._folder.cleanup()

    def _path(self, name: str) -> Path:
        return Path(self._folder.name, name)


class JobReplanning:
    """Plans a running job again every so many steps, and goes over to what pays; all processes have one.

    Process 0 plans. The others hear of it every few steps, and all change between the same two.

    Args:
        engine: Executes the plan.
        counter: Counts this process's lookups.
        plan: The plan.
        row_orders: Its row orders that list ids, by table.
        settings: How.
        last_step: Number of the job's last step; None where the data decide.
        device: Where processes meet.

    Attributes:
        changes: What was decided, in turn.
        plan: The plan that is executed.
        row_orders: Its row orders that list ids, by table.
    """

    def __init__(
        self,
        engine: ShardedEmbeddings,
        counter: AccessCounter,
        plan: ShardingPlan,
        row_orders: Mapping[str, torch.Tensor],
        settings: ReplanSettings,
        last_step: int | None,
        device: torch.device,
    ) -> None:
        self._engine, self._counter, self._settings, self._last_step = engine, counter, settings, last_step
        self._device = device
        self._planner = Replanner(plan, row_orders, settings) if dist.get_rank() == 0 else None
        self._is_under_way, self._heard_at = False, 0
        self._heard_every = max(1, settings.every // _HEARD_PER_DECISION)
        self.changes: list[PlanChange] = []
        self.plan, self.row_orders = plan, row_orders

    def after(self, step: int) -> None:
        """What is to be done after a step: all processes call it after the same.

        Args:
            step: Steps that the job has made.
        """
        groups = self.plan.replica_groups
        # Where replica groups differ, no plan can be changed.
        may_change = groups.num_groups == 1 or step % groups.sync_every == 0
        if self._is_under_way and may_change and step >= self._heard_at + self._heard_every:
            self._heard_at = step
            self._hear(step)
        left = None if self._last_step is None else self._last_step - step
        if step % self._settings.every == 0 and not self._is_under_way and left != 0:
            max_rows = min(_ROWS_OF_A_DECISION, _ROWS_OF_A_TABLE * len(self.plan.tables.tables))
            counts = merged_counts(self._counter, max_rows)
            if self._planner is not None and counts is not None:
                self._planner.begin(step, counts, left)
            self._is_under_way, self._heard_at = True, step

    def close(self) -> None:
        """Ends what is under way."""
        if self._planner is not None:
            self._planner.close()

    def _hear(self, step: int) -> None:
        """Changes the plan if process 0 has decided so; training waits for no decision."""
        decision = None if self._planner is None else self._planner.decision()
        is_made = torch.tensor([int(decision is not None)], device=self._device)
        dist.broadcast(is_made, 0)
        if not int(is_made):
            return
        told = [decision]
        dist.broadcast_object_list(told, 0, device=self._device)
        decision = told[0]
        assert decision is not None, "process 0 has told it"
        self._is_under_way = False
        change = _change_of(decision, step)
        if decision.plan is not None:
            begun_s = time.perf_counter()
            try:
                self._engine.adopt(decision.plan, decision.row_orders)
            except (DeviceError, InputError) as error:  # the same on all processes, which go on with the older plan
                change = replace(change, is_changed=False, reason=f"could not be adopted: {error}")
            else:
                change = replace(change, adopt_ms=(time.perf_counter() - begun_s) * 1e3)
                self.plan, self.row_orders = decision.plan, decision.row_orders
                if self._planner is not None:
                    self._planner.adopted(decision)
        self.changes.append(change)


def merged_counts(counter: AccessCounter, max_rows: int) -> AccessCounts | None:
    """Lookups of all processes, on process 0; None on the others. All have to call it.

    Where there are more rows, each process sends a sample of its own that is unbiased in sum: so what travels, and what
    process 0 has in memory, grows neither with the tables nor with the job. It is compressed, to a sixth of 132 kB for
    8,192 rows of Zipf-like access, in 1 ms: training waits for it.

    Args:
        counter: Of this process.
        max_rows: Rows that all processes send together, expected.
    """
    size, counted = dist.get_world_size(), None
    own = zlib.compress(pickle.dumps(counter.counted_within(max(max_rows // size, _LEAST_ROWS))), 1)
    if dist.get_rank() == 0:
        counted = [own] * size
    dist.gather_object(own, counted)
    return None if counted is None else AccessCounts.merged([pickle.loads(zlib.decompress(one)) for one in counted])


def _change_of(decision: PlanDecision, step: int) -> PlanChange:
    figures = decision.figures
    if figures is None:
        return PlanChange(counted_at=decision.step, decided_at=step, is_changed=False, reason=decision.reason)
    return PlanChange(
        counted_at=decision.step,
        decided_at=step,
        is_changed=figures.is_changed,
        reason=figures.reason,
        gain=figures.gain,
        migration_bytes=figures.migration_bytes,
        migration_ms=figures.migration_ms,
    )
