"""Gaps of `auto` to the best plans known, and its time: `python -m studies search`.

Plans are of whole tables on single ranks (`objective=kernel`), and what counts are the kernels of the slowest rank.
Tables are MetaSyn's, scaled by 64: drawn without replacement where there are enough, else with it, under new names. Of
each task there are two kinds: as drawn, where one table often decides alone, and without tables that alone cost more
than half of a rank's share, where the search decides. The best plan known is the best of all planners here and of
searches from several seeds for `--best-s` seconds in all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Annotated

import numpy as np
import typer

from autoshard.commands.arguments import positive_option
from autoshard.commands.options import command_options
from autoshard.console import log, progress
from autoshard.core import CostModels, Level, TableSet, Topology
from autoshard.core.errors import InfeasiblePlanError, InvalidOptionError, ModelError
from autoshard.evaluation.communication import AlphaBetaComm
from autoshard.formats import load_topology
from autoshard.formats.metasyn import metasyn
from autoshard.planners.planner import PlanRequest
from autoshard.planners.registry import get_planner
from autoshard.planners.space.placement import PlacementProblem
from autoshard.planning import kernel_model
from autoshard.table import Table
from studies.frame import OutputOptions, PartsOption, PartStore, RegistryOption, StudyResult, names_in

SCALE = 64
#: Tables, ranks and the time limit in seconds of each size.
SIZES = ((80, 8, 0.1), (800, 80, 1.0), (5000, 1024, 10.0))
#: CP-SAT has a variable for each pair of table and rank.
_MAX_EXACT_PAIRS = 2000
_SEARCHES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRun:
    """One task: the slowest rank's predicted milliseconds of several plans.

    Attributes:
        num_tables: Tables.
        num_ranks: Ranks.
        level: Whether tables that decide alone were left out.
        seed: Seed of the task.
        auto_ms: Of `auto` within its time limit.
        auto_s: Seconds of it.
        best_ms: Of the best plan known.
        by: Which planner made that.
        greedy_ms: Of `cost-greedy`.
    """

    num_tables: int
    num_ranks: int
    level: bool
    seed: int
    auto_ms: float
    auto_s: float
    best_ms: float
    by: str
    greedy_ms: float

    @property
    def gap(self) -> float:
        """Excess of `auto` over the best plan known, as a share of it."""
        return self.auto_ms / self.best_ms - 1.0

    @property
    def line(self) -> str:
        """One line for people."""
        return (
            f"{self.num_tables} tables on {self.num_ranks} ranks, {_kind(self.level)}, seed {self.seed}: "
            f"auto {self.auto_ms:.4f} ms in {self.auto_s:.2f} s, {self.gap:.2%} above {self.best_ms:.4f} ms "
            f"({self.by}); cost-greedy {self.greedy_ms / self.best_ms - 1:.2%}"
        )


def _kind(level: bool) -> str:
    return "level" if level else "as drawn"


def widened(base: Topology, num_ranks: int) -> Topology:
    """A topology with as many ranks, all in one level."""
    level: Level = replace(base.levels[-1], size=num_ranks)
    return replace(base, world_size=num_ranks, levels=(level,))


class SearchBenchmark:
    """Runs `auto` and what it is compared with on drawn tasks.

    Args of the constructor:
        device: Whose kernel model prices.
        registry: Folder of trained models; None for the default.
        best_s: Seconds for the best plan known.
    """

    def __init__(self, device: str, registry: Path | None, best_s: float) -> None:
        self.topology = replace(load_topology("cpu-8"), device=device)
        self.pool = metasyn().scaled(SCALE)
        self.model = kernel_model(self.topology, registry)
        self.registry = registry
        self.best_s = best_s
        alone = PlacementProblem.table_wise(self.pool, self.topology, self.model)
        self.costs_ms = alone.kernel_ms_N.tolist()
        # Trained models are loaded here, not on the time of the first task.
        self._planned("auto", self._request(self.pool.sample(8, 0), 2, 0.01))

    def run(self, num_tables: int, num_ranks: int, limit_s: float, seed: int, level: bool) -> SearchRun:
        """One task: `auto` first, so that nothing it could use is there already."""
        pool = self.pool.level(self.costs_ms, num_tables, num_ranks) if level else self.pool
        tables = pool.redrawn(num_tables, seed)
        request = self._request(tables, num_ranks, limit_s)
        auto_ms, auto_s = self._planned("auto", request)
        known = {"auto": auto_ms}
        names = ["cost-greedy", "karmarkar-karp"]
        if num_tables * num_ranks <= _MAX_EXACT_PAIRS:
            names.append("cp-sat")
        for name in names:
            known[name] = self._planned(name, replace(request, time_limit_s=self.best_s / 4))[0]
        for search in range(_SEARCHES):
            longer = replace(request, time_limit_s=self.best_s / _SEARCHES, seed=search + 1)
            known[f"auto, {self.best_s:g} s"] = min(
                self._planned("auto", longer)[0], known.get(f"auto, {self.best_s:g} s", np.inf)
            )
        best = min(known, key=lambda name: known[name])
        return SearchRun(
            num_tables=num_tables,
            num_ranks=num_ranks,
            level=level,
            seed=seed,
            auto_ms=auto_ms,
            auto_s=auto_s,
            best_ms=known[best],
            by=best,
            greedy_ms=known["cost-greedy"],
        )

    def _request(self, tables: TableSet, num_ranks: int, limit_s: float) -> PlanRequest:
        return PlanRequest(
            tables=tables,
            topology=widened(self.topology, num_ranks),
            costs=CostModels(kernel=self.model, comm=AlphaBetaComm()),
            registry=self.registry,
            time_limit_s=limit_s,
        )

    def _planned(self, name: str, request: PlanRequest) -> tuple[float, float]:
        planner = get_planner(name)
        if name == "auto":
            request = replace(request, options={"objective": "kernel", "sharding_types": "table_wise"})
        started_s = time.perf_counter()
        try:
            plan = planner.plan(request)
        except (InfeasiblePlanError, ModelError):  # no plan, or a program that is not installed
            return np.inf, time.perf_counter() - started_s
        took_s = time.perf_counter() - started_s
        problem = PlacementProblem.table_wise(request.tables, request.topology, self.model)
        return float(problem.rank_ms(problem.ranks_of(plan)).max()), took_s


@command_options()
class SearchRunOptions:
    """Options of the study `search`."""

    device: Annotated[str, typer.Option(help="Device whose kernel model prices.")] = "cpu"
    registry: RegistryOption = None
    tasks: Annotated[int, typer.Option(min=1, help="Tasks of each size and kind.")] = 5
    sizes: Annotated[str, typer.Option(help="Numbers of tables, of 80, 800 and 5000, with commas.")] = "80,800,5000"
    best_s: Annotated[float, positive_option("Seconds of search for the best plan known.")] = 60.0
    parts: PartsOption = None

    @property
    def chosen(self) -> tuple[tuple[int, int, float], ...]:
        """Tables, ranks and time limit of each chosen size."""
        return tuple(size for size in SIZES if str(size[0]) in names_in(self.sizes))

    def __post_init__(self) -> None:
        if not self.chosen or len(self.chosen) != len(names_in(self.sizes)):
            raise InvalidOptionError(f"must be any of 80, 800, 5000, got {self.sizes!r}", field="--sizes")


def main(options: SearchRunOptions, output: OutputOptions) -> None:
    """Measures how near `auto` comes to the best plan known, in how much time.

    Example:
        OMP_NUM_THREADS=1 python -m studies search --sizes 80 --tasks 5 --best-s 20 --parts searches -o docs/figures
    """
    bench = SearchBenchmark(options.device, options.registry, options.best_s)
    settings = {"model": bench.model.name, "best_s": options.best_s}
    parts = PartStore(options.parts)
    parts.check_identity(settings)
    runs = []
    tasks = list(product(options.chosen, (False, True), range(options.tasks)))
    with progress("Searching", len(tasks)) as advance:
        for size, level, seed in tasks:
            name = f"{size[0]}-{_kind(level).replace(' ', '-')}-{seed}"
            runs.append(parts.find_data(name, SearchRun, partial(bench.run, *size, seed, level)))
            log(runs[-1].line)
            advance(1)
    document = {**settings, "runs": [asdict(run) | {"gap": run.gap} for run in runs]}
    name = "-".join(["search", *(str(size[0]) for size in options.chosen)])
    output.write(StudyResult(name=name, document=document, tables=(runs_table(runs),)))


def runs_table(runs: Sequence[SearchRun]) -> Table:
    """Gaps to the best plans known, by size and kind of tasks."""
    lines = []
    for num_tables, num_ranks, level in dict.fromkeys((run.num_tables, run.num_ranks, run.level) for run in runs):
        mine = [run for run in runs if (run.num_tables, run.num_ranks, run.level) == (num_tables, num_ranks, level)]
        names, gaps = [run.by for run in mine], [run.gap for run in mine]
        lines.append(
            (
                f"{num_tables} on {num_ranks}, {_kind(level)}",
                str(len(mine)),
                *(f"{gap:.2%}" for gap in (median(gaps), mean(gaps), max(gaps))),
                f"{median(run.greedy_ms / run.best_ms - 1 for run in mine):.2%}",
                f"{median(run.auto_s for run in mine):.2f}",
                max(set(names), key=names.count),
            )
        )
    columns = (
        "tables on ranks",
        "tasks",
        "median gap",
        "mean gap",
        "largest gap",
        "cost-greedy's",
        "median s",
        "best by",
    )
    return Table(columns=columns, rows=tuple(lines), caption="Kernels of the slowest rank, over the best known")
