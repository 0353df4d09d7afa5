"""The service itself: its state, and what tasks may name."""

from __future__ import annotations

from typing import get_args, get_origin

from pydantic import BaseModel, Field


class Health(BaseModel):
    """State of the service."""

    status: str
    detail: str | None = Field(default=None, description="What the database lacks.")


class PlannerSummary(BaseModel):
    """A planner that can be named."""

    name: str
    summary: str
    options: list[str] = Field(description="Names of its options.")
    takes_start: bool = Field(description="Whether it searches from a request's start.")
    is_compared: bool = Field(description="Whether the page plans with it when planners are compared.")


class ListColumn(BaseModel):
    """A column of a list, which is a field of what the list holds."""

    name: str = Field(description="The field.")
    title: str = Field(description="Its heading.")
    kind: str = Field(description="What its values are: id, time, number, ms, share, flag or text.")


def list_columns(model: type[BaseModel]) -> list[ListColumn]:
    """Columns of a list of a model's objects: its fields but those that are objects themselves."""
    found = []
    for name, field in model.model_fields.items():
        kinds = {field.annotation, *get_args(field.annotation)}
        if name == "id":
            kind = "id"
        elif name.endswith("_at"):
            kind = "time"
        elif float in kinds:
            kind = "ms" if name.endswith("_ms") else "share"
        else:
            kind = "flag" if bool in kinds else "number" if int in kinds else "text"
        if not any(get_origin(one) is dict for one in kinds):
            found.append(ListColumn(name=name, title=field.title or name.replace("_", " "), kind=kind))
    return found


class Catalogue(BaseModel):
    """What tasks may name, and what lists show."""

    tables: list[str] = Field(description="Bundled table sets.")
    topologies: list[str] = Field(description="Bundled topologies.")
    planners: list[PlannerSummary]
    table_fields: list[str] = Field(description="Fields that columns of a table list may be read as.")
    columns: dict[str, list[ListColumn]] = Field(description="Columns of the lists of plans, jobs and models.")
