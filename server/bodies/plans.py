"""Request and answer bodies."""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from autoshard.core import GroupLayout
from autoshard.core.accepted import MAX_SEED
from autoshard.core.costs import Risk
from autoshard.core.errors import FormatError
from autoshard.core.step import Overlap
from autoshard.simulation import Lengths
from server.bodies.runs import MAX_FEATURES, PoolingFactors

MAX_TIME_LIMIT_S = 60.0

#: How many keys there may be in fields whose keys are the client's.
_MAX_KEYS: Final = {"options": 128, "pooling_factors": MAX_FEATURES}

B = TypeVar("B", bound=BaseModel)

_Name = Annotated[str, Field(min_length=1, max_length=512)]
_Option = bool | int | float | Annotated[str, Field(max_length=512)]
_Options = dict[str, _Option]


#: Digest of a plan's canonical JSON.
PlanId = Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$", description="Digest of the plan's canonical JSON.")]

_ROWS_SCHEMA: Final = {"description": "A row per table.", "type": "array", "minItems": 1, "items": {"type": "object"}}
_LIST_SCHEMA: Final = {
    "type": "object",
    "oneOf": [{"required": [name]} for name in ("tables", "rows", "text", "base64")],
    "additionalProperties": False,
    "properties": {
        "tables": _ROWS_SCHEMA,
        "rows": _ROWS_SCHEMA,
        "text": {"description": "Text of a CSV, TSV, JSON, JSON lines or YAML file.", "type": "string"},
        "base64": {"description": "Bytes of such a file, or of Parquet.", "type": "string", "format": "byte"},
        "batch_size": {"description": "Samples per step over all ranks.", "type": "integer", "minimum": 1},
        "columns": {
            "description": "Fields by column, where names do not say them; empty to ignore a column.",
            "type": "object",
            "additionalProperties": {"type": "string"},
        },
    },
}

# Fields that several bodies have.
_Tables = Annotated[
    _Name
    | dict[str, Any]
    | Annotated[dict[str, Any], WithJsonSchema(_LIST_SCHEMA)]
    | Annotated[list[dict[str, Any]], WithJsonSchema(_ROWS_SCHEMA)],
    Field(
        description="The object of a tables.json (autoshard.tables/1), the name of a bundled table set, or a table "
        "list, whose columns may have any usual names: its rows, or an object that holds rows or a file."
    ),
]
_Topology = Annotated[
    _Name | dict[str, Any],
    Field(description="The object of a topology.json (autoshard.topology/1), or the name of a bundled topology."),
]
_TimeLimit = Annotated[
    float,
    Field(gt=0, le=MAX_TIME_LIMIT_S, description="Seconds that a planner which improves its plan may use."),
]
_Payload = Annotated[
    str,
    Field(
        max_length=512,
        description="Number format in which embeddings and their gradients travel: fp32, fp16, bf16 or int8; or one "
        "for each, FORWARD/BACKWARD, such as fp16/bf16.",
    ),
]
_Seed = Annotated[int, Field(ge=0, le=MAX_SEED, description="Same seed, same plan, time limits aside.")]
# Words of enumerations: a strict model takes their members only.
_Risk = Annotated[Risk, Field(strict=False, description="Price by the mean or the 95th percentile of predicted times.")]
_Overlap = Annotated[
    Overlap | None,
    Field(strict=False, description="Which parts of a step run at the same time; null for that of the step model."),
]
_Count = Annotated[int, Field(ge=1, le=1 << 31)]
_Counts = Annotated[list[_Count], Field(min_length=1, max_length=64)]

_NOTES = "How a table list was read, and what was taken for what it leaves open."
_SMALL_TASK = {"tables": "criteo-kaggle", "topology": "cpu-8"}
_LINK = {"bytes_per_s": 1e9, "latency_s": 1e-4}
_SMALL_PLAN = {
    "schema": "autoshard.plan/1",
    "tables": {
        "schema": "autoshard.tables/1",
        "batch_size": 1024,
        "tables": [
            {
                "name": "t0",
                "num_embeddings": 100_000,
                "embedding_dim": 64,
                "dtype": "fp32",
                "pooling": "sum",
                "features": [{"name": "f0", "pooling_factor": 3.0}],
                "access": {"kind": "zipf", "alpha": 1.05},
            }
        ],
    },
    "topology": {
        "schema": "autoshard.topology/1",
        "world_size": 2,
        "device": "cpu",
        "memory_bytes": {"hbm": 1 << 30},
        "levels": [{"name": "node", "size": 2, "all_to_all": _LINK, "all_reduce": _LINK}],
    },
    "replica_groups": {"num_groups": 1, "layout": "across_nodes", "sync_every": 1},
    "payload": {"forward": "fp32", "backward": "fp32"},
    "shards": [
        {
            "table": "t0",
            "rows": {"by": "index", "start": 0, "stop": 100_000},
            "columns": [0, 64],
            "tier": "table_wise",
            "replicas": [[1]],
            "deduplicate": False,
        }
    ],
}


def _closed(*examples: dict[str, Any]) -> ConfigDict:
    """What all bodies have in common, and examples of one."""
    return ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, json_schema_extra={"examples": list(examples)})


class PlanBody(BaseModel):
    """A planning task."""

    model_config = _closed({**_SMALL_TASK, "planner": "cost-greedy"})

    tables: _Tables
    topology: _Topology
    planner: _Name = Field(default="auto", description="Name of the planner.")
    options: _Options = Field(default_factory=dict, description="The planner's own options.")
    time_limit_s: _TimeLimit = 1.0
    payload: _Payload = "fp32"
    start: dict[str, Any] | None = Field(
        default=None,
        description="The object of a plan.json (autoshard.plan/1) of the same tables to start from: the answer is no "
        "slower.",
    )
    seed: _Seed = 0
    risk: _Risk = Risk.MEAN


class ReplanBody(BaseModel):
    """Changes of a stored plan's task; what is left out stays as it was."""

    model_config = _closed({"batch_size": 4096}, {"topology": "cpu-8", "planner": "cost-greedy"})

    topology: _Topology | None = Field(default=None, description="Other ranks, as in the body of a plan.")
    batch_size: _Count | None = Field(default=None, description="Samples per step of all ranks.")
    pooling_factors: PoolingFactors = Field(
        default_factory=dict, description="Other mean ids per sample by feature, such as those of a run."
    )
    planner: _Name | None = Field(default=None, description="Another planner, with its default options.")
    options: _Options | None = Field(default=None, description="The planner's own options.")
    time_limit_s: _TimeLimit = 1.0
    payload: _Payload | None = None
    seed: _Seed | None = None


class EvaluationBody(BaseModel):
    """A plan to price and store."""

    model_config = _closed({"plan": _SMALL_PLAN})

    plan: dict[str, Any] = Field(description="The object of a plan.json (autoshard.plan/1).")
    overlap: _Overlap = None
    risk: _Risk = Risk.MEAN


class ComparisonBody(BaseModel):
    """A task for several planners."""

    model_config = _closed({**_SMALL_TASK, "planners": ["random", "cost-greedy"]})

    tables: _Tables
    topology: _Topology
    planners: list[_Name] = Field(min_length=1, max_length=32, description="Names of planners, each once.")
    options: dict[str, _Options] = Field(default_factory=dict, description="Options by planner.")
    time_limit_s: _TimeLimit = Field(default=1.0, description="Seconds of each planner; all together have 60.")
    payload: _Payload = "fp32"
    seed: _Seed = 0
    risk: _Risk = Risk.MEAN


class ExplanationBody(BaseModel):
    """What to explain of a plan."""

    model_config = _closed()

    tables: list[_Name] = Field(default_factory=list, max_length=2048)
    risk: _Risk = Risk.MEAN


class NoBody(BaseModel):
    """Nothing: the path says it all."""

    model_config = _closed()


class SimulationBody(BaseModel):
    """Combinations of clusters and batch sizes to plan and price for one set of tables."""

    model_config = _closed(
        {"tables": "criteo-kaggle", "topologies": ["dgx-a100", "cpu-8"], "ranks": [8], "batch_sizes": [1024, 2048]}
    )

    tables: _Tables
    topologies: list[_Topology] = Field(min_length=1, max_length=16, description="Machines, as in a plan's body.")
    ranks: _Counts = Field(description="Numbers of ranks; each machine is made for each of them.")
    batch_sizes: _Counts | None = Field(default=None, description="Samples per step; null for that of the tables.")
    is_batch_per_rank: bool = Field(default=False, description="Whether batch sizes are those of each rank.")
    groups: _Counts = Field(default=[1], description="Numbers of replica groups.")
    group_sizes: _Counts | None = Field(default=None, description="Ranks per replica group, instead of `groups`.")
    layout: Annotated[GroupLayout, Field(strict=False)] = GroupLayout.ACROSS_NODES
    sync_every: _Count = Field(default=1, description="Steps from one synchronisation of groups to the next.")
    planner: _Name = Field(default="neo", description="Name of the planner.")
    options: _Options = Field(default_factory=dict, description="The planner's own options.")
    time_limit_s: _TimeLimit = Field(default=1.0, description="Seconds of each point; all together have 60.")
    payload: _Payload = "fp32"
    seed: _Seed = 0
    overlap: _Overlap = None
    risk: _Risk = Risk.MEAN
    num_batches: int = Field(default=0, ge=0, le=1000, description="Batches to draw per point, for the spread.")
    lengths: Annotated[Lengths, Field(strict=False)] = Lengths.DECLARED


class ValidationBody(BaseModel):
    """Tables, a topology, or both to check."""

    model_config = _closed(_SMALL_TASK, {"tables": "criteo-kaggle"}, {"topology": {"schema": "autoshard.topology/1"}})

    tables: _Tables | None = None
    topology: _Topology | None = None


class Fault(BaseModel):
    """Why a part of a request could not be answered."""

    type: str = Field(description="The kind of error, as in a problem.")
    detail: str
    field: str | None = None


class ValidationAnswer(BaseModel):
    """Whether a task can be planned for, and its size."""

    is_valid: bool
    faults: list[Fault] = Field(description="The first fault of each document, and all those of a table list.")
    columns: dict[str, str] | None = Field(
        default=None, description="Fields that a table list's columns were read as, empty for ignored ones."
    )
    notes: list[str] = Field(default_factory=list, description=_NOTES)
    num_tables: int | None = None
    table_bytes: int | None = Field(default=None, description="Weights and optimizer states of all tables, once.")
    num_ranks: int | None = None
    hbm_bytes: int | None = Field(default=None, description="Device memory of all ranks together.")


class ComparisonAnswer(BaseModel):
    """Planners side by side."""

    comparison: dict[str, Any] = Field(description="What `autoshard compare --json` prints.")
    plans: dict[str, dict[str, Any]] = Field(description="Plans by planner, of those that found one.")
    failures: dict[str, Fault] = Field(description="Why the others found none, by planner.")
    notes: list[str] = Field(default_factory=list, description=_NOTES)


class PlanAnswer(BaseModel):
    """A plan and its id."""

    id: PlanId
    plan: dict[str, Any] = Field(description="The object of a plan.json (autoshard.plan/1).")
    notes: list[str] = Field(default_factory=list, description=_NOTES)


class PlanFacts(BaseModel):
    """What is stored of a plan, beside the plan."""

    id: str
    planner: str
    device: str
    num_tables: int
    num_ranks: int
    step_ms: float
    search_text: str


class PlanSummary(BaseModel):
    """A stored plan, in a list."""

    id: PlanId
    created_at: str = Field(description="When it was first made, UTC (ISO 8601).")
    planner: str = Field(description="Name of the planner.")
    device: str = Field(description="Key of the topology's device.")
    num_tables: int
    num_ranks: int
    step_ms: float = Field(description="Predicted milliseconds of a training step.")


class PlanList(BaseModel):
    """One page of stored plans, the latest first."""

    plans: list[PlanSummary]
    next: str | None = Field(description="The `cursor` of the next page; null on the last.")


class Health(BaseModel):
    """State of the service."""

    status: str


class RemedyAnswer(BaseModel):
    """A single change with which the planner found a plan."""

    field: str = Field(description="What to change, as a dotted path in the body.")
    value: int | str | None = Field(description="What to change it to; null for what is to be left out.")
    text: str = Field(description="The change in words.")
    step_ms: float = Field(description="Predicted milliseconds of a step of the plan that was found.")


class Problem(BaseModel):
    """Problem details (RFC 9457)."""

    type: str = Field(description="`urn:autoshard:problem:` and the kind of error, such as `infeasible`.")
    title: str = Field(description="The kind of error in words.")
    status: int
    detail: str = Field(description="What is wrong here, and what would be accepted.")
    field: str | None = Field(default=None, description="Dotted path of the offending field, if there is one.")
    table: str | None = Field(
        default=None,
        description="Of an infeasible task: the first table without room, where whole tables are placed by falling "
        "size; several share a rank.",
    )
    rank: int | None = Field(default=None, description="The rank that may hold it and has most room left.")
    missing_bytes: int | None = Field(default=None, description="Bytes of device memory that the rank lacks for it.")
    faults: list[Fault] | None = Field(default=None, description="All faults, of a table list that has several.")
    remedies: list[RemedyAnswer] | None = Field(
        default=None, description="Of an infeasible task: changes with which the service found a plan, one by one."
    )


def parse_body(kind: type[B], document: object) -> B:
    """Checks a parsed body.

    Args:
        kind: What it has to be.
        document: The parsed JSON.

    Raises:
        FormatError: If a field is missing, unknown or of the wrong kind; the text names the first one.
    """
    _check_keys(kind, document)
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        message = _message(kind, first["type"], first["msg"])
        raise FormatError(message, field=_path(first["loc"]) or None) from None


def _check_keys(kind: type[BaseModel], document: object) -> None:
    """Checks what validation would make an error of for each of what may be 100,000 keys, of a kilobyte each."""
    if not isinstance(document, dict):
        return
    for key, value in document.items():
        if key not in kind.model_fields:
            raise FormatError(_message(kind, "extra_forbidden", ""), field=_path((key,)))
        most = _MAX_KEYS.get(key)
        if most is not None and isinstance(value, dict) and len(value) > most:
            raise FormatError(f"must have at most {most:,} keys, got {len(value):,}", field=key)


def _message(body: type[BaseModel], kind: str, message: str) -> str:
    known = {
        "missing": "is missing",
        "extra_forbidden": f"is unknown; the body takes: {', '.join(body.model_fields) or 'nothing'}",
    }
    return known.get(kind, message[:1].lower() + message[1:])


def _path(location: tuple[int | str, ...]) -> str:
    if len(location) > 1 and location[0] != "options":
        location = location[:1]  # what follows is pydantic's name of a union's branch
    elif len(location) > 2:
        location = location[:2]
    return ".".join(str(part)[:100] for part in location)
