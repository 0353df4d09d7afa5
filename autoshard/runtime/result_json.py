"""Results of runs (`autoshard.run/1`): what processes tell their launcher, and what `autoshard run --json` prints."""

from __future__ import annotations

from typing import Final

from autoshard.formats.documents.document import Document
from autoshard.formats.documents.kinds import (
    ANY_TEXT,
    FLAG,
    TEXT,
    Field,
    Kind,
    derived,
    list_of,
    number_in,
    one_of,
    optional,
    or_null,
    record,
    whole_number,
)
from autoshard.formats.documents.prediction_json import ESTIMATE, STEP_PARTS, collective_times
from autoshard.runtime.results import OVERLAPS, Device, Engine, RankTiming, RunPrediction, RunResult, Verification

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
_COLLECTIVES: Final = (
    "Times of the collectives that the engine times, in ms; those that took no time are left out. Exposed is the time "
    "that the step waited."
)
_RANK: Final = record(
    RankTiming,
    Field("process", whole_number(), "Rank of the process."),
    Field("plan_ranks", list_of(whole_number(), 0), "Ranks of the plan that it runs."),
    Field("num_tables", whole_number(), "Tables that it holds."),
    Field("input_ms", _MS, "Exchange of ids and lengths, waiting for other processes included."),
    Field("forward_kernel_ms", _MS, "Lookup and pooling."),
    Field("forward_exchange_ms", _MS, "Embeddings to the ranks of their samples, waiting included."),
    Field("backward_exchange_ms", _MS, "Gradients to the ranks of their rows, waiting included."),
    Field("backward_kernel_ms", _MS, "Update of the rows, optimizer included."),
    Field("sync_ms", _MS, "Sums of gradients of rows that several processes hold, waiting included."),
    Field("sent_bytes", _SENT, "Mean bytes of a step; empty where the engine does not count them."),
    Field("collectives", collective_times(optional), _COLLECTIVES),
    derived("kernel_ms", _MS, "Forward and backward kernels."),
)
_ERROR: Final = number_in()
_VERIFICATION: Final = record(
    Verification,
    Field("steps", whole_number(), "Training steps that were compared."),
    Field("output_error", _ERROR, "Of pooled embeddings, over all steps, samples and features."),
    Field("weight_error", _ERROR, "Of the tables' weights after the last step."),
    Field("moment_error", _ERROR, "Of the tables' optimizer moments after the last step, over the table's largest."),
    Field("dense_error", _ERROR, "Of the dense layers' weights after the last step."),
    optional("weight_rounding", _ERROR, "What rounding explains of weights that are held in fp16, about.", 0.0),
    derived("max_error", _ERROR, "The largest of these."),
)
_PREDICTION: Final = record(
    RunPrediction,
    Field("step_ms", ESTIMATE, "Predicted step, in ms."),
    Field("parts", or_null(STEP_PARTS), "Its parts at their slowest ranks, in ms; null where the plan has none."),
    Field("reasons", list_of(ANY_TEXT, 0), "How the run differs from what the prediction is for."),
)
_FIELDS: Final = (
    Field("plan_path", ANY_TEXT, "File of the plan."),
    Field("engine", one_of(Engine), "What executed the embedding part."),
    Field("device", one_of((Device.CPU, Device.CUDA)), "Where it ran."),
    Field("backend", TEXT, "Backend of torch.distributed: gloo or nccl."),
    Field("num_processes", whole_number(1), "Processes."),
    Field("plan_world_size", whole_number(1), "Ranks of the plan."),
    Field("folded", FLAG, "Whether processes ran several ranks each."),
    Field("batch_size", whole_number(1), "Samples per step over all processes."),
    Field("steps", whole_number(1), "Measured steps."),
    Field("warmup_steps", whole_number(), "Steps before them that were not measured."),
    Field("seed", whole_number(0, 2**64), "Seed of weights and batches."),
    Field("interaction", one_of(("dot", "concat")), "How dense and embedded features met."),
    Field("step_ms", _MS, "Time of a step at the slowest process, median over steps, in ms."),
    Field("samples_per_s", number_in(), "Throughput: batch_size over that step."),
    Field("balance", number_in(0, 1), "Least over most kernel time of a process."),
    Field("first_loss", number_in(), "Mean loss over the batch of the first measured step."),
    Field("last_loss", number_in(), "The same of the last step."),
    Field("ranks", list_of(_RANK), "One entry per process: medians over the measured steps, in ms."),
    Field("verification", or_null(_VERIFICATION), "Largest absolute errors against an unsharded model; null without."),
    Field("overlap", one_of(OVERLAPS), "Which parts of a step ran at the same time."),
    Field("predicted", or_null(_PREDICTION), "What the plan predicted; null where it has no prices."),
)
RUN: Final = Document(
    name="run",
    meaning="What `autoshard run --json` prints: the measured steps of a plan.",
    make=RunResult,
    fields=lambda _: _FIELDS,
)
