"""Time of training and pricing: `python -m studies cost-speed --store samples`.

Shape suffixes: S sets of shards, N shards, C candidates, H width of a code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer

from autoshard.commands.options import command_options
from autoshard.formats.stores.samples import read_samples
from autoshard.runtime.processes.threads import intra_op_threads
from autoshard.table import Table
from bench.measuring.devices import find_device
from costmodel.kernel.dataset import CostDataset
from costmodel.kernel.learned import LearnedCostModel
from costmodel.kernel.metrics import sum_codes
from costmodel.kernel.training import CostTrainingOptions, TrainedCostModel, train_cost_model
from studies.frame import Machine, OutputOptions, StudyResult, command_line

SCHEMA: Final = "autoshard.cost_speed/1"
NUM_SETS, MOST_SHARDS, NUM_CANDIDATES, NUM_TRAINED = 1_000, 100, 10_000, 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times of one thing, run several times in turn with the others.

    Attributes:
        name: The timed operation.
        unit: Of the times.
        median: In the middle of all runs.
        lowest: Of the run that other programs disturbed least.
        bound: Largest acceptable time.
    """

    name: str
    unit: str
    median: float
    lowest: float
    num_runs: int
    bound: float


def time_pricing(model: LearnedCostModel, dataset: CostDataset, num_runs: int, seed: int = 0) -> tuple[Timing, ...]:
    """Times of pricing sets of cached codes on one thread, and of adding and removing one shard.

    Args:
        model: The cost model.
        dataset: Its shards are drawn from.
        num_runs: Runs of each.
        seed: Of the draw.
    """
    rng = np.random.default_rng(seed)
    codes_NH = model.encode(dataset.shards_U)
    num_shards_S = rng.integers(1, MOST_SHARDS + 1, size=NUM_SETS)
    shard_N = rng.integers(len(codes_NH), size=num_shards_S.sum())
    starts_S = np.cumsum(num_shards_S) - num_shards_S
    codes_SH = sum_codes(codes_NH, shard_N, starts_S)
    set_C = rng.integers(NUM_SETS, size=NUM_CANDIDATES)
    shard_C = rng.integers(len(codes_NH), size=NUM_CANDIDATES)
    last_C = shard_N[(starts_S + num_shards_S - 1)[set_C]]
    runs: dict[str, Callable[[], object]] = {
        "sum": lambda: model.predict_ms(sum_codes(codes_NH, shard_N, starts_S)),
        "add": lambda: model.predict_ms(codes_SH[set_C] + codes_NH[shard_C]),
        "remove": lambda: model.predict_ms(codes_SH[set_C] - codes_NH[last_C]),
    }
    with intra_op_threads(1):
        took = {name: _seconds(run, num_runs) for name, run in runs.items()}
    return (
        _timing(f"{NUM_SETS:,} sets of up to {MOST_SHARDS} shards, from cached codes", "ms", took["sum"], 1e3, 5.0),
        _timing("one shard more, per candidate", "µs", took["add"], 1e6 / NUM_CANDIDATES, 2.0),
        _timing("one shard less, per candidate", "µs", took["remove"], 1e6 / NUM_CANDIDATES, 2.0),
    )


def time_training(
    dataset: CostDataset, device: str, num_runs: int, options: CostTrainingOptions | None = None
) -> tuple[TrainedCostModel, Timing]:
    """Times of training on 10,000 samples; fewer are repeated until they are as many."""
    options = options or CostTrainingOptions()
    repeated = dataset.take(np.resize(np.arange(len(dataset)), NUM_TRAINED))
    took, trained = [], None
    for seed in range(num_runs):
        started = time.perf_counter()
        trained = train_cost_model(repeated, device=device, options=options, seed=seed)
        took.append(time.perf_counter() - started)
    assert trained is not None
    updates = options.num_updates
    return trained, _timing(f"training on {NUM_TRAINED:,} samples, {updates:,} updates", "s", took, 1.0, 60.0)


def _seconds(run: Callable[[], object], num_runs: int) -> list[float]:
    run()  # caches and clocks
    took = []
    for _ in range(num_runs):
        started = time.perf_counter()
        run()
        took.append(time.perf_counter() - started)
    return took


def _timing(name: str, unit: str, seconds: Sequence[float], factor: float, bound: float) -> Timing:
    return Timing(
        name=name,
        unit=unit,
        median=float(np.median(seconds)) * factor,
        lowest=min(seconds) * factor,
        num_runs=len(seconds),
        bound=bound,
    )


def timings_table(timings: Sequence[Timing]) -> Table:
    """A line for each timing."""
    return Table.of(
        timings,
        (
            ("timed", lambda one: one.name),
            ("median", lambda one: f"{one.median:.2f} {one.unit}"),
            ("lowest", lambda one: f"{one.lowest:.2f} {one.unit}"),
            ("should be below", lambda one: f"{one.bound:g} {one.unit}"),
            ("runs", lambda one: str(one.num_runs)),
        ),
        caption="Timings",
    )


@command_options()
class CostSpeedOptions:
    """Options of the study `cost-speed`."""

    store: Annotated[Path, typer.Option(help="Folder of samples to train on.")]
    device: Annotated[str | None, typer.Option(help="Key of the device, if the store has several.")] = None
    runs: Annotated[int, typer.Option(min=1, help="Runs of pricing.")] = 50
    train_runs: Annotated[int, typer.Option(min=1, help="Runs of training.")] = 3


def main(options: CostSpeedOptions, output: OutputOptions) -> None:
    """Times the training of the cost model and the pricing with it.

    Example:
        python -m studies cost-speed --store docs/data/samples
    """
    table = read_samples(options.store, options.device)
    dataset = CostDataset.from_samples(table)
    trained, training = time_training(dataset, table.samples[0].device, options.train_runs)
    timings = (training, *time_pricing(trained.model, dataset, options.runs))
    machine = Machine.this(find_device("cpu"), command_line("cost-speed", options))
    document = {
        "schema": SCHEMA,
        "machine": machine.to_json(),
        "num_samples": len(dataset),
        "timings": [asdict(timing) for timing in timings],
    }
    notes = tuple(f"{name}: {value}" for name, value in machine.described())
    output.write(StudyResult(name="cost-speed", document=document, tables=(timings_table(timings),), notes=notes))
