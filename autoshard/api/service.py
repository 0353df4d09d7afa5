"""The service itself: its state, and what tasks may name."""

from __future__ import annotations

from pydantic import BaseModel, Field

from autoshard.api.problems import RequestBody


class Health(BaseModel):
    """State of the service."""

    status: str


class SessionBody(RequestBody):
    """A key that signs in."""

    key: str = Field(min_length=1, max_length=256)


class PlannerSummary(BaseModel):
    """A planner that can be named."""

    name: str


class Catalogue(BaseModel):
    """What tasks may name."""

    tables: list[str] = Field(description="Bundled table sets.")
    topologies: list[str] = Field(description="Bundled topologies.")
    planners: list[PlannerSummary]
    table_fields: list[str] = Field(description="Fields that columns of a table list may be read as.")
