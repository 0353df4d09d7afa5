"""AutoShard's Fig. 9: the best of many random placements, against one pass of the policy.

Shape suffixes: P placements, N items, R ranks, H width of a code.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from autoshard.core.costs import MsArray
from autoshard.planners.space.placement import PlacementProblem
from autoshard.report.images import NumberTable, Section
from env import balances
from studies.frame import Numbers, Summary
from studies.policies.charts import Line, Panel, line_chart
from studies.policies.figure import Figure, Found, Part
from studies.policies.figures.heuristics import compare_seed, policy_levels
from studies.policies.lab import AUTO, COST_GREEDY, LOOKUP_GREEDY, POLICY, RANDOM, Lab
from studies.policies.settings import EvaluationSettings
from studies.policies.summaries import label, write_seconds, write_seeds, write_share, write_time

_LEVELS = (LOOKUP_GREEDY, COST_GREEDY, POLICY, AUTO)
_AT_ONCE = 256


def random_costs(problem: PlacementProblem, count: int, seed: int) -> Iterator[MsArray]:
    """Costs per rank of random placements, batch by batch; shape (P, R)."""
    rng = np.random.default_rng(seed)
    ranks_R1 = np.arange(problem.num_ranks)[:, None]
    for start in range(0, count, _AT_ONCE):
        ranks_PN = rng.integers(problem.num_ranks, size=(min(_AT_ONCE, count - start), problem.num_items))
        is_there_PRN = (ranks_PN[:, None] == ranks_R1).astype(np.float32)
        codes_PRH = is_there_PRN @ problem.codes_NH
        yield problem.model.predict_ms(codes_PRH.reshape(-1, codes_PRH.shape[-1])).reshape(codes_PRH.shape[:2])


def marks(count: int) -> list[int]:
    """Numbers of placements at which the best so far is noted: three per power of ten, and the last."""
    wanted = [factor * 10**power for power in range(10) for factor in (1, 2, 5)]
    return [*(number for number in wanted if number < count), count]


def _search(problem: PlacementProblem, count: int, seed: int) -> tuple[MsArray, MsArray, float]:
    """Best balance and lowest maximum after each placement, and the seconds that all took."""
    started_s = time.perf_counter()
    costs_PR = np.concatenate(list(random_costs(problem, count, seed)))
    max_ms_P = costs_PR.max(axis=1)
    balance_P = balances(costs_PR)
    seconds = time.perf_counter() - started_s
    return np.maximum.accumulate(balance_P), np.minimum.accumulate(max_ms_P), seconds


def _search_seed(seed: int, lab: Lab) -> Numbers:
    found = [
        _search(problem, lab.settings.num_random, index)
        for index, problem in enumerate(lab.problems(lab.test_seeds(seed)))
    ]
    at = np.array(marks(lab.settings.num_random))
    return {
        "num_placements": at.tolist(),
        "balance": np.mean([balance_P[at - 1] for balance_P, _, _ in found], axis=0).tolist(),
        "max_ms": np.mean([max_ms_P[at - 1] for _, max_ms_P, _ in found], axis=0).tolist(),
        "seconds": float(np.mean([seconds for _, _, seconds in found])),
        "tasks": compare_seed(lab, seed)["tasks"],
    }


def _parts(settings: EvaluationSettings) -> Sequence[Part]:
    return [Part(f"seed-{seed}", partial(_search_seed, seed)) for seed in range(settings.num_seeds)]


def _show(found: Found, settings: EvaluationSettings) -> Section:
    parts = list(found.values())
    numbers = parts[0]["num_placements"]
    searched = {
        name: [Summary.of(values) for values in zip(*(part[name] for part in parts), strict=True)] for name in _SCORES
    }
    ends = (numbers[0], numbers[-1])
    panels = []
    for name, title in _SCORES.items():
        lines = {"random search": Line(x=numbers, y=searched[name])}
        for planner, level in policy_levels(parts, _LEVELS, name).items():
            lines[planner] = Line(x=ends, y=(level, level), is_level=True)
        is_share = name == "balance"
        panels.append(Panel(title=title, lines=lines, x_title="random placements", is_percent=is_share, x_log=True))
    seconds = float(np.mean([part["seconds"] for part in parts]))
    return Section(
        title=FIGURE.title,
        caption=f"Best of n random placements of the test tasks of Fig. 8, by predicted costs; means and deviations "
        f"over {write_seeds(len(parts))}. {numbers[-1]:,} placements of a task are priced in {write_seconds(seconds)}. "
        "AutoShard's paper: 1,000 placements, measured, took 9,783 s, and came close to lookup-greedy at best.",
        figure=line_chart(panels),
        tables=(_table(parts, searched, settings, seconds),),
    )


_SCORES = {"balance": "degree of balance", "max_ms": "slowest rank, ms"}


def _table(
    parts: Sequence[Numbers], searched: dict[str, list[Summary]], settings: EvaluationSettings, seconds: float
) -> NumberTable:
    numbers = parts[0]["num_placements"]
    lines = [
        (
            f"{RANDOM}, best of {number:,}",
            write_share(balance),
            write_time(max_ms),
            write_seconds(seconds * number / numbers[-1]),
        )
        for number, balance, max_ms in zip(numbers, searched["balance"], searched["max_ms"], strict=True)
        if str(number).startswith("1") or number == numbers[-1]
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
    return NumberTable(
        columns=("placement", "balance", "slowest rank, ms", "time per task"),
        lines=tuple(lines),
        caption="Random search and planners; the best balance and the fastest slowest rank may be of two placements",
    )


FIGURE = Figure(name="fig9", title="Against random search (AutoShard, Fig. 9)", parts=_parts, show=_show)
