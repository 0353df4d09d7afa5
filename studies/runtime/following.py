"""What a job gains whose plan follows its data: `python -m studies following`.

Jobs train on a cluster of network namespaces, with a fixed plan and with one that is made anew every so many steps, on
data whose hot rows change and on data that stay. Samples per second are those of the whole run: planning, counting and
moving rows included.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from autoshard import console
from autoshard.commands.options import command_options
from autoshard.core import AccessProfile, EmbeddingTable, Feature, ImpliedOrder, Pooling, ShardingPlan, TableSet
from autoshard.core.choices import Device
from autoshard.formats import write_plan
from autoshard.planners.planner import PlanRequest
from autoshard.planning import make_costs, make_plan
from autoshard.runtime import RunProgress, RunRequest, run_requests
from autoshard.runtime.results import PlanChange
from autoshard.table import Table
from studies.cluster.network import Cluster, ClusterSpec, open_cluster
from studies.frame import Machine, OutputOptions, StudyResult

_DIM, _FACTOR, _ALPHA = 64, 20.0, 1.3


@command_options()
class FollowingOptions:
    """Options of the study `following`."""

    num_tables: Annotated[int, typer.Option(min=1, help="Sequence tables.")] = 4
    rows: Annotated[int, typer.Option(min=1_000, help="Rows of each.")] = 200_000
    batch_size: Annotated[int, typer.Option(min=4, help="Samples of a step.")] = 512
    steps: Annotated[int, typer.Option(min=10, help="Steps of a run.")] = 600
    drift_every: Annotated[int, typer.Option(min=5, help="Steps after which other rows are hot.")] = 200
    replan_every: Annotated[int, typer.Option(min=5, help="Steps after which the plan is made anew.")] = 40
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each kind, in turns.")] = 2
    num_nodes: Annotated[int, typer.Option(min=2, help="Nodes of the cluster.")] = 2
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Processes of each node.")] = 2
    mbit_per_s: Annotated[float, typer.Option(min=1, help="Rate of a node's link.")] = 200.0
    seed: Annotated[int, typer.Option(min=0, help="Seed of plans and data.")] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowingRun:
    """One run.

    Attributes:
        drifts: Whether hot rows change.
        follows: Whether the plan does.
        samples_per_s: From the end of the first step to that of the last.
        step_ms: Median step.
        changes: What was decided.
    """

    drifts: bool
    follows: bool
    samples_per_s: float
    step_ms: float
    changes: tuple[PlanChange, ...]


def planned(options: FollowingOptions, spec: ClusterSpec) -> ShardingPlan:
    """The plan that jobs start with: the planner's, for the access of the first steps."""
    tables = tuple(
        EmbeddingTable(
            name=f"t{number}",
            num_embeddings=options.rows,
            embedding_dim=_DIM,
            pooling=Pooling.SEQUENCE,
            features=(Feature(name=f"f{number}", pooling_factor=_FACTOR),),
            access=AccessProfile.zipf(options.rows, _ALPHA),
            row_order=ImpliedOrder.BY_ID,
        )
        for number in range(options.num_tables)
    )
    task = TableSet(batch_size=options.batch_size, tables=tables)
    topology = spec.topology()
    request = PlanRequest(
        tables=task, topology=topology, costs=make_costs(task, topology), seed=options.seed, time_limit_s=5.0
    )
    return make_plan("auto", request)


def trained(
    plan_path: Path, options: FollowingOptions, cluster: Cluster, *, drifts: bool, follows: bool
) -> FollowingRun:
    """Trains one job."""
    request = RunRequest(
        plan_path=str(plan_path),
        steps=options.steps,
        seed=options.seed,
        device=Device.CPU,
        drift_every=options.drift_every if drifts else 0,
        replan_every=options.replan_every if follows else 0,
    )
    ended_s: list[tuple[int, float]] = []

    def on_progress(state: RunProgress) -> None:
        ended_s.append((state.done, time.perf_counter()))

    (result,) = run_requests([request], cluster.spec.num_ranks, on_progress=on_progress, launcher=cluster)
    (first, begun_s), (last, finished_s) = ended_s[0], ended_s[-1]
    return FollowingRun(
        drifts=drifts,
        follows=follows,
        samples_per_s=(last - first) * options.batch_size / (finished_s - begun_s),
        step_ms=result.step_ms,
        changes=() if result.job is None else result.job.plan_changes,
    )


def main(options: FollowingOptions, output: OutputOptions) -> None:
    """Trains jobs whose hot rows change, with a fixed plan and with one that follows them.

    Example:
        python -m studies following -o docs/figures
    """
    spec = ClusterSpec(
        num_nodes=options.num_nodes, ranks_per_node=options.ranks_per_node, bits_per_s=options.mbit_per_s * 1e6
    )
    runs: list[FollowingRun] = []
    kinds = [(drifts, follows) for drifts in (True, False) for follows in (False, True)]
    with TemporaryDirectory(prefix="autoshard-study-") as folder, open_cluster(spec) as cluster:
        path = Path(folder, "plan.json")
        write_plan(planned(options, spec), path)
        for number in range(options.rounds):
            # In turns, since others use the machine.
            for drifts, follows in kinds[:: 1 if number % 2 == 0 else -1]:
                runs.append(trained(path, options, cluster, drifts=drifts, follows=follows))
                console.log(f"{_kind(runs[-1])}: {runs[-1].samples_per_s:,.0f} samples/s")
    ratios = {drifts: speedup(runs, drifts=drifts) for drifts in (True, False)}
    found = {
        "options": asdict(options),
        "runs": [asdict(run) for run in runs],
        "following_over_fixed": {"drifting": ratios[True], "still": ratios[False]},
    }
    document = Machine.of("following", options).document(found, "autoshard.following/1")
    notes = (
        f"With a plan that follows, samples/s are {ratios[True]:.2f} times those of the fixed plan where hot rows "
        f"change, and {ratios[False]:.2f} times where they stay.",
    )
    output.write(StudyResult(name="following", document=document, tables=(_table(runs, options),), notes=notes))


def speedup(runs: Sequence[FollowingRun], *, drifts: bool) -> float:
    """Samples/s with a plan that follows over those with a fixed one, medians of all rounds."""
    fixed, following = (
        median(run.samples_per_s for run in runs if run.drifts is drifts and run.follows is follows)
        for follows in (False, True)
    )
    return following / fixed


def _kind(run: FollowingRun) -> str:
    return f"{'drifting' if run.drifts else 'still'}, {'following' if run.follows else 'fixed'}"


def _table(runs: Sequence[FollowingRun], options: FollowingOptions) -> Table:
    return Table.of(
        runs,
        [
            ("run", _kind),
            ("samples/s", lambda run: f"{run.samples_per_s:,.0f}"),
            ("median step ms", lambda run: f"{run.step_ms:.1f}"),
            ("decisions", lambda run: f"{len(run.changes)}"),
            ("changes after", lambda run: ", ".join(f"{one.decided_at}" for one in run.changes if one.is_changed)),
            (
                "changing took ms",
                lambda run: ", ".join(f"{one.adopt_ms:.0f}" for one in run.changes if one.adopt_ms is not None),
            ),
        ],
        caption=f"{options.steps} steps of {options.batch_size} samples on {options.num_nodes} nodes of "
        f"{options.ranks_per_node} processes at {options.mbit_per_s:g} Mbit/s",
    )
