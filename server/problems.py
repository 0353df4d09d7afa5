"""Errors as `application/problem+json`, with types from the error tree."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import structlog

from autoshard.api import Fault, Problem, RemedyAnswer
from autoshard.core.errors import (
    AutoshardError,
    FormatError,
    InfeasiblePlanError,
    InputError,
    ModelError,
    UnknownNameError,
)
from autoshard.whatif.remedies import Shortage

_log = structlog.get_logger()
MEDIA_TYPE = "application/problem+json"


class BodyTooLargeError(InputError):
    """A request body above the service's limit."""

    kind = "body-too-large"


class BodyTimeoutError(InputError):
    """A request body that took too long to arrive."""

    kind = "body-timeout"


class MediaTypeError(InputError):
    """A request body that is not declared as what is read here."""

    kind = "media-type"


class UnauthenticatedError(AutoshardError):
    """A request without a valid key."""

    kind = "unauthenticated"


class ForbiddenError(AutoshardError):
    """A request that this key is not for."""

    kind = "forbidden"


class QuotaError(InputError):
    """The client stores as much as one client may; delete some of it."""

    kind = "quota"


class HostError(InputError):
    """A request for another host."""

    kind = "host"


class RetryError(AutoshardError):
    """A request that may succeed later; answers carry `Retry-After`.

    Args:
        message: Why not now.
        retry_after_s: Seconds until it may be sent again.
    """

    def __init__(self, message: str, retry_after_s: int = 1, **where: str) -> None:
        super().__init__(message, **where)
        self.retry_after_s = retry_after_s


class BusyError(RetryError):
    """The service has as much to do as it takes in; try again."""

    kind = "busy"


class ClientBusyError(RetryError):
    """The client has as much to do here as one client may; try again."""

    kind = "too-many-requests"


class RateLimitError(RetryError):
    """The client sends too many requests; try again."""

    kind = "rate-limit"


class NotReadyError(RetryError):
    """The service starts or stops; try again."""

    kind = "not-ready"


class StorageError(RetryError):
    """The database does not answer; try again."""

    kind = "storage"


class UnknownPlanError(InputError):
    """A plan that is not stored."""

    kind = "unknown-plan"


class UnknownJobError(InputError):
    """A job that is not stored."""

    kind = "unknown-job"


class UnknownModelError(InputError):
    """A trained model that is not there."""

    kind = "unknown-model"


class UnknownKeyError(UnknownNameError):
    """A key that is not there."""

    kind = "unknown-key"


class UnknownScheduleError(InputError):
    """A schedule that is not there."""

    kind = "unknown-schedule"


class ScheduleExistsError(InputError):
    """A schedule under a name that another one has."""

    kind = "schedule-exists"


class ModelChangedError(InputError):
    """A model whose aliases were changed meanwhile."""

    kind = "model-changed"


class NotComparedError(InputError):
    """A cost model that has not been compared with the one in use."""

    kind = "not-compared"


class WorseModelError(InputError):
    """A model that was worse than the one in use when it was trained."""

    kind = "worse-model"


class JobStateError(InputError):
    """Something that a job in its state is not open to."""

    kind = "job-state"


class KeyReusedError(InputError):
    """An idempotency key that another request had."""

    kind = "idempotency-key-reused"


class KeyInUseError(RetryError):
    """An idempotency key of a request that is still being answered; try again."""

    kind = "idempotency-key-in-use"


class ClientGoneError(AutoshardError):
    """The client left before it was answered."""

    kind = "client-gone"


class UnplannableTaskError(InfeasiblePlanError):
    """No plan satisfies the limits; changes with which one does are known.

    Args:
        message: What the planner says.
        shortage: The first table without room; None if whole tables find room.
        remedies: Changes with which a plan was found.
    """

    def __init__(self, message: str, *, shortage: Shortage | None, remedies: Sequence[RemedyAnswer]) -> None:
        super().__init__(message)
        self.shortage = shortage
        self.remedies = list(remedies)


class OvertimeError(AutoshardError):
    """A planner that did not keep its time limit, and was ended."""

    kind = "overtime"


class InternalError(AutoshardError):
    """A fault of the service; details are in its log."""

    kind = "internal"


#: What is told of an error that no request should meet.
UNEXPECTED = "an unexpected fault; the service's log says more, by the request's id"
#: Input that is read but makes no sense answers 422, and so does a task without a feasible plan: the request is
#: at fault, and `type` tells the two apart. The first class that fits counts.
_STATUS: tuple[tuple[type[AutoshardError], int], ...] = (
    (BodyTooLargeError, 413),
    (BodyTimeoutError, 408),
    (MediaTypeError, 415),
    (UnauthenticatedError, 401),
    (ForbiddenError, 403),
    (QuotaError, 403),
    (UnknownPlanError, 404),
    (UnknownJobError, 404),
    (UnknownModelError, 404),
    (UnknownScheduleError, 404),
    (UnknownKeyError, 404),
    (ScheduleExistsError, 409),
    (ModelChangedError, 412),
    (NotComparedError, 409),
    (WorseModelError, 409),
    (JobStateError, 409),
    (HostError, 421),
    (FormatError, 400),
    (InputError, 422),
    (InfeasiblePlanError, 422),
    (ModelError, 422),  # the registry's models are checked at start: this is a task that none of them can price
    (ClientGoneError, 408),
    (ClientBusyError, 429),
    (RateLimitError, 429),
    (KeyInUseError, 409),
    (RetryError, 503),
    (OvertimeError, 504),
    (AutoshardError, 500),
)


def retry_after_s(error: AutoshardError) -> int | None:
    """Seconds after which a request that failed so may be sent again; None where that would not help."""
    return error.retry_after_s if isinstance(error, RetryError) else None


def fault_of(error: AutoshardError) -> Fault:
    """The error of a part of a request, of which the others are answered."""
    return Fault(type=_type(error), detail=_detail(error), field=error.field)


def problem_of(error: AutoshardError) -> Problem:
    """The problem document of an error. One that no request should meet is logged, and told without what it says."""
    status = next(status for kind, status in _STATUS if isinstance(error, kind))
    if status == 500 and not isinstance(error, InternalError):
        _log.error("unexpected error", exc_info=error)
        error = InternalError(UNEXPECTED)
    title = (type(error).__doc__ or "").split("\n")[0].rstrip(".").split(";")[0]
    known: dict[str, Any] = {}
    if isinstance(error, FormatError) and error.faults:
        known = {"faults": [fault_of(fault) for fault in error.faults]}
    if isinstance(error, UnplannableTaskError):
        known = {"remedies": error.remedies, **(asdict(error.shortage) if error.shortage else {})}
    return Problem(
        type=_type(error),
        title=title,
        status=status,
        detail=_detail(error),
        field=error.field,
        **known,
    )


def _detail(error: AutoshardError) -> str:
    """What an error says, without the names of the service's own files."""
    source = None if error.source is None or os.sep in error.source else error.source
    said = str(AutoshardError(error.message, field=error.field, source=source))
    name = getattr(error.__cause__, "filename", None)
    return said if name is None else said.replace(str(name), "a file of the service")


def _type(error: AutoshardError) -> str:
    return f"urn:autoshard:problem:{error.kind}"
