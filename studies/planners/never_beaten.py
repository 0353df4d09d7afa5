"""`auto` against every planner, and against itself with fewer sharding types: `python -m studies never-beaten`.

Tasks are drawn at random: machines, numbers of ranks and tables, sizes, dimensions, pooling and known row orders. Plans
of other planners count where they leave room for training on a batch, as those of `auto` do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from autoshard.commands.arguments import positive_option
from autoshard.commands.options import command_options
from autoshard.core import EmbeddingTable, Pooling, TableSet
from autoshard.core.errors import AutoshardError
from autoshard.evaluation.batch_memory import has_room
from autoshard.formats import load_topology
from autoshard.formats.metasyn import metasyn
from autoshard.planners.planner import PlanRequest
from autoshard.planners.registry import planner_names
from autoshard.planners.space.options import ShardingType
from autoshard.planning import make_costs, make_plan
from autoshard.table import Table
from studies.frame import OutputOptions, PartsOption, PartStore, RegistryOption, StudyResult, names_in
from studies.planners.limit_runs import of_ranks

AUTO = "auto"
#: Topologies with the numbers of their ranks.
_MACHINES = (
    *(("cpu-8", num_ranks) for num_ranks in (1, 2, 4, 8)),
    *(("a100-8", num_ranks) for num_ranks in (1, 2, 4, 8)),
    *(("a100-32", num_ranks) for num_ranks in (16, 32)),
    *((f"dgx-a100-{num_ranks}", num_ranks) for num_ranks in (8, 16)),
    ("dgx-h100-16", 16),
)
_MOST_TABLES = 160
#: What rows and batches are divided by: on CPUs, and on other devices.
_CPU_DIVISORS, _DIVISORS = (64, 256), (1, 8, 64)
_WIDTHS = (1, 1, 2, 4, 8)
#: Chances that a task has sequences, that one of its tables is one then, and that row orders are known.
_SEQUENCES, _IS_SEQUENCE, _ORDERED = 0.25, 0.3, 0.5
#: Subsets of sharding types that are drawn for a task besides single ones.
_NUM_SUBSETS = 4
_SUBSETS = ("table_wise,column_wise", "table_wise,data_parallel")
#: Time limits where steps are counted, over those that the steps stand for.
_PATIENCE = 30.0
#: Excess of `auto` that counts as none: at the shorter limit, and at the longer one.
_SLACKS = (1e-3, 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """One task's predicted steps in ms; None where there is no plan, or one without room for training.

    Attributes:
        title: The task, in words.
        auto_ms: Of `auto` at the shorter limit, and at the longer one.
        planners_ms: Of the other planners, by name.
        subsets_ms: Of `auto` at the shorter limit, by the sharding types that it was restricted to.
        longer_ms: The same, at the longer limit; of the best subset at the shorter one.
    """

    title: str
    auto_ms: tuple[float | None, float | None]
    planners_ms: dict[str, float | None]
    subsets_ms: dict[str, float | None]
    longer_ms: dict[str, float | None]

    def losses(self, longer: bool) -> dict[str, float]:
        """Opponents with a shorter step than `auto`, with its excess as a share; infinite where it has no plan."""
        others = {**self.planners_ms, **(self.longer_ms if longer else self.subsets_ms)}
        mine_ms, slack = self.auto_ms[longer], _SLACKS[longer]
        excess = {
            name: np.inf if mine_ms is None else mine_ms / step_ms - 1.0
            for name, step_ms in others.items()
            if step_ms is not None
        }
        return {name: share for name, share in excess.items() if share > slack}

    @property
    def line(self) -> str:
        """One line for people."""
        texts = []
        for longer in (False, True):
            losses = sorted(self.losses(longer).items(), key=lambda one: -one[1])
            texts.append(", ".join(f"{name} {share:.2%}" for name, share in losses[:3]) or "nobody")
        mine = "no plan" if self.auto_ms[0] is None else f"{self.auto_ms[0]:.5g} ms"
        return f"{self.title}: {mine}, beaten by {texts[0]}; at the longer limit by {texts[1]}"


def drawn_request(seed: int, registry: Path | None) -> tuple[str, PlanRequest]:
    """A random task, and what it is in words."""
    rng = np.random.default_rng((715, seed))
    base, num_ranks = _MACHINES[int(rng.integers(len(_MACHINES)))]
    topology = of_ranks(load_topology(base), num_ranks)
    num_tables = round(float(np.exp(rng.uniform(0.0, np.log(_MOST_TABLES)))))
    divisor = int(rng.choice(_CPU_DIVISORS if topology.device == "cpu" else _DIVISORS))
    tables = metasyn().scaled(divisor).redrawn(num_tables, seed)
    of_sequences = rng.random() < _SEQUENCES
    drawn = tuple(_drawn_table(table, rng, of_sequences) for table in tables.tables)
    tables = TableSet(batch_size=tables.batch_size, tables=drawn)
    if rng.random() < _ORDERED:
        tables = tables.assuming_orders()
    title = f"task {seed}: {num_tables} tables over {divisor} on {num_ranks} ranks of {base}"
    title += f"{', with sequences' if of_sequences else ''}"
    costs = make_costs(tables, topology, registry)
    return title, PlanRequest(tables=tables, topology=topology, costs=costs, registry=registry)


def _drawn_table(table: EmbeddingTable, rng: np.random.Generator, of_sequences: bool) -> EmbeddingTable:
    is_sequence = of_sequences and rng.random() < _IS_SEQUENCE
    wide = replace(table, embedding_dim=table.embedding_dim * int(rng.choice(_WIDTHS)))
    return replace(wide, pooling=Pooling.SEQUENCE) if is_sequence else wide


def drawn_subsets(seed: int) -> tuple[str, ...]:
    """Sharding types that `auto` is restricted to on a task: each alone, and some sets."""
    rng = np.random.default_rng((716, seed))
    names = [str(one) for one in ShardingType if one is not ShardingType.ROW_GROUPS]
    sets = [rng.permutation(names)[: int(rng.integers(2, len(names)))].tolist() for _ in range(_NUM_SUBSETS)]
    return tuple(dict.fromkeys([*names, *_SUBSETS, *(",".join(sorted(one)) for one in sets)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """How plans are made.

    Attributes:
        limits_s: The shorter and the longer time limit.
        steps_per_s: Steps of `auto`'s search for each second of a limit, in place of the clock; 0 for the clock.
        planners: The other planners.
        registry: Folder of trained models; None for the default.
    """

    limits_s: tuple[float, float]
    steps_per_s: int
    planners: tuple[str, ...]
    registry: Path | None

    def run(self, seed: int) -> Contest:
        """Plans one task in every way."""
        title, request = drawn_request(seed, self.registry)
        subsets_ms = {names: self._auto_ms(request, False, names) for names in drawn_subsets(seed)}
        known = {names: step_ms for names, step_ms in subsets_ms.items() if step_ms is not None}
        best = min(known, key=lambda names: known[names], default=None)
        return Contest(
            title=title,
            auto_ms=(self._auto_ms(request, False), self._auto_ms(request, True)),
            planners_ms={
                name: _step_ms(name, replace(request, time_limit_s=self.limits_s[0])) for name in self.planners
            },
            subsets_ms=subsets_ms,
            longer_ms={} if best is None else {best: self._auto_ms(request, True, best)},
        )

    def _auto_ms(self, request: PlanRequest, longer: bool, names: str = "all") -> float | None:
        limit_s = self.limits_s[longer]
        options: Mapping[str, object] = {"sharding_types": names}
        if self.steps_per_s:
            options = {**options, "steps": max(1, round(self.steps_per_s * limit_s))}
            limit_s *= _PATIENCE
        return _step_ms(AUTO, replace(request, time_limit_s=limit_s, options=options))


def _step_ms(name: str, request: PlanRequest) -> float | None:
    try:
        plan = make_plan(name, request)
    except AutoshardError:
        return None
    return plan.prices.step_ms.value if has_room(plan) else None


@command_options()
class NeverBeatenOptions:
    """Options of the study `never-beaten`."""

    tasks: Annotated[int, typer.Option(min=1, help="Tasks.")] = 300
    first: Annotated[int, typer.Option(min=0, help="Number of the first task.")] = 0
    limit: Annotated[float, positive_option("Seconds of all planners.")] = 1.0
    longer: Annotated[float, positive_option("Seconds that auto also gets.")] = 10.0
    planners: Annotated[
        str | None, typer.Option(help="The other planners, with commas.", show_default="all of them")
    ] = None
    steps: Annotated[
        int, typer.Option(min=0, help="Steps of auto's search per second of a limit, in place of the clock; 0 for it.")
    ] = 0
    registry: RegistryOption = None
    parts: PartsOption = None

    def __post_init__(self) -> None:
        _ = self.others

    @property
    def others(self) -> tuple[str, ...]:
        """The other planners."""
        known = tuple(name for name in planner_names() if name != AUTO)
        return known if self.planners is None else names_in(self.planners, "--planners", known)

    def ring(self) -> Ring:
        """How plans are made."""
        return Ring(
            limits_s=(self.limit, self.longer),
            steps_per_s=self.steps,
            planners=self.others,
            registry=self.registry,
        )


def main(options: NeverBeatenOptions, output: OutputOptions) -> None:
    """Compares `auto` with every planner, and with itself restricted to some sharding types, on random tasks.

    Example:
        OMP_NUM_THREADS=1 python -m studies never-beaten --tasks 300 --parts never-beaten -o docs/figures

    Example whose plans depend on no clock:
        OMP_NUM_THREADS=1 python -m studies never-beaten --tasks 20 --steps 100
    """
    ring = options.ring()
    settings = {"limits_s": list(ring.limits_s), "steps_per_s": ring.steps_per_s, "planners": list(ring.planners)}
    parts = PartStore.of(options.parts, settings)
    seeds = range(options.first, options.first + options.tasks)
    makers = {f"task-{seed:04d}": partial(ring.run, seed) for seed in seeds}
    contests = parts.find_all("Planning", Contest, makers, lambda one: one.line)
    document = {**settings, "contests": [asdict(one) for one in contests]}
    output.write(StudyResult(name="never-beaten", document=document, tables=(losses_table(contests),)))


def losses_table(contests: Sequence[Contest]) -> Table:
    """How often each opponent beats `auto`, and by how much at most, at both limits."""
    lines = []
    planners = dict.fromkeys(name for one in contests for name in one.planners_ms)
    for title, names in (*((name, [name]) for name in planners), ("auto of fewer sharding types", None)):
        cells = []
        for longer in (False, True):
            shares = [
                max(found)
                for one in contests
                if (found := [share for name, share in one.losses(longer).items() if _is_of(one, name, names)])
            ]
            cells += [str(len(shares)), f"{max(shares):.2%}" if shares else ""]
        known = sum(_has_plan(one, names) for one in contests)
        lines.append((title, str(known), *cells))
    columns = (
        "opponent",
        "tasks with a plan",
        "beats auto",
        "by at most",
        "beats it at the longer limit",
        "by at most",
    )
    return Table(columns=columns, rows=tuple(lines), caption="Predicted steps shorter than those of `auto`")


def _is_of(one: Contest, name: str, names: Sequence[str] | None) -> bool:
    return name not in one.planners_ms if names is None else name in names


def _has_plan(one: Contest, names: Sequence[str] | None) -> bool:
    of_names = one.subsets_ms if names is None else {name: one.planners_ms.get(name) for name in names}
    return any(step_ms is not None for step_ms in of_names.values())
