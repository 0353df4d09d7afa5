"""How each kind of work is answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel

from autoshard.formats import parse_json
from server.bodies.plans import (
    ComparisonBody,
    EvaluationBody,
    ExplanationBody,
    NoBody,
    PlanBody,
    ReplanBody,
    SimulationBody,
    ValidationBody,
    parse_body,
)
from server.bodies.runs import RunBody
from server.tasks.comparing import answer_compare
from server.tasks.context import TaskContext
from server.tasks.models import ModelCheck, answer_check_model, answer_shadow
from server.tasks.planning import answer_plan, answer_replan
from server.tasks.pricing import answer_diff, answer_evaluate, answer_explain, answer_improve, answer_report
from server.tasks.reply import Reply
from server.tasks.running import answer_run
from server.tasks.sampling import answer_list_samples, answer_samples
from server.tasks.simulating import answer_simulate
from server.tasks.validating import answer_validate
from server.tasks.work import Work, WorkKind


@dataclass(frozen=True, slots=True)
class _Answerer:
    body: type[BaseModel]
    answer: Callable[..., Reply]
    """Takes the body, the context, and the stored plans."""


_ANSWERERS: Final[Mapping[WorkKind, _Answerer]] = {
    WorkKind.PLAN: _Answerer(PlanBody, answer_plan),
    WorkKind.REPLAN: _Answerer(ReplanBody, answer_replan),
    WorkKind.EVALUATE: _Answerer(EvaluationBody, answer_evaluate),
    WorkKind.COMPARE: _Answerer(ComparisonBody, answer_compare),
    WorkKind.EXPLAIN: _Answerer(ExplanationBody, answer_explain),
    WorkKind.IMPROVE: _Answerer(ExplanationBody, answer_improve),
    WorkKind.SIMULATE: _Answerer(SimulationBody, answer_simulate),
    WorkKind.DIFF: _Answerer(NoBody, answer_diff),
    WorkKind.REPORT: _Answerer(NoBody, answer_report),
    WorkKind.RUN: _Answerer(RunBody, answer_run),
    WorkKind.SAMPLES: _Answerer(NoBody, answer_samples),
    WorkKind.LIST_SAMPLES: _Answerer(NoBody, answer_list_samples),
    WorkKind.VALIDATE: _Answerer(ValidationBody, answer_validate),
    WorkKind.CHECK_MODEL: _Answerer(ModelCheck, answer_check_model),
    WorkKind.SHADOW: _Answerer(ModelCheck, answer_shadow),
}


def answer_work(work: Work, context: TaskContext) -> Reply:
    """Does one request's work.

    Args:
        work: What is asked for.
        context: Limits, models and time.

    Raises:
        AutoshardError: If it cannot be done.
    """
    answerer = _ANSWERERS[work.kind]
    body: Any = parse_body(answerer.body, parse_json(work.body))
    return answerer.answer(body, context, *work.stored)
