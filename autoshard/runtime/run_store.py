"""A folder of runs: plans, and what their steps took, which calibrations of steps learn from."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from autoshard.core import ShardingPlan
from autoshard.core.errors import AutoshardError, SampleStoreError
from autoshard.core.machine import MeasuredMachine, device_family
from autoshard.core.step import Overlap
from autoshard.formats import atomic_write, plan_from_json, plan_to_json
from autoshard.formats.documents.machine_json import MACHINE
from autoshard.hardware import this_processor
from autoshard.runtime.result_json import RUN
from autoshard.runtime.results import RunResult

_SCHEMA: Final = "autoshard.run-record/1"
_SUFFIX: Final = ".run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run of a store.

    Attributes:
        plan: What was executed, with the batch size of the run.
        result: What was measured.
        machine: Whose processors ran it; None of runs on GPUs, whose models the plan names, and of older records.
    """

    plan: ShardingPlan
    result: RunResult
    machine: MeasuredMachine | None = None

    @property
    def is_comparable(self) -> bool:
        """Whether predictions are of such runs: the thin engine's, a process for each rank, on the plan's device."""
        result = self.result
        return (
            result.steps > 0
            and result.engine == "thin"
            and result.overlap is Overlap.NONE
            and not result.folded
            and (device_family(self.plan.topology.device) == "cpu") == (result.device == "cpu")
        )


def append_run(store: Path, plan: ShardingPlan, result: RunResult) -> Path:
    """Adds a run of this machine to a store, which is made if it is not there; returns its file.

    Raises:
        SampleStoreError: If it cannot be written.
    """
    plan = replace(plan, tables=replace(plan.tables, batch_size=result.batch_size))
    document: dict[str, Any] = {"schema": _SCHEMA, "plan": plan_to_json(plan), "run": RUN.to_json(result)}
    if result.device == "cpu":
        document["machine"] = MACHINE.write(this_processor())
    file = store / f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:8]}{_SUFFIX}"
    try:
        atomic_write(file, json.dumps(document, allow_nan=False))
    except AutoshardError as error:
        raise SampleStoreError(error.message, source=str(store)) from error
    return file


def read_runs(store: Path) -> Iterator[RunRecord]:
    """The runs of a store, the oldest first.

    Raises:
        SampleStoreError: If the folder or a file of it cannot be read.
    """
    if not store.is_dir():
        raise SampleStoreError("is no folder of runs; `autoshard run --append-to` makes one", source=str(store))
    for file in sorted(store.glob(f"*{_SUFFIX}")):
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
            if document.get("schema") != _SCHEMA:
                raise SampleStoreError(f"must be of schema {_SCHEMA}", source=str(file))
            machine = MACHINE.read(document["machine"], "machine") if "machine" in document else None
            plan, result = plan_from_json(document["plan"]), RUN.from_json(document["run"])
            yield RunRecord(plan=plan, result=result, machine=machine)
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise SampleStoreError(f"cannot be read: {str(error).splitlines()[0]}", source=str(file)) from error
