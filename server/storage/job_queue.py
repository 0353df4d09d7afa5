"""The jobs that wait and run: which is next, and when the others will begin."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from sqlalchemy import Row

from autoshard.api import JobState, JobTask

#: A client: its team, and its name there.
Client = tuple[str, str]
_NOBODY: Final[Client] = ("", "")
#: Seconds that a job is thought to take whose request has no limit, such as training.
_UNSTATED_S: Final = 600.0
#: Seconds that a job takes beside its limit: the start of its process, imports, the pricing of its plan.
_BESIDE_S: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePlace:
    """When a job that waits will begin.

    Attributes:
        position: Its place, from 1.
        begins_in_s: Seconds until then, if the jobs before it take as long as they asked for.
    """

    position: int
    begins_in_s: int


class JobQueue:
    """All unfinished jobs at a moment.

    Those of a higher priority come first. Then clients take turns: the next one is the client whose last job began
    longest ago, with its oldest job. The last free place of a process is for clients that have no job running, and for
    jobs of a priority above 0: one client's long jobs never hold all places. Clients of two teams are two, whatever
    their names.

    Args:
        rows: The jobs, with `COLUMNS`.
        last_us: When each client's last job began, of those that wait; microseconds since 1970.
        num_places: Jobs that run at the same time.
        now_us: The moment.
    """

    COLUMNS: ClassVar = ("id", "attempt", "team", "client", "state", "created_us", "started_us", "task", "priority")

    def __init__(
        self, rows: Sequence[Row[*tuple[Any, ...]]], last_us: Mapping[Client, int], num_places: int, now_us: int
    ) -> None:
        self._rows = rows
        self._last_us = last_us
        self._running = [row for row in rows if row.state == JobState.RUNNING]
        self._waiting = [row for row in rows if row.state == JobState.QUEUED]
        self._num_places = max(num_places, len(self._running))
        self._now_us = now_us

    def __len__(self) -> int:
        return len(self._rows)

    def next(self, *, is_last_place: bool) -> Row[*tuple[Any, ...]] | None:
        """The job that begins next in a place; None if none may.

        Args:
            is_last_place: Whether it is the last free place of its process.
        """
        holders = {holder_of(row) for row in self._running}
        return _next(self._waiting, self._last_us, holders if is_last_place else set())

    @property
    def turns(self) -> dict[str, QueuePlace]:
        """Turns of the jobs that wait, by id."""
        return self._forecast()[0]

    def ends_in_s(self, client: Client | None = None) -> list[int]:
        """Seconds until each job is thought to end, of a client or of all, in no order."""
        ends_s = self._forecast()[1]
        return [max(1, math.ceil(ends_s[row.id])) for row in self._rows if client in (None, holder_of(row))]

    def _forecast(self) -> tuple[dict[str, QueuePlace], dict[str, float]]:
        """Turns of those that wait, and seconds until each job ends."""
        ends_s = {
            row.id: max(1.0, _seconds(row) - (self._now_us - (row.started_us or self._now_us)) / 1e6)
            for row in self._running
        }
        places = [(ends_s[row.id], holder_of(row)) for row in self._running]
        places += [(0.0, _NOBODY)] * (self._num_places - len(places))
        waiting, last_us = list(self._waiting), dict(self._last_us)
        turns: dict[str, QueuePlace] = {}
        while waiting:
            places.sort()
            free_s = places[0][0]
            is_last = len(places) > 1 and places[1][0] > free_s
            holders = {client for until_s, client in places if until_s > free_s}
            row = _next(waiting, last_us, holders if is_last else set())
            if row is None:  # this place stays free until another one is
                places[0] = (places[1][0], _NOBODY)
                continue
            waiting.remove(row)
            last_us[holder_of(row)] = self._now_us + int(free_s * 1e6) + len(turns)
            ends_s[row.id] = free_s + _seconds(row)
            places[0] = (ends_s[row.id], holder_of(row))
            turns[row.id] = QueuePlace(position=len(turns) + 1, begins_in_s=math.ceil(free_s))
        return turns, ends_s


def holder_of(row: Row[*tuple[Any, ...]]) -> Client:
    """Whose share of the jobs one counts to."""
    return row.team, row.client


def _next(
    waiting: Sequence[Row[*tuple[Any, ...]]], last_us: Mapping[Client, int], holders: set[Client]
) -> Row[*tuple[Any, ...]] | None:
    """Which job is next, but of these clients only if its priority is above 0."""
    may_begin = [row for row in waiting if holder_of(row) not in holders or (row.priority or 0) > 0]
    return min(
        may_begin,
        key=lambda row: (-(row.priority or 0), last_us.get(holder_of(row), 0), row.created_us, row.id),
        default=None,
    )


def _seconds(row: Row[*tuple[Any, ...]]) -> float:
    """What a job is thought to take."""
    limit_s = JobTask.model_validate_json(row.task or "{}").limit_s
    return (_UNSTATED_S if limit_s is None else float(limit_s)) + _BESIDE_S
