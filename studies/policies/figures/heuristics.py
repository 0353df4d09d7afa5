"""AutoShard's Fig. 8: the policy against heuristics, as predicted and as replayed on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from autoshard.report.images import Section
from autoshard.table import Table
from policies.algorithms.training_options import TrainingOptions
from studies.frame import Numbers, Summary
from studies.policies.charts import Panel, bar_chart
from studies.policies.lab import AUTO, HEURISTICS, POLICY, RANDOM, SAMPLED, EvaluationSettings, Figure, Found, Lab, Part
from studies.policies.scores import (
    by_planner,
    label,
    measured_table,
    planner_table,
    replay_note,
    replayed,
    seed_parts,
    seeds_and_replays,
    write_factor,
    write_seconds,
    write_seeds,
    write_share,
    write_time,
)

PLANNERS = (*HEURISTICS, "torchrec", POLICY, SAMPLED, AUTO)
NAME = "fig8"


def compare_seed(lab: Lab, seed: int) -> dict[str, Any]:
    """Scores of all planners on the test tasks of a seed, by the policy of that seed; kept for other figures."""
    return lab.parts.find(f"{NAME}/seed-{seed}", partial(_plan_seed, seed, lab))


def _plan_seed(seed: int, lab: Lab) -> Numbers:
    num_tables, num_ranks = lab.settings.size
    draw = partial(lab.pool.sample, num_tables)
    return lab.plan_tests(PLANNERS, seed, num_ranks, lab.policy_registry(seed), draw)


def _replay_task(seed: int, index: int, lab: Lab) -> Numbers:
    """Replays all plans of one task of a seed."""
    request = lab.test_request(seed, index, lab.settings.size)
    return replayed(lab, {name: lab.plan(name, request) for name in PLANNERS})


def _parts(settings: EvaluationSettings) -> Sequence[Part]:
    return seed_parts(settings, _plan_seed, _replay_task)


def _show(found: Found, settings: EvaluationSettings) -> Section:
    seeds, replays = seeds_and_replays(found, settings)
    groups = {"predicted": by_planner(seeds, PLANNERS)}
    if replays:
        groups = {"measured": by_planner(replays, PLANNERS), **groups}
    balance = {
        name: {label(planner, settings): scores.balance for planner, scores in group.items()}
        for name, group in groups.items()
    }
    speedup = {
        name: {label(planner, settings): scores.speedup for planner, scores in group.items() if scores.speedup}
        for name, group in groups.items()
    }
    figure = bar_chart(
        [
            Panel(title="degree of balance", bars=balance, is_percent=True),
            Panel(title="speed-up over random", bars=speedup),
        ]
    )
    tables = (_predicted_table(seeds, settings), *([measured_table(replays, PLANNERS, settings)] if replays else []))
    return Section(title=FIGURE.title, caption=_caption(settings, replays), figure=figure, tables=tables)


def _num_steps(settings: EvaluationSettings) -> int:
    """Tables that are placed in one training: each update plays whole episodes of several tasks, several times."""
    training = TrainingOptions()
    return settings.num_updates * training.num_groups * training.num_rollouts * settings.num_tables


def _caption(settings: EvaluationSettings, replays: Sequence[Numbers]) -> str:
    text = (
        f"{settings.num_tables} tables on {settings.num_ranks} ranks; policies of {write_seeds(settings.num_seeds)}, "
        f"each trained on {settings.num_train_tasks} tasks ({settings.num_updates} updates, {_num_steps(settings):,} "
        "steps of the environment; the paper's training has 100,000, with measured rewards) and compared on "
        f"{settings.num_test_tasks} others; means and deviations over seeds. AutoShard's paper: 88.6% ± 1.2 balance "
        "and 1.712 ± 0.027 speed-up, measured, above all its heuristics."
    )
    if not replays:
        return text
    return f"{text} {replay_note(replays)}"


def _predicted_table(seeds: Sequence[Numbers], settings: EvaluationSettings) -> Table:
    return planner_table(
        seeds,
        PLANNERS,
        settings,
        "Predicted, means and deviations over seeds",
        (
            ("balance", lambda _, one: write_share(one.balance)),
            ("slowest rank, ms", lambda _, one: write_time(one.max_ms)),
            (f"speed-up over {RANDOM}", lambda _, one: write_factor(one.speedup)),
            ("planning", lambda _, one: write_seconds(one.planning_s.mean if one.planning_s else None)),
        ),
    )


def policy_levels(parts: Sequence[Mapping[str, Any]], planners: Sequence[str], name: str) -> dict[str, Summary]:
    """Balance or another score of some planners, from the parts of this figure."""
    return {planner: getattr(scores, name) for planner, scores in by_planner(parts, planners).items()}


FIGURE = Figure(name=NAME, title="Against heuristics (AutoShard, Fig. 8)", parts=_parts, show=_show)
