"""Stored plans."""

from __future__ import annotations

import zlib
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, delete, select, tuple_

from autoshard.api import PlanFigures, PlanList, PlanSearch, PlanSummary
from server.problems import UnknownPlanError
from server.storage.database import Database
from server.storage.paging import cursor_of, position_of
from server.storage.schema import PLAN_DOCUMENTS, PLANS, now_us, told
from server.tasks.reply import PlanFacts

_IDS = "sha256:[0-9a-f]{64}"
_LISTED = [PLANS.c[name] for name in ("id", "created_us", "owner", *PlanFigures.model_fields)]


class PlanStore:
    """Plans by team and id, which is the digest of their content: a plan that a team makes twice is stored once.

    Args:
        database: Where they are.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, connection: Connection, facts: PlanFacts, answer: bytes, team: str, owner: str) -> None:
        """Stores a plan unless it is there.

        Args:
            connection: A transaction that writes.
            facts: What lists show.
            answer: The JSON text that answers the requests for it.
            team: Whose it is.
            owner: Who made it.
        """
        if self._database.insert_new(connection, PLANS, plan_row(facts, now_us(), team, owner)):
            document = {"team": team, "plan_id": facts.id, "answer": zlib.compress(answer)}
            self._database.insert_new(connection, PLAN_DOCUMENTS, document)

    def read(self, plan_id: str, team: str) -> bytes:
        """The JSON text of an answer that holds a plan of a team.

        Raises:
            UnknownPlanError: If it is not there.
            StorageError: If the database does not answer.
        """
        with self._database.reading() as connection:
            columns = PLAN_DOCUMENTS.c
            query = select(columns.answer).where(columns.team == team, columns.plan_id == plan_id)
            found = connection.execute(query).scalar()
        if found is None:
            raise _unknown(plan_id)
        return zlib.decompress(found)

    def check(self, plan_id: str, team: str) -> None:
        """Checks that a plan of a team is there.

        Raises:
            UnknownPlanError: If it is not.
            StorageError: If the database does not answer.
        """
        with self._database.reading() as connection:
            if connection.execute(select(PLANS.c.id).where(_named(plan_id, team))).scalar() is None:
                raise _unknown(plan_id)

    def delete(self, connection: Connection, plan_id: str, team: str) -> None:
        """Deletes a plan.

        Args:
            connection: A transaction that writes.
            plan_id: Its id.
            team: Whose it is.

        Raises:
            UnknownPlanError: If it is not there.
        """
        if connection.execute(delete(PLANS).where(_named(plan_id, team))).rowcount == 0:
            raise _unknown(plan_id)

    def list(self, search: PlanSearch, team: str) -> PlanList:
        """One page of plans, the latest first.

        Args:
            search: Which plans.
            team: Whose plans.

        Raises:
            FormatError: If the cursor is not one.
            StorageError: If the database does not answer.
        """
        query = select(*_LISTED).where(PLANS.c.team == team).limit(search.limit + 1)
        for name, value in search.figures.items():
            query = query.where(PLANS.c[name] == value)
        if search.owner is not None:
            query = query.where(PLANS.c.owner == search.owner)
        if search.text:
            query = query.where(PLANS.c.search_text.contains(search.text.casefold(), autoescape=True))
        if search.cursor is not None:
            query = query.where(tuple_(PLANS.c.created_us, PLANS.c.id) < tuple_(*position_of(search.cursor, _IDS)))
        with self._database.reading() as connection:
            rows = connection.execute(query.order_by(PLANS.c.created_us.desc(), PLANS.c.id.desc())).all()
        shown = rows[: search.limit]
        following = cursor_of(shown[-1].created_us, shown[-1].id) if len(rows) > len(shown) else None
        return PlanList(plans=[PlanSummary.model_validate(told(row)) for row in shown], next=following)


def plan_row(facts: PlanFacts, created_us: int, team: str = "", owner: str = "") -> dict[str, Any]:
    """The row of a plan."""
    return {**facts.model_dump(), "created_us": created_us, "team": team, "owner": owner}


def _named(plan_id: str, team: str) -> ColumnElement[bool]:
    return and_(PLANS.c.team == team, PLANS.c.id == plan_id)


def _unknown(plan_id: str) -> UnknownPlanError:
    return UnknownPlanError(f"no plan {plan_id} is stored")
