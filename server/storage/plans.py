"""Stored plans."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, delete, select, tuple_

from autoshard.api import PlanList, PlanSummary
from server.bodies.plans import PlanFacts
from server.problems import UnknownPlanError
from server.storage.database import Database
from server.storage.paging import cursor_of, position_of
from server.storage.schema import PLAN_DOCUMENTS, PLANS, iso_time, now_us

_IDS = "sha256:[0-9a-f]{64}"
_SUMMARY = (
    *(PLANS.c.id, PLANS.c.created_us, PLANS.c.planner, PLANS.c.device),
    *(PLANS.c.num_tables, PLANS.c.num_ranks, PLANS.c.step_ms),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFilter:
    """Which plans a list shows; what is None does not matter.

    Attributes:
        planner: Name of the planner.
        device: Key of the device.
        num_ranks: Ranks of the topology.
        text: Part of the names of the planner, the device, the topology's levels or the first tables, in any case.
    """

    planner: str | None = None
    device: str | None = None
    num_ranks: int | None = None
    text: str | None = None


class PlanStore:
    """Plans by id, which is the digest of their content: a plan that is made twice is stored once.

    Args:
        database: Where they are.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, connection: Connection, facts: PlanFacts, answer: bytes) -> None:
        """Stores a plan unless it is there.

        Args:
            connection: A transaction that writes.
            facts: What lists show.
            answer: The JSON text that answers the requests for it.
        """
        values = facts.model_dump()
        if self._database.insert_new(connection, PLANS, {**values, "created_us": now_us()}):
            document = {"plan_id": facts.id, "answer": zlib.compress(answer)}
            self._database.insert_new(connection, PLAN_DOCUMENTS, document)

    def read(self, plan_id: str) -> bytes:
        """The JSON text of an answer that holds a plan.

        Raises:
            UnknownPlanError: If it is not there.
            StorageError: If the database does not answer.
        """
        with self._database.reading() as connection:
            query = select(PLAN_DOCUMENTS.c.answer).where(PLAN_DOCUMENTS.c.plan_id == plan_id)
            found = connection.execute(query).scalar()
        if found is None:
            raise _unknown(plan_id)
        return zlib.decompress(found)

    def check(self, plan_id: str) -> None:
        """Checks that a plan is there.

        Raises:
            UnknownPlanError: If it is not.
            StorageError: If the database does not answer.
        """
        with self._database.reading() as connection:
            if connection.execute(select(PLANS.c.id).where(PLANS.c.id == plan_id)).scalar() is None:
                raise _unknown(plan_id)

    def delete(self, connection: Connection, plan_id: str) -> None:
        """Deletes a plan.

        Args:
            connection: A transaction that writes.
            plan_id: Its id.

        Raises:
            UnknownPlanError: If it is not there.
        """
        if connection.execute(delete(PLANS).where(PLANS.c.id == plan_id)).rowcount == 0:
            raise _unknown(plan_id)

    def list(self, chosen: PlanFilter, *, limit: int, cursor: str | None = None) -> PlanList:
        """One page of plans, the latest first.

        Args:
            chosen: Which plans.
            limit: Most plans of a page.
            cursor: `next` of the page before; None for the first.

        Raises:
            FormatError: If the cursor is not one.
            StorageError: If the database does not answer.
        """
        query = select(*_SUMMARY).order_by(PLANS.c.created_us.desc(), PLANS.c.id.desc()).limit(limit + 1)
        for column, value in (
            (PLANS.c.planner, chosen.planner),
            (PLANS.c.device, chosen.device),
            (PLANS.c.num_ranks, chosen.num_ranks),
        ):
            if value is not None:
                query = query.where(column == value)
        if chosen.text:
            query = query.where(PLANS.c.search_text.contains(chosen.text.casefold(), autoescape=True))
        if cursor is not None:
            query = query.where(tuple_(PLANS.c.created_us, PLANS.c.id) < tuple_(*position_of(cursor, _IDS)))
        with self._database.reading() as connection:
            rows = connection.execute(query).all()
        following = cursor_of(rows[limit - 1].created_us, rows[limit - 1].id) if len(rows) > limit else None
        return PlanList(plans=[_summary(row) for row in rows[:limit]], next=following)


def _summary(row: Row[*tuple[Any, ...]]) -> PlanSummary:
    values = dict(row._mapping)
    created_at = iso_time(values.pop("created_us"))
    return PlanSummary(**values, created_at=created_at)


def _unknown(plan_id: str) -> UnknownPlanError:
    return UnknownPlanError(f"no plan {plan_id} is stored")
