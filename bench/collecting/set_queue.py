"""The sets that a collector has yet to measure: a stream of chosen ones, less those that the store holds already."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from autoshard.core.errors import FormatError, SampleStoreError
from autoshard.formats import atomic_write, digest
from autoshard.formats.files import read_bytes
from bench.sampling.stream import REPEAT

#: Known sets in a row, beyond as many as the store holds, after which the stream is taken to have no others.
_MOST_SKIPPED = 10_000


class Chosen(Protocol):
    """What a stream chose to measure."""

    @property
    def source(self) -> str:
        """How it was chosen; `repeat` for what is to be measured again."""
        ...


ChosenT = TypeVar("ChosenT", bound=Chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued(Generic[ChosenT]):
    """A set to measure, with its place in the stream."""

    position: int
    chosen: ChosenT


class SetQueue(Generic[ChosenT]):
    """An iterator over the sets of a stream that were not measured before.

    Sets with the source `repeat` are measured whatever the store holds; that is what they are for.

    Attributes:
        skipped: Sets left out because they were measured before, by source.

    Args of the constructor:
        sets: What to measure.
        position: Where in their stream they start, and which of them are done.
        known: Identities of what was measured on this device with this software; those of the sets taken are added,
            so that queues for devices of one kind can share it.
        identity: Tells whether two sets are measured alike.
        is_over: Asked while known sets are passed over; ends the queue.
    """

    def __init__(
        self,
        sets: Iterator[ChosenT],
        *,
        position: StreamPosition,
        known: set[Any],
        identity: Callable[[ChosenT], Hashable],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.skipped: Counter[str] = Counter()
        self._sets = enumerate(sets, position.start)
        self._position = position
        self._known = known
        self._identity = identity
        self._is_over = is_over
        self._most_skipped = len(known) + _MOST_SKIPPED

    def __iter__(self) -> Iterator[Queued[ChosenT]]:
        return self

    def __next__(self) -> Queued[ChosenT]:
        """The next new set.

        Raises:
            StopIteration: If the stream has ended, time is up, or nothing new comes.
        """
        for number, (place, chosen) in enumerate(self._sets):
            if self._position.is_done(place):
                continue
            if chosen.source == REPEAT:
                return Queued(position=place, chosen=chosen)
            identity = self._identity(chosen)
            if identity not in self._known:
                self._known.add(identity)
                return Queued(position=place, chosen=chosen)
            self.skipped[chosen.source] += 1
            self._position.finish(place)
            if number >= self._most_skipped or self._is_over():
                break
        raise StopIteration


class StreamPosition:
    """How far a stream of sets has been measured, kept in the store so that a later run goes on there.

    It only saves time: what it does not know of, for it is written after the samples, is found by its content.

    Attributes:
        start: All sets of the stream before this one are done.

    Args of the constructor:
        file: Where it is kept; None to keep it nowhere.

    Raises:
        FormatError: If the file is there and is not one of these.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self.start = 0
        self._done: set[int] = set()
        if file is not None and file.exists():
            self.start, self._done = _read(file)

    @classmethod
    def of_stream(cls, store: Path, description: object) -> StreamPosition:
        """The position of the stream that a JSON value describes."""
        mark = digest(description).removeprefix("sha256:")[:16]
        return cls(store / "streams" / f"{mark}.json")

    def is_done(self, position: int) -> bool:
        """Whether nothing is left to do for a set."""
        return position < self.start or position in self._done

    def finish(self, position: int) -> None:
        """Takes a set as done."""
        self._done.add(position)
        while self.start in self._done:
            self._done.remove(self.start)
            self.start += 1

    def save(self) -> None:
        """Writes the position.

        Raises:
            SampleStoreError: If it cannot be written.
        """
        if self._file is None:
            return
        try:
            atomic_write(self._file, json.dumps({"start": self.start, "done": sorted(self._done)}) + "\n")
        except FormatError as error:
            raise SampleStoreError(error.message, source=error.source) from error


def _read(file: Path) -> tuple[int, set[int]]:
    try:
        content = json.loads(read_bytes(file))
        start, done = content["start"], content["done"]
        if not all(type(value) is int and value >= 0 for value in (start, *done)):
            raise ValueError
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError("is no position of a stream; remove it to start over", source=str(file)) from error
    return start, set(done)
