"""Trains DLRMs on planted clicks with plans, on processes of this machine, and tests them on clicks not seen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from autoshard.core import ShardingPlan
from autoshard.formats import write_plan
from autoshard.runtime.processes.job import RESULTS_FILE
from autoshard.runtime.processes.launch import running_workers
from studies.runtime.clicks import ClickModel

#: Where the worker is imported from.
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClickRun:
    """One training.

    Attributes:
        plan: Its tables are those of the clicks' model; its batch is the global batch.
        seed: Of the planted model and of all batches.
        weights_seed: Of the initial weights.
        steps: Training steps.
        held_out: Batches that the trained model is tested on, of the same size.
        learning_rate: Of tables and dense layers.
    """

    plan: ShardingPlan
    seed: int
    weights_seed: int
    steps: int
    held_out: int
    learning_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClickResult:
    """What came of a training.

    Attributes:
        normalised_entropy: Of the trained model on held-out clicks.
        best_entropy: Of the planted model on the same clicks.
        sent_bytes: Bytes that all processes send to others in a step, by exchange.
    """

    normalised_entropy: float
    best_entropy: float
    sent_bytes: dict[str, float]


def train_runs(model: ClickModel, runs: Sequence[ClickRun], nproc: int) -> tuple[ClickResult, ...]:
    """Trains all runs, one after the other on the same processes.

    Args:
        model: Sizes of the trained and of the planted model.
        runs: The runs; those of one seed in a row share their batches.
        nproc: Processes, at most the ranks of each plan.

    Raises:
        ExecutionError: If a process fails.
    """
    with TemporaryDirectory(prefix="autoshard-clicks-") as name:
        folder = Path(name)
        job = {"model": asdict(model), "runs": [_written(run, folder, index) for index, run in enumerate(runs)]}
        module = "studies.runtime.worker"
        with running_workers(module, job, nproc, path=(str(_ROOT),)) as (shared, documents):
            for _ in documents:
                pass
            results = json.loads((shared / RESULTS_FILE).read_text(encoding="utf-8"))
    return tuple(ClickResult(**result) for result in results)


def _written(run: ClickRun, folder: Path, index: int) -> dict[str, Any]:
    """What the worker reads: the plan as a file."""
    path = folder / f"{index}.json"
    write_plan(run.plan, path)
    settings = {name: getattr(run, name) for name in ("seed", "weights_seed", "steps", "held_out", "learning_rate")}
    return {"plan_path": str(path), **settings}
