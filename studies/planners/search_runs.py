"""How near `auto` comes to the best plan known, in how much time: `python -m studies search`.

Plans are of whole tables on single ranks (`objective=kernel`), and what counts are the kernels of the slowest rank.
Tables are MetaSyn's, scaled by 64: drawn without replacement where there are enough, else with it, under new names. Of
each task there are two kinds: as drawn, where one table often decides alone, and without tables that alone cost more
than half of a rank's share, where the search decides. The best plan known is the best of all planners here and of
searches from several seeds for `--best-s` seconds in all. With `--output`, results are written after every task, and a
run that was ended goes on where it was.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from autoshard.console import JsonOption, emit, log, progress
from autoshard.core import CostModels, Level, TableSet, Topology
from autoshard.core.errors import FormatError, InfeasiblePlanError, InvalidOptionError, ModelError
from autoshard.evaluation.communication import AlphaBetaComm
from autoshard.formats import atomic_write, load_topology, read_json
from autoshard.formats.metasyn import metasyn
from autoshard.planners.planner import PlanRequest
from autoshard.planners.registry import get_planner
from autoshard.planners.space.placement import PlacementProblem
from autoshard.planning import kernel_model

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
        auto_s: What it took.
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
    def key(self) -> tuple[int, bool, int]:
        """Which task of the benchmark this is."""
        return self.num_tables, self.level, self.seed

    @property
    def gap(self) -> float:
        """How far `auto` is above the best plan known, as a share of it."""
        return self.auto_ms / self.best_ms - 1.0

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {name: getattr(self, name) for name in (*self.__slots__, "gap")}

    @classmethod
    def from_json(cls, document: Any, source: str) -> SearchRun:
        """What `to_json` made.

        Raises:
            FormatError: If it is something else.
        """
        if not isinstance(document, dict) or set(document) != {*cls.__slots__, "gap"}:
            raise FormatError("must be a run of this program", source=source, field="runs")
        return cls(**{name: document[name] for name in cls.__slots__})

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
            request = replace(request, options={"objective": "kernel"})
        started_s = time.perf_counter()
        try:
            plan = planner.plan(request)
        except (InfeasiblePlanError, ModelError):  # no plan, or a program that is not installed
            return np.inf, time.perf_counter() - started_s
        took_s = time.perf_counter() - started_s
        problem = PlacementProblem.table_wise(request.tables, request.topology, self.model)
        return float(problem.rank_ms(problem.ranks_of(plan)).max()), took_s


def main(
    device: Annotated[str, typer.Option(help="Device whose kernel model prices.")] = "cpu",
    registry: Annotated[
        Path | None, typer.Option(help="Folder of trained models; the default one if left out.")
    ] = None,
    tasks: Annotated[int, typer.Option(help="Tasks of each size and kind.")] = 5,
    sizes: Annotated[str, typer.Option(help="How many tables, of 80, 800 and 5000, with commas.")] = "80,800,5000",
    best_s: Annotated[float, typer.Option(help="Seconds of search for the best plan known.")] = 60.0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="JSON file, written after every task; tasks in it are not done again."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """How near `auto` comes to the best plan known, in how much time.

    Example:
        OMP_NUM_THREADS=1 python -m studies search --sizes 80 --tasks 5 --best-s 20 -o searches.json
    """
    chosen = [size for size in SIZES if str(size[0]) in sizes.split(",")]
    if not chosen or len(chosen) != len(sizes.split(",")):
        raise InvalidOptionError(f"must be any of 80, 800, 5000, got {sizes!r}", field="--sizes")
    if tasks < 1:
        raise InvalidOptionError(f"must be at least 1, got {tasks}", field="--tasks")
    if best_s <= 0:
        raise InvalidOptionError(f"must be above 0 seconds, got {best_s:g}", field="--best-s")
    bench = SearchBenchmark(device, registry, best_s)
    settings = {"model": bench.model.name, "best_s": best_s}
    runs = [] if output is None else _read_runs(output, settings)
    done = {run.key for run in runs}
    with progress("Searching", len(chosen) * 2 * tasks) as advance:
        for (num_tables, num_ranks, limit_s), level, seed in product(chosen, (False, True), range(tasks)):
            if (num_tables, level, seed) not in done:
                runs.append(bench.run(num_tables, num_ranks, limit_s, seed, level))
                log(runs[-1].line)
                if output is not None:
                    atomic_write(output, json.dumps(_document(runs, settings), indent=2) + "\n")
            advance(1)
    emit(_document(runs, settings), _table(runs), as_json=as_json)


def _document(runs: Sequence[SearchRun], settings: Mapping[str, object]) -> dict[str, object]:
    return {**settings, "runs": [run.to_json() for run in runs]}


def _read_runs(file: Path, settings: Mapping[str, object]) -> list[SearchRun]:
    """Runs of a file, if there is one; they have to be of the same model and as long a search."""
    if not file.exists():
        return []
    document = read_json(file)
    runs = document.get("runs") if isinstance(document, dict) else None
    if not isinstance(document, dict) or not isinstance(runs, list):
        raise FormatError("must be a list", source=str(file), field="runs")
    for name, value in settings.items():
        found = document.get(name)
        if found != value:
            raise FormatError(f"must be {value!r} as in this run, got {found!r}", source=str(file), field=name)
    return [SearchRun.from_json(run, str(file)) for run in runs]


def _table(runs: Sequence[SearchRun]) -> Table:
    table = Table(
        "tables",
        "ranks",
        "kind",
        "tasks",
        "median gap",
        "mean gap",
        "largest gap",
        "cost-greedy's",
        "median s",
        "best by",
    )
    keys = dict.fromkeys((run.num_tables, run.num_ranks, run.level) for run in runs)
    for num_tables, num_ranks, level in keys:
        mine = [run for run in runs if (run.num_tables, run.num_ranks, run.level) == (num_tables, num_ranks, level)]
        names = [run.by for run in mine]
        table.add_row(
            str(num_tables),
            str(num_ranks),
            _kind(level),
            str(len(mine)),
            f"{median(run.gap for run in mine):.2%}",
            f"{mean(run.gap for run in mine):.2%}",
            f"{max(run.gap for run in mine):.2%}",
            f"{median(run.greedy_ms / run.best_ms - 1 for run in mine):.2%}",
            f"{median(run.auto_s for run in mine):.2f}",
            max(set(names), key=names.count),
        )
    return table
