"""Stored prices of candidates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sqlalchemy import insert, select

from server.storage.database import Database
from server.storage.schema import SHADOW_PRICES, now_us

#: Prices of one candidate that are looked at: the latest.
_MOST_READ = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowRow:
    """One plan's prices.

    Attributes:
        name: Name of the model.
        candidate: Id of the candidate.
        production: The model in use, as answers name it: with the version's id after an @, if it has one.
        plan_id: The plan.
        production_ms: Its step by the model in use.
        candidate_ms: Its step by the candidate.
    """

    name: str
    candidate: str
    production: str
    plan_id: str
    production_ms: float
    candidate_ms: float


class ShadowStore:
    """Prices by candidate.

    Args:
        database: Where they are.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, row: ShadowRow) -> None:
        """Stores a plan's prices.

        Raises:
            StorageError: If the database does not answer.
        """
        values = {name: getattr(row, name) for name in ShadowRow.__slots__}
        with self._database.writing() as connection:
            connection.execute(insert(SHADOW_PRICES).values({**values, "at_us": now_us()}))

    def ratios(self, name: str, candidate: str, production: str | None) -> list[float]:
        """Steps of different plans by a candidate over those by the version in use, the latest first.

        Args:
            name: Name of the model.
            candidate: Id of the candidate.
            production: Id of the version in use; None where the analytic model is.

        Raises:
            StorageError: If the database does not answer.
        """
        columns = SHADOW_PRICES.c
        is_its = columns.production.contains("@" if production is None else f"@{production}")
        query = (
            select(columns.plan_id, columns.candidate_ms, columns.production_ms)
            .where(columns.name == name, columns.candidate == candidate, columns.production_ms > 0)
            .where(~is_its if production is None else is_its)
            .order_by(columns.id.desc())
            .limit(_MOST_READ)
        )
        with self._database.reading() as connection:
            rows = connection.execute(query).all()
        latest: dict[str, float] = {}
        for row in rows:
            latest.setdefault(row.plan_id, row.candidate_ms / row.production_ms)
        ratios = np.array(list(latest.values()))
        found: list[float] = ratios[np.isfinite(ratios)].tolist()
        return found
