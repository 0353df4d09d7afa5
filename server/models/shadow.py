"""Prices plans by a candidate after they were answered, and never instead of anything that waits."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import structlog
from starlette.concurrency import run_in_threadpool

from autoshard.api import ShadowSummary
from autoshard.core.errors import AutoshardError
from server.models.catalogue import COST, ModelCatalogue
from server.planning.workers import WorkerPool
from server.storage.shadow import ShadowRow
from server.storage.storage import Storage
from server.tasks.models import ModelCheck, ShadowPrice
from server.tasks.reply import Reply
from server.tasks.work import Body, Work, WorkKind

_log = structlog.get_logger()

#: Different plans that a cost model is compared on before it becomes the production one.
LEAST_PLANS = 20
_CLIENT = "shadow"


class ShadowPricer:
    """Has a share of the plans priced by the candidate of their device, if there is one and a process has time.

    Args:
        pool: The planning processes.
        storage: Keeps the prices.
        catalogue: Knows the candidates.
        share: Share of the plans.
    """

    def __init__(self, pool: WorkerPool, storage: Storage, catalogue: ModelCatalogue, share: float) -> None:
        self._pool = pool
        self._storage = storage
        self._catalogue = catalogue
        self._share = share
        self._tasks: set[asyncio.Task[None]] = set()

    def consider(self, reply: Reply) -> None:
        """Takes note of a plan that was made."""
        if reply.facts is None or random.random() >= self._share:
            return
        if self._pool.num_idle > 0 and self._pool.num_waiting == 0:
            task = asyncio.get_running_loop().create_task(self._price(reply))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def summary(self, name: str, candidate: str) -> ShadowSummary:
        """How a candidate's prices compare with those of the version in use.

        Raises:
            ModelError: If the registry is damaged.
            StorageError: If the database does not answer.
        """
        ratios = self._storage.shadow.ratios(name, candidate, self._catalogue.used_id(COST, name))
        return ShadowSummary(
            num_plans=len(ratios),
            median_ratio=float(np.median(ratios)) if ratios else None,
            least_ratio=min(ratios, default=None),
            largest_ratio=max(ratios, default=None),
        )

    def summaries(self) -> list[tuple[str, str, ShadowSummary]]:
        """The same of all candidates, with their names and ids.

        Raises:
            ModelError: If the registry is damaged.
            StorageError: If the database does not answer.
        """
        return [(name, candidate, self.summary(name, candidate)) for name, candidate in self._catalogue.candidates()]

    async def _price(self, reply: Reply) -> None:
        assert reply.facts is not None
        try:
            found = await run_in_threadpool(self._catalogue.candidate_of, reply.facts.device)
            if found is None:
                return
            name, candidate = found
            body = ModelCheck(kind=COST, name=name, version=candidate).model_dump_json().encode()
            answer = await self._pool.answer(Work(kind=WorkKind.SHADOW, body=Body(body), stored=(reply.body,)), _CLIENT)
            if answer.status != 200:
                _log.warning(
                    "candidate cannot price a plan", name=name, candidate=candidate, problem=answer.body.decode()
                )
                return
            price = ShadowPrice.model_validate_json(answer.body)
            row = ShadowRow(name=name, candidate=candidate, plan_id=reply.facts.id, **price.model_dump())
            await run_in_threadpool(self._storage.shadow.add, row)
        except AutoshardError as error:  # the plan was answered, and another will be compared
            _log.info("plan not priced by the candidate", reason=str(error))
