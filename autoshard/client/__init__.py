"""Clients of the REST service: one that waits, one for asyncio.

with Client("http://localhost:8000") as client:
    made = client.plan(PlanTask(tables="criteo-kaggle", topology="cpu-8", planner="auto"))
made.plan.predicted.step_ms

Answers that hold no plans are those of `autoshard.api`.
"""

from typing import TYPE_CHECKING

from autoshard.core.deferred import deferred

if TYPE_CHECKING:
    from autoshard.client.answers import Job, ServedComparison, StoredPlan
    from autoshard.client.clients import AsyncClient, Client
    from autoshard.client.endpoints import ServiceEndpoints
    from autoshard.client.problems import InfeasibleTaskError, ServiceError
    from autoshard.client.retries import Retries
    from autoshard.client.tasks import ComparisonTask, PlanTask, Replan, SimulationTask

__all__ = [
    "AsyncClient",
    "Client",
    "ComparisonTask",
    "InfeasibleTaskError",
    "Job",
    "PlanTask",
    "Replan",
    "Retries",
    "ServedComparison",
    "ServiceEndpoints",
    "ServiceError",
    "SimulationTask",
    "StoredPlan",
]

if not TYPE_CHECKING:
    __getattr__ = deferred(__name__, __all__, ("answers", "clients", "endpoints", "problems", "retries", "tasks"))
