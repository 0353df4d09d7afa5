"""Errors of the service, as this package's errors.

AutoshardError
├── ServiceError              an answer that no error of this package stands for: refused, busy, a fault
└── InfeasibleTaskError       also an InfeasiblePlanError: no plan fits, and what would help
Others are raised as they are here: the kind of a problem names the class.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from autoshard.api import Fault, Problem, RemedyAnswer
from autoshard.core.errors import AutoshardError, InfeasiblePlanError

_URN = "urn:autoshard:problem:"


class ServiceError(AutoshardError):
    """An answer of the service that is an error of its own, or no answer at all.

    Args:
        message: What it says.
        status: HTTP status; None without an answer.
        problem: The kind of problem; empty if it does not say.
        field: The offending field, if there is one.
        source: The service's address.
    """

    kind = "service"

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        problem: str = "",
        field: str | None = None,
        source: str | None = None,
    ) -> None:
        super().__init__(message, field=field, source=source)
        self.status = status
        self.problem = problem


class InfeasibleTaskError(InfeasiblePlanError):
    """No plan satisfies the limits; the text says by how many bytes and on what.

    Args:
        message: What the planner says, with the remedies.
        table: The first table without room, where whole tables are placed by falling size; None if all find room.
        rank: The rank that may hold it and has most room left.
        missing_bytes: Bytes of device memory that the rank lacks for it.
        remedies: Changes with which the service found a plan.
    """

    def __init__(
        self,
        message: str,
        *,
        table: str | None = None,
        rank: int | None = None,
        missing_bytes: int | None = None,
        remedies: tuple[RemedyAnswer, ...] = (),
    ) -> None:
        super().__init__(message)
        self.table, self.rank, self.missing_bytes, self.remedies = table, rank, missing_bytes, remedies


def error_of(response: httpx.Response, url: str) -> AutoshardError:
    """The error that an answer stands for."""
    problem = _problem(response)
    kind = str(problem.get("type", "")).removeprefix(_URN)
    detail, field = str(problem.get("detail") or response.reason_phrase), problem.get("field")
    if kind == InfeasiblePlanError.kind:
        return _infeasible(problem, detail)
    own = _own_error(kind, detail, field)
    return own or ServiceError(
        f"{detail} (HTTP {response.status_code})", status=response.status_code, problem=kind, source=url
    )


def error_of_fault(fault: Fault | Problem) -> AutoshardError:
    """The error that a part of a request has, of which the others were answered."""
    return _own_error(fault.type.removeprefix(_URN), fault.detail, fault.field) or AutoshardError(fault.detail)


def _own_error(kind: str, detail: str, field: str | None) -> AutoshardError | None:
    """An error of this package by its kind; None if it has no such kind."""
    own = {one.kind: one for one in _kinds(AutoshardError)}.get(kind)
    return None if own is None else own(detail.removeprefix(f"{field}: "), field=field)


def _problem(response: httpx.Response) -> Mapping[str, Any]:
    try:
        document = response.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        return {}
    return document if isinstance(document, dict) else {}


def _infeasible(problem: Mapping[str, Any], detail: str) -> InfeasibleTaskError:
    remedies = tuple(map(RemedyAnswer.model_validate, problem.get("remedies") or ()))
    helps = f"; a plan was found with {', or with '.join(one.text for one in remedies)}" if remedies else ""
    return InfeasibleTaskError(
        detail + helps,
        table=problem.get("table"),
        rank=problem.get("rank"),
        missing_bytes=problem.get("missing_bytes"),
        remedies=remedies,
    )


def _kinds(base: type[AutoshardError]) -> Iterator[type[AutoshardError]]:
    """Error classes of this package that are made of a text alone."""
    for one in base.__subclasses__():
        if one.__module__ == base.__module__:
            yield one
            yield from _kinds(one)
