"""What clients ask for: bodies of requests, of which tables, topologies and plans may be this package's own types."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from autoshard.api import ComparisonBody, PlanJobBody, ReplanBody, RequestBody, SimulationBody


class _Task(RequestBody):
    if not TYPE_CHECKING:  # type checkers know the fields

        def __init__(self, **given: object) -> None:
            try:
                super().__init__(**json_of(given))
            except ValidationError as error:
                raise self.fault_of(error) from None


class PlanTask(_Task, PlanJobBody):
    """A planning task; `tables` may be a `TableSet`, `topology` a `Topology`, `payload` a `Payload`, `start` a plan.

    More than 60 s make a job, for which `Client.plan` waits.
    """


class Replan(_Task, ReplanBody):
    """Changes of a stored plan's task; None leaves what the plan has."""


class ComparisonTask(_Task, ComparisonBody):
    """A task for several planners; fields as of `PlanTask`, `options` by planner."""


class SimulationTask(_Task, SimulationBody):
    """Combinations of clusters and batch sizes; fields as of `PlanTask` and `autoshard.whatif.sweep.Simulator`."""


def as_body(body: RequestBody | type[RequestBody], /, **fields: object) -> dict[str, Any]:
    """The JSON object of a body, or of one that is made of fields; what is left out takes the service's default.

    Raises:
        InputError: If a field is none that the service takes, or no document can hold it.
    """
    made = body if isinstance(body, RequestBody) else body.parse(json_of(fields))
    return made.model_dump(mode="json", exclude_unset=True)


def json_of(value: Any) -> Any:
    """A value of a body as JSON.

    Raises:
        InputError: If no document can hold it.
    """
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, Mapping):
        return {name: json_of(inner) for name, inner in value.items()}
    if isinstance(value, Sequence):
        return [json_of(inner) for inner in value]
    from autoshard.core import Payload, ShardingPlan, TableSet, Topology
    from autoshard.formats import plan_to_json, tables_to_json, topology_to_json

    kinds: dict[type, Callable[[Any], Any]] = {
        TableSet: tables_to_json,
        Topology: topology_to_json,
        ShardingPlan: plan_to_json,
        Payload: str,
    }
    return kinds[type(value)](value) if type(value) in kinds else value
