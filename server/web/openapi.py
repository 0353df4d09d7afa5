"""The service's OpenAPI document: bodies are described by the published JSON Schemas of the files that they hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import FastAPI, Path
from fastapi.routing import APIRoute

from autoshard.api import FILE_SCHEMA, PlanId, Problem
from autoshard.formats import json_schemas
from autoshard.formats.documents.document import Document
from autoshard.report.comparison_json import COMPARISON
from autoshard.results.explanation import EXPLANATION
from autoshard.results.plan_diff import DIFF
from autoshard.results.sweep_record import SIMULATION
from server.problems import MEDIA_TYPE

#: A plan in the path of a route.
StoredPlanId = Annotated[PlanId, Path(description="The plan's id.")]

_COMPONENTS = "#/components/schemas/"

#: The content of every answer that is an error.
PROBLEM: dict[str, Any] = {"content": {MEDIA_TYPE: {"schema": {"$ref": _COMPONENTS + Problem.__name__}}}}

#: Operations on a stored plan, with what they need beside its id.
OF_STORED_PLANS: Mapping[str, Mapping[str, str]] = {
    "read_plan": {},
    "explain_plan": {},
    "improve_plan": {},
    "draw_report": {},
    "diff_stored_plans": {"other_id": "$response.body#/id"},
    "replan": {},
    "delete_plan": {},
}

_PROBLEMS = {
    401: "The request has no valid key, and needs one.",
    403: "The key is not for this.",
    421: "The service does not go by the name that the request calls it by.",
    400: "The body is not JSON, or it or a parameter does not follow its schema.",
    404: "There is no such plan, job, model, schedule or key, or it is another team's.",
    408: "The body took too long to arrive.",
    409: "The request is still being answered, says its idempotency key: try again; or the job is in another state, "
    "or the model has not been compared with the one in use, or there is a schedule of the name.",
    412: "The model's aliases were changed meanwhile.",
    413: "The body is too large.",
    415: "The body is not declared as application/json, or is declared as compressed.",
    422: "The body makes no sense, the idempotency key was another request's, or (type "
    "`urn:autoshard:problem:infeasible`) no plan fits the memory.",
    429: "The client has as many requests here, or sends as many, as one client may: try again.",
    500: "A fault of the service.",
    503: "The service has as many requests as it takes in, loads its models, or lacks its database: try again.",
    504: "The planner did not keep its time limit by far, and was ended.",
}

_ACCESS_STATUSES = (401, 403, 421, 429)
#: Statuses of requests that may succeed later, and whether the header that says when is always there: of conflicts, a
#: job's state may be one that no waiting changes.
_RETRIED = {409: False, 429: True, 503: True}


def _retry_after(status: int) -> dict[str, Any]:
    """The header of a status, if it may have one."""
    if status not in _RETRIED:
        return {}
    described = {
        "description": "Seconds after which the request may be sent again.",
        "required": _RETRIED[status],
        "schema": {"type": "integer", "minimum": 1},
    }
    return {"headers": {"Retry-After": described}}


def shared_schema(name: str) -> dict[str, str]:
    """A reference to a schema that several routes have in common, by the name of its model."""
    return {"$ref": _COMPONENTS + name}


def document_answer(document: Document[Any]) -> dict[str, Any]:
    """An answer that is a document of a published schema, for a route's description."""
    schema = shared_schema(_component(document.schema_name))
    return {"description": document.meaning, "content": {"application/json": {"schema": schema}}}


def plan_answer() -> dict[int | str, dict[str, Any]]:
    """An answer with a stored plan, and the requests that may follow with its id, for a route's description."""
    links = {
        operation: {"operationId": operation, "parameters": {"plan_id": "$response.body#/id", **more}}
        for operation, more in OF_STORED_PLANS.items()
    }
    return {200: {"description": "The plan and its id.", "links": links}}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """A route's answers that are errors, described; those of access control come to them."""
    return {
        status: {"description": _PROBLEMS[status], **PROBLEM, **_retry_after(status)}
        for status in sorted({*statuses, *_ACCESS_STATUSES})
    }


def complete_description(app: FastAPI) -> None:
    """Completes the application's OpenAPI document, which is made at this call, and answers HEAD wherever GET is.

    The document leaves HEAD out: generated clients would have each reading operation twice.
    """
    document = app.openapi()
    components = document["components"]["schemas"]
    for name, schema in components.items():
        components[name] = _with_files(schema)
    published = {one.schema_name: one.json_schema() for one in (COMPARISON, DIFF, EXPLANATION, SIMULATION)}
    for name, schema in {**json_schemas(), **published}.items():
        prefix = _component(name)
        for definition, value in schema.get("$defs", {}).items():
            components[f"{prefix}.{definition}"] = _relocated(value, prefix)
        body = {key: value for key, value in schema.items() if key not in ("$schema", "$id", "$defs")}
        components[prefix] = _relocated(body, prefix)
    _describe_access(document)
    _drop_unused_errors(document)
    app.openapi_schema = document
    for route in app.routes:
        if isinstance(route, APIRoute) and route.methods and "GET" in route.methods:
            route.methods.add("HEAD")


def _with_files(value: Any) -> Any:
    """A part of a schema in which fields that hold a file's object refer to the file's schema."""
    if isinstance(value, list):
        return [_with_files(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    changed = {key: _with_files(inner) for key, inner in value.items() if key != FILE_SCHEMA}
    return changed | ({"$ref": _COMPONENTS + _component(value[FILE_SCHEMA])} if FILE_SCHEMA in value else {})


def _describe_access(document: dict[str, Any]) -> None:
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        if path.startswith("/v1/"):
            for operation in operations.values():
                operation["security"] = [{"key": []}, {}]  # none where the service has no keys


def _drop_unused_errors(document: dict[str, Any]) -> None:
    """Drops FastAPI's answer to bad parameters, which answer 400 here."""
    for operations in document["paths"].values():
        for operation in operations.values():
            if "HTTPValidationError" in str(operation["responses"].get("422")):
                del operation["responses"]["422"]
    for unused in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(unused, None)


def _component(name: str) -> str:
    return name.replace("/", "-")


def _relocated(value: Any, prefix: str) -> Any:
    """A part of a schema with its references turned to where the parts are now."""
    if isinstance(value, Mapping):
        return {
            key: _target(inner, prefix) if key == "$ref" else _relocated(inner, prefix) for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_relocated(inner, prefix) for inner in value]
    return value


def _target(reference: str, prefix: str) -> str:
    """`#/$defs/dtype` and `urn:autoshard:tables:1#/$defs/dtype` as references to components."""
    document, _, path = reference.partition("#")
    if document:
        _, _, kind, version = document.split(":")
        prefix = f"autoshard.{kind}-{version}"
    definition = path.removeprefix("/$defs/")
    return _COMPONENTS + (f"{prefix}.{definition}" if definition else prefix)
