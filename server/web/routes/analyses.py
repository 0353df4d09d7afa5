"""Routes that price, compare, explain and draw plans."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, FastAPI, Path, Query, Request, Response

from autoshard.api import (
    ComparisonAnswer,
    ComparisonBody,
    EvaluationBody,
    PlanAnswer,
    PlanId,
    ReplanBody,
    Scope,
    SimulationBody,
    ValidationAnswer,
    ValidationBody,
)
from autoshard.core.choices import MOST_EXPLAINED
from autoshard.core.costs import Risk
from autoshard.results.explanation import EXPLANATION, Explanation
from autoshard.results.plan_diff import DIFF
from autoshard.results.sweep_record import SIMULATION
from server.access import opened_to
from server.tasks.work import WorkKind
from server.web.openapi import StoredPlanId, document_answer, plan_answer, problems
from server.web.reading import JsonBody, ReceivedBody
from server.web.work_handler import WorkHandler

#: What any request can be answered with that a planning process works on.
_WORK_STATUSES = (400, 408, 413, 415, 422, 429, 500, 503, 504)
_STORED_STATUSES = (400, 404, 408, 422, 429, 500, 503, 504)

#: The page's own policy, in its head, lets its scripts run and nothing be loaded; this one keeps it off the service,
#: whose own page may show it.
_PAGE_POLICY = "sandbox allow-scripts; frame-ancestors 'self'"

_Explained = Annotated[
    list[Annotated[str, Query(min_length=1, max_length=512)]] | None,
    Query(max_length=256, description="Only this table; may be repeated."),
]
_MostExplained = Annotated[
    int,
    Query(
        ge=0,
        le=1 << 31,
        description="Without `table`: so many of the tables, those of which a batch reads most bytes; 0 for all.",
    ),
]
_PricedBy = Annotated[
    Risk | None,
    Query(description="Price by the mean or the 95th percentile; left out for what the plan was made for."),
]


def add_analyses(app: FastAPI, handler: WorkHandler) -> None:
    """Adds the routes."""
    _add_pricing(app, handler)
    _add_comparing(app, handler)
    _add_of_plans(app, handler)
    _add_pages(app, handler)


def _add_pricing(app: FastAPI, handler: WorkHandler) -> None:
    @app.post(
        "/v1/evaluations",
        tags=["plans"],
        summary="Price a plan and store it",
        response_model=PlanAnswer,
        responses={**plan_answer(), **problems(*_WORK_STATUSES, 409)},
    )
    @opened_to(Scope.PLAN)
    async def evaluate_plan(received: Annotated[ReceivedBody[Any], Depends(JsonBody(EvaluationBody))]) -> Response:
        return await handler.answer(received, WorkKind.EVALUATE)

    @app.post(
        "/v1/plans/{plan_id}/replans",
        tags=["plans"],
        summary="Plan anew for a changed task",
        response_model=PlanAnswer,
        responses={**plan_answer(), **problems(*_WORK_STATUSES, 404, 409)},
    )
    @opened_to(Scope.PLAN)
    async def replan(
        received: Annotated[ReceivedBody[Any], Depends(JsonBody(ReplanBody))], plan_id: StoredPlanId
    ) -> Response:
        return await handler.answer(received, WorkKind.REPLAN, plan_id)


def _add_comparing(app: FastAPI, handler: WorkHandler) -> None:
    @app.post(
        "/v1/comparisons",
        tags=["tasks"],
        summary="Plan with several planners",
        response_model=ComparisonAnswer,
        responses=problems(*_WORK_STATUSES, 409),
    )
    @opened_to(Scope.PLAN)
    async def compare_planners(received: Annotated[ReceivedBody[Any], Depends(JsonBody(ComparisonBody))]) -> Response:
        return await handler.answer(received, WorkKind.COMPARE)

    @app.post(
        "/v1/simulations",
        tags=["tasks"],
        summary="Plan for other clusters and batch sizes",
        responses={200: document_answer(SIMULATION), **problems(*_WORK_STATUSES, 409)},
    )
    @opened_to(Scope.PLAN)
    async def simulate_steps(received: Annotated[ReceivedBody[Any], Depends(JsonBody(SimulationBody))]) -> Response:
        return await handler.answer(received, WorkKind.SIMULATE)

    @app.post(
        "/v1/validations",
        tags=["tasks"],
        summary="Check tables and a topology",
        response_model=ValidationAnswer,
        responses=problems(*_WORK_STATUSES, 409),
    )
    @opened_to(Scope.PLAN)
    async def validate_task(received: Annotated[ReceivedBody[Any], Depends(JsonBody(ValidationBody))]) -> Response:
        return await handler.answer(received, WorkKind.VALIDATE)


def _add_of_plans(app: FastAPI, handler: WorkHandler) -> None:
    @app.get(
        "/v1/plans/{plan_id}/explanation",
        tags=["plans"],
        summary="Compare each table's sharding with its alternatives",
        response_model=Explanation,
        responses=problems(*_STORED_STATUSES),
    )
    @opened_to(Scope.READ)
    async def explain_plan(
        request: Request,
        plan_id: StoredPlanId,
        table: _Explained = None,
        most: _MostExplained = MOST_EXPLAINED,
        risk: _PricedBy = None,
    ) -> Response:
        parameters = {"tables": table or [], "most": most, "risk": risk}
        return await handler.read(request, WorkKind.EXPLAIN, plan_id, parameters=parameters)

    @app.get(
        "/v1/plans/{plan_id}/improvements",
        tags=["plans"],
        summary="Explain a plan, and plan with single changes",
        responses={200: document_answer(EXPLANATION), **problems(*_STORED_STATUSES)},
    )
    @opened_to(Scope.PLAN)
    async def improve_plan(
        request: Request,
        plan_id: StoredPlanId,
        table: _Explained = None,
        most: _MostExplained = MOST_EXPLAINED,
        risk: _PricedBy = None,
    ) -> Response:
        parameters = {"tables": table or [], "most": most, "risk": risk}
        return await handler.read(request, WorkKind.IMPROVE, plan_id, parameters=parameters)

    @app.get(
        "/v1/plans/{plan_id}/diff/{other_id}",
        tags=["plans"],
        summary="Compare two plans",
        responses={200: document_answer(DIFF), **problems(*_STORED_STATUSES)},
    )
    @opened_to(Scope.READ)
    async def diff_stored_plans(
        request: Request, plan_id: StoredPlanId, other_id: Annotated[PlanId, Path(description="Id of the second plan.")]
    ) -> Response:
        return await handler.read(request, WorkKind.DIFF, plan_id, other_id)


def _add_pages(app: FastAPI, handler: WorkHandler) -> None:
    page: dict[int | str, dict[str, Any]] = {
        200: {"description": "A page that needs no network.", "content": {"text/html": {"schema": {"type": "string"}}}}
    }

    @app.get(
        "/v1/plans/{plan_id}/report",
        tags=["plans"],
        summary="Draw a plan's page",
        response_class=Response,
        responses={**page, **problems(*_STORED_STATUSES)},
    )
    @opened_to(Scope.READ)
    async def draw_report(request: Request, plan_id: StoredPlanId) -> Response:
        answer = await handler.read(request, WorkKind.REPORT, plan_id, media_type="text/html; charset=utf-8")
        answer.headers["Content-Security-Policy"] = _PAGE_POLICY
        return answer
