"""What a planner is: a request in, a plan out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from autoshard.core import CostModels, Payload, ShardingPlan, TableSet, Topology
from autoshard.core.accepted import FINITE_ABOVE_0, SEED
from autoshard.core.errors import InvalidOptionError
from autoshard.core.quoting import shown

OptionsT = TypeVar("OptionsT")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """One planning task.

    Attributes:
        tables: What to place.
        topology: Where to.
        costs: Models that price the plan.
        seed: Same seed, same plan (time limits aside).
        time_limit_s: Wall-clock time that an anytime planner may use.
        started_s: When that time began, by `time.perf_counter`; None for when the planner begins.
        options: The planner's own options, by name.
        registry: Folder of trained models for planners that need one; None for the default.
        payload: Number formats in which the plan sends embeddings and gradients.
        start: An older plan of the same tables, to search from; for planners with `takes_start`.
        is_stopped: Asked now and then by an anytime planner, which ends soon once it is true, with the best plan that
            it has found.
    """

    tables: TableSet
    topology: Topology
    costs: CostModels
    seed: int = 0
    time_limit_s: float = 1.0
    started_s: float | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    registry: Path | None = None
    payload: Payload = field(default_factory=Payload)
    start: ShardingPlan | None = None
    is_stopped: Callable[[], bool] = field(default=lambda: False, repr=False, compare=False)

    def __post_init__(self) -> None:
        FINITE_ABOVE_0.check_fields(self, "time_limit_s")
        SEED.check_fields(self, "seed")

    def deadline_s(self) -> float:
        """When the time is over, by `time.perf_counter`; asked by a planner as it begins."""
        begun_s = time.perf_counter() if self.started_s is None else self.started_s
        return begun_s + self.time_limit_s


@dataclass(frozen=True, slots=True, kw_only=True)
class NoOptions:
    """For planners that have no options of their own."""


class PlannerProtocol(Protocol):
    """Makes plans. Planners are named by the entry-point group `autoshard.planners` and made without arguments.

    The contract (tests/contracts): tables are tiled exactly, memory limits hold, the plan has the request's payload,
    the same seed gives the same plan, and a task without a feasible plan raises InfeasiblePlanError: its text has the
    bytes that are missing, or says what the sharding types lack.

    Class attributes that a planner may leave out:

    - `when`: For which tasks it is the right one, for the list of planners in the docs.
    - `takes_start`: True if it searches from a request's start; its plan is never worse than that, if it is a plan for
      the task (see `start_of`).
    - `cuts_tables`: True if tables may be larger than a rank's memory.
    - `is_compared`: True if the service's page plans with it when planners are compared.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for `autoshard list planners`."""
    options_type: ClassVar[type]
    """Frozen dataclass of the options; every field has a default and `metadata={"help": ...}`.

    Where its property `cuts_by_access` is true, users are told of tables whose row order is unknown.
    """

    def plan(self, request: PlanRequest) -> ShardingPlan:
        """Makes a plan; its provenance, if it has any, names the models that it was made with.

        Where the planner has the plan's prediction, as `evaluate` makes it by the request's models, the plan carries it
        and is not priced again.

        Raises:
            InfeasiblePlanError: If no plan within the memory limits was found.
            InvalidOptionError: If an option is unknown or out of range.
        """
        ...


def parse_options(options_type: type[OptionsT], values: Mapping[str, object]) -> OptionsT:
    """Makes a planner's options from `--set KEY=VALUE` texts or JSON values.

    Raises:
        InvalidOptionError: If a key is unknown or a value does not convert to the type of the field's default.
    """
    known = {item.name: item for item in fields(options_type)}  # type: ignore[arg-type]
    parsed: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            accepted = ", ".join(known) or "none"
            raise InvalidOptionError(f"unknown option; this planner takes: {accepted}", field=f"options.{key}")
        parsed[key] = _convert(value, type(known[key].default), f"options.{key}")
    return options_type(**parsed)


def options_kept(options_type: type, made_with: Mapping[str, object]) -> dict[str, object]:
    """Of the options that a plan was made with, those that its planner takes.

    Plans of another version may have others, and refined ones say besides how often they were measured.
    """
    known = {item.name for item in fields(options_type)}
    return {name: value for name, value in made_with.items() if name in known}


_ACCEPTED = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def _convert(value: object, wanted: type, label: str) -> object:
    if wanted is bool and isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if wanted in (bool, str) and isinstance(value, wanted):
        return value
    if wanted in (int, float) and isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            number = int(value) if wanted is int and isinstance(value, str | int) else float(value)
        except ValueError:
            number = math.nan
        if math.isfinite(number) and wanted(number) == number:
            return wanted(number)
    raise InvalidOptionError(f"must be {_ACCEPTED[wanted]}, got {shown(value)}", field=label)
