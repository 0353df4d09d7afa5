"""Results of runs (`autoshard.run/1`): what processes tell their launcher, and what `autoshard run --json` prints."""

from __future__ import annotations

from typing import Final

from autoshard.core.choices import Device
from autoshard.core.plan import Estimate
from autoshard.core.step import StepPart
from autoshard.formats.documents.document import Document
from autoshard.formats.documents.kinds import (
    Kind,
    derived,
    fields_of,
    list_of,
    number_in,
    one_of,
    optional,
    or_null,
    record,
    whole_number,
)
from autoshard.formats.documents.prediction_json import ESTIMATE, STEP_PARTS, collective_times
from autoshard.runtime.results import (
    OVERLAPS,
    JobReport,
    RankTiming,
    RunPrediction,
    RunResult,
    Verification,
    VirtualRun,
)

_MS: Final = number_in()
_BYTES: Final = number_in()
_SENT: Final[Kind[dict[str, float]]] = record(
    dict,
    optional("lengths", _BYTES, "Numbers of ids per sample and feature, to other processes."),
    optional("ids", _BYTES, "Ids, to other processes."),
    optional("forward", _BYTES, "Embeddings, to other processes."),
    optional("backward", _BYTES, "Gradients of embeddings, to other processes."),
    optional("sync", _BYTES, "Gradients of rows that several processes hold, into their collectives."),
    optional("group_sync", _BYTES, "Weights and moments of replica groups, into their collectives."),
    parts=dict,
)
_WORK: Final[Kind[dict[StepPart, float]]] = record(
    lambda **values: {StepPart(name): ms for name, ms in values.items()},
    *(optional(part.value, _MS, f"In `{part}`.") for part in StepPart),
    parts=lambda times: {part.value: ms for part, ms in times.items()},
)
_RANK: Final = record(
    RankTiming,
    *fields_of(RankTiming, sent_bytes=_SENT, collectives=collective_times(optional), work_ms=_WORK),
    derived("kernel_ms", _MS, "Forward and backward kernels."),
)
_VERIFICATION: Final = record(
    Verification, *fields_of(Verification), derived("max_error", _MS, "The largest of these.")
)
_PREDICTION: Final = record(RunPrediction, *fields_of(RunPrediction, known={Estimate: ESTIMATE}, parts=STEP_PARTS))
_JOB: Final = record(JobReport, *fields_of(JobReport))
_FIELDS: Final = fields_of(
    RunResult,
    device=one_of((Device.CPU, Device.CUDA)),
    seed=whole_number(0, 2**64),
    interaction=one_of(("dot", "concat")),
    overlap=one_of(OVERLAPS),
    ranks=list_of(_RANK),
    verification=or_null(_VERIFICATION),
    predicted=or_null(_PREDICTION),
    job=or_null(_JOB),
    virtual=record(VirtualRun, *fields_of(VirtualRun)),
)
RUN: Final = Document(
    name="run",
    meaning="What `autoshard run --json` prints: the measured steps of a plan.",
    make=RunResult,
    fields=lambda _: _FIELDS,
)
