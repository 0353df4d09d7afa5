"""The study `slow-links`: `python -m studies slow-links`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from autoshard import console
from autoshard.commands.options import command_options
from autoshard.core.errors import InvalidOptionError
from autoshard.runtime import RunProgress
from bench.collecting.termination import TERMINATED_EXIT_CODE, Terminated
from bench.measuring.devices import find_device
from studies.cluster.network import Cluster, ClusterSpec, check_support, open_cluster
from studies.frame import Machine, OutputOptions, PartStore, StudyResult, command_line, names_in
from studies.runtime.slow_links.contests import Contest, ContestResult, Effort, run_contest
from studies.runtime.slow_links.models import (
    ClusterModels,
    ModelSettings,
    cluster_registry,
    drawn_task,
    train_cluster,
    train_kernels,
)
from studies.runtime.slow_links.papers import GROUPS_RANKS, groups_contest, paper_contests
from studies.runtime.slow_links.report import RateResults, document, figures, measured_ms, tables


@command_options()
class SlowLinkOptions:
    """Options of the study `slow-links`."""

    parts: Annotated[
        Path, typer.Option(help="Folder of models and finished parts: a study that was stopped continues from them.")
    ]
    kernel_samples: Annotated[
        Path, typer.Option(help="Store of kernel samples of this machine, made by `autoshard collect`.")
    ]
    rates: Annotated[str, typer.Option(help="Rates of a node's link in Mbit/s, with commas between them.")] = "200,1000"
    tasks: Annotated[int, typer.Option(min=1, help="Drawn tasks of each rate.")] = 20
    papers: Annotated[bool, typer.Option(help="Also run the papers' proportions.")] = True
    num_nodes: Annotated[int, typer.Option(min=1, help="Nodes of the cluster.")] = 4
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Processes of each node.")] = 2
    max_tables: Annotated[int, typer.Option(min=20, help="Most tables of a task.")] = 80
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each run.")] = 6
    warmup_steps: Annotated[int, typer.Option(min=0, help="Steps before them.")] = 2
    repeats: Annotated[int, typer.Option(min=1, help="Rounds over all plans of a task; the quickest run counts.")] = 2
    calibration_runs: Annotated[int, typer.Option(min=4, help="Runs that steps are calibrated on.")] = 24
    kernel_updates: Annotated[int, typer.Option(min=1, help="Updates of the training of the model of kernels.")] = 5000
    max_bytes: Annotated[int, typer.Option(min=2**20, help="Bytes per rank of the largest collective.")] = 2**22
    seed: Annotated[int, typer.Option(min=0, help="Of tasks, plans and runs.")] = 0

    def specs(self) -> tuple[ClusterSpec, ...]:
        """A cluster for each rate.

        Raises:
            InvalidOptionError: If a rate is no number or out of range.
        """
        try:
            rates = tuple(map(float, names_in(self.rates)))
        except ValueError:
            message = f"must be numbers with commas between them, got {self.rates!r}"
            raise InvalidOptionError(message, field="--rates") from None
        return tuple(
            ClusterSpec(num_nodes=self.num_nodes, ranks_per_node=self.ranks_per_node, bits_per_s=rate * 1e6)
            for rate in rates
        )

    def effort(self) -> Effort:
        """How long each plan runs."""
        return Effort(steps=self.steps, warmup_steps=self.warmup_steps, repeats=self.repeats)

    def models(self) -> ModelSettings:
        """How much is measured for the models."""
        return ModelSettings(
            kernel_samples=self.kernel_samples,
            kernel_updates=self.kernel_updates,
            max_bytes=self.max_bytes,
            calibration_runs=self.calibration_runs,
            calibration_tables=self.max_tables,
        )

    def contests(self, num_ranks: int) -> tuple[Contest, ...]:
        """Drawn tasks, then the papers'."""
        tasks = []
        for number in range(self.tasks):
            kind, tables = drawn_task(number, self.seed, most_tables=self.max_tables)
            tasks.append(Contest(name=f"task-{number}", group=kind.value, tables=tables, seed=self.seed + number))
        return (*tasks, *(paper_contests(num_ranks) if self.papers else ()))

    def identity(self) -> dict[str, object]:
        """What parts must share."""
        settings = asdict(replace(self.models(), kernel_samples=Path()))
        del settings["kernel_samples"]
        return {
            "cluster": [self.num_nodes, self.ranks_per_node],
            "models": settings,
            "effort": asdict(self.effort()),
            "max_tables": self.max_tables,
            "seed": self.seed,
        }


def main(options: SlowLinkOptions, output: OutputOptions) -> None:
    """Plans tasks with all planners and executes the plans on a test cluster: needs Linux, root and iproute2.

    The cluster's links are network namespaces of this machine. First its models are measured: kernels come from a
    store of samples, links and calibration from the cluster.

    Example:
        python -m studies slow-links --parts slow-links --kernel-samples samples -o docs/figures
    """
    specs, parts = options.specs(), PartStore(options.parts)
    check_support()
    parts.check_identity(options.identity())
    console.log("Training the model of kernels.")
    kernels = parts.find("kernels", lambda: train_kernels(options.parts, options.models()))
    rates = tuple(_run_rate(options, spec, parts) for spec in specs)
    machine = Machine.this(find_device("cpu"), command_line("slow-links", options))
    facts = {"settings": options.identity(), "kernels": kernels, "machine": machine.to_json()}
    output.write(
        StudyResult(
            name="slow-links", document=document(rates, facts), tables=tables(rates), images=figures(rates), width=1400
        )
    )


def _run_rate(options: SlowLinkOptions, spec: ClusterSpec, parts: PartStore) -> RateResults:
    rate = f"{spec.bits_per_s / 1e6:g}"
    with _opened(spec) as cluster:
        models = _models(options, cluster, parts, f"{rate}-models")
        lab = _Lab(folder=options.parts, parts=parts, rate=rate, effort=options.effort())
        contests = options.contests(spec.num_ranks)
        registry = cluster_registry(options.parts, cluster)
        found = [
            lab.run(contest, f"{number} of {len(contests)}", cluster, models, registry)
            for number, contest in enumerate(contests, start=1)
        ]
    if options.papers:
        found.append(_groups(options, spec, lab))
    return RateResults(mbit_per_s=spec.bits_per_s / 1e6, models=models, contests=tuple(found))


def _models(options: SlowLinkOptions, cluster: Cluster, parts: PartStore, name: str) -> ClusterModels:
    console.log(f"Measuring the cluster: {name}.")
    with console.progress("Calibrating steps", options.calibration_runs) as advance:
        return parts.find_data(
            name, ClusterModels, lambda: train_cluster(options.parts, cluster, options.models(), advance)
        )


def _groups(options: SlowLinkOptions, spec: ClusterSpec, lab: _Lab) -> ContestResult:
    """Replica groups on more ranks per node, with links as they are set and no calibration: none was measured."""
    larger = replace(spec, ranks_per_node=GROUPS_RANKS // spec.num_nodes)
    models = ClusterModels(topology={}, metrics={})
    with _opened(larger) as cluster:
        return lab.run(groups_contest(larger.num_ranks), "replica groups", cluster, models, options.parts / "kernels")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lab:
    """Runs contests of one rate, or reads what is finished."""

    folder: Path
    parts: PartStore
    rate: str
    effort: Effort

    def run(
        self, contest: Contest, place: str, cluster: Cluster, models: ClusterModels, registry: Path
    ) -> ContestResult:
        """The result of a contest."""
        topology = models.read_topology() if models.topology else cluster.spec.topology()
        with console.progress(f"{self.rate} Mbit/s, {contest.name}", 1.0) as advance:
            result = self.parts.find_data(
                f"{self.rate}-{contest.name}",
                ContestResult,
                lambda: run_contest(contest, topology, registry, cluster, self.effort, _share_of(advance)),
            )
        steps = ", ".join(f"{label} {step_ms:.0f}" for label, step_ms in measured_ms(result).items())
        console.log(f"{self.rate} Mbit/s, {contest.name} ({place}): ms {steps}")
        return result


def _share_of(advance: Callable[[float], None]) -> Callable[[RunProgress], None]:
    done = 0

    def on_progress(state: RunProgress) -> None:
        nonlocal done
        advance((state.done - done) / state.total)
        done = state.done

    return on_progress


@contextmanager
def _opened(spec: ClusterSpec) -> Iterator[Cluster]:
    try:
        with open_cluster(spec) as cluster:
            yield cluster
    except Terminated:
        raise typer.Exit(TERMINATED_EXIT_CODE) from None
