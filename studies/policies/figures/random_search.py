"""AutoShard's Fig. 9: the best of many random placements, against one pass of the policy.

Shape suffixes: P placements, N items, R ranks, H width of a code.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.core.costs import MsArray
from autoshard.evaluation.evaluate import evaluate
from autoshard.planners.space.placement import PlacementProblem
from autoshard.report.images import Section
from autoshard.table import Table
from env import balances
from studies.frame import Numbers, Summary
from studies.policies.charts import Line, Panel, line_chart
from studies.policies.figures.heuristics import compare_seed, policy_levels
from studies.policies.lab import (
    AUTO,
    COST_GREEDY,
    LOOKUP_GREEDY,
    POLICY,
    RANDOM,
    EvaluationSettings,
    Figure,
    Found,
    Lab,
    Part,
    Scored,
)
from studies.policies.scores import (
    by_planner,
    label,
    measured_table,
    replay_note,
    replayed,
    seed_parts,
    seeds_and_replays,
    write_seconds,
    write_seeds,
    write_share,
    write_time,
)

_LEVELS = (LOOKUP_GREEDY, COST_GREEDY, POLICY, AUTO)
_AT_ONCE = 256


def random_costs(problem: PlacementProblem, count: int, seed: int) -> Iterator[tuple[NDArray[np.int64], MsArray]]:
    """Random placements and their costs per rank, batch by batch; shapes (P, N) and (P, R)."""
    rng = np.random.default_rng(seed)
    ranks_R1 = np.arange(problem.num_ranks)[:, None]
    for start in range(0, count, _AT_ONCE):
        ranks_PN = rng.integers(problem.num_ranks, size=(min(_AT_ONCE, count - start), problem.num_items))
        is_there_PRN = (ranks_PN[:, None] == ranks_R1).astype(np.float32)
        codes_PRH = is_there_PRN @ problem.codes_NH
        costs_PRH = problem.model.predict_ms(codes_PRH.reshape(-1, codes_PRH.shape[-1]))
        yield ranks_PN, costs_PRH.reshape(codes_PRH.shape[:2])


def marks(count: int) -> list[int]:
    """Numbers of placements at which the best so far is noted: three per power of ten, and the last."""
    wanted = [factor * 10**power for power in range(10) for factor in (1, 2, 5)]
    return [*(number for number in wanted if number < count), count]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Searched:
    """Random placements of a task.

    Attributes:
        ranks_PN: The placements, shape (P, N).
        max_ms_P: Predicted time of the slowest rank, shape (P,).
        balance_P: Predicted balance, shape (P,).
        seconds: Time that drawing and pricing them took.
    """

    ranks_PN: NDArray[np.int64]
    max_ms_P: MsArray
    balance_P: MsArray
    seconds: float


def _search(problem: PlacementProblem, count: int, seed: int) -> _Searched:
    started_s = time.perf_counter()
    ranks, costs = zip(*random_costs(problem, count, seed), strict=True)
    costs_PR = np.concatenate(costs)
    max_ms_P, balance_P = costs_PR.max(axis=1), balances(costs_PR)
    seconds = time.perf_counter() - started_s
    return _Searched(ranks_PN=np.concatenate(ranks), max_ms_P=max_ms_P, balance_P=balance_P, seconds=seconds)


def _search_seed(seed: int, lab: Lab) -> Numbers:
    found = [
        _search(problem, lab.settings.num_random, index)
        for index, problem in enumerate(lab.problems(lab.test_seeds(seed)))
    ]
    at = np.array(marks(lab.settings.num_random))
    return {
        "num_placements": at.tolist(),
        "balance": np.mean([np.maximum.accumulate(one.balance_P)[at - 1] for one in found], axis=0).tolist(),
        "max_ms": np.mean([np.minimum.accumulate(one.max_ms_P)[at - 1] for one in found], axis=0).tolist(),
        "seconds": float(np.mean([one.seconds for one in found])),
        "tasks": compare_seed(lab, seed)["tasks"],
    }


def _replay_task(seed: int, index: int, lab: Lab) -> Numbers:
    """Replays what random search found for one task of a seed, and the plans of planners."""
    request = lab.test_request(seed, index, lab.settings.size)
    scored = {name: lab.plan(name, request) for name in (RANDOM, *_LEVELS)}
    problem = lab.problems(lab.test_seeds(seed))[index]
    found = _search(problem, lab.settings.num_random, index)
    for number in _tabled(marks(lab.settings.num_random)):
        best = int(np.argmin(found.max_ms_P[:number]))
        plan = problem.to_plan(found.ranks_PN[best])
        priced = replace(plan, predicted=evaluate(plan, lab.costs))
        scored[_best_of(number)] = Scored(plan=priced, seconds=found.seconds * number / lab.settings.num_random)
    return replayed(lab, scored)


def _best_of(number: int) -> str:
    return f"{RANDOM}, best of {number:,}"


def _tabled(numbers: Sequence[int]) -> list[int]:
    """Powers of ten, and the last."""
    return [number for number in numbers if str(number).strip("0") == "1" or number == numbers[-1]]


def _parts(settings: EvaluationSettings) -> Sequence[Part]:
    return seed_parts(settings, _search_seed, _replay_task)


def _show(found: Found, settings: EvaluationSettings) -> Section:
    parts, replays = seeds_and_replays(found, settings)
    numbers = parts[0]["num_placements"]
    searched = {
        name: [Summary.of(values) for values in zip(*(part[name] for part in parts), strict=True)] for name in _SCORES
    }
    ends = (numbers[0], numbers[-1])
    tabled = _tabled(numbers)
    measured = by_planner(replays, (*map(_best_of, tabled), *_LEVELS))
    panels = []
    for name, title in _SCORES.items():
        lines = {"random search": Line(x=numbers, y=searched[name])}
        if measured:
            lines["best by price, replayed"] = Line(
                x=tabled, y=[getattr(measured[_best_of(number)], name) for number in tabled]
            )
            level = getattr(measured[POLICY], name)
            lines["policy, replayed"] = Line(x=ends, y=(level, level), is_level=True)
        for planner, level in policy_levels(parts, _LEVELS, name).items():
            lines[planner] = Line(x=ends, y=(level, level), is_level=True)
        is_share = name == "balance"
        panels.append(Panel(title=title, lines=lines, x_title="random placements", is_percent=is_share, x_log=True))
    seconds = float(np.mean([part["seconds"] for part in parts]))
    return Section(
        title=FIGURE.title,
        caption=f"Best of n random placements of the test tasks of Fig. 8, by predicted costs; means and deviations "
        f"over {write_seeds(len(parts))}. {numbers[-1]:,} placements of a task are priced in {write_seconds(seconds)}. "
        "AutoShard's paper: 1,000 placements, measured, took 9,783 s, and came close to lookup-greedy at best."
        + (f" {_replay_note(replays)}" if replays else ""),
        figure=line_chart(panels),
        tables=(
            _table(parts, searched, settings, seconds),
            *([measured_table(replays, (RANDOM, *map(_best_of, tabled), *_LEVELS), settings)] if replays else []),
        ),
    )


def _replay_note(replays: Sequence[Numbers]) -> str:
    return f"{replay_note(replays)} Of n placements the one with the fastest slowest rank by price is replayed."


_SCORES = {"balance": "degree of balance", "max_ms": "slowest rank, ms"}


def _table(
    parts: Sequence[Numbers], searched: dict[str, list[Summary]], settings: EvaluationSettings, seconds: float
) -> Table:
    numbers = parts[0]["num_placements"]
    lines = [
        (
            _best_of(number),
            write_share(balance),
            write_time(max_ms),
            write_seconds(seconds * number / numbers[-1]),
        )
        for number, balance, max_ms in zip(numbers, searched["balance"], searched["max_ms"], strict=True)
        if number in _tabled(numbers)
    ]
    levels = {name: policy_levels(parts, _LEVELS, name) for name in (*_SCORES, "planning_s")}
    lines += [
        (
            label(planner, settings),
            write_share(levels["balance"][planner]),
            write_time(levels["max_ms"][planner]),
            write_seconds(levels["planning_s"][planner].mean),
        )
        for planner in levels["balance"]
    ]
    return Table(
        columns=("placement", "balance", "slowest rank, ms", "time per task"),
        rows=tuple(lines),
        caption="Random search and planners; the best balance and the fastest slowest rank may be of two placements",
    )


FIGURE = Figure(name="fig9", title="Against random search (AutoShard, Fig. 9)", parts=_parts, show=_show)
