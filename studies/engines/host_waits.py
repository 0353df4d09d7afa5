"""How often a step of the thin engine would make the host wait for a GPU: `python -m studies host-waits`.

Gloo processes train on CPUs, and what they call is counted: tensors that are read into Python, operators whose result
has a size that the host has to ask for, and lists that are copied to the device, where a copy from pageable memory
waits. Batches are prefetched; one step is counted, and the batch that is distributed beside it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import typer

from autoshard.commands.options import command_options
from autoshard.core import AccessProfile, EmbeddingTable, Exchange, Feature, Pooling, ShardingPlan, TableSet
from autoshard.formats import write_plan
from autoshard.runtime.processes.job import RESULTS_FILE
from autoshard.runtime.processes.launch import running_workers
from autoshard.table import Table
from autoshard.whatif.trials import local_topology
from studies.engines.input_work import plans_of
from studies.frame import OutputOptions, StudyResult

SCHEMA: Final = "autoshard.host_waits/1"
_WORKER: Final = "studies.engines.waits_worker"
#: Where the processes find it.
_PATH: Final = (str(Path(__file__).parents[2]),)
_ROWS, _DIM, _BATCH_PER_PROCESS = 40, 8, 8
#: Plans by name: pooling, and how tables are held.
_PLANS: Final = {
    "table-wise": (Pooling.SUM, "whole tables"),
    "row-wise": (Pooling.SUM, "blocks of rows"),
    "means": (Pooling.MEAN, "whole tables"),
    "sequences": (Pooling.SEQUENCE, "whole tables"),
    "tiers": (Pooling.SUM, "hot rows on all ranks"),
    "tiers of sequences": (Pooling.SEQUENCE, "hot rows on all ranks"),
    "rows exchanged once": (Pooling.SUM, "rows in turn, rows exchanged once"),
}
#: Counts of a step by thread, for each of some plans on a number of processes.
CountSteps: TypeAlias = Callable[[Sequence[ShardingPlan], int], Sequence[Mapping[str, Mapping[str, int]]]]
_WAITS: Final = ("read by the host", "size of the result", "copied from a list")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWaits:
    """What one step calls, on one process.

    Attributes:
        plan: Name of the plan.
        num_features: Features, each of a table of its own.
        step_waits: Waits of the thread that trains.
        prefetch_waits: Waits of the thread that distributes the next batch.
        copies: Copies to the device that do not wait, on both threads.
        operators: Operators of the thread that trains.
    """

    plan: str
    num_features: int
    step_waits: int
    prefetch_waits: int
    copies: int
    operators: int

    @property
    def cells(self) -> tuple[str, ...]:
        """A row of the table of results."""
        numbers = (self.num_features, self.step_waits, self.prefetch_waits, self.copies, self.operators)
        return (self.plan, *map(str, numbers))


@command_options()
class HostWaitsOptions:
    """Options of the study `host-waits`."""

    features: Annotated[
        list[int] | None, typer.Option(help="Features, each of a table of its own.  [default: 10, 200]")
    ] = None
    nproc: Annotated[int, typer.Option(min=2, help="Processes, one per rank.")] = 2


def plans(num_features: int, num_processes: int) -> dict[str, ShardingPlan]:
    """Small plans of every kind, by name."""
    topology = local_topology("cpu", num_processes, 1 << 30)
    tables = TableSet(
        batch_size=_BATCH_PER_PROCESS * num_processes,
        tables=tuple(
            EmbeddingTable(
                name=f"t{number}",
                num_embeddings=_ROWS,
                embedding_dim=_DIM,
                features=(Feature(name=f"f{number}", pooling_factor=2.0),),
                access=AccessProfile.zipf(_ROWS, 1.0),
            )
            for number in range(num_features)
        ),
    )
    made = {}
    for name, (pooling, layout) in _PLANS.items():
        of_pooling = replace(tables, tables=tuple(replace(one, pooling=pooling) for one in tables.tables))
        plan = plans_of(of_pooling, topology)[layout]
        if pooling is Pooling.SEQUENCE:
            plan = replace(plan, shards=tuple(replace(one, exchange=Exchange.ROWS) for one in plan.shards))
        made[name] = plan
    return made


def count(num_features: Sequence[int], num_processes: int) -> list[HostWaits]:
    """Counts a step of every plan, on process 0.

    Raises:
        AutoshardError: If a process fails.
    """
    return waits_of(num_features, num_processes, _counted)


def waits_of(num_features: Sequence[int], num_processes: int, counted: CountSteps) -> list[HostWaits]:
    """What a step of every plan waits for, as processes that execute the plans have counted it."""
    made = [(name, number, plan) for number in num_features for name, plan in plans(number, num_processes).items()]
    return [
        HostWaits(
            plan=name,
            num_features=number,
            step_waits=sum(of["step"].get(one, 0) for one in _WAITS),
            prefetch_waits=sum(of["prefetch"].get(one, 0) for one in _WAITS),
            copies=sum(of_thread.get("staged copies", 0) for of_thread in of.values()),
            operators=of["step"]["operators"],
        )
        for (name, number, _), of in zip(made, counted([plan for *_, plan in made], num_processes), strict=True)
    ]


def _counted(of: Sequence[ShardingPlan], num_processes: int) -> list[dict[str, dict[str, int]]]:
    """What processes count that torchrun starts."""
    with tempfile.TemporaryDirectory(prefix="autoshard-host-waits-") as own:
        paths = [str(Path(own, f"{number}.json")) for number in range(len(of))]
        for plan, path in zip(of, paths, strict=True):
            write_plan(plan, Path(path))
        with running_workers(_WORKER, {"plan_paths": paths}, num_processes, path=_PATH) as (folder, documents):
            for _ in documents:
                pass
            counted: list[dict[str, dict[str, int]]] = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
    return counted


def main(options: HostWaitsOptions, output: OutputOptions) -> None:
    """Counts how often a step would make the host wait for a GPU.

    Example:
        python -m studies host-waits
    """
    found = count(options.features or [10, 200], options.nproc)
    table = Table(
        columns=("plan", "features", "waits of the step", "waits of the prefetch", "copies", "operators of the step"),
        rows=tuple(one.cells for one in found),
        caption=f"One step on {options.nproc} processes: where the host would wait for a GPU, and what it calls",
    )
    document = {
        "schema": SCHEMA,
        "processes": options.nproc,
        "plans": [{name: getattr(one, name) for name in one.__dataclass_fields__} for one in found],
    }
    output.write(StudyResult(name="host-waits", document=document, tables=(table,)))
