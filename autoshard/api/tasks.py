"""What is asked of planners and of plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field, GetCoreSchemaHandler, ValidationInfo, WithJsonSchema, field_validator
from pydantic_core import CoreSchema, PydanticCustomError

from autoshard.api.problems import MAX_FEATURES, RequestBody, examples
from autoshard.core.accepted import MAX_SEED
from autoshard.core.choices import MOST_EXPLAINED, GroupLayout, Lengths, Overlap, Risk
from autoshard.core.quoting import shown

#: Seconds that a request may plan; a job has more.
MAX_TIME_LIMIT_S: Final = 60.0
#: Key in the schemas of fields that hold a file's object: the name of the file's own schema.
FILE_SCHEMA: Final = "x-file-schema"


@dataclass(frozen=True, slots=True)
class _Checked:
    """Has a field be checked and described as one of some kinds; clients may give what becomes one of them."""

    kinds: Any

    def __get_pydantic_core_schema__(self, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(self.kinds)


_Name = Annotated[str, Field(min_length=1, max_length=512)]
_Option = bool | int | float | Annotated[str, Field(max_length=512)]
_Options = Annotated[Any, _Checked(dict[str, _Option])]


_ROWS_SCHEMA: Final = {
    "description": "A row per table.",
    "type": "array",
    "minItems": 1,
    "items": {"type": "object", "additionalProperties": True},
}
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


# Objects of files, which the files' own schemas describe.
_TablesObject = Annotated[dict[str, Any], WithJsonSchema({FILE_SCHEMA: "autoshard.tables/1"})]
_TopologyObject = Annotated[dict[str, Any], WithJsonSchema({FILE_SCHEMA: "autoshard.topology/1"})]
PlanObject = Annotated[dict[str, Any], WithJsonSchema({FILE_SCHEMA: "autoshard.plan/1"})]


# Fields that several bodies have.
_Tables = Annotated[
    Any,
    _Checked(
        _Name
        | _TablesObject
        | Annotated[dict[str, Any], WithJsonSchema(_LIST_SCHEMA)]
        | Annotated[list[dict[str, Any]], Field(fail_fast=True), WithJsonSchema(_ROWS_SCHEMA)]
    ),
    Field(
        description="The object of a tables.json (autoshard.tables/1), the name of a bundled table set, or a table "
        "list, whose columns may have any usual names: its rows, or an object that holds rows or a file."
    ),
]
_Topology = Annotated[
    Any,
    _Checked(_Name | _TopologyObject),
    Field(description="The object of a topology.json (autoshard.topology/1), or the name of a bundled topology."),
]
_Plan = Annotated[Any, _Checked(PlanObject), Field(description="The object of a plan.json.")]
_TimeLimit = Annotated[
    float,
    Field(gt=0, le=MAX_TIME_LIMIT_S, description="Seconds that a planner which improves its plan may use."),
]
_Payload = Annotated[
    Any,
    _Checked(str),
    Field(
        max_length=512,
        description="Number format in which embeddings and their gradients travel: fp32, fp16, bf16 or int8; or one "
        "for each, FORWARD/BACKWARD, such as fp16/bf16.",
    ),
]
_Constraints = Annotated[
    dict[_Name, dict[str, list[int | _Name]]],
    Field(
        description="Limits of tables by their names, in place of the tables' own: `pinned_ranks`, `colocate_with` and "
        "`forbidden_tiers`, as in a tables.json."
    ),
]
_Seed = Annotated[int, Field(ge=0, le=MAX_SEED, description="Same seed, same plan, time limits aside.")]
# Words of enumerations: a strict model takes their members only.
_Risk = Annotated[Risk, Field(strict=False, description="Price by the mean or the 95th percentile of predicted times.")]
_PlansRisk = Annotated[
    Risk | None,
    Field(
        strict=False,
        description="Price by the mean or the 95th percentile of predicted times; null for what the plan was made for.",
    ),
]
_Overlap = Annotated[
    Overlap | None,
    Field(strict=False, description="Which parts of a step run at the same time; null for that of the step model."),
]
_Count = Annotated[int, Field(ge=1, le=1 << 31)]
_Counts = Annotated[list[_Count], Field(min_length=1, max_length=64, fail_fast=True)]

_PoolingFactors = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=512)], Annotated[float, Field(ge=0, le=1e9)]],
    Field(max_length=MAX_FEATURES),
]

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


class PlanBody(RequestBody):
    """A planning task."""

    model_config = examples({**_SMALL_TASK, "planner": "cost-greedy"})

    tables: _Tables
    topology: _Topology
    constraints: _Constraints = Field(default_factory=dict)
    planner: _Name = Field(default="auto", description="Name of the planner.")
    options: _Options = Field(default_factory=dict, description="The planner's own options.")
    time_limit_s: _TimeLimit = 1.0
    payload: _Payload = "fp32"
    start: _Plan | None = Field(
        default=None, description="The object of a plan.json of the same tables to start from: the answer is no slower."
    )
    seed: _Seed = 0
    risk: _Risk = Risk.MEAN


class ReplanBody(RequestBody):
    """Changes of a stored plan's task; what is left out stays as it was."""

    max_bytes: ClassVar[int] = 4 << 20
    model_config = examples({"batch_size": 4096}, {"topology": "cpu-8", "planner": "cost-greedy"})

    topology: _Topology | None = Field(default=None, description="Other ranks, as in the body of a plan.")
    batch_size: _Count | None = Field(default=None, description="Samples per step of all ranks.")
    pooling_factors: _PoolingFactors = Field(
        default_factory=dict, description="Other mean ids per sample by feature, such as those of a run."
    )
    planner: _Name | None = Field(default=None, description="Another planner, with its default options.")
    options: _Options | None = Field(default=None, description="The planner's own options.")
    time_limit_s: _TimeLimit = 1.0
    payload: _Payload | None = None
    seed: _Seed | None = None
    risk: _PlansRisk = None


class EvaluationBody(RequestBody):
    """A plan to price and store."""

    model_config = examples({"plan": _SMALL_PLAN})

    plan: _Plan
    overlap: _Overlap = None
    risk: _PlansRisk = None


class ComparisonBody(RequestBody):
    """A task for several planners."""

    model_config = examples({**_SMALL_TASK, "planners": ["random", "cost-greedy"]})

    tables: _Tables
    topology: _Topology
    planners: list[_Name] = Field(
        fail_fast=True, min_length=1, max_length=32, description="Names of planners, each once."
    )
    options: dict[str, _Options] = Field(default_factory=dict, description="Options by planner.")
    time_limit_s: _TimeLimit = Field(
        default=1.0, description="Seconds of each planner; all together have 60, but where they are a job."
    )
    payload: _Payload = "fp32"
    seed: _Seed = 0
    risk: _Risk = Risk.MEAN

    @field_validator("planners")
    @classmethod
    def _check_planners(cls, planners: list[str]) -> list[str]:
        for name in planners:
            if planners.count(name) > 1:
                raise PydanticCustomError("twice", "{name} is given twice", {"name": shown(name)})
        return planners

    @field_validator("options")
    @classmethod
    def _check_options(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        for name in options:
            if name not in info.data.get("planners", options):
                raise PydanticCustomError("unknown", "{name} is none of the planners", {"name": shown(name)})
        return options


#: Largest number of measured steps of one report.
_MAX_STEPS: Final = 10_000

_Ms = Annotated[float, Field(gt=0, le=1e9)]


class RunBody(RequestBody):
    """What a training job measured of a plan that it executes."""

    max_bytes: ClassVar[int] = 4 << 20
    model_config = examples({"steps_ms": [12.1, 11.8, 12.4], "pooling_factors": {"t0": 1.4}})

    steps_ms: list[_Ms] = Field(
        fail_fast=True, min_length=1, max_length=_MAX_STEPS, description="Milliseconds of training steps."
    )
    pooling_factors: _PoolingFactors = Field(
        default_factory=dict, description="Mean ids per sample by feature, as the job sees them."
    )


class ExplanationBody(RequestBody):
    """What to explain of a plan."""

    tables: list[_Name] = Field(default_factory=list, max_length=2048)
    most: int = Field(default=MOST_EXPLAINED, ge=0, le=1 << 31)
    risk: _PlansRisk = None


class NoBody(RequestBody):
    """Nothing: the path says it all."""


class SimulationBody(RequestBody):
    """Combinations of clusters and batch sizes to plan and price for one set of tables."""

    model_config = examples(
        {"tables": "criteo-kaggle", "topologies": ["dgx-a100", "cpu-8"], "ranks": [8], "batch_sizes": [1024, 2048]}
    )

    tables: _Tables
    topologies: list[_Topology] = Field(
        fail_fast=True, min_length=1, max_length=16, description="Machines, as in a plan's body."
    )
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
    num_batches: int = Field(
        default=0, ge=0, le=1000, description="Batches to draw per point, for the spread, at least 2; 0 for none."
    )
    lengths: Annotated[Lengths, Field(strict=False)] = Lengths.DECLARED


class ValidationBody(RequestBody):
    """Tables, a topology, or both to check."""

    model_config = examples(_SMALL_TASK, {"tables": "criteo-kaggle"}, {"topology": {"schema": "autoshard.topology/1"}})

    tables: _Tables | None = None
    topology: _Topology | None = None
    constraints: _Constraints = Field(default_factory=dict)
