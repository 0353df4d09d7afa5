"""The study `rounds`: what samples cost and how well they repeat, with all rounds, with early stops, beside a process.

Shape suffixes: N sets, P passes.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Final

import numpy as np
import typer
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from autoshard import console
from autoshard.commands.options import command_options
from autoshard.core import LocalShard
from autoshard.formats import load_tables
from autoshard.formats.stores.drift import corrected_ms
from autoshard.report.wording import write_percent
from autoshard.table import Table
from bench.kernels.harness import Harness, Measurement, Settings, reference_set
from bench.kernels.measurable import is_measurable
from bench.measuring.devices import BenchDevice, find_device
from bench.measuring.robust_stats import SIGMA_PER_DEVIATION, MsArray
from bench.sampling.stream import DEFAULT_WEIGHTS, REPEAT, SetSource, stream_sets
from studies.frame import BenchDeviceOption, Machine, OutputOptions, StudyResult, command_line
from studies.frame.documents import to_document

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

SCHEMA: Final = "autoshard.rounds/1"
ALL, EARLY, BESIDE = "all rounds", "early stops", "early stops, beside a process"
_MEMORY_BYTES = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """How sets are measured.

    Attributes:
        settings: Rounds and groups.
        has_neighbour: Whether another process runs kernels meanwhile.
    """

    settings: Settings
    has_neighbour: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Samples of an arm.

    Attributes:
        arm: Its name.
        num_samples: Measurements of sets, each of one or more attempts.
        processor_s: Processor time of this process per sample, the median over passes.
        wall_s: As `processor_s`, of the clock.
        rounds: Counted runs per sample, of all attempts.
        attempts: Per sample.
        noisy_share: Samples that stayed noisy.
        deviation: Standard deviation of a set's samples over their mean, drift divided out; root mean square over sets.
        robust_deviation: As `deviation`, by the median absolute deviation from the mean.
        latency_ratio: Times as measured over those of the first arm: the median over sets of mean over mean.
        corrected_ratio: As `latency_ratio`, relative to the reference of the same rounds.
    """

    arm: str
    num_samples: PositiveInt
    processor_s: PositiveFloat
    wall_s: PositiveFloat
    rounds: PositiveFloat
    attempts: PositiveFloat
    noisy_share: NonNegativeFloat
    deviation: NonNegativeFloat
    robust_deviation: NonNegativeFloat
    latency_ratio: PositiveFloat
    corrected_ratio: PositiveFloat


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """All arms, measured in turn.

    Attributes:
        machine: Machine and software.
        num_sets: Sets, the same for all arms and passes.
        num_passes: Measurements of every set with every arm.
        arms: The arms.
    """

    machine: Machine
    num_sets: PositiveInt
    num_passes: PositiveInt
    arms: tuple[Cost, ...]


@dataclass(slots=True)
class _Taken:
    """Passes of an arm: measurements of all sets in order, and seconds of the processor and of the clock."""

    passes: list[list[Measurement]]
    seconds: list[tuple[float, float]]


def arms_of(device: BenchDevice) -> dict[str, Arm]:
    """What `collect` does, what it would do if no set stopped early, and the former with a core taken."""
    usual = Settings.for_collecting(device)
    every = replace(usual, rounds=replace(usual.rounds, num_least=None))
    return {ALL: Arm(settings=every), EARLY: Arm(settings=usual), BESIDE: Arm(settings=usual, has_neighbour=True)}


def chosen_sets(device: BenchDevice, count: int, *, scale: int, seed: int) -> list[tuple[LocalShard, ...]]:
    """Sets of MetaSyn's tables as `collect` chooses them for an empty store, repeats left out."""
    source = SetSource(
        tables=load_tables("metasyn").scaled(scale),
        max_tables=15,
        device=device.key,
        memory_bytes=max(2**20, _MEMORY_BYTES * 64 // scale),
        accepts=partial(is_measurable, on_cuda=device.is_cuda),
    )
    weights = {name: share for name, share in DEFAULT_WEIGHTS.items() if name != "uncertain"}
    stream = (one for one in stream_sets(source, seed=seed, weights=weights) if one.source != REPEAT)
    return [one.shards for one in islice(stream, count)]


def measure_costs(
    device: BenchDevice,
    arms: Mapping[str, Arm],
    sets: Sequence[Sequence[LocalShard]],
    *,
    num_passes: int,
    seed: int = 0,
    command: str = "",
    advance: Callable[[float], None] = lambda _: None,
) -> Costs:
    """Measures all sets with all arms in turn, in a new order each time.

    Args:
        device: Where to measure.
        arms: By name, at least one.
        sets: What to measure.
        num_passes: At least 2.
        seed: Of the orders.
        command: Command of the measurement, for the record.
        advance: Told after every pass of an arm.
    """
    rng = np.random.default_rng(seed)
    harnesses = {name: Harness(device, arm.settings) for name, arm in arms.items()}
    taken = {name: _Taken(passes=[], seconds=[]) for name in arms}
    with _neighbour(any(arm.has_neighbour for arm in arms.values())) as works:
        for _ in range(num_passes):
            order = rng.permutation(len(sets)).tolist()
            for name in rng.permutation(list(arms)).tolist():
                if arms[name].has_neighbour:
                    works.set()
                processor_s, wall_s = time.process_time(), time.monotonic()
                found = harnesses[name].measure([sets[index] for index in order])
                taken[name].seconds.append((time.process_time() - processor_s, time.monotonic() - wall_s))
                works.clear()
                taken[name].passes.append([one for _, one in sorted(zip(order, found, strict=True), key=_place)])
                advance(1)
    first = taken[next(iter(arms))]
    return Costs(
        machine=Machine.this(device, command),
        num_sets=len(sets),
        num_passes=num_passes,
        arms=tuple(_cost(name, one, first) for name, one in taken.items()),
    )


def _place(pair: tuple[int, Measurement]) -> int:
    return pair[0]


@contextmanager
def _neighbour(is_wanted: bool) -> Iterator[Event]:
    """A process that runs the reference's kernels while the event is set; without one, an event that nobody reads."""
    context = multiprocessing.get_context("spawn")
    works = context.Event()
    if not is_wanted:
        yield works
        return
    process = context.Process(target=_run_kernels, args=(works,), daemon=True)
    process.start()
    try:
        yield works
    finally:
        process.terminate()
        process.join()


def _run_kernels(works: Event) -> None:
    harness = Harness(find_device("cpu"))
    while works.wait():
        harness.measure([reference_set(harness.settings.reference_bags)])


def _corrected(taken: _Taken) -> MsArray:
    """Kernel times with the drift divided out, shape (P, N)."""
    forward_ms, backward_ms = corrected_ms([one for measured in taken.passes for one in measured])
    corrected: MsArray = (forward_ms + backward_ms).reshape(len(taken.passes), -1)
    return corrected


def _relative(taken: _Taken) -> MsArray:
    """Mean kernel time of each set over that of the reference beside it, shape (N,)."""
    relative_PN = [
        [one.kernel_ms / (one.reference_forward_ms + one.reference_backward_ms) for one in measured]
        for measured in taken.passes
    ]
    means_N: MsArray = np.mean(relative_PN, axis=0)
    return means_N


def _raw(taken: _Taken) -> MsArray:
    means_N: MsArray = np.mean([[one.kernel_ms for one in measured] for measured in taken.passes], axis=0)
    return means_N


def _cost(name: str, taken: _Taken, first: _Taken) -> Cost:
    samples = [one for measured in taken.passes for one in measured]
    ms_PN = _corrected(taken)
    off_PN = ms_PN / ms_PN.mean(axis=0) - 1
    # The mean is the passes' own, so that deviations from it are too small by this.
    unbiased = float(np.sqrt(len(off_PN) / (len(off_PN) - 1)))
    processor_s, wall_s = np.median(np.array(taken.seconds), axis=0) / ms_PN.shape[1]
    return Cost(
        arm=name,
        num_samples=len(samples),
        processor_s=float(processor_s),
        wall_s=float(wall_s),
        rounds=float(np.mean([one.num_rounds * one.num_attempts for one in samples])),
        attempts=float(np.mean([one.num_attempts for one in samples])),
        noisy_share=float(np.mean([one.is_noisy for one in samples])),
        deviation=unbiased * float(np.sqrt(np.mean(off_PN**2))),
        robust_deviation=unbiased * SIGMA_PER_DEVIATION * float(np.median(np.abs(off_PN))),
        latency_ratio=float(np.median(_raw(taken) / _raw(first))),
        corrected_ratio=float(np.median(_relative(taken) / _relative(first))),
    )


def _table(costs: Costs) -> Table:
    return Table.of(
        costs.arms,
        (
            ("sets are measured with", lambda one: one.arm),
            ("samples per processor second", lambda one: f"{1 / one.processor_s:.2f}"),
            ("per second", lambda one: f"{1 / one.wall_s:.2f}"),
            ("rounds", lambda one: f"{one.rounds:.1f}"),
            ("measurements", lambda one: f"{one.attempts:.2f}"),
            ("noisy", lambda one: write_percent(one.noisy_share)),
            ("samples of a set differ by", lambda one: write_percent(one.deviation)),
            ("robust", lambda one: write_percent(one.robust_deviation)),
            ("times over the first line's", lambda one: f"{one.latency_ratio:.3f}"),
            ("relative to the reference", lambda one: f"{one.corrected_ratio:.3f}"),
        ),
        caption=f"{costs.num_sets} sets, {costs.num_passes} times each, arms in turn",
    )


@command_options()
class RoundsOptions:
    """Options of the study `rounds`."""

    sets: Annotated[int, typer.Option(min=1, help="Sets of tables.")] = 48
    passes: Annotated[int, typer.Option(min=2, help="Times that each is measured in each way.")] = 4
    device: BenchDeviceOption = "cpu"
    scale: Annotated[int, typer.Option(min=1, help="Divide rows and batch.")] = 64
    seed: Annotated[int, typer.Option(min=0, help="Of sets and orders.")] = 0


def main(options: RoundsOptions, output: OutputOptions) -> None:
    """Measures the same sets with all rounds, with early stops, and beside another process, in turn.

    Example:
        python -m studies rounds --sets 48 --passes 4 -o docs/figures
    """
    device = find_device(options.device)
    arms = arms_of(device)
    sets = chosen_sets(device, options.sets, scale=options.scale, seed=options.seed)
    with console.progress("Passes", options.passes * len(arms)) as advance:
        costs = measure_costs(
            device,
            arms,
            sets,
            num_passes=options.passes,
            seed=options.seed,
            command=command_line("rounds", options),
            advance=advance,
        )
    notes = tuple(f"{name}: {value}" for name, value in costs.machine.described())
    output.write(StudyResult(name="rounds", document=to_document(costs, SCHEMA), tables=(_table(costs),), notes=notes))
