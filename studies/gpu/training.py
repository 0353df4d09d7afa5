"""Stage `training`: the policy's training on this device and on the CPU: steps a second, and time to good plans."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import plotly.graph_objects as go
import torch

from autoshard.formats import load_tables
from autoshard.report.figures import BLUE, GRID, INK, ORANGE, in_house_style
from autoshard.report.images import Section
from autoshard.report.wording import write_percent
from autoshard.runtime.processes.learners import Learners
from autoshard.table import Table
from costmodel.kernel.learned import LearnedCostModel
from costmodel.registry.versions import shipped_models
from policies.algorithms.training_options import TrainingOptions
from policies.planning.tasks import TaskKind, TaskSplit, sample_problems, task_seeds
from policies.training.trainer import Budget, Evaluation, PolicyTrainer
from studies.frame import Numbers
from studies.gpu.stages import Stage, Visit

#: Tasks are those of the shipped model of CPUs, so that curves of all devices can be compared.
_KEY, _SCALE, _TABLES, _RANKS = "cpu", 64, 80, 8
_NUM_TRAIN, _NUM_VALIDATION = 100, 20
_GOAL: Final = 0.95
_EVERY: Final = 2


def _run(visit: Visit) -> Numbers:
    model = LearnedCostModel.load(shipped_models(), _KEY)
    kind = TaskKind(device=_KEY, num_tables=_TABLES, num_ranks=_RANKS)
    pool = load_tables("metasyn").scaled(_SCALE)
    train, validation = (
        sample_problems(pool, model, kind, task_seeds(split, number))
        for split, number in ((TaskSplit.TRAIN, _NUM_TRAIN), (TaskSplit.VALIDATION, _NUM_VALIDATION))
    )
    devices = list(dict.fromkeys([visit.device.device, torch.device("cpu")]))
    arms: list[dict[str, Any]] = []
    for place, device in enumerate(devices):
        seconds = visit.share(0.9 / (len(devices) - place))
        trainer = PolicyTrainer(
            train, validation, options=TrainingOptions(evaluate_every=_EVERY), learners=Learners(device=device)
        )
        arms.append(_trained(trainer, str(device), seconds))
        visit.keep({"arms": arms})
    return {"arms": arms}


def _trained(trainer: PolicyTrainer, device: str, seconds: float) -> dict[str, Any]:
    started = time.monotonic()
    curve: list[dict[str, float]] = []

    def on_evaluated(found: Evaluation) -> None:
        curve.append(
            {
                "seconds": time.monotonic() - started,
                "updates": found.num_updates,
                "balance": found.policy.balance,
                "over_greedy": found.relative_ms,
                "steps_per_s": found.steps_per_s,
            }
        )

    trainer.run(Budget(seconds=seconds, patience=0), on_evaluated=on_evaluated)
    reached = next((point["seconds"] for point in curve if point["balance"] >= _GOAL), None)
    times = trainer.times.to_json()
    return {"device": device, "curve": curve, "seconds_to_goal": reached, "times": times}


def _show(numbers: Numbers) -> Sequence[Section]:
    arms = [arm for arm in numbers["arms"] if arm["curve"]]
    if not arms:
        return ()
    table = Table.of(
        arms,
        (
            ("device", lambda one: one["device"]),
            ("steps a second", lambda one: f"{one['curve'][-1]['steps_per_s']:,.0f}"),
            ("updates", lambda one: f"{one['curve'][-1]['updates']:,.0f}"),
            ("balance at the end", lambda one: write_percent(one["curve"][-1]["balance"])),
            ("over cost-greedy", lambda one: f"{one['curve'][-1]['over_greedy']:.3f}"),
            (f"seconds to {_GOAL}", lambda one: _seconds(one["seconds_to_goal"])),
            ("playing, s", lambda one: f"{one['times']['collect_s']:.1f}"),
            ("learning, s", lambda one: f"{one['times']['learn_s']:.1f}"),
        ),
        caption=f"{_TABLES} tables on {_RANKS} ranks, prices of the shipped model of CPUs",
    )
    caption = (
        f"Balance of the kernels on {_NUM_VALIDATION} unseen tasks, one greedy decode each. The environment steps on "
        "the host, which takes each step's choices from the device."
    )
    return (Section(title="Training the policy", caption=caption, figure=curves_figure(arms), tables=(table,)),)


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def curves_figure(arms: Sequence[dict[str, Any]]) -> go.Figure:
    """Balance over seconds of training, a line for each device."""
    figure = go.Figure()
    in_house_style(figure, height=420)
    for arm, colour in zip(arms, (ORANGE, BLUE), strict=False):
        figure.add_scatter(
            name=arm["device"],
            x=[point["seconds"] for point in arm["curve"]],
            y=[point["balance"] for point in arm["curve"]],
            mode="lines+markers",
            line={"color": colour, "width": 2},
        )
    figure.add_hline(y=_GOAL, line={"color": INK, "dash": "dot", "width": 1.5})
    figure.update_xaxes(title_text="seconds of training", gridcolor=GRID)
    figure.update_yaxes(title_text="balance on unseen tasks", gridcolor=GRID)
    return figure


def _headline(numbers: Numbers) -> str:
    return "; ".join(
        f"{arm['curve'][-1]['steps_per_s']:,.0f} steps a second on {arm['device']}, balance {_GOAL} after "
        f"{_seconds(arm['seconds_to_goal'])} s"
        for arm in numbers["arms"]
        if arm["curve"]
    )


STAGE: Final = Stage(name="training", share=0.1, run=_run, show=_show, headline=_headline)
