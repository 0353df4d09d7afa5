"""AutoShard's Algorithm 1: policy and cost model learned together, from an empty buffer and with squared errors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np

from autoshard.core import CostModel, ShardingPlan
from autoshard.core.costs import MsArray
from autoshard.planners.refine import MeasurePlans
from autoshard.planners.space.placement import PlacementProblem
from autoshard.report.images import Section
from autoshard.report.wording import write_percent
from autoshard.runtime.processes.threads import intra_op_threads
from autoshard.table import Table
from env import PlacementTask
from policies.choices import CostLoss, RewardSource
from policies.planning.decoding import decode
from policies.planning.tasks import whole_tables
from policies.training.joint import JointTrainer
from policies.training.joint_cost import CostUpdates, JointCost
from policies.training.scores import Baselines, score_placements
from policies.training.trainer import TrainingOptions
from studies.frame import Numbers, Summary
from studies.policies.charts import Line, Panel, line_chart
from studies.policies.lab import COST_GREEDY, LOOKUP_GREEDY, EvaluationSettings, Figure, Found, Lab, Part
from studies.policies.scores import write_seeds, write_share, write_time

#: Spread of repeated measurements: sets of docs/data/samples that were measured again differ by 1.9%
#: (docs/results/cost-models.md).
_NOISE: Final = 0.02


def stand_in(model: CostModel, seed: int, noise: float = _NOISE) -> MeasurePlans:
    """A cost model in the place of the machine: it prices each rank's shards, times a random factor.

    Args:
        model: Prices the shards.
        seed: Source of the factors.
        noise: Standard deviation of their logarithms.
    """
    rng = np.random.default_rng(seed)

    def measured(plan: ShardingPlan) -> MsArray:
        cost_ms_R = np.zeros(plan.topology.world_size)
        for rank, shards in enumerate(plan.local_shards()):
            if shards:
                cost_ms_R[rank] = model.predict_ms(model.encode(shards).sum(axis=0, keepdims=True))[0]
        return cost_ms_R * rng.lognormal(0.0, noise, len(cost_ms_R))

    return lambda plans: tuple(measured(plan) for plan in plans)


def _train_seed(num_updates: int, seed: int, lab: Lab) -> Numbers:
    settings = lab.settings
    cost = JointCost(
        whole_tables(lab.pool, settings.device),
        device=settings.device,
        seed=seed,
        updates=CostUpdates(loss=CostLoss.SQUARED),
    )
    trainer = JointTrainer(
        lab.problems(lab.train_seeds(seed), model=cost.model()),
        lab.problems(lab.validation_seeds(), model=cost.model()),
        cost=cost,
        options=TrainingOptions(reward=RewardSource.MEASURED),
        seed=seed,
        measure=stand_in(lab.model, seed),
    )
    known, points = lab.problems(lab.target_seeds()), []
    with intra_op_threads(1):
        for number in range(num_updates + 1):
            if number:
                trainer.update()
            if number % settings.curve_every == 0 or number == num_updates:
                unknown = lab.problems(lab.target_seeds(), model=cost.model())
                points.append({"num_updates": number, **_scored(trainer, unknown, known)})
    baselines = Baselines.of(known)
    return {
        "points": points,
        COST_GREEDY: baselines.cost_greedy.to_json(),
        LOOKUP_GREEDY: baselines.lookup_greedy.to_json(),
    }


def _scored(
    trainer: JointTrainer, unknown: Sequence[PlacementProblem], known: Sequence[PlacementProblem]
) -> dict[str, float]:
    """Scores of one greedy decode per task by the lab's cost model, and how far the learned one is off on its ranks.

    Args:
        trainer: Has the network, and what was measured.
        unknown: The tasks, as the cost model in training prices them.
        known: The same ones, as the lab's cost model does.
    """
    placements = decode(trainer.network, [PlacementTask.of(problem) for problem in unknown]).ranks
    pairs = list(zip(unknown, known, placements, strict=True))
    learned_ms = np.concatenate([ours.rank_ms(ranks_N) for ours, _, ranks_N in pairs])
    true_ms = np.concatenate([theirs.rank_ms(ranks_N) for _, theirs, ranks_N in pairs])
    held = true_ms > 0
    off_ms = learned_ms[held] - true_ms[held]
    measured = trainer.measured
    return {
        **score_placements(known, placements).to_json(),
        "relative_error": float(np.mean(np.abs(off_ms) / true_ms[held])),
        "mse_ms2": float(np.mean(off_ms**2)),
        "num_measured": 0 if measured is None else measured.num_measured,
    }


def _parts(settings: EvaluationSettings) -> Sequence[Part]:
    number = settings.joint_updates
    if not number:
        return []
    return [Part(f"{number}-{seed}", partial(_train_seed, number, seed)) for seed in range(settings.num_seeds)]


def _show(found: Found, settings: EvaluationSettings) -> Section:
    seeds = list(found.values())
    columns = list(zip(*(part["points"] for part in seeds), strict=True))
    updates = [column[0]["num_updates"] for column in columns]

    def over_seeds(column: Sequence[Numbers], name: str) -> Summary:
        return Summary.of([point[name] for point in column])

    rows = tuple(
        (
            f"{number}",
            f"{over_seeds(column, 'num_measured').mean:,.0f}",
            write_share(over_seeds(column, "balance")),
            write_time(over_seeds(column, "max_ms")),
            write_percent(over_seeds(column, "relative_error").mean),
            f"{over_seeds(column, 'mse_ms2').mean:.2f}",
        )
        for number, column in zip(updates, columns, strict=True)
    )
    levels = {
        planner: Summary.of([part[planner]["balance"] for part in seeds]) for planner in (COST_GREEDY, LOOKUP_GREEDY)
    }
    balance = {"policy": Line(x=updates, y=[over_seeds(column, "balance") for column in columns])} | {
        planner: Line(x=(updates[0], updates[-1]), y=(level, level), is_level=True) for planner, level in levels.items()
    }
    error = Line(x=updates, y=[over_seeds(column, "relative_error") for column in columns])
    return Section(
        title=FIGURE.title,
        caption="Policy and cost model begin with random weights and without a sample; after each update of the policy "
        f"the cost model makes {CostUpdates().num_updates} of {CostUpdates().batch_size} samples with squared errors, "
        "from the ranks of the placements that the policy tried. The cost model that ships stands in for the machine: "
        f"it prices these placements, with {_NOISE:.0%} noise. One greedy decode on {settings.num_target_tasks} unseen "
        f"tasks of {settings.num_tables} tables on {settings.num_ranks} ranks; mean and deviation over "
        f"{write_seeds(len(seeds))}. With the shipped cost model, cost-greedy balances at "
        f"{write_share(levels[COST_GREEDY])} and lookup-greedy at {write_share(levels[LOOKUP_GREEDY])}. The error is "
        "that of the learned cost model on the ranks of the policy's plans.",
        figure=line_chart(
            [
                Panel(title="degree of balance", lines=balance, x_title="updates", is_percent=True),
                Panel(title="error of the cost model", lines={"cost model": error}, x_title="updates", is_percent=True),
            ]
        ),
        tables=(
            Table(
                columns=(
                    *("updates", "placements measured", "balance", "slowest rank, ms"),
                    *("error of the cost model", "MSE, ms²"),
                ),
                rows=rows,
                caption="From an empty buffer, with squared errors",
            ),
        ),
    )


FIGURE = Figure(
    name="joint", title="Policy and cost model from an empty buffer (AutoShard, Algorithm 1)", parts=_parts, show=_show
)
