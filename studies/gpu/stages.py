"""Stages of a run on one GPU: what each is given, and what it leaves.

FOLDER/gpu.json         the numbers of all stages, written after each of them and whenever one has more
FOLDER/samples.parquet  measured sets of shards
FOLDER/models.zip       a registry with the cost model that they made
FOLDER/gpu.md, .html    the report
FOLDER/gpu*.png         its picture, where there is a browser to draw with
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from pydantic import NonNegativeFloat

from autoshard import console
from autoshard.core.errors import AutoshardError
from autoshard.formats.documents.json_document import format_json
from autoshard.formats.files import atomic_write
from autoshard.report.images import Section
from bench.measuring.devices import BenchDevice
from studies.frame import Machine, Numbers, read_document, to_document

SCHEMA: Final = "autoshard.gpu/1"
NUMBERS_FILE: Final = "gpu.json"
#: A stage that would get less is left for the next run.
LEAST_SECONDS: Final = 2.0
#: A stage ends by itself when its time is up. One that does not is ended at so much of it.
_MOST_TIME: Final = 1.2


class State(StrEnum):
    """How far a stage has come."""

    DONE = "done"
    CUT = "cut"
    """It was ended before it was done, and has left what it had until then."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a stage left.

    Attributes:
        state: How far it came.
        seconds: Time that it took, in all runs.
        numbers: A JSON object.
        error: Why it failed, as Python tells it.
    """

    state: State
    seconds: NonNegativeFloat = 0.0
    numbers: dict[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What all stages of a run, and of the runs that it goes on from, have left.

    Attributes:
        machine: Machine and software of the last one.
        outcomes: By stage.
    """

    machine: Machine
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def numbers(self, stage: str) -> dict[str, Any]:
        """The numbers of a stage; none if it has left none."""
        return self.outcomes[stage].numbers if stage in self.outcomes else {}

    def reopened(self, stages: Collection[str]) -> Found:
        """With stages that run again, done or not; until then they keep what they have left."""
        outcomes = {
            name: replace(outcome, state=State.CUT) if name in stages else outcome
            for name, outcome in self.outcomes.items()
        }
        return replace(self, outcomes=outcomes)

    @classmethod
    def read(cls, folder: Path) -> Found:
        """Reads a folder's numbers.

        Raises:
            FormatError: If there are none, or they are damaged.
        """
        return read_document(folder / NUMBERS_FILE, cls, SCHEMA)

    def write(self, folder: Path) -> None:
        """Writes them.

        Raises:
            FormatError: If the file cannot be written.
        """
        atomic_write(folder / NUMBERS_FILE, format_json(to_document(self, SCHEMA)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What a stage is given.

    Attributes:
        device: The device.
        folder: Where results go.
        deadline: When its time is up, by the monotonic clock.
        found: What the stages before it have left, and itself in an earlier run.
        keep: Receives its numbers so far, which are written at once.
    """

    device: BenchDevice
    folder: Path
    deadline: float
    found: Found
    keep: Callable[[Numbers], None]

    @property
    def seconds_left(self) -> float:
        """Time left, at least 0."""
        return max(0.0, self.deadline - time.monotonic())

    def share(self, share: float) -> float:
        """So much of the time left, in seconds, at least a tenth of one."""
        return max(0.1, share * self.seconds_left)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage.

    Attributes:
        name: Its name.
        share: Share of the minutes, relative to the other stages'.
        run: Measures, and returns its numbers. What takes long leaves numbers on the way (`Visit.keep`).
        show: The sections of the report that its numbers fill.
        headline: Its numbers in a line; empty for none.
    """

    name: str
    share: float
    run: Callable[[Visit], Numbers]
    show: Callable[[Numbers], Sequence[Section]]
    headline: Callable[[Numbers], str]


def run_stages(
    stages: Sequence[Stage],
    device: BenchDevice,
    folder: Path,
    found: Found,
    *,
    deadline: float,
    on_result: Callable[[Found], None] = lambda _: None,
) -> Found:
    """Runs the stages that are not done, each in its share of the time that is left, and writes what they leave.

    A stage that fails must not take the others' minutes: its error is kept among the results. Nor must one that goes on
    when its time is up: it is ended soon after.

    Args:
        stages: In this order; a stage may use what those before it have left.
        device: Where.
        folder: Where results go.
        found: What earlier runs have left.
        deadline: When the time of all is up, by the monotonic clock.
        on_result: Receives everything after each stage.
    """
    waiting = [
        stage for stage in stages if stage.name not in found.outcomes or found.outcomes[stage.name].state != State.DONE
    ]
    for place, stage in enumerate(waiting):
        shares = sum(one.share for one in waiting[place:])
        seconds = (deadline - time.monotonic()) * stage.share / shares
        if seconds < LEAST_SECONDS:
            console.log(f"{stage.name}: no time left")
            continue
        console.log(f"{stage.name}: {seconds:.0f} s")
        latest_end = min(deadline, time.monotonic() + _MOST_TIME * seconds)
        found = _run_stage(stage, device, folder, found, seconds, latest_end)
        found.write(folder)
        on_result(found)
    return found


class _TimeUp(BaseException):  # so that no stage takes it for a fault of what it measures
    """The time of a stage is up."""


@contextmanager
def _ended_at(latest_end: float) -> Iterator[None]:
    """Raises `_TimeUp` in the main thread, which this is, and again each second while something holds it up."""

    def end(*_: object) -> None:
        raise _TimeUp

    started, before = time.monotonic(), signal.signal(signal.SIGALRM, end)
    due_s, every_s = signal.setitimer(signal.ITIMER_REAL, max(0.01, latest_end - started), 1.0)
    try:
        yield
    finally:
        # As it was, for whoever else is waiting.
        left_s = max(0.01, due_s + started - time.monotonic()) if due_s else 0.0
        signal.setitimer(signal.ITIMER_REAL, left_s, every_s)
        signal.signal(signal.SIGALRM, before)


def _run_stage(
    stage: Stage, device: BenchDevice, folder: Path, found: Found, seconds: float, latest_end: float
) -> Found:
    started = time.monotonic()
    before = found.outcomes.get(stage.name, Outcome(state=State.CUT))
    latest = before.numbers

    def left(state: State, numbers: Numbers, error: str = "") -> Found:
        took = before.seconds + time.monotonic() - started
        outcome = Outcome(state=state, seconds=round(took, 3), numbers=dict(numbers), error=error)
        return replace(found, outcomes={**found.outcomes, stage.name: outcome})

    def keep(numbers: Numbers) -> None:
        nonlocal latest
        latest = dict(numbers)
        left(State.CUT, latest).write(folder)

    visit = Visit(device=device, folder=folder, deadline=started + seconds, found=found, keep=keep)
    try:
        with _ended_at(latest_end):
            return left(State.DONE, stage.run(visit))
    except _TimeUp:
        console.warn(f"{stage.name} was cut: its time was up")
        return left(State.CUT, latest)
    except AutoshardError as error:
        console.warn(f"{stage.name} failed: {error}")
        return left(State.FAILED, latest, str(error))
    # What fails on a machine that nobody has seen is not known before, and the minutes there do not come again.
    except Exception as error:  # noqa: BLE001
        console.warn(f"{stage.name} failed: {type(error).__name__}: {error}")
        return left(State.FAILED, latest, "".join(traceback.format_exception(error)[-6:]))


def failures(found: Found) -> Mapping[str, str]:
    """The last line of each failed stage's error."""
    return {
        name: outcome.error.strip().splitlines()[-1]
        for name, outcome in found.outcomes.items()
        if outcome.state is State.FAILED
    }
