"""When the parts and collectives of steps began and ended on all ranks, and for whom each rank waited.

The file is a Chrome trace (chrome://tracing, Perfetto): a process for each rank, in virtual time as on a cluster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist

from autoshard.runtime.timing import Span, Timings

#: Rows of a rank. A collective may run beside the parts of a step, and its wait is a part of one of them.
_ROWS: Final = ("steps", "parts", "collectives", "waits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Something that began and ended.

    Attributes:
        name: A part or a kind of collective.
        begun_ms: When it began.
        ended_ms: When it ended.
    """

    name: str
    begun_ms: float
    ended_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """A step on one rank.

    Attributes:
        step: The whole step.
        parts: Its parts.
        collectives: Its collectives, from where the rank began them to their ends, by kind in their order.
        waits: For each of these, while the step waited for it.
    """

    step: Stretch
    parts: tuple[Stretch, ...]
    collectives: tuple[Stretch, ...]
    waits: tuple[Stretch, ...]


def rank_steps(steps: Sequence[tuple[Span, Timings]]) -> list[RankStep]:
    """This rank's steps, by the marks of a timer; a GPU has to have come to their ends.

    Times of a CPU are those of its clock, which ranks of one machine share; those of a GPU begin with the first step.
    """
    origin: Any = steps[0][0].begun if steps else 0.0
    origin = 0.0 if isinstance(origin, float) else origin

    def stretch(name: str, span: Span) -> Stretch:
        begun_ms = Span(origin, span.begun).ms
        return Stretch(name=name, begun_ms=begun_ms, ended_ms=begun_ms + span.ms)

    return [
        RankStep(
            step=stretch("step", whole),
            parts=tuple(stretch(part.removesuffix("_ms"), span) for part, span in timings.spans),
            collectives=tuple(stretch(kind.value, took) for kind, took, _ in timings.awaited),
            waits=tuple(stretch(kind.value, waited) for kind, _, waited in timings.awaited),
        )
        for whole, timings in steps
    ]


def gather_steps(own: Sequence[RankStep]) -> list[list[RankStep]] | None:
    """The steps of all ranks, on rank 0; None on the others. All processes call it."""
    everybody: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(list(own), everybody)
    return everybody


def chrome_trace(ranks: Sequence[Sequence[RankStep]]) -> dict[str, Any]:
    """The trace of some steps of all ranks, as a JSON object."""
    begin_ms = min((one.step.begun_ms for steps in ranks for one in steps), default=0.0)
    events: list[dict[str, Any]] = []
    for rank in range(len(ranks)):
        events.append(_named("process_name", rank, 0, f"rank {rank}"))
        events += [_named("thread_name", rank, row, name) for row, name in enumerate(_ROWS)]
    for of_ranks in zip(*ranks, strict=True):
        late = _late(of_ranks)
        for rank, one in enumerate(of_ranks):
            rows = ((one.step,), one.parts, one.collectives, one.waits)
            for row, stretches in enumerate(rows):
                for number, stretch in enumerate(stretches):
                    told = late.get((rank, number), {}) if row >= _ROWS.index("collectives") else {}
                    events.append(_event(stretch, rank, row, begin_ms, told))
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _event(stretch: Stretch, rank: int, row: int, begin_ms: float, told: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": stretch.name,
        "ph": "X",
        "pid": rank,
        "tid": row,
        "ts": (stretch.begun_ms - begin_ms) * 1e3,
        "dur": (stretch.ended_ms - stretch.begun_ms) * 1e3,
        "args": dict(told),
    }


def _named(what: str, rank: int, row: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}


def _late(of_ranks: Sequence[RankStep]) -> dict[tuple[int, int], dict[str, Any]]:
    """By rank and number of a collective, who came last to it, and how much later.

    Collectives of which ranks have different numbers, as holders of other copies do, are left out.
    """
    by_kind: list[dict[str, list[int]]] = []
    for one in of_ranks:
        found: dict[str, list[int]] = defaultdict(list)
        for number, stretch in enumerate(one.collectives):
            found[stretch.name].append(number)
        by_kind.append(found)
    told: dict[tuple[int, int], dict[str, Any]] = {}
    for kind, first in by_kind[0].items():
        if any(len(found[kind]) != len(first) for found in by_kind):
            continue
        for numbers in zip(*(found[kind] for found in by_kind), strict=True):
            came_ms = [one.collectives[number].begun_ms for one, number in zip(of_ranks, numbers, strict=True)]
            last = max(range(len(came_ms)), key=came_ms.__getitem__)
            for rank, number in enumerate(numbers):
                told[rank, number] = {"last_rank": last, "later_ms": came_ms[last] - came_ms[rank]}
    return told
