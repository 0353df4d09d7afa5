"""Whether plans change what is learned: `python -m studies loss-curves`.

A DLRM trains on a file in Criteo's format, whose labels a planted model has drawn, on one process and on several under
every planner's plan, and the losses are compared step by step. Only the order of sums may differ.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Final

import numpy as np
import typer

from autoshard import console
from autoshard.commands.options import command_options
from autoshard.core import (
    AccessProfile,
    DenseLayers,
    EmbeddingTable,
    Feature,
    ImpliedOrder,
    Optimizer,
    ShardingPlan,
    TableSet,
)
from autoshard.core.choices import Device
from autoshard.core.errors import AutoshardError, InfeasiblePlanError
from autoshard.formats import write_plan
from autoshard.planners.planner import PlanRequest
from autoshard.planners.registry import planner_names
from autoshard.planning import make_costs, make_plan
from autoshard.runtime import RunRequest, run_requests
from autoshard.table import Table
from autoshard.whatif.trials import local_topology
from studies.frame import Machine, OutputOptions, StudyResult

#: Criteo's columns.
_NUM_COUNTS, _NUM_CATEGORIES = 13, 26
_DIM: Final = 16
_ALPHA: Final = 1.2
#: Memory of all processes over that of the tables: too little for the largest table on one process.
_ROOM: Final = 1.2


@command_options()
class LossCurveOptions:
    """Options of the study `loss-curves`."""

    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 200
    batch_size: Annotated[int, typer.Option(min=4, help="Samples per step over all processes.")] = 512
    processes: Annotated[int, typer.Option(min=2, help="Processes under planners' plans.")] = 4
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds of planners that search.")] = 2.0
    seed: Annotated[int, typer.Option(min=0, help="Of samples, plans and weights.")] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurve:
    """One training.

    Attributes:
        planner: Who made its plan.
        processes: Processes.
        layout: Shards of its plan by tier.
        losses: Mean cross-entropy of each step's samples, before their update.
    """

    planner: str
    processes: int
    layout: str
    losses: tuple[float, ...]


def criteo_tables(batch_size: int) -> TableSet:
    """26 tables from 10 to 400,000 rows, of which the first are the hottest, and Criteo's dense features."""
    sizes = np.geomspace(10, 400_000, _NUM_CATEGORIES).round().astype(int).tolist()
    tables = tuple(
        EmbeddingTable(
            name=f"t{number}",
            num_embeddings=size,
            embedding_dim=_DIM,
            optimizer=Optimizer.ROWWISE_ADAGRAD,
            features=(Feature(name=f"c{number}", pooling_factor=1.0),),
            access=AccessProfile.zipf(size, _ALPHA),
            row_order=ImpliedOrder.BY_ID,
        )
        for number, size in enumerate(sizes)
    )
    dense = DenseLayers(num_dense_features=_NUM_COUNTS, bottom_mlp=(64, _DIM), top_mlp=(64, 1))
    return TableSet(batch_size=batch_size, tables=tables, dense=dense)


def write_clicks(path: Path, tables: TableSet, num_samples: int, seed: int) -> None:
    """Writes a file in Criteo's format: skewed categories, counts, and labels that depend on both."""
    rng = np.random.default_rng(seed)
    rows = [table.num_embeddings for table in tables.tables]
    counts = rng.geometric(0.2, (num_samples, _NUM_COUNTS)) - 1
    ids = np.stack([np.minimum(rng.zipf(_ALPHA, num_samples) - 1, size - 1) for size in rows], axis=1)
    effects = [rng.standard_normal(size) for size in rows]
    logits = np.sum([effect[ids[:, number]] for number, effect in enumerate(effects)], axis=0) / _NUM_CATEGORIES**0.5
    logits += np.log1p(counts) @ rng.standard_normal(_NUM_COUNTS) / _NUM_COUNTS**0.5 - 1
    labels = rng.random(num_samples) < 1 / (1 + np.exp(-logits))
    with path.open("w", encoding="ascii") as file:
        for label, of_sample, categories in zip(labels, counts.tolist(), ids.tolist(), strict=True):
            words = [str(int(label)), *map(str, of_sample), *(f"{one:08x}" for one in categories)]
            file.write("\t".join(words) + "\n")


def main(options: LossCurveOptions, output: OutputOptions) -> None:
    """Trains a model on Criteo-shaped clicks under every planner's plan, and compares the losses with one process's.

    Example:
        python -m studies loss-curves --steps 200
    """
    tables = criteo_tables(options.batch_size)
    with TemporaryDirectory(prefix="autoshard-study-") as name:
        folder = Path(name)
        write_clicks(folder / "clicks.tsv", tables, options.steps * options.batch_size, options.seed)
        [alone] = trained(folder, tables, options, ["size-greedy"], 1)
        planned = trained(folder, tables, options, planner_names(), options.processes)
    output.write(_result(options, alone, planned))


def trained(
    folder: Path, tables: TableSet, options: LossCurveOptions, planners: Sequence[str], processes: int
) -> list[LossCurve]:
    """Trains under the plan of each planner that makes one for this device."""
    requests, layouts = {}, {}
    for planner in planners:
        try:
            plan = _planned(planner, tables, options, processes)
        except AutoshardError as error:
            console.log(f"{planner} makes no plan: {error}")
            continue
        place = folder / f"{planner}-{processes}"
        place.mkdir()
        write_plan(plan, place / "plan.json")
        tiers = [str(shard.tier) for shard in plan.shards]
        layouts[planner] = ", ".join(f"{tiers.count(tier)} {tier}" for tier in sorted(set(tiers)))
        requests[planner] = RunRequest(
            plan_path=str(place / "plan.json"),
            steps=None,
            warmup_steps=0,
            seed=options.seed,
            device=Device.CPU,
            data_path=str(folder / "clicks.tsv"),
            metrics_path=str(place),
            metrics_every=1,
        )
    run_requests(list(requests.values()), processes)
    return [
        LossCurve(planner=planner, processes=processes, layout=layouts[planner], losses=_losses(Path(one.plan_path)))
        for planner, one in requests.items()
    ]


def _planned(planner: str, tables: TableSet, options: LossCurveOptions, processes: int) -> ShardingPlan:
    """A planner's plan where memory is short or, if it can make none there, where it is not."""
    try:
        return _planned_within(_ROOM, planner, tables, options, processes)
    except InfeasiblePlanError:
        return _planned_within(processes, planner, tables, options, processes)


def _planned_within(
    room: float, planner: str, tables: TableSet, options: LossCurveOptions, processes: int
) -> ShardingPlan:
    topology = local_topology("cpu", processes, round(room * tables.storage_bytes / processes))
    costs = make_costs(tables, topology)
    request = PlanRequest(
        tables=tables, topology=topology, costs=costs, seed=options.seed, time_limit_s=options.time_limit
    )
    return make_plan(planner, request)


def _losses(plan_path: Path) -> tuple[float, ...]:
    lines = (plan_path.parent / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line)["loss"] for line in lines)


def _result(options: LossCurveOptions, alone: LossCurve, planned: Sequence[LossCurve]) -> StudyResult:
    def farthest(curve: LossCurve) -> float:
        return float(np.abs(np.array(curve.losses) - np.array(alone.losses)).max())

    def mean_of_last(curve: LossCurve) -> str:
        return f"{np.mean(curve.losses[-20:]):.5f}"

    table = Table.of(
        [alone, *planned],
        [
            ("planner", lambda one: one.planner),
            ("processes", lambda one: f"{one.processes}"),
            ("shards", lambda one: one.layout),
            ("loss of step 1", lambda one: f"{one.losses[0]:.5f}"),
            ("of the last 20", mean_of_last),
            ("farthest from one process", lambda one: f"{farthest(one):.1e}"),
        ],
        caption=f"{len(alone.losses)} steps of {options.batch_size} samples in Criteo's format",
    )
    found = {
        "options": asdict(options),
        "runs": [{**asdict(one), "farthest": farthest(one)} for one in (alone, *planned)],
    }
    document = Machine.of("loss-curves", options).document(found, "autoshard.loss-curves/1")
    return StudyResult(name="loss-curves", document=document, tables=(table,))
