"""How each kind of work is answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, get_type_hints

from autoshard.api import RequestBody
from autoshard.formats import parse_json
from server.tasks.comparing import answer_check_comparison, answer_short_comparison
from server.tasks.context import TaskContext
from server.tasks.models import answer_check_model, answer_shadow
from server.tasks.planning import answer_check_plan, answer_plan_or_accept, answer_replan
from server.tasks.pricing import answer_diff, answer_evaluate, answer_explain, answer_improve, answer_report
from server.tasks.reply import Reply
from server.tasks.running import answer_run
from server.tasks.sampling import answer_list_samples, answer_samples
from server.tasks.simulating import answer_simulate
from server.tasks.validating import answer_validate
from server.tasks.work import Work, WorkKind

#: What answers: a function of the body, the context, and the stored plans.
_ANSWERS: Final[Mapping[WorkKind, Callable[..., Reply]]] = {
    WorkKind.PLAN: answer_plan_or_accept,
    WorkKind.REPLAN: answer_replan,
    WorkKind.EVALUATE: answer_evaluate,
    WorkKind.COMPARE: answer_short_comparison,
    WorkKind.EXPLAIN: answer_explain,
    WorkKind.IMPROVE: answer_improve,
    WorkKind.SIMULATE: answer_simulate,
    WorkKind.DIFF: answer_diff,
    WorkKind.REPORT: answer_report,
    WorkKind.RUN: answer_run,
    WorkKind.SAMPLES: answer_samples,
    WorkKind.LIST_SAMPLES: answer_list_samples,
    WorkKind.VALIDATE: answer_validate,
    WorkKind.CHECK_PLAN: answer_check_plan,
    WorkKind.CHECK_COMPARISON: answer_check_comparison,
    WorkKind.CHECK_MODEL: answer_check_model,
    WorkKind.SHADOW: answer_shadow,
}


def answer_work(work: Work, context: TaskContext) -> Reply:
    """Does one request's work.

    Args:
        work: What is asked for.
        context: Limits, models and time.

    Raises:
        AutoshardError: If it cannot be done.
    """
    answer = _ANSWERS[work.kind]
    return answer(_body_of(answer).parse(parse_json(work.body.take())), context, *work.stored)


def _body_of(answer: Callable[..., Reply]) -> type[RequestBody]:
    """What an answer's first argument is."""
    kind: type[RequestBody] = next(iter(get_type_hints(answer).values()))
    return kind
