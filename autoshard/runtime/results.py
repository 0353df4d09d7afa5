"""What is asked of a run, and what it measures, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Final, TypeVar

from autoshard.core.accepted import (
    AT_LEAST_0,
    AT_LEAST_1,
    FINITE_ABOVE_0,
    SHARE,
    WHOLE_AT_LEAST_0,
    WHOLE_AT_LEAST_1,
    Range,
    check_choice,
)
from autoshard.core.choices import BadIds, Device, Engine
from autoshard.core.declared import Meaning, Size, Written
from autoshard.core.errors import InvalidOptionError
from autoshard.core.optimizers import UpdateSettings
from autoshard.core.plan import Estimate
from autoshard.core.step import CollectiveTime, Overlap, StepCollective, StepPart
from autoshard.evaluation.traffic import Stream

T = TypeVar("T", bound=StrEnum)

#: What runs count the bytes of.
SENT: Final = (*map(str, Stream), "sync", "group_sync")
#: Dense features of a sample where a plan describes no dense layers.
DEFAULT_DENSE_FEATURES: Final = 13
#: What the thin engine overlaps; TorchRec's overlaps nothing.
OVERLAPS: Final = (Overlap.NONE, Overlap.PIPELINED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest(UpdateSettings):
    """One execution of a plan.

    Attributes:
        plan_path: File of the plan.
        engine: What executes its embedding part.
        steps: Measured training steps; None to train until the files of samples end.
        warmup_steps: Steps before them that are not measured.
        verify_steps: Steps before those that are compared with the unsharded reference, from the initial weights.
        batch_size: Samples per step over all processes; None for the plan's.
        seed: Same seed, same weights and batches, whatever the placement.
        learning_rate: Learning rate of the embedding tables and of the dense layers, above 0.
        device: Where to execute it.
        overlap: Which parts of a step run at the same time: `none` or, on the thin engine, `pipelined`. The results
            are the same.
        trace_path: File for a Chrome trace of two more steps of process 0, after the measured ones; None for none.
        profile_path: File for a Chrome trace of the last measured steps of all processes, see `runtime.timeline`; None
            for none.
        access_path: File for the tables as all processes look them up, on the thin engine; None to count no lookups.
        data_path: File or folder of samples to train on; None for generated ones.
        epochs: How often the files are read.
        shuffle: Samples that are shuffled among each other; 0 for the files' order.
        balance: Whether samples of a batch are dealt to processes so that all have about as many lookups.
        drift_every: Of generated samples: steps after which other rows are hot; 0 for never.
        on_bad_ids: What becomes of ids in files that are no rows.
        checkpoints_path: Folder of checkpoints, where a job goes on from the last one; None for none.
        checkpoint_every: Steps from one checkpoint to the next.
        keep: How many checkpoints are kept.
        replan_every: Steps after which the job plans again for what it looks up; 0 for never.
        replan_horizon: Steps within which changing the plan has to pay off; the job's own where these are fewer.
        metrics_path: Folder for the measures of every so many steps, see `training.metrics`; None for none.
        metrics_every: Steps from one of these to the next.
        virtual_time: Whether steps are timed as if each rank had a core of its own, and as if the wire were that of the
            topology; see `runtime.virtual`. A rank is a process then, on a CPU of this machine.
        topology_path: In virtual time, the topology of the wire; None for the plan's.
        registry_path: In virtual time, folder of trained models of collectives; None for the default.
        row_share: In virtual time, share of the rows that have memory of their own (`FusedSettings.row_share`); None
            for all of them if they fit this machine, else a half, a quarter and so on.

    Raises:
        InvalidOptionError: If a value is not accepted.
    """

    plan_path: str
    engine: Engine = Engine.THIN
    steps: int | None = 20
    warmup_steps: int = 3
    verify_steps: int = 0
    batch_size: int | None = None
    seed: int = 0
    learning_rate: Annotated[float, FINITE_ABOVE_0, Meaning("Of the tables and of the dense layers.")] = 0.05
    device: Device = Device.AUTO
    overlap: Overlap = Overlap.NONE
    trace_path: str | None = None
    profile_path: str | None = None
    access_path: str | None = None
    data_path: str | None = None
    epochs: int = 1
    shuffle: int = 0
    balance: bool = False
    drift_every: int = 0
    on_bad_ids: BadIds = BadIds.ERROR
    checkpoints_path: str | None = None
    checkpoint_every: int = 1000
    keep: int = 3
    replan_every: int = 0
    replan_horizon: float = 10_000.0
    metrics_path: str | None = None
    metrics_every: int = 100
    virtual_time: bool = False
    topology_path: str | None = None
    registry_path: str | None = None
    row_share: float | None = None

    def __post_init__(self) -> None:
        UpdateSettings.__post_init__(self)
        object.__setattr__(self, "engine", _member(Engine, self.engine, "engine"))
        object.__setattr__(self, "device", _member(Device, self.device, "device"))
        object.__setattr__(self, "on_bad_ids", _member(BadIds, self.on_bad_ids, "on_bad_ids"))
        accepted = OVERLAPS if self.engine is Engine.THIN else (Overlap.NONE,)
        check_choice(self.overlap, accepted, "overlap")
        object.__setattr__(self, "overlap", Overlap(self.overlap))
        if self.access_path is not None and self.engine is not Engine.THIN:
            raise InvalidOptionError("lookups are counted by the engine thin alone", field="access_path")
        WHOLE_AT_LEAST_1.check_fields(
            self, "steps", "batch_size", "epochs", "checkpoint_every", "keep", "metrics_every"
        )
        whole = ("warmup_steps", "verify_steps", "seed", "shuffle", "drift_every", "replan_every")
        WHOLE_AT_LEAST_0.check_fields(self, *whole)
        FINITE_ABOVE_0.check_fields(self, "replan_horizon")
        if self.steps is None and self.data_path is None:
            raise InvalidOptionError("must be told: generated samples have no end", field="steps")
        if self.data_path is not None and self.drift_every:
            raise InvalidOptionError("must be 0: samples of files are as they are", field="drift_every")
        if self.balance and self.data_path is None:
            raise InvalidOptionError("is for files of samples: generated batches are even", field="balance")
        if self.is_job and self.verify_steps:
            raise InvalidOptionError(
                "must be 0 where checkpoints are kept, files are trained on or plans are changed", field="verify_steps"
            )
        needed = "checkpoints are kept" if self.checkpoints_path is not None else "plans are changed"
        if (self.checkpoints_path is not None or self.replan_every) and self.engine is not Engine.THIN:
            raise InvalidOptionError(f"must be thin where {needed}, got {self.engine}", field="engine")
        self._check_virtual()

    def _check_virtual(self) -> None:
        """Refuses what virtual time has no meaning for, or what means nothing without it."""
        if not self.virtual_time:
            for field in ("topology_path", "registry_path", "row_share"):
                if getattr(self, field) is not None:
                    raise InvalidOptionError("is for virtual time alone", field=field)
            return
        if self.device is Device.CUDA:
            raise InvalidOptionError("must be auto or cpu in virtual time, got cuda", field="device")
        SHARE.check_fields(self, "row_share")
        if self.row_share is not None and self.row_share < 1:
            if self.verify_steps:
                raise InvalidOptionError("must be 0 where rows share memory", field="verify_steps")
            if self.engine is not Engine.THIN:
                raise InvalidOptionError(f"must be thin where rows share memory, got {self.engine}", field="engine")
        refused = {
            "trace_path": self.trace_path is not None,
            "checkpoints_path": self.checkpoints_path is not None,
            "metrics_path": self.metrics_path is not None,
            "replan_every": self.replan_every > 0,
        }
        for field in (one for one, is_given in refused.items() if is_given):
            raise InvalidOptionError("must be left out in virtual time", field=field)

    @property
    def last_step(self) -> int | None:
        """Number of the last step, those of the warm-up counted; None where the data decide."""
        return None if self.steps is None else self.warmup_steps + self.steps

    @property
    def is_job(self) -> bool:
        """Whether it trains on files, keeps checkpoints or changes its plan, beside being measured."""
        return self.data_path is not None or self.checkpoints_path is not None or self.replan_every > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTiming:
    """Medians over the measured steps of one process."""

    process: Annotated[int, Meaning("Rank of the process.")]
    plan_ranks: Annotated[tuple[int, ...], Size(), Meaning("Ranks of the plan that it runs.")]
    num_tables: Annotated[int, Meaning("Tables that it holds.")]
    input_ms: Annotated[float, Meaning("Exchange of ids and lengths, waiting for other processes included.")]
    forward_kernel_ms: Annotated[float, Meaning("Lookup and pooling.")]
    forward_exchange_ms: Annotated[float, Meaning("Embeddings to the ranks of their samples, waiting included.")]
    backward_exchange_ms: Annotated[float, Meaning("Gradients to the ranks of their rows, waiting included.")]
    backward_kernel_ms: Annotated[float, Meaning("Update of the rows, optimizer included.")]
    sync_ms: Annotated[
        float,
        Meaning("Sums of gradients of rows that several processes hold, waiting included.", written=Written.REQUIRED),
    ] = 0.0
    sent_bytes: Annotated[
        Mapping[str, float],
        Meaning(
            "Mean bytes of a step, by what is sent; empty where the engine does not count them.",
            written=Written.REQUIRED,
        ),
    ] = field(default_factory=dict)
    memory_bytes: Annotated[
        int,
        Meaning(
            "Most memory of the device that the process used; on a CPU, beyond what it had before tables were made.",
            written=Written.REQUIRED,
        ),
    ] = 0
    collectives: Annotated[
        Mapping[StepCollective, CollectiveTime],
        Meaning(
            "Times of the collectives that the engine times, in ms; those that took no time are left out. Exposed "
            "is the time that the step waited.",
            written=Written.REQUIRED,
        ),
    ] = field(default_factory=dict)
    work_ms: Annotated[
        Mapping[StepPart, float],
        Meaning(
            "CPU time of the thread that trains, by part of the step, in ms: no wait is in it. `dense` is all that "
            "belongs to no other part. Empty on a GPU, and of runs before this was counted."
        ),
    ] = field(default_factory=dict)

    @property
    def kernel_ms(self) -> float:
        """Forward and backward kernels."""
        return self.forward_kernel_ms + self.backward_kernel_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Largest errors against the unsharded reference, absolute unless said otherwise."""

    steps: Annotated[int, Meaning("Training steps that were compared.")]
    output_error: Annotated[float, Meaning("Of pooled embeddings, over all steps, samples and features.")]
    weight_error: Annotated[float, Meaning("Of the tables' weights after the last step.")]
    moment_error: Annotated[
        float,
        Meaning(
            "Of the tables' optimizer moments after the last step, over the table's largest: row-wise AdaGrad "
            "cancels the scale of gradients in the weights, only the moments show it."
        ),
    ]
    dense_error: Annotated[float, Meaning("Of the dense layers' weights after the last step.")]
    weight_rounding: Annotated[
        float,
        Meaning(
            "About what rounding explains of weights that are held in fp16, and of output_error for each row of a bag."
        ),
    ] = 0.0

    @property
    def max_error(self) -> float:
        """The largest of all errors."""
        return max(self.output_error, self.weight_error, self.moment_error, self.dense_error)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrediction:
    """What a plan predicted for a run, in milliseconds."""

    step_ms: Annotated[Estimate, Meaning("Predicted step, in ms, with its 90% interval.")]
    parts: Annotated[
        Mapping[StepPart, Estimate] | None,
        Meaning("Its parts at their slowest ranks, in ms; null where the plan has none."),
    ]
    reasons: Annotated[tuple[str, ...], Size(), Meaning("How the run differs from what the prediction is for.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """A decision whether a running job changes its plan."""

    counted_at: Annotated[int, Meaning("Steps that the job had made when lookups were counted for it.")]
    decided_at: Annotated[int, Meaning("Steps that it had made when all processes heard of it.")]
    is_changed: Annotated[bool, Meaning("Whether the plan was changed.")]
    reason: Annotated[str, Size(), Meaning("Why.")]
    gain: Annotated[
        float | None, Range(at_least=-1), Meaning("Predicted step before over that after, minus 1; null if none was.")
    ] = None
    migration_bytes: Annotated[float | None, Meaning("Bytes that ranks receive, as predicted.")] = None
    migration_ms: Annotated[float | None, Meaning("Predicted time of that.")] = None
    adopt_ms: Annotated[float | None, Meaning("How long going over to the new plan took; null where it stayed.")] = None


class ResumedPlan(StrEnum):
    """Which plan a job goes on under whose checkpoint has one that it had adopted."""

    ADOPTED = "adopted"
    PLAN_CHANGED = "plan_changed"
    PROCESSES_CHANGED = "processes_changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """What became of a training job."""

    trained_steps: Annotated[int, Meaning("Steps that the job has made in all, those before restarts counted.")]
    resumed_from: Annotated[int | None, Meaning("Step of the checkpoint that it went on from; null if from none.")]
    restarts: Annotated[int, Meaning("How often it was started again after a process failed.")]
    is_stopped: Annotated[bool, Meaning("Whether SIGTERM ended it, after a checkpoint where these are kept.")]
    skipped_lines: Annotated[int, Meaning("Lines or rows of the files that are no samples and were left out.")]
    first_skipped: Annotated[str | None, Meaning("What is wrong with the first of these; null without.")]
    plan_changes: Annotated[
        tuple[PlanChange, ...],
        Size(),
        Meaning("Decisions about the plan, where the job plans again.", written=Written.ALWAYS),
    ] = ()
    resumed_plan: Annotated[
        ResumedPlan | None,
        Meaning(
            "Which plan it went on under, where its checkpoint has an adopted one: that (`adopted`), or the command's, "
            "because the job was begun with another (`plan_changed`) or on other processes (`processes_changed`)."
        ),
    ] = None
    resumed_learning_rate: Annotated[
        float | None, Meaning("Learning rate that it went on with, its checkpoint's, where the command's is another.")
    ] = None

    @property
    def has_adopted(self) -> bool:
        """Whether steps were made under another plan than the command's."""
        return self.resumed_plan is ResumedPlan.ADOPTED or any(one.is_changed for one in self.plan_changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualRun:
    """What times in virtual time are made of."""

    wire: Annotated[str, Meaning("The model that collectives took their times from.")]
    num_cores: Annotated[int, AT_LEAST_1, Meaning("Cores of this machine that the processes took turns on.")]
    row_share: Annotated[float, SHARE, Meaning("Share of the rows of large tables that had memory of their own.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run measured."""

    plan_path: Annotated[str, Size(), Meaning("File of the plan.")]
    engine: Annotated[Engine, Meaning("What executed the embedding part.")]
    device: Annotated[Device, Meaning("Where it ran.")]
    backend: Annotated[str, Meaning("Backend of torch.distributed: gloo, nccl or virtual.")]
    num_processes: Annotated[int, AT_LEAST_1, Meaning("Processes.")]
    plan_world_size: Annotated[int, AT_LEAST_1, Meaning("Ranks of the plan.")]
    folded: Annotated[bool, Meaning("Whether processes ran several ranks each: rank r on process r % num_processes.")]
    batch_size: Annotated[int, AT_LEAST_1, Meaning("Samples per step over all processes.")]
    steps: Annotated[int, AT_LEAST_0, Meaning("Measured steps; 0 where a job was resumed at its end.")]
    warmup_steps: Annotated[int, Meaning("Steps before them that were not measured.")]
    seed: Annotated[int, Meaning("Seed of weights and batches.")]
    interaction: Annotated[str, Meaning("How dense and embedded features met.")]
    step_ms: Annotated[float, Meaning("Time of a step at the slowest process, median over steps, in ms.")]
    samples_per_s: Annotated[float, Meaning("Throughput: batch_size over that step.")]
    balance: Annotated[float, Range(at_least=0, at_most=1), Meaning("Least over most kernel time of a process.")]
    first_loss: Annotated[float | None, Meaning("Mean loss over the batch of the first measured step; null without.")]
    last_loss: Annotated[float | None, Meaning("The same of the last step.")]
    ranks: Annotated[tuple[RankTiming, ...], Meaning("One entry per process: medians over the measured steps, in ms.")]
    verification: Annotated[
        Verification | None,
        Meaning("Largest absolute errors against an unsharded model; null without.", written=Written.REQUIRED),
    ] = None
    overlap: Annotated[Overlap, Meaning("Which parts of a step ran at the same time.", written=Written.REQUIRED)] = (
        Overlap.NONE
    )
    predicted: Annotated[
        RunPrediction | None, Meaning("What the plan predicted; null where it has no prices.", written=Written.REQUIRED)
    ] = None
    bad_steps: Annotated[int, AT_LEAST_0, Meaning("Steps with a loss or gradients that were not finite.")] = 0
    bad_ids: Annotated[int, AT_LEAST_0, Meaning("Ids in files that were no rows, and were clipped or left out.")] = 0
    job: Annotated[
        JobReport | None,
        Meaning("Of runs on files or with checkpoints; null for others.", written=Written.REQUIRED),
    ] = None
    step_low_ms: Annotated[float | None, Meaning("Lower end of the 95% interval of the median step, in ms.")] = None
    step_high_ms: Annotated[float | None, Meaning("Its upper end.")] = None
    virtual: Annotated[
        VirtualRun | None, Meaning("Of runs in virtual time: what their times are made of; left out for others.")
    ] = None

    @property
    def has_trained(self) -> bool:
        """Whether it made a step; a job that was resumed at its end makes none."""
        return self.job is None or self.job.trained_steps > (self.job.resumed_from or 0)

    def part_ms(self, part: StepPart) -> float:
        """A part at its slowest process; `dense` is what the step has beyond the longest sum of others."""
        others = [one for one in StepPart if one is not StepPart.DENSE]
        if part is StepPart.DENSE:
            known_ms = max((sum(getattr(rank, f"{one}_ms") for one in others) for rank in self.ranks), default=0.0)
            return max(0.0, self.step_ms - known_ms)
        return max((getattr(rank, f"{part}_ms") for rank in self.ranks), default=0.0)


def _member(choices: type[T], value: str, field: str) -> T:
    check_choice(value, choices, field)
    return choices(value)
