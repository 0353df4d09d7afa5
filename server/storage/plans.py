"""Stored plans."""

from __future__ import annotations

import zlib
from collections.abc import Collection
from contextlib import suppress
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, and_, delete, func, or_, select, tuple_, update
from sqlalchemy.exc import SQLAlchemyError

from autoshard.api import PlanFigures, PlanLabels, PlanList, PlanSearch, PlanSummary
from server.access import Principal
from server.problems import StorageError, UnknownPlanError
from server.storage.audit import record
from server.storage.database import Database
from server.storage.paging import cursor_of, position_of
from server.storage.schema import PLAN_DOCUMENTS, PLANS, now_us, told
from server.tasks.reply import PlanFacts

#: How long a deleted plan can be restored.
KEPT_US: Final = 24 * 3600 * 1_000_000
#: For so long after a plan was asked for, that it is asked for again is not noted: reading seldom writes.
_NOTED_US: Final = 3600 * 1_000_000
_IDS = "sha256:[0-9a-f]{64}"
_LISTED = [PLANS.c[name] for name in ("id", "created_us", "owner", "name", "tags", *PlanFigures.model_fields)]


class PlanStore:
    """Plans by team and id, which is the digest of their content: a plan that a team makes twice is stored once.

    Args:
        database: Where they are.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, connection: Connection, facts: PlanFacts, answer: bytes, team: str, owner: str) -> None:
        """Stores a plan unless it is there, anew if it was deleted.

        Args:
            connection: A transaction that writes.
            facts: What lists show.
            answer: The JSON text that answers the requests for it.
            team: Whose it is.
            owner: Who made it.
        """
        is_same = and_(PLANS.c.team == team, PLANS.c.id == facts.id)
        connection.execute(delete(PLANS).where(is_same, PLANS.c.deleted_us.is_not(None)))
        document, now = zlib.compress(answer), now_us()
        row = {**plan_row(facts, now, team, owner), "num_bytes": len(document)}
        if self._database.insert_new(connection, PLANS, row):
            values = {"team": team, "plan_id": facts.id, "answer": document}
            self._database.insert_new(connection, PLAN_DOCUMENTS, values)
        else:
            connection.execute(update(PLANS).where(is_same).values(asked_us=now))

    def read(self, plan_id: str, team: str) -> bytes:
        """The JSON text of an answer that holds a plan of a team.

        Raises:
            UnknownPlanError: If it is not there.
            StorageError: If the database does not answer.
        """
        with self._database.reading() as connection:
            columns = PLAN_DOCUMENTS.c
            query = select(columns.answer, _asked_us().label("asked_us")).join(
                PLANS, and_(PLANS.c.team == columns.team, PLANS.c.id == columns.plan_id)
            )
            query = query.where(_named(plan_id, team))
            found = connection.execute(query).first()
        if found is None:
            raise _unknown(plan_id)
        self._note_asked(plan_id, team, found.asked_us)
        return zlib.decompress(found.answer)

    def check(self, plan_id: str, team: str) -> None:
        """Checks that a plan of a team is there.

        Raises:
            UnknownPlanError: If it is not.
            StorageError: If the database does not answer.
        """
        with self._database.reading() as connection:
            asked_us = connection.execute(select(_asked_us()).where(_named(plan_id, team))).scalar()
        if asked_us is None:
            raise _unknown(plan_id)
        self._note_asked(plan_id, team, asked_us)

    def _note_asked(self, plan_id: str, team: str, asked_us: int) -> None:
        """Notes that a plan is asked for, at most once an hour, and not while that cannot be written."""
        if asked_us <= now_us() - _NOTED_US:
            with suppress(StorageError, SQLAlchemyError), self._database.writing(is_needed=False) as connection:
                connection.execute(update(PLANS).where(_named(plan_id, team)).values(asked_us=now_us()))

    def delete(self, plan_id: str, actor: Principal) -> None:
        """Deletes a plan, which can be restored for a day as long as it is not forgotten.

        On a full disk, deleted plans are forgotten until there is room.

        Args:
            plan_id: Its id.
            actor: Who changes it, of the plan's team.

        Raises:
            UnknownPlanError: If it is not there.
            StorageError: If the database does not answer.
        """
        self._change("delete", plan_id, actor, uses_reserve=True, deleted_us=now_us())
        while self._database.is_full and (self._database.shrink() or self._forget_some_deleted()):
            pass

    def _forget_some_deleted(self) -> int:
        with self._database.writing(uses_reserve=True) as connection:
            return self.forget_deleted(connection, kept_us=0)

    def forget_deleted(
        self, connection: Connection, kept_us: int = KEPT_US, owners: Collection[str] = (), team: str = ""
    ) -> int:
        """Removes some of the plans for good that were deleted so long ago, those first that were deleted first.

        Args:
            connection: A transaction that writes.
            kept_us: Microseconds since they were deleted.
            owners: Only plans of these; empty for those of all.
            team: Whose owners.

        Returns:
            How many.
        """
        which = PLANS.c.deleted_us <= now_us() - kept_us
        which = and_(which, PLANS.c.team == team, PLANS.c.owner.in_(owners)) if owners else which
        return self._database.delete_some(connection, PLANS, which, PLANS.c.deleted_us)

    def forget_old(self, connection: Connection, kept_us: int) -> int:
        """As `forget_deleted`, of plans that are there, by when they were last asked for, known to the hour."""
        which = and_(PLANS.c.deleted_us.is_(None), _asked_us() <= now_us() - kept_us - _NOTED_US)
        return self._database.delete_some(connection, PLANS, which, _asked_us())

    def num_bytes(self, connection: Connection, owners: Collection[str], team: str) -> int:
        """Bytes that plans take, those included that can be restored."""
        query = select(func.coalesce(func.sum(PLANS.c.num_bytes), 0))
        query = query.where(PLANS.c.team == team, PLANS.c.owner.in_(owners))
        return int(connection.execute(query).scalar_one())

    def restore(self, plan_id: str, actor: Principal) -> None:
        """Brings a plan back that was deleted within a day; arguments and errors as of `delete`."""
        self._change("restore", plan_id, actor, is_deleted=True, deleted_us=None, asked_us=now_us())

    def label(self, plan_id: str, actor: Principal, labels: PlanLabels) -> None:
        """Changes what a plan is called; arguments and errors as of `delete`."""
        self._change("label", plan_id, actor, asked_us=now_us(), **labels.model_dump(exclude_none=True))

    def _change(
        self,
        change: str,
        plan_id: str,
        actor: Principal,
        *,
        is_deleted: bool = False,
        uses_reserve: bool = False,
        **values: Any,
    ) -> None:
        """Gives a plan of the actor's team other values, and notes so in the audit log."""
        named = _named(plan_id, actor.team, is_deleted=is_deleted)
        with self._database.writing(uses_reserve=uses_reserve) as connection:
            if connection.execute(update(PLANS).where(named).values(values)).rowcount == 0:
                raise _unknown(plan_id)
            record(connection, actor, f"plan.{change}", plan_id)

    def list(self, search: PlanSearch, team: str) -> PlanList:
        """One page of plans, the latest first.

        Args:
            search: Which plans.
            team: Whose plans.

        Raises:
            FormatError: If the cursor is not one.
            StorageError: If the database does not answer.
        """
        query = select(*_LISTED).where(PLANS.c.team == team, _is_deleted(search.is_deleted)).limit(search.limit + 1)
        for name, value in search.figures.items():
            query = query.where(PLANS.c[name] == value)
        for column, wanted in ((PLANS.c.owner, search.owner), (PLANS.c.id, search.id)):
            query = query if wanted is None else query.where(column == wanted)
        if search.text:
            labels = (PLANS.c[name].contains(search.text, autoescape=True) for name in ("name", "tags"))
            words = PLANS.c.search_text.contains(search.text.casefold(), autoescape=True)
            query = query.where(or_(words, *labels))
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


def _asked_us() -> ColumnElement[int]:
    """When plans were last asked for."""
    return func.coalesce(PLANS.c.asked_us, PLANS.c.created_us)


def _named(plan_id: str, team: str, *, is_deleted: bool = False) -> ColumnElement[bool]:
    return and_(PLANS.c.team == team, PLANS.c.id == plan_id, _is_deleted(is_deleted))


def _is_deleted(value: bool) -> ColumnElement[bool]:
    """Of plans that can be restored, or of those that are there."""
    return PLANS.c.deleted_us >= now_us() - KEPT_US if value else PLANS.c.deleted_us.is_(None)


def _unknown(plan_id: str) -> UnknownPlanError:
    return UnknownPlanError(f"no plan {plan_id} is stored")
