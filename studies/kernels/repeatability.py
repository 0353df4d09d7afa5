"""Repeatability of measurements: the same sets over and over, `python -m studies repeatability`.

Shape suffixes: N measurements of a set, one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from pydantic import FiniteFloat, NonNegativeFloat, PositiveFloat, PositiveInt

from autoshard.core import LocalShard
from autoshard.core.errors import FormatError, InvalidOptionError
from autoshard.formats import load_tables
from autoshard.formats.stores.drift import divide_out_drift
from bench.kernels.harness import Harness, Measurement, Settings
from bench.measuring.devices import BenchDevice
from bench.measuring.robust_stats import SIGMA_PER_DEVIATION, MsArray
from bench.sampling.stream import table_wise_pool
from studies.frame import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """How far repeated measurements of one thing lie apart, relative to where they lie."""

    plain: float
    """Standard deviation over mean."""
    robust: float
    """The same by median absolute deviation and median, which single hiccups leave alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """How a reference changed over time.

    Attributes:
        variation: Of its latencies.
        range: Largest latency over the smallest, less 1.
        per_minute: Slope of a line through the latencies, relative to their mean.
    """

    variation: Variation
    range: float
    per_minute: float


def variation(latency_ms_N: ArrayLike) -> Variation:
    """Coefficient of variation of two or more latencies."""
    latency_ms = np.asarray(latency_ms_N, dtype=np.float64)
    assert latency_ms.size > 1
    middle_ms = np.median(latency_ms)
    robust = SIGMA_PER_DEVIATION * np.median(np.abs(latency_ms - middle_ms)) / middle_ms
    return Variation(plain=float(latency_ms.std(ddof=1) / latency_ms.mean()), robust=float(robust))


def drift_of(reference_ms_N: ArrayLike, elapsed_s_N: Sequence[float]) -> Drift:
    """Drift of a reference that was measured at these times, at least twice."""
    reference_ms, minutes = np.asarray(reference_ms_N, dtype=np.float64), np.asarray(elapsed_s_N) / 60
    slope_ms = np.polyfit(minutes, reference_ms, 1)[0]
    return Drift(
        variation=variation(reference_ms),
        range=float(reference_ms.max() / reference_ms.min() - 1),
        per_minute=float(slope_ms / reference_ms.mean()),
    )


#: Largest coefficient of variation of a sample, after drift correction, that a machine should keep to.
BOUND_CPU = 0.03
BOUND_GPU = 0.01

#: Other sizes that are measured, so that one set alone does not decide.
_OTHER_SIZES = (1, 4, 15)
_LARGEST_SIZE = 15
_MIN_MEASUREMENTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One set, measured over and over.

    Attributes:
        num_tables: Tables of the set.
        forward_ms: One latency per measurement.
        backward_ms: As `forward_ms`.
        reference_forward_ms: The reference in the same rounds.
        reference_backward_ms: As `reference_forward_ms`.
        spread: Spread of the single runs within each measurement.

    Raises:
        FormatError: If these are not equally many.
    """

    num_tables: PositiveInt
    forward_ms: tuple[PositiveFloat, ...]
    backward_ms: tuple[PositiveFloat, ...]
    reference_forward_ms: tuple[PositiveFloat, ...]
    reference_backward_ms: tuple[PositiveFloat, ...]
    spread: tuple[NonNegativeFloat, ...]

    def __post_init__(self) -> None:
        for name in ("backward_ms", "reference_forward_ms", "reference_backward_ms", "spread"):
            if len(getattr(self, name)) != len(self.forward_ms):
                raise FormatError(f"must be {len(self.forward_ms)} numbers, as forward_ms", field=name)

    @property
    def raw_ms(self) -> MsArray:
        """Forward plus backward as measured; shape (N,)."""
        return np.add(self.forward_ms, self.backward_ms)

    @property
    def reference_ms(self) -> MsArray:
        """Forward plus backward of the reference; shape (N,)."""
        return np.add(self.reference_forward_ms, self.reference_backward_ms)

    @property
    def corrected_ms(self) -> MsArray:
        """The latencies with the drift of the machine divided out, of forward and backward apart; shape (N,)."""
        forward_ms = divide_out_drift(self.forward_ms, self.reference_forward_ms)
        return np.asarray(forward_ms + divide_out_drift(self.backward_ms, self.reference_backward_ms))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All repetitions with one kind of settings.

    Attributes:
        settings: Name of the settings: `collecting` or `usual`.
        num_rounds: Runs that are counted, per measurement.
        group_sets: Sets that shared the rounds of each measurement, besides the reference.
        elapsed_s: When each measurement ended.
        sets: The watched sets, that of the chosen size first.

    Raises:
        FormatError: If there are fewer than 3 measurements, no sets, or lists of different lengths.
    """

    settings: str
    num_rounds: PositiveInt
    group_sets: PositiveInt
    elapsed_s: tuple[FiniteFloat, ...]
    sets: tuple[Series, ...]

    def __post_init__(self) -> None:
        if len(self.elapsed_s) < _MIN_MEASUREMENTS:
            raise FormatError(f"must be {_MIN_MEASUREMENTS} or more, got {len(self.elapsed_s)}", field="elapsed_s")
        if not self.sets:
            raise FormatError("must hold at least one set", field="sets")
        if {len(watched.forward_ms) for watched in self.sets} != {len(self.elapsed_s)}:
            raise FormatError(f"must hold {len(self.elapsed_s)} measurements each, as elapsed_s", field="sets")


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeatability:
    """Repeated measurements of the same sets.

    Attributes:
        machine: Machine and software.
        seconds: Time used.
        bound: Largest coefficient of variation that the device should keep to.
        runs: One per kind of settings; their measurements took turns.
    """

    machine: Machine
    seconds: PositiveFloat
    bound: PositiveFloat
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Variation of the measurements of one set with one kind of settings.

    Attributes:
        settings: Name of the settings.
        num_tables: Tables of the set.
        num_measurements: How often it was measured.
        median_ms: Where its corrected latencies lie.
        raw: Variation of the latencies as measured.
        corrected: Variation after dividing out the drift.
        median_spread: Spread of the single runs within a measurement, in the middle.
        drift: Of the reference, meanwhile.
        is_met: Whether the plain corrected variation keeps the bound.
    """

    settings: str
    num_tables: int
    num_measurements: int
    median_ms: float
    raw: Variation
    corrected: Variation
    median_spread: float
    drift: Drift
    is_met: bool


def verdicts(found: Repeatability) -> list[Verdict]:
    """One verdict for each set with each kind of settings."""
    return [
        Verdict(
            settings=run.settings,
            num_tables=series.num_tables,
            num_measurements=len(run.elapsed_s),
            median_ms=float(np.median(series.corrected_ms)),
            raw=variation(series.raw_ms),
            corrected=(corrected := variation(series.corrected_ms)),
            median_spread=float(np.median(series.spread)),
            drift=drift_of(series.reference_ms, run.elapsed_s),
            is_met=corrected.plain <= found.bound,
        )
        for run in found.runs
        for series in run.sets
    ]


def settings_of(device: BenchDevice) -> dict[str, Settings]:
    """The settings that samples are measured with, by name; on a GPU both kinds are the same."""
    collecting, usual = Settings.for_collecting(device), Settings.for_device(device)
    return {"collecting": collecting} if collecting == usual else {"collecting": collecting, "usual": usual}


def measure_repeatability(
    device: BenchDevice,
    settings: Mapping[str, Settings],
    *,
    num_tables: int = 8,
    seconds: float = 600.0,
    scale: int | None = None,
    command: str = "",
    advance: Callable[[float], None] = lambda _: None,
) -> Repeatability:
    """Measures fixed sets of MetaSyn tables over and over, as `autoshard collect` measures them.

    Each measurement shares its rounds with as many other sets, new ones every time, as a group of the collector has.
    The kinds of settings take turns, so that slow phases of the machine affect them alike.

    Args:
        device: Where to measure.
        settings: Kinds of settings, by name.
        num_tables: Tables of the set that is watched first; sets of 1, 4 and 15 are watched beside it.
        seconds: Time to use; at least 3 measurements are made with each kind, however long they take.
        scale: Divisor of MetaSyn's rows and batch; by default 64 on a CPU and 1 on a GPU.
        command: Command of the measurement, for the record.
        advance: Receives the seconds of each measurement.

    Raises:
        InvalidOptionError: If an argument is out of its range.
        DeviceError: If a set does not fit in memory.
    """
    pool = table_wise_pool(load_tables("metasyn").scaled((1 if device.is_cuda else 64) if scale is None else scale))
    if not 1 <= num_tables <= len(pool):
        raise InvalidOptionError(f"must be in [1, {len(pool)}], got {num_tables}", field="tables")
    if not seconds > 0:
        raise InvalidOptionError(f"must be above 0, got {seconds}", field="seconds")
    rng = np.random.default_rng(0)
    sizes = [num_tables, *(size for size in _OTHER_SIZES if size != num_tables)]
    watched = [_drawn(pool, size, rng) for size in sizes]
    harnesses = {name: Harness(device, kind) for name, kind in settings.items()}
    groups: dict[str, list[list[Measurement]]] = {name: [] for name in settings}
    times: dict[str, list[float]] = {name: [] for name in settings}
    started = last = time.monotonic()
    for name in _turns(list(settings), lambda: time.monotonic() - started >= seconds):
        num_others = max(0, settings[name].max_group_sets - len(watched))
        others = [_drawn(pool, int(rng.integers(1, _LARGEST_SIZE + 1)), rng) for _ in range(num_others)]
        groups[name].append(harnesses[name].measure([*watched, *others])[: len(watched)])
        now = time.monotonic()
        times[name].append(round(now - started, 3))
        advance(now - last)
        last = now
    return Repeatability(
        machine=Machine.this(device, command),
        seconds=last - started,
        bound=BOUND_GPU if device.is_cuda else BOUND_CPU,
        runs=tuple(_run(name, kind, sizes, groups[name], times[name]) for name, kind in settings.items()),
    )


def _drawn(pool: Sequence[LocalShard], size: int, rng: np.random.Generator) -> tuple[LocalShard, ...]:
    return tuple(pool[index] for index in rng.choice(len(pool), min(size, len(pool)), replace=False))


def _turns(names: Sequence[str], is_over: Callable[[], bool]) -> Iterator[str]:
    """The names in turn, until time is up and each has had enough turns."""
    turn = 0
    while turn < _MIN_MEASUREMENTS or not is_over():
        yield from names
        turn += 1


def _run(
    name: str, settings: Settings, sizes: Sequence[int], groups: Sequence[Sequence[Measurement]], times: Sequence[float]
) -> Run:
    by_set = list(zip(*groups, strict=True))
    return Run(
        settings=name,
        num_rounds=settings.rounds.num_measured,
        group_sets=max(settings.max_group_sets, len(sizes)),
        elapsed_s=tuple(times),
        sets=tuple(
            Series(
                num_tables=size,
                forward_ms=tuple(result.forward_ms for result in results),
                backward_ms=tuple(result.backward_ms for result in results),
                reference_forward_ms=tuple(result.reference_forward_ms for result in results),
                reference_backward_ms=tuple(result.reference_backward_ms for result in results),
                spread=tuple(result.spread for result in results),
            )
            for size, results in zip(sizes, by_set, strict=True)
        ),
    )
