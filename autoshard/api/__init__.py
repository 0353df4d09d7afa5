"""What the REST service is asked and what it answers, once for the service, its description and its clients."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoshard.api.jobs import (
        JOB_BODIES,
        CalibrateBody,
        CollectBody,
        JobAnswer,
        JobId,
        JobKind,
        JobList,
        JobState,
        JobSummary,
        PlanJobBody,
        ScheduleAnswer,
        ScheduleBody,
        ScheduledKind,
        ScheduleList,
        ScheduleName,
        TrainCostBody,
        TrainPolicyBody,
    )
    from autoshard.api.keys import (
        AuditEntry,
        AuditList,
        AuditSearch,
        KeyBody,
        KeyId,
        KeyList,
        KeyMade,
        KeySummary,
        Scope,
        TeamName,
    )
    from autoshard.api.models import (
        PARQUET,
        AliasChange,
        FileId,
        ModelAnswer,
        ModelKind,
        ModelList,
        ModelName,
        ModelState,
        ModelSummary,
        PromotionBody,
        QuarantinedFile,
        RollbackBody,
        SampleList,
        SamplesAnswer,
        ShadowSummary,
        StoredSamples,
        VersionId,
    )
    from autoshard.api.plans import (
        MAX_PAGE,
        PLAN_FILTERS,
        ComparisonAnswer,
        FeatureDrift,
        PlanAnswer,
        PlanFigures,
        PlanFilter,
        PlanId,
        PlanLabels,
        PlanList,
        PlanSearch,
        PlanSummary,
        RunAnswer,
        RunFigures,
        RunList,
        StoredRun,
        ValidationAnswer,
    )
    from autoshard.api.problems import Fault, Problem, RemedyAnswer, RequestBody
    from autoshard.api.service import Catalogue, Health, ListColumn, PlannerSummary, list_columns
    from autoshard.api.tasks import (
        FILE_SCHEMA,
        MAX_TIME_LIMIT_S,
        ComparisonBody,
        EvaluationBody,
        ExplanationBody,
        NoBody,
        PlanBody,
        PlanObject,
        ReplanBody,
        RunBody,
        SimulationBody,
        ValidationBody,
    )

__all__ = [
    "FILE_SCHEMA",
    "JOB_BODIES",
    "MAX_PAGE",
    "MAX_TIME_LIMIT_S",
    "PARQUET",
    "PLAN_FILTERS",
    "AliasChange",
    "AuditEntry",
    "AuditList",
    "AuditSearch",
    "CalibrateBody",
    "Catalogue",
    "CollectBody",
    "ComparisonAnswer",
    "ComparisonBody",
    "EvaluationBody",
    "ExplanationBody",
    "Fault",
    "FeatureDrift",
    "FileId",
    "Health",
    "JobAnswer",
    "JobId",
    "JobKind",
    "JobList",
    "JobState",
    "JobSummary",
    "KeyBody",
    "KeyId",
    "KeyList",
    "KeyMade",
    "KeySummary",
    "ListColumn",
    "ModelAnswer",
    "ModelKind",
    "ModelList",
    "ModelName",
    "ModelState",
    "ModelSummary",
    "NoBody",
    "PlanAnswer",
    "PlanBody",
    "PlanFigures",
    "PlanFilter",
    "PlanId",
    "PlanJobBody",
    "PlanLabels",
    "PlanList",
    "PlanObject",
    "PlanSearch",
    "PlanSummary",
    "PlannerSummary",
    "Problem",
    "PromotionBody",
    "QuarantinedFile",
    "RemedyAnswer",
    "ReplanBody",
    "RequestBody",
    "RollbackBody",
    "RunAnswer",
    "RunBody",
    "RunFigures",
    "RunList",
    "SampleList",
    "SamplesAnswer",
    "ScheduleAnswer",
    "ScheduleBody",
    "ScheduleList",
    "ScheduleName",
    "ScheduledKind",
    "Scope",
    "ShadowSummary",
    "SimulationBody",
    "StoredRun",
    "StoredSamples",
    "TeamName",
    "TrainCostBody",
    "TrainPolicyBody",
    "ValidationAnswer",
    "ValidationBody",
    "VersionId",
    "list_columns",
]

#: Those with the fewest declarations first.
_MODULES = ("problems", "models", "service", "plans", "keys", "tasks", "jobs")

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Declarations are made when their module is asked for: a plan needs those of models, not those of services."""
        if name in __all__:
            for module in _MODULES:
                declared = vars(import_module(f"{__name__}.{module}"))
                if name in declared:
                    globals()[name] = declared[name]
                    return declared[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
