"""Work on trained models: whether a version can be used, and a plan's price by a candidate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from autoshard.api import RequestBody
from autoshard.core.errors import ModelError
from autoshard.evaluation import evaluate
from autoshard.planning import plan_costs
from costmodel.kernel.learned import LearnedCostModel
from costmodel.registry.versions import Registry, StoredModel
from costmodel.step.collective_model import LearnedCollectives
from costmodel.step.dense_model import LearnedDense
from costmodel.step.model import CalibratedStep
from server.tasks.context import TaskContext
from server.tasks.inputs import stored_plan
from server.tasks.reply import Reply


class ModelCheck(RequestBody):
    """A version that may be used."""

    kind: str
    name: str
    version: str


class ShadowPrice(BaseModel):
    """A plan's predicted steps by the production model and by a candidate."""

    production: str
    production_ms: float
    candidate_ms: float


def answer_check_model(body: ModelCheck, context: TaskContext) -> Reply:
    """Loads a version as those do that use it.

    Raises:
        ModelError: If it is missing, damaged, of another schema or of no known kind.
    """
    stored = Registry(context.registry).load(body.kind, body.name, body.version)
    readers = _readers()
    if body.kind not in readers:
        raise ModelError(f"must be one of {', '.join(readers)}, got {body.kind}", field="kind")
    readers[body.kind](stored)
    return Reply(status=200, body=b"{}")


def answer_shadow(body: ModelCheck, context: TaskContext, stored: bytes) -> Reply:
    """Prices a stored plan with a candidate's kernels, all else being equal.

    Raises:
        ModelError: If the candidate cannot price it.
    """
    plan = stored_plan(stored)
    costs = plan_costs(plan, context.registry)
    candidate = LearnedCostModel.load(Registry(context.registry), body.name, body.version)
    ours, theirs = (evaluate(plan, replace(costs, kernel=model)) for model in (costs.kernel, candidate))
    found = ShadowPrice(
        production=costs.kernel.name, production_ms=ours.step_ms.value, candidate_ms=theirs.step_ms.value
    )
    return Reply(status=200, body=found.model_dump_json().encode())


def _readers() -> Mapping[str, Callable[[StoredModel], Any]]:
    """What reads a version, by kind."""
    from policies.planning.trained import TrainedPolicy

    own = (LearnedCostModel, LearnedCollectives, LearnedDense, CalibratedStep, TrainedPolicy)
    return {model.kind: model.from_stored for model in own}
