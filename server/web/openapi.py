"""The service's OpenAPI document: bodies are described by the published JSON Schemas of the files that they hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

from autoshard.formats import json_schemas
from server.bodies import PlanBody, Problem
from server.problems import MEDIA_TYPE

_COMPONENTS = "#/components/schemas/"

#: The request body of `POST /v1/plans`.
PLAN_BODY: dict[str, Any] = {
    "required": True,
    "content": {"application/json": {"schema": {"$ref": _COMPONENTS + PlanBody.__name__}}},
}
#: The content of every answer that is an error.
PROBLEM: dict[str, Any] = {"content": {MEDIA_TYPE: {"schema": {"$ref": _COMPONENTS + Problem.__name__}}}}

#: The header of requests that a client may send twice and that are to be done once.
IDEMPOTENCY_KEY: dict[str, Any] = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "Chosen by the client. A request with a key of the last day is answered as the one before.",
    "schema": {"type": "string", "pattern": "^[!-~]{1,128}$"},
}

_PROBLEMS = {
    401: "The request has no valid key, and needs one.",
    403: "The key is not for this.",
    421: "The service does not go by the name that the request calls it by.",
    400: "The body is not JSON, or it or a parameter does not follow its schema.",
    404: "There is no such plan.",
    408: "The body took too long to arrive.",
    409: "The request is still being answered, says its idempotency key: try again.",
    413: "The body is too large.",
    415: "The body is not declared as application/json.",
    422: "The body makes no sense, the idempotency key was another request's, or (type "
    "`urn:autoshard:problem:infeasible`) no plan fits the memory.",
    429: "The client has as many requests here as one client may: try again.",
    500: "A fault of the service.",
    503: "The service has as many requests as it takes in, loads its models, or lacks its database: try again.",
    504: "The planner did not keep its time limit by far, and was ended.",
}

_ACCESS_STATUSES = (401, 403, 421)


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """A route's answers that are errors, described; those of access control come to them."""
    return {status: {"description": _PROBLEMS[status], **PROBLEM} for status in sorted({*statuses, *_ACCESS_STATUSES})}


def add_published_schemas(app: FastAPI) -> None:
    """Completes the application's OpenAPI document, which is made at this call."""
    document = app.openapi()
    components = document["components"]["schemas"]
    for model in (PlanBody, Problem):
        components[model.__name__] = model.model_json_schema()
    for name, schema in json_schemas().items():
        prefix = _component(name)
        for definition, value in schema.get("$defs", {}).items():
            components[f"{prefix}.{definition}"] = _relocated(value, prefix)
        body = {key: value for key, value in schema.items() if key not in ("$schema", "$id", "$defs")}
        components[prefix] = _relocated(body, prefix)
    for body_name, field, name in (
        ("PlanBody", "tables", "autoshard.tables/1"),
        ("PlanBody", "topology", "autoshard.topology/1"),
        ("PlanAnswer", "plan", "autoshard.plan/1"),
    ):
        reference = {"$ref": _COMPONENTS + _component(name)}
        described = components[body_name]["properties"][field]
        if "anyOf" in described:
            described["anyOf"] = [kind if kind["type"] == "string" else reference for kind in described["anyOf"]]
        else:
            components[body_name]["properties"][field] = reference
    _describe_access(document)
    _drop_unused_errors(document)
    app.openapi_schema = document


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
