"""Virtual time against the wall: `python -m studies virtual-time`.

Two ranks, each with a core of its own and a namespace with a shaped link, make the same steps in real time and in
virtual time, on a wire that was measured on these links. The machine has to be quiet, with two cores of its own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

import numpy as np
import plotly.graph_objects as go
import typer

from autoshard import console
from autoshard.commands.options import command_options
from autoshard.core import (
    AccessProfile,
    Collective,
    EmbeddingTable,
    Feature,
    PlacedShard,
    Shard,
    ShardingPlan,
    TableSet,
    Topology,
)
from autoshard.core.accepted import FINITE_ABOVE_0, WHOLE_AT_LEAST_1
from autoshard.core.errors import AutoshardError, DeviceError
from autoshard.core.step import KERNEL_PARTS, Overlap, StepPart
from autoshard.formats import topology_from_json, topology_to_json, write_plan
from autoshard.planners.planner import PlanRequest
from autoshard.planning import make_costs
from autoshard.report.figures import BLUE, GREY, ORANGE, in_house_style
from autoshard.runtime import RunRequest, RunResult
from autoshard.runtime.processes.job import RESULTS_FILE
from autoshard.runtime.processes.launch import FORKED, LOCAL, Launcher, Torchrun, running_workers
from autoshard.runtime.processes.worker import run_worker
from autoshard.runtime.result_json import RUN
from autoshard.table import Table
from autoshard.whatif.trials import LOPSIDED, MeasuredStep, execute_plans, local_topology, plan_task
from costmodel.kernel.metrics import kendall_tau
from costmodel.step.collective_training import train_collective_model
from costmodel.step.comparison import collective_version
from studies.cluster.commands import opened_cluster
from studies.cluster.links import fit_links, link_samples, measured_topology
from studies.cluster.network import ClusterSpec, check_support
from studies.frame import (
    Machine,
    OutputOptions,
    PartsOption,
    PartStore,
    StudyResult,
    names_in,
    numbers_in,
    options_without,
)
from studies.frame.jobs import STUDIES_PATH
from studies.runtime.slow_links.contests import Entry
from studies.runtime.slow_links.models import doubled_sizes, drawn_task, emptied, published

#: Each way to hold tables, balanced and not; `LOPSIDED` comes beside them.
ENTRIES: Final = (
    Entry(label="table-wise", planner="cost-greedy"),
    Entry(label="row-wise", planner="neo", options={"sharding_types": "row_wise"}),
    Entry(label="column-wise", planner="neo", options={"sharding_types": "column_wise"}),
    Entry(label=LOPSIDED),
    Entry(label="data-parallel", planner="neo", options={"sharding_types": "data_parallel"}),
    Entry(
        label="row-wise, all-to-all",
        planner="neo",
        options={"sharding_types": "row_wise"},
        collective=Collective.ALL_TO_ALL,
    ),
    Entry(label="random", planner="random"),
    Entry(label="flexshard", planner="flexshard"),
    Entry(label="oper", planner="oper"),
    Entry(label="auto", planner="auto"),
    Entry(label="replica-groups", planner="replica-groups", options={"num_groups": 2}),
)
_NUM_RANKS: Final = 2
_MAX_BYTES: Final = 2**22
_RUN_BYTES: Final = 4 << 30
#: Milliseconds of work that one rank has more, where one is slowed.
_SLOWED_MS: Final = 10.0
#: Where rows share memory: ranks, rows of each one's table of 64 columns, shares, and exponents of Zipf's law.
_SHARED_RANKS, _SHARED_ROWS = 8, 2_000_000
_SHARES: Final = (1.0, 1 / 4, 1 / 16, 1 / 64)
_ALPHAS: Final = (0.0, 1.05)


@dataclass(frozen=True, slots=True)
class PinnedLauncher:
    """Starts processes on some cores: those of each torchrun on the next of them.

    Attributes:
        launcher: Starts them.
        cores: As `taskset` has them, by torchrun.
    """

    launcher: Launcher
    cores: tuple[str, ...]

    def torchruns(self, nproc: int) -> Sequence[Torchrun]:
        """The launcher's, each on its cores."""
        found = self.launcher.torchruns(nproc)
        return [
            replace(one, prefix=(*one.prefix, "taskset", "-c", self.cores[index % len(self.cores)]))
            for index, one in enumerate(found)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A plan's step in one launch, in milliseconds.

    Attributes:
        step_ms: Median over steps.
        parts: By part of the step.
        waits_ms: For each rank, by collective, how long the step waited for it.
    """

    step_ms: float
    parts: Mapping[str, float]
    waits_ms: tuple[Mapping[str, float], ...]

    @classmethod
    def of(cls, result: RunResult) -> Timed:
        """Of a run."""
        measured = MeasuredStep.of(result)
        return cls(
            step_ms=result.step_ms,
            parts={part.value: measured.part_ms[part] for part in StepPart},
            waits_ms=tuple(
                {kind.value: one.exposed_ms for kind, one in rank.collectives.items()} for rank in result.ranks
            ),
        )

    @property
    def computed_ms(self) -> list[float]:
        """What each rank has of the step beside its waits."""
        return [self.step_ms - sum(waits.values()) for waits in self.waits_ms]

    @property
    def unexplained_ms(self) -> float:
        """What the step has beyond the work of its busiest rank, and the waits of those that wait least."""
        kinds = dict.fromkeys(kind for waits in self.waits_ms for kind in waits)
        wire_ms = sum(min(waits.get(kind, 0.0) for waits in self.waits_ms) for kind in kinds)
        return self.step_ms - max(self.computed_ms) - wire_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A plan in real time, twice, and in virtual time.

    Attributes:
        label: How it holds tables.
        overlap: What its step overlaps.
        mbit_per_s: Rate of the links.
        num_tables: Tables.
        batch_size: Samples of a step.
        real: Launches in real time, one before and one after the one in virtual time.
        virtual: In virtual time.
    """

    label: str
    overlap: str
    mbit_per_s: float
    num_tables: int
    batch_size: int
    real: tuple[Timed, Timed]
    virtual: Timed

    @property
    def real_ms(self) -> float:
        """Mean of the launches in real time."""
        return sum(one.step_ms for one in self.real) / len(self.real)

    @property
    def error(self) -> float:
        """Virtual over real step, minus 1."""
        return self.virtual.step_ms / self.real_ms - 1

    @property
    def noise(self) -> float:
        """The second launch in real time over the first, minus 1."""
        return self.real[1].step_ms / self.real[0].step_ms - 1

    def part_error(self, part: StepPart) -> float | None:
        """Virtual minus real time of a part, as a share of the real step; None if neither has any."""
        real_ms = sum(one.parts[part.value] for one in self.real) / len(self.real)
        virtual_ms = self.virtual.parts[part.value]
        return (virtual_ms - real_ms) / self.real_ms if real_ms or virtual_ms else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Plans of one rate that were run in the same launches; `refused` says which were not made."""

    plans: tuple[Compared, ...]
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links of one rate, as a topology's JSON object."""

    topology: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """One plan, several times in virtual time.

    Attributes:
        runs: What it took.
        labels: What is different between the runs.
    """

    runs: tuple[Timed, ...]
    labels: tuple[str, ...]


@command_options()
class VirtualTimeOptions:
    """Options of the study `virtual-time`."""

    parts: PartsOption = None
    rates: Annotated[str, typer.Option(help="Rates of a rank's link in Mbit/s, with commas between them.")] = (
        "200,1000,5000"
    )
    plans: Annotated[int, typer.Option(min=1, help="Plans in all, over all rates.")] = 40
    per_launch: Annotated[int, typer.Option(min=1, help="Plans of one launch, which take turns.")] = 4
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each plan.")] = 3
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of a turn.")] = 10
    overlaps: Annotated[str, typer.Option(help="What steps overlap, each plan with each of them.")] = "none,pipelined"
    max_tables: Annotated[int, typer.Option(min=20, help="Most tables of a task.")] = 60
    ranks: Annotated[str, typer.Option(help="Numbers of identical ranks.")] = "2,4,8"
    seed: Annotated[int, typer.Option(min=0, help="Of tasks, plans and runs.")] = 0

    def __post_init__(self) -> None:
        self.specs()
        self.numbers_of_ranks()
        _ = self.chosen_overlaps

    def specs(self) -> tuple[ClusterSpec, ...]:
        """A cluster for each rate.

        Raises:
            InvalidOptionError: If a rate is no number or out of range.
        """
        return tuple(
            ClusterSpec(num_nodes=_NUM_RANKS, ranks_per_node=1, bits_per_s=rate * 1e6)
            for rate in numbers_in(self.rates, "--rates", float, FINITE_ABOVE_0)
        )

    def numbers_of_ranks(self) -> tuple[int, ...]:
        """Numbers of identical ranks.

        Raises:
            InvalidOptionError: If one is no whole number of at least 1.
        """
        return numbers_in(self.ranks, "--ranks", int, WHOLE_AT_LEAST_1)

    @property
    def chosen_overlaps(self) -> tuple[str, ...]:
        """What steps overlap."""
        return names_in(self.overlaps, "--overlaps", (Overlap.NONE, Overlap.PIPELINED))

    def identity(self) -> dict[str, object]:
        """What parts must share."""
        return options_without(self, ("parts", "plans", "rates", "ranks"))

    @property
    def effort(self) -> dict[str, Any]:
        """How long a plan runs, as `execute_plans` takes it."""
        return {"steps": self.steps, "warmup_steps": 3, "rounds": self.rounds}


def main(options: VirtualTimeOptions, output: OutputOptions) -> None:
    """Compares steps in virtual time with real ones: needs Linux, root, iproute2 and two cores that nobody else uses.

    Example:
        python -m studies virtual-time --parts virtual-time -o docs/figures
    """
    check_support()
    if len(os.sched_getaffinity(0)) < _NUM_RANKS:
        raise DeviceError("two ranks need a core each, this machine has one")
    parts = PartStore.of(options.parts, options.identity())
    compared: list[Compared] = []
    refused: list[str] = []
    for index, spec in enumerate(options.specs()):
        for chunk in _chunks(options, spec, index, parts):
            compared += chunk.plans
            refused += chunk.refused
    alike = {
        number: parts.find_data(f"alike-{number}", Repeated, partial(_alike, options, number))
        for number in options.numbers_of_ranks()
    }
    slowed = parts.find_data("slowed", Repeated, lambda: _slowed(options))
    tokens = parts.find_data("tokens", Repeated, lambda: _tokens(options))
    shared = {
        alpha: parts.find_data(f"shared-{alpha}", Repeated, partial(_shared, options, alpha)) for alpha in _ALPHAS
    }
    tables = (
        _summary(compared),
        _parts_table(compared),
        _plans_table(compared),
        _checks(alike, slowed, tokens),
        _shared_table(shared),
    )
    numbers = {
        "settings": options.identity(),
        "plans": [{**asdict(one), "error": one.error, "noise": one.noise} for one in compared],
        "refused": refused,
        "alike": {str(number): asdict(one) for number, one in alike.items()},
        "slowed": asdict(slowed),
        "tokens": asdict(tokens),
        "shared_rows": {str(alpha): asdict(one) for alpha, one in shared.items()},
    }
    output.write(
        StudyResult(
            name="virtual-time",
            document=Machine.of("virtual-time", options).document(numbers, "autoshard.virtual-time/1"),
            tables=tables,
            notes=tuple(f"Not made: {one}" for one in refused),
            images={"": _figure(compared)},
        )
    )


def _chunks(options: VirtualTimeOptions, spec: ClusterSpec, index: int, parts: PartStore) -> Iterator[Chunk]:
    """Plans of one rate, launch by launch."""
    num_rates, rate = len(options.specs()), f"{spec.bits_per_s / 1e6:g}"
    # Rates have about as many plans; numbers of tasks and ways to hold tables go through all of them.
    numbers = range(index, options.plans, num_rates)
    cores = tuple(map(str, sorted(os.sched_getaffinity(0))[:_NUM_RANKS]))
    registry = (options.parts or Path(".")).absolute() / f"models-{rate}"
    with opened_cluster(spec) as cluster:
        launcher = PinnedLauncher(cluster, cores)
        links = parts.find_data(f"{rate}-links", Links, lambda: _measured_links(spec, launcher, registry))
        topology = topology_from_json(dict(links.topology))
        for start in range(0, len(numbers), options.per_launch):
            chosen = numbers[start : start + options.per_launch]
            name = f"{rate}-plans-{chosen[0]}-to-{chosen[-1]}"
            console.log(f"{rate} Mbit/s: plans {start + 1} to {start + len(chosen)} of {len(numbers)}")
            yield parts.find_data(name, Chunk, partial(_compare, options, spec, chosen, topology, registry, launcher))


def _measured_links(spec: ClusterSpec, launcher: Launcher, registry: Path) -> Links:
    """Measures what collectives take on the links, and trains the model of them."""
    folder = emptied(registry.with_name(f"{registry.name}-samples"))
    samples = link_samples(folder, spec, doubled_sizes(_MAX_BYTES), launcher)
    published(collective_version(train_collective_model(samples)), emptied(registry))
    return Links(topology=topology_to_json(measured_topology(spec.topology(), fit_links(samples))))


def _compare(
    options: VirtualTimeOptions,
    spec: ClusterSpec,
    numbers: Sequence[int],
    topology: Topology,
    registry: Path,
    launcher: Launcher,
) -> Chunk:
    made: list[tuple[str, str, ShardingPlan]] = []
    refused = []
    for number in numbers:
        entry = ENTRIES[number % len(ENTRIES)]
        _, tables = drawn_task(number, options.seed, most_tables=options.max_tables)
        try:
            plan = _plan(entry, tables, topology, options.seed + number, registry)
        except AutoshardError as error:
            refused.append(f"{entry.label} of task {number}: {error}")
            continue
        made += [(entry.label, overlap, plan) for overlap in options.chosen_overlaps]
    if not made:
        return Chunk(plans=(), refused=tuple(refused))
    plans = [plan for *_, plan in made]
    each = [{"overlap": overlap} for _, overlap, _ in made]

    def timed(launcher: Launcher, **settings: Any) -> list[Timed]:
        found = execute_plans(plans, each, launcher=launcher, device="cpu", **options.effort, **settings)
        return [Timed.of(result) for (result,) in found]

    before = timed(launcher)
    virtual = timed(LOCAL, virtual_time=True, registry_path=str(registry), row_share=1.0)
    after = timed(launcher)
    return Chunk(
        plans=tuple(
            Compared(
                label=label,
                overlap=overlap,
                mbit_per_s=spec.bits_per_s / 1e6,
                num_tables=len(plan.tables.tables),
                batch_size=plan.tables.batch_size,
                real=(first, second),
                virtual=of_virtual,
            )
            for (label, overlap, plan), first, second, of_virtual in zip(made, before, after, virtual, strict=True)
        ),
        refused=tuple(refused),
    )


def _plan(entry: Entry, tables: TableSet, topology: Topology, seed: int, registry: Path) -> ShardingPlan:
    if entry.label == LOPSIDED:
        return plan_task(LOPSIDED, tables, topology, seed)
    costs = make_costs(tables, topology, registry)
    return entry.plan(PlanRequest(tables=tables, topology=topology, costs=costs, seed=seed, registry=registry))


def _even_plan(options: VirtualTimeOptions, num_ranks: int) -> ShardingPlan:
    """As many equal tables on each rank."""
    _, tables = drawn_task(1, options.seed, most_tables=options.max_tables)
    table = max(tables.tables, key=lambda one: one.num_embeddings)
    features = [replace(one, name=f"{one.name}-{{}}") for one in table.features]
    copies = tuple(
        replace(
            table,
            name=f"table-{number}",
            features=tuple(replace(one, name=one.name.format(number)) for one in features),
        )
        for number in range(4 * num_ranks)
    )
    whole = replace(tables, tables=copies)
    topology = local_topology("cpu", num_ranks, _RUN_BYTES)
    shards = tuple(
        PlacedShard.table_wise(Shard.whole(one), number % num_ranks) for number, one in enumerate(whole.tables)
    )
    return ShardingPlan(tables=whole, topology=topology, shards=shards)


def _alike(options: VirtualTimeOptions, num_ranks: int) -> Repeated:
    plan = _even_plan(options, num_ranks)
    (results,) = execute_plans([plan], repeats=2, virtual_time=True, device="cpu", **options.effort)
    return Repeated(runs=tuple(map(Timed.of, results)), labels=("first", "second"))


def _tokens(options: VirtualTimeOptions) -> Repeated:
    """The same plan on one core of the machine and on two."""
    plan, found = _even_plan(options, 4), []
    cores = list(map(str, sorted(os.sched_getaffinity(0))[:_NUM_RANKS]))
    chosen = (cores[0], ",".join(cores))
    for one in chosen:
        launcher = PinnedLauncher(FORKED, (one,))
        ((result,),) = execute_plans([plan], launcher=launcher, virtual_time=True, device="cpu", **options.effort)
        found.append(Timed.of(result))
    return Repeated(runs=tuple(found), labels=("1 core", "2 cores"))


def _shared(options: VirtualTimeOptions, alpha: float) -> Repeated:
    """The same plan with all rows, and with ever fewer that have memory of their own."""
    number = _SHARED_RANKS
    table = EmbeddingTable(
        name="table",
        num_embeddings=_SHARED_ROWS,
        embedding_dim=64,
        features=(Feature(name="feature", pooling_factor=20.0),),
        access=AccessProfile.zipf(_SHARED_ROWS, alpha) if alpha else AccessProfile.uniform(_SHARED_ROWS),
    )
    copies = tuple(
        replace(table, name=f"table-{index}", features=(replace(table.features[0], name=f"feature-{index}"),))
        for index in range(number)
    )
    _, task = drawn_task(1, options.seed, most_tables=options.max_tables)
    topology = local_topology("cpu", number, _RUN_BYTES)
    shards = tuple(PlacedShard.table_wise(Shard.whole(one), index) for index, one in enumerate(copies))
    plan = ShardingPlan(tables=replace(task, tables=copies), topology=topology, shards=shards)
    each = [{"row_share": share} for share in _SHARES]
    found = execute_plans([plan] * len(_SHARES), each, virtual_time=True, device="cpu", **options.effort)
    return Repeated(
        runs=tuple(Timed.of(result) for (result,) in found), labels=tuple(f"1/{1 / share:g}" for share in _SHARES)
    )


def _slowed(options: VirtualTimeOptions) -> Repeated:
    """The same plan in turn as it is, and with more work on one rank."""
    num_ranks, pairs = 4, 3
    with _written(_even_plan(options, num_ranks)) as path:
        request = RunRequest(plan_path=path, steps=options.steps, virtual_time=True)
        job = {"requests": [asdict(request)] * 2 * pairs, "slowed_rank": 1, "slowed_ms": _SLOWED_MS}
        with running_workers(__name__, job, num_ranks, path=STUDIES_PATH, launcher=FORKED) as (folder, documents):
            for _ in documents:
                pass
            results = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))["results"]
    runs = tuple(Timed.of(RUN.from_json(one)) for one in results)
    return Repeated(runs=runs, labels=("as it is", "slowed") * pairs)


def _work(job: Any, folder: Path, rank: int) -> object:
    """What a process of `_slowed` does."""
    from autoshard.runtime.processes.session import open_session

    requests = [RunRequest(**one) for one in job["requests"]]
    steps = requests[0].last_step or 1

    def burn(done: int, _: int) -> None:
        if rank == job["slowed_rank"] and (done - 1) // steps % 2:
            until_s = time.thread_time() + job["slowed_ms"] / 1e3
            while time.thread_time() < until_s:
                pass

    with open_session(requests, folder, burn) as session:
        results = session.run_all()
    return {"results": [RUN.to_json(one) for one in results]}


@contextmanager
def _written(plan: ShardingPlan) -> Iterator[str]:
    with TemporaryDirectory(prefix="autoshard-virtual-time-") as folder:
        path = str(Path(folder, "plan.json"))
        write_plan(plan, path)
        yield path


def _share(values: Sequence[float], within: float) -> str:
    return f"{np.mean([abs(value) <= within for value in values]):.0%}"


def _summary(compared: Sequence[Compared]) -> Table:
    """Errors of virtual steps, beside how far two launches in real time are apart."""
    lines = []
    groups = {"all": list(compared)}
    groups |= {overlap: [one for one in compared if one.overlap == overlap] for overlap in _named(compared, "overlap")}
    groups |= {
        f"{rate:g} Mbit/s": [one for one in compared if one.mbit_per_s == rate]
        for rate in _named(compared, "mbit_per_s")
    }
    for name, chosen in groups.items():
        errors, noise = [one.error for one in chosen], [one.noise for one in chosen]
        virtual_ms, real_ms = (np.array([of(one) for one in chosen]) for of in (_virtual_ms, _real_ms))
        lines.append(
            (
                name,
                str(len(chosen)),
                f"{median(errors):+.1%}",
                f"{median(map(abs, errors)):.1%}",
                f"{np.percentile(np.abs(errors), 95):.1%}",
                _share(errors, 0.1),
                f"{kendall_tau(virtual_ms, real_ms):.2f}",
                f"{median(map(abs, noise)):.1%}",
                f"{np.percentile(np.abs(noise), 95):.1%}",
            )
        )
    columns = (
        "steps",
        "number",
        "virtual over real, median",
        "|difference|, median",
        "95% within",
        "within 10%",
        "Kendall's tau",
        "real over real, median",
        "95% within",
    )
    return Table(columns=columns, rows=tuple(lines), caption="Steps in virtual time against real time")


def _virtual_ms(compared: Compared) -> float:
    return compared.virtual.step_ms


def _real_ms(compared: Compared) -> float:
    return compared.real_ms


def _named(compared: Sequence[Compared], field: str) -> list[Any]:
    return list(dict.fromkeys(getattr(one, field) for one in compared))


def _parts_table(compared: Sequence[Compared]) -> Table:
    """Differences by part, as shares of the real step."""
    lines = []
    for part in StepPart:
        errors = [error for one in compared if (error := one.part_error(part)) is not None]
        if errors:
            shares = [one.real[0].parts[part.value] / one.real_ms for one in compared]
            lines.append(
                (
                    part.value.replace("_", " "),
                    f"{median(shares):.0%}",
                    f"{median(errors):+.1%}",
                    f"{median(map(abs, errors)):.1%}",
                    f"{np.percentile(np.abs(errors), 95):.1%}",
                )
            )
    columns = ("part", "share of the real step", "difference, median", "|difference|, median", "95% within")
    return Table(columns=columns, rows=tuple(lines), caption="Parts, as shares of the real step")


def _plans_table(compared: Sequence[Compared]) -> Table:
    return Table.of(
        compared,
        (
            ("tables held", lambda one: one.label),
            ("overlap", lambda one: one.overlap),
            ("Mbit/s", lambda one: f"{one.mbit_per_s:g}"),
            ("tables, batch", lambda one: f"{one.num_tables}, {one.batch_size}"),
            ("real ms", lambda one: f"{one.real[0].step_ms:.1f}, {one.real[1].step_ms:.1f}"),
            ("virtual ms", lambda one: f"{one.virtual.step_ms:.1f}"),
            ("difference", lambda one: f"{one.error:+.1%}"),
        ),
        caption="Each plan",
    )


def _checks(alike: Mapping[int, Repeated], slowed: Repeated, tokens: Repeated) -> Table:
    """Ranks that are alike, a rank that is slowed, and cores of the machine."""
    lines = []
    for number, one in alike.items():
        for run in one.runs:
            computed = run.computed_ms
            lines.append(
                (
                    f"{number} ranks alike",
                    f"step {run.step_ms:.2f} ms; ranks compute {min(computed):.2f} to {max(computed):.2f} ms; "
                    f"{run.unexplained_ms:.2f} ms of the step are neither the busiest rank nor the wire",
                )
            )
    plain, more = slowed.runs[::2], slowed.runs[1::2]
    added = [slow.step_ms - usual.step_ms for usual, slow in zip(plain, more, strict=True)]
    lines.append(
        (
            f"one of 4 ranks with {_SLOWED_MS:g} ms more work",
            f"step {median(one.step_ms for one in plain):.2f} ms, "
            f"slowed by {', '.join(f'{ms:.2f}' for ms in added)} ms",
        )
    )
    first, second = (one.step_ms for one in tokens.runs)
    lines.append(("4 ranks on 1 core and on 2", f"{first:.2f} and {second:.2f} ms: {first / second - 1:+.1%}"))
    return Table(columns=("check", "found"), rows=tuple(lines), caption="Other checks")


def _shared_table(shared: Mapping[float, Repeated]) -> Table:
    """What it changes that rows share memory: caches hold more of what is looked up."""
    lines = []
    for alpha, one in shared.items():
        whole = one.runs[0]
        for label, run in zip(one.labels, one.runs, strict=True):
            kernels = [run.parts[part.value] for part in KERNEL_PARTS]
            of_whole = [whole.parts[part.value] for part in KERNEL_PARTS]
            lines.append(
                (
                    f"Zipf {alpha:g}" if alpha else "uniform",
                    label,
                    *(f"{ms:.2f} ({ms / full - 1:+.0%})" for ms, full in zip(kernels, of_whole, strict=True)),
                    f"{run.step_ms:.2f} ({run.step_ms / whole.step_ms - 1:+.0%})",
                )
            )
    columns = ("lookups", "rows with memory of their own", "forward kernel ms", "backward kernel ms", "step ms")
    return Table(columns=columns, rows=tuple(lines), caption=f"Rows that share memory, {_SHARED_RANKS} ranks")


def _figure(compared: Sequence[Compared]) -> go.Figure:
    figure = in_house_style(go.Figure(), height=480)
    for overlap, colour in zip(_named(compared, "overlap"), (BLUE, ORANGE), strict=False):
        chosen = [one for one in compared if one.overlap == overlap]
        figure.add_scatter(
            name=overlap,
            x=[one.real_ms for one in chosen],
            y=[one.virtual.step_ms for one in chosen],
            mode="markers",
            marker={"color": colour},
        )
    ends = [min(one.real_ms for one in compared), max(one.real_ms for one in compared)]
    figure.add_scatter(x=ends, y=ends, mode="lines", line={"color": GREY, "dash": "dot"}, showlegend=False)
    figure.update_xaxes(title_text="step in real time, ms", type="log")
    figure.update_yaxes(title_text="step in virtual time, ms", type="log")
    return figure


if __name__ == "__main__":
    run_worker(_work)
