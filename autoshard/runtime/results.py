"""What is asked of a run, and what it measures, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from autoshard.core.accepted import FINITE_ABOVE_0, WHOLE_AT_LEAST_0, WHOLE_AT_LEAST_1, check_choice
from autoshard.core.plan import Estimate
from autoshard.core.step import CollectiveTime, Overlap, StepCollective, StepPart
from autoshard.evaluation.traffic import Stream

#: What runs count the bytes of.
SENT: Final = (*map(str, Stream), "sync", "group_sync")
#: What the thin engine overlaps; TorchRec's overlaps nothing.
OVERLAPS: Final = (Overlap.NONE, Overlap.PIPELINED)


class Engine(StrEnum):
    """What executes the embedding part of a step."""

    THIN = "thin"
    """autoshard's own engine on torch.distributed and FBGEMM."""
    TORCHREC = "torchrec"
    """TorchRec's DistributedModelParallel."""


class Device(StrEnum):
    """Where a plan is executed; `auto` is CUDA where every process gets a GPU of its own, else the CPU."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """One execution of a plan.

    Attributes:
        plan_path: File of the plan.
        engine: What executes its embedding part.
        steps: Measured training steps.
        warmup_steps: Steps before them that are not measured.
        verify_steps: Steps before those that are compared with the unsharded reference, from the initial weights.
        batch_size: Samples per step over all processes; None for the plan's.
        seed: Same seed, same weights and batches, whatever the placement.
        learning_rate: Learning rate of the embedding tables and of the dense layers.
        eps: Added to the root of the moments.
        device: Where to execute it.
        overlap: Which parts of a step run at the same time: `none` or, on the thin engine, `pipelined`. The results
            are the same.
        trace_path: File for a Chrome trace of two more steps of process 0, after the measured ones; None for none.

    Raises:
        InvalidOptionError: If a value is not accepted.
    """

    plan_path: str
    engine: Engine = Engine.THIN
    steps: int = 20
    warmup_steps: int = 3
    verify_steps: int = 0
    batch_size: int | None = None
    seed: int = 0
    learning_rate: float = 0.05
    eps: float = 1e-8
    device: Device = Device.AUTO
    overlap: Overlap = Overlap.NONE
    trace_path: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "engine", _member(Engine, self.engine, "engine"))
        object.__setattr__(self, "device", _member(Device, self.device, "device"))
        accepted = OVERLAPS if self.engine is Engine.THIN else (Overlap.NONE,)
        check_choice(self.overlap, accepted, "overlap")
        object.__setattr__(self, "overlap", Overlap(self.overlap))
        WHOLE_AT_LEAST_1.check_fields(self, "steps", "batch_size")
        WHOLE_AT_LEAST_0.check_fields(self, "warmup_steps", "verify_steps", "seed")
        FINITE_ABOVE_0.check_fields(self, "learning_rate", "eps")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTiming:
    """Medians over the measured steps of one process.

    Attributes:
        process: Rank of the process.
        plan_ranks: Ranks of the plan that it runs.
        num_tables: Tables that it holds.
        input_ms: Distribution of lengths and ids, waiting for other processes included.
        forward_kernel_ms: Fused lookups.
        forward_exchange_ms: All-to-all of pooled embeddings and putting them in order, waiting included.
        backward_exchange_ms: All-to-all of their gradients, waiting included.
        backward_kernel_ms: Backward kernels with the optimizer.
        sent_bytes: Mean bytes of a step, by `SENT`: `lengths`, `ids`, `forward` and `backward` that it sends to other
            processes; what it puts into collectives of gradients of rows that several processes hold (`sync`) and of
            weights and moments of replica groups (`group_sync`). Empty where the engine does not count them.
        sync_ms: Sums of gradients of rows that several processes hold, waiting included.
        collectives: Time of each kind of collective that the engine times, and what of it the step waited for.
    """

    process: int
    plan_ranks: tuple[int, ...]
    num_tables: int
    input_ms: float
    forward_kernel_ms: float
    forward_exchange_ms: float
    backward_exchange_ms: float
    backward_kernel_ms: float
    sync_ms: float = 0.0
    sent_bytes: Mapping[str, float] = field(default_factory=dict)
    collectives: Mapping[StepCollective, CollectiveTime] = field(default_factory=dict)

    @property
    def kernel_ms(self) -> float:
        """Forward and backward kernels."""
        return self.forward_kernel_ms + self.backward_kernel_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Largest errors against the unsharded reference, absolute unless said otherwise.

    Attributes:
        steps: Training steps that were compared.
        output_error: Of the pooled embeddings, over all steps, samples and features.
        weight_error: Of the tables' weights after the last step.
        moment_error: Of the tables' optimizer moments after the last step, relative to the table's largest. Row-wise
            AdaGrad cancels the scale of gradients in the weights; only the moments show it.
        dense_error: Of the dense layers' weights after the last step.
        weight_rounding: About what rounding explains of `weight_error` where weights are held in fp16, and of
            `output_error` for each row of a bag.
    """

    steps: int
    output_error: float
    weight_error: float
    moment_error: float
    dense_error: float
    weight_rounding: float = 0.0

    @property
    def max_error(self) -> float:
        """The largest of all errors."""
        return max(self.output_error, self.weight_error, self.moment_error, self.dense_error)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrediction:
    """What a plan predicted for a run, in milliseconds.

    Attributes:
        step_ms: Its step, with the 90% interval.
        parts: Parts of the step at their slowest ranks; None where the plan does not have them.
        reasons: How the run differs from what the prediction is for.
    """

    step_ms: Estimate
    parts: Mapping[StepPart, Estimate] | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run measured.

    Attributes:
        plan_path: File of the plan.
        engine: What executed the embedding part.
        device: `cpu` or `cuda`.
        backend: Of torch.distributed.
        num_processes: Processes that executed the plan.
        plan_world_size: Ranks that the plan was made for.
        folded: Whether processes ran several ranks each (rank r on process `r % num_processes`).
        batch_size: Samples per step over all processes.
        steps: Measured steps.
        warmup_steps: Steps left out before them.
        seed: Seed of weights and batches.
        interaction: `dot` or `concat`, as executed.
        step_ms: Median over the measured steps of the slowest process's time.
        samples_per_s: `batch_size` over the median step.
        balance: min / max over processes of kernel time.
        first_loss: Mean loss over the global batch of the first measured step.
        last_loss: The same of the last step.
        ranks: Medians per process.
        verification: Errors against the unsharded reference, where asked for.
        overlap: Which parts of a step ran at the same time.
        predicted: What the plan predicted; None where it has no prices.
    """

    plan_path: str
    engine: Engine
    device: Device
    backend: str
    num_processes: int
    plan_world_size: int
    folded: bool
    batch_size: int
    steps: int
    warmup_steps: int
    seed: int
    interaction: str
    step_ms: float
    samples_per_s: float
    balance: float
    first_loss: float
    last_loss: float
    ranks: tuple[RankTiming, ...]
    verification: Verification | None = None
    overlap: Overlap = Overlap.NONE
    predicted: RunPrediction | None = None

    def part_ms(self, part: StepPart) -> float:
        """A part at its slowest process; `dense` is what the step has beyond the longest sum of others."""
        others = [one for one in StepPart if one is not StepPart.DENSE]
        if part is StepPart.DENSE:
            known_ms = max((sum(getattr(rank, f"{one}_ms") for one in others) for rank in self.ranks), default=0.0)
            return max(0.0, self.step_ms - known_ms)
        return max((getattr(rank, f"{part}_ms") for rank in self.ranks), default=0.0)


def _member(choices: type[Engine] | type[Device], value: str, field: str) -> Engine | Device:
    check_choice(value, choices, field)
    return choices(value)
