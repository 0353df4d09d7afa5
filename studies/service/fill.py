"""Many stored plans, written past the service."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

from sqlalchemy import insert, text

from autoshard import console
from server.settings import ServerSettings
from server.storage.database import Database
from server.storage.location import parsed_url
from server.storage.plans import plan_row
from server.storage.schema import PLAN_DOCUMENTS, PLANS, now_us
from server.tasks.answering import answer_work
from server.tasks.context import TaskContext
from server.tasks.reply import Reply
from server.tasks.work import Work, WorkKind
from studies.service.bodies import small_task

_NUM_DOCUMENTS, _ROWS_AT_ONCE = 10, 500
_PLANNERS: Final = ("auto", "cost-greedy", "flexshard", "neo", "karmarkar-karp")
_DEVICES: Final = ("cpu", "a100", "h100")
_NUM_RANKS: Final = (8, 16, 32, 128)
#: Of one plan in so many.
RARE_PLANNER: Final = "cp-sat"
_RARE_EVERY: Final = 5000


def fill(address: str, num_plans: int) -> list[str]:
    """Stores plans; returns some of their ids.

    Their documents are answers to real requests; ids, names and times differ, so that each has a row of its own.
    """
    replies = [_answered(seed) for seed in range(_NUM_DOCUMENTS)]
    database, ids = Database(parsed_url(address)), []
    with console.progress("Storing plans", num_plans) as advance:
        rows = _rows(replies, num_plans)
        while batch := list(itertools.islice(rows, _ROWS_AT_ONCE)):
            with database.writing() as connection:
                connection.execute(insert(PLANS), [plan for plan, _ in batch])
                connection.execute(insert(PLAN_DOCUMENTS), [document for _, document in batch])
            ids.append(batch[0][0]["id"])
            advance(len(batch))
    if not database.is_sqlite:  # as the server does by itself after a minute
        with database.writing() as connection:
            connection.execute(text("ANALYZE"))
    database.close()
    return ids


def _answered(seed: int) -> Reply:
    context = TaskContext(settings=ServerSettings(), allow_s=lambda _: None)
    return answer_work(Work(kind=WorkKind.PLAN, body=small_task(seed)), context)


def _rows(replies: Sequence[Reply], count: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    rng, first_us = random.Random(0), now_us() - 1_000_000 * count
    answers = [zlib.compress(reply.body) for reply in replies]
    for number in range(count):
        facts = replies[number % len(replies)].facts
        assert facts is not None
        plan_id = f"sha256:{rng.getrandbits(256):064x}"
        planner = RARE_PLANNER if number % _RARE_EVERY == 0 else rng.choice(_PLANNERS)
        device = rng.choice(_DEVICES)
        names = f"{planner} {device} team-{number % 1000:03d} {facts.search_text}"[:256]
        named = {"id": plan_id, "planner": planner, "device": device, "search_text": names}
        stored = facts.model_copy(update={**named, "num_ranks": rng.choice(_NUM_RANKS)})
        document = {"plan_id": plan_id, "answer": answers[number % len(answers)]}
        yield plan_row(stored, first_us + 1_000_000 * number), document
