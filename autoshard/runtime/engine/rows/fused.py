"""Fused kernels: one table-batched embedding of FBGEMM for all holdings that it can take.

Shape suffixes: F features, G samples of the global batch, O columns of the kernel's output, N rows, D embedding dim,
L lookups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    CacheAlgorithm,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import DEFAULT_ASSOC, ComputeDevice
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode as FbgemmDecayMode

from autoshard.core import DType, MemoryLevel, MemoryPlacement, Optimizer
from autoshard.core.declared import declared
from autoshard.core.optimizers import UpdateSettings, WeightDecayMode
from autoshard.core.plan import Payload
from autoshard.evaluation.executable import is_fused_on_gpu
from autoshard.runtime.engine.rows.averaging import UPDATED, RowStates
from autoshard.runtime.engine.rows.huge_pages import advise_huge_pages, huge_zeros
from autoshard.runtime.engine.staging import TORCH_DTYPES
from autoshard.runtime.releases import fused_embedding

#: FBGEMM's names of the optimizers that it fuses into the backward kernel.
FUSED_OPTIMIZERS = {
    Optimizer.SGD: EmbOptimType.EXACT_SGD,
    Optimizer.ROWWISE_ADAGRAD: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    Optimizer.ADAGRAD: EmbOptimType.EXACT_ADAGRAD,
    Optimizer.ADAM: EmbOptimType.ADAM,
    Optimizer.PARTIAL_ROWWISE_ADAM: EmbOptimType.PARTIAL_ROWWISE_ADAM,
}
_FUSED_ON_CPU = (Optimizer.SGD, Optimizer.ROWWISE_ADAGRAD, Optimizer.ADAGRAD)
_CACHE_POLICIES = {"lru": CacheAlgorithm.LRU, "lfu": CacheAlgorithm.LFU}
#: Of a table whose rows share memory.
_LEAST_KEPT_ROWS = 4096
_PRECISION = {DType.FP32: SparseType.FP32, DType.FP16: SparseType.FP16, DType.BF16: SparseType.BF16}


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedSettings(UpdateSettings):
    """What the kernels of all tables have in common.

    Attributes:
        seed: Seed of the initial weights.
        moment_scale: By which moments are divided under the root, where groups of processes train replicas of all
            tables: c of 2D's Algorithm 1.
        marks_rows: Whether kernels mark the rows that they update, for delta checkpoints of these alone; replica groups
            that average these alone do it anyway.
        output: As what kernels give embeddings out and take gradients (`kernel_output`).
        row_share: Share of the rows that have memory of their own in FBGEMM's kernels, see `kept_rows`; below 1 others
            share it with them, which is for measurements: nothing useful is trained so.

    Raises:
        InvalidOptionError: If a number is out of range.
    """

    seed: int = 0
    moment_scale: float = 1.0
    marks_rows: bool = False
    output: DType = DType.FP32
    row_share: float = 1.0

    @classmethod
    def of(cls, updates: UpdateSettings, *, seed: int, moment_scale: float = 1.0, row_share: float = 1.0) -> Self:
        """The settings of updates, with more of kernels."""
        settings = {one.name: getattr(updates, one.name) for one in declared(UpdateSettings)}
        return cls(**settings, seed=seed, moment_scale=moment_scale, row_share=row_share)

    def scale_of(self, optimizer: Optimizer) -> float:
        """What learning rate and epsilon are multiplied by for an optimizer that does not divide its moments.

        Source:
            2D Algorithm 1: eta / (sqrt(v / c) + eps), which is eta sqrt(c) / (sqrt(v) + eps sqrt(c)).
        """
        return math.sqrt(self.moment_scale) if optimizer.divides_by_sums else 1.0


def kept_rows(num_rows: int, row_share: float) -> int:
    """Rows that have memory of their own; row r is row r modulo that, so that the first rows, often the hot ones, do.

    Small tables keep all of theirs: they fit anywhere, and their lookups depend on it.
    """
    return min(num_rows, max(_LEAST_KEPT_ROWS, math.ceil(num_rows * row_share)))


class Verdict:
    """What is found of the gradients of one lookup, once they are there.

    Attributes:
        is_bad: Whether its step is kept from all tables, bool of shape (), on the device; None where none is.
    """

    __slots__ = ("is_bad",)

    def __init__(self) -> None:
        self.is_bad: torch.Tensor | None = None


class UpdateStep(NamedTuple):
    """What updates of a lookup depend on beside the settings."""

    learning_rate: float
    number: int
    """Of the training step, from 1: by it Adam and LAMB correct moments that began at 0."""
    verdict: Verdict | None = None
    """What is found of its gradients, once they are there; None where nobody looks."""


def is_fused(optimizer: Optimizer, dtype: DType, settings: FusedSettings, device: torch.device) -> bool:
    """Whether FBGEMM has a kernel of the device that updates rows so, as `FusedKernel` runs it.

    Its kernels of CPUs leave out `max_norm` and, of tables with one feature, the decay of weights (1.8).
    """
    if device.type == "cuda":
        return is_fused_on_gpu(optimizer, dtype)
    return optimizer in _FUSED_ON_CPU and settings.max_norm is None and not settings.weight_decay


class FusedKernel:
    """One table-batched embedding with the optimizer in its backward pass.

    Args:
        sizes: Rows and columns of its tables; of one width where rows are given out.
        dtype: Of the weights.
        optimizer: Of all tables.
        settings: Of the updates.
        device: Where to hold them.
        table_of_feature: For each feature the table that it looks up, rising; None where rows are given out, for
            lookups of the first table alone.
        memory: Where the rows live, and the cache of all of them; on a CPU all levels are one memory, without a cache.
        allocate: On a CPU, gives memory for so many numbers of `weights` or, in fp32, of `momentum1`; None for memory
            of its own, zeroed, in large pages where the system has them.

    Attributes:
        module: FBGEMM's.
        fills_ahead: Whether rows of a batch may be brought into the cache ahead of its lookup.
        shares_rows: Whether rows share memory (`FusedSettings.row_share`), so that ids are looked up as `shared` has
            them.
    """

    def __init__(
        self,
        sizes: Sequence[tuple[int, int]],
        dtype: DType,
        optimizer: Optimizer,
        settings: FusedSettings,
        device: torch.device,
        table_of_feature: Sequence[int] | None = None,
        memory: MemoryPlacement = MemoryPlacement(),  # noqa: B008 - frozen
        allocate: Callable[[str, int], torch.Tensor] | None = None,
    ) -> None:
        self._scale, self._moments = settings.scale_of(optimizer), optimizer.moments
        self._dtype = TORCH_DTYPES[dtype]
        kept = [(kept_rows(rows, settings.row_share), dim) for rows, dim in sizes]
        self.shares_rows = kept != list(sizes)
        if self.shares_rows:
            self._kept_F = torch.tensor([kept[table][0] for table in table_of_feature or [0]], device=device)
        sizes = kept
        self._num_features = len(table_of_feature or [0])
        on_gpu = device.type == "cuda"
        location = _location(memory) if on_gpu else EmbeddingLocation.HOST
        compute = ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU
        with _float32_by_default():
            self.module = fused_embedding(
                [(rows, dim, location, compute) for rows, dim in sizes],
                None if on_gpu else _host_memory(sizes, optimizer, allocate or self._zeros),
                feature_table_map=[0] if table_of_feature is None else list(table_of_feature),
                pooling_mode=PoolingMode.NONE if table_of_feature is None else PoolingMode.SUM,
                weights_precision=_PRECISION[dtype],
                output_dtype=_PRECISION[settings.output],
                optimizer=FUSED_OPTIMIZERS[optimizer],
                learning_rate=settings.learning_rate * self._scale,
                **update_options(settings, self._scale),
                # Ids are checked before they are sent.
                bounds_check_mode=BoundsCheckMode.NONE,
                stochastic_rounding=rounds_at_random(dtype, device),
                device=device,
                **(_cache_options(sizes, dtype, memory) if on_gpu else {}),
            )
        self.fills_ahead = on_gpu and _is_filled_ahead(memory)
        self._step = UpdateStep(settings.learning_rate, 1)
        self._rows_T = [rows for rows, _ in sizes]
        self._marks_N: torch.Tensor | None = None
        if settings.marks_rows:
            self._marks_N = torch.zeros(sum(self._rows_T), dtype=torch.uint8, device=device)
            first_T = [0, *itertools.accumulate(self._rows_T)]
            self._first_F = torch.tensor([first_T[table] for table in table_of_feature or [0]], device=device)

    def _zeros(self, name: str, number: int) -> torch.Tensor:
        kept = self._dtype if name == "weights" else torch.float32
        if name == "weights" and not self.shares_rows:
            return huge_zeros(number, kept, torch.device("cpu"))
        # Nobody writes the others before training does, whose first steps would take longer.
        return advise_huge_pages(torch.empty(number, dtype=kept)).zero_()

    def shared(self, ids_L: torch.Tensor, lengths_FG: torch.Tensor | None) -> torch.Tensor:
        """Ids of the rows whose memory the rows share; lengths are those of bags, None for a lookup of rows."""
        if lengths_FG is None:
            return ids_L % self._kept_F
        return ids_L % torch.repeat_interleave(self._kept_F, lengths_FG.sum(dim=1), output_size=len(ids_L))

    def sums(
        self, ids_L: torch.Tensor, lengths_FG: torch.Tensor, weights_L: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sums over bags, of rows times their weights if there are some; shape (G, O)."""
        output_GO = self._looked_up(ids_L, _offsets(ids_L, lengths_FG), weights_L)
        if self._marks_N is not None:
            first_L = torch.repeat_interleave(self._first_F, lengths_FG.sum(dim=1), output_size=len(ids_L))
            _mark_with_gradient(output_GO, self._marks_N, ids_L + first_L)
        return output_GO

    def rows(self, ids_L: torch.Tensor) -> torch.Tensor:
        """Rows, of shape (L, D)."""
        output_LD = self._looked_up(ids_L, _offsets(ids_L))
        if self._marks_N is not None:
            _mark_with_gradient(output_LD, self._marks_N, ids_L)
        return output_LD

    def fill(
        self, ids_L: torch.Tensor, lengths_FG: torch.Tensor | None, forward_stream: torch.cuda.Stream | None
    ) -> None:
        """Brings the rows of the next lookup into the cache, where they stay until its backward pass.

        Called after a lookup and before its backward pass, on a stream of its own, always the same; FBGEMM's backward
        pass waits for it, and it for FBGEMM's backward pass.

        Args:
            ids_L: Ids of the next lookup.
            lengths_FG: Its bag lengths; None for a lookup of rows.
            forward_stream: Where the lookup will be.
        """
        self.module.prefetch(ids_L, _offsets(ids_L, lengths_FG), forward_stream=forward_stream)

    def forget_fill(self) -> None:
        """Lets rows that were brought for the next lookup leave the cache: another lookup comes before it."""
        if self.module.prefetch_stream is not None:
            torch.cuda.current_stream().wait_stream(self.module.prefetch_stream)
        while self.module.timesteps_prefetched:
            self.module.timesteps_prefetched.pop()
            places_L = self.module.lxu_cache_locations_list.pop()
            torch.ops.fbgemm.lxu_cache_locking_counter_decrement(self.module.lxu_cache_locking_counter, places_L)

    def _looked_up(
        self, ids_L: torch.Tensor, offsets: torch.Tensor, weights_L: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.fills_ahead:
            # A lookup keeps its rows in the cache until its backward pass; without one, for good.
            self.module.lock_cache_line = torch.is_grad_enabled()
        if len(self._moments) > 1:
            # FBGEMM counts lookups, also those that are not trained on; the second number is read where the first is 0.
            self.module.iter_cpu.fill_(self._step.number - 1)
            self.module.iter.fill_(self._step.number - 1)
        weights: tuple[torch.Tensor, ...] = ()
        if weights_L is not None:
            # Weights get no gradients: FBGEMM's backward pass makes some of all features that do not say so, in three
            # to four times the time on a CPU.
            weights = weights_L, weights_L.new_zeros(self._num_features, dtype=torch.int32)
        if not torch.is_inference_mode_enabled():
            output: torch.Tensor = self.module(ids_L, offsets, *weights)
            return output
        # FBGEMM's kernels of CPUs are found by way of autograd, which inference mode leaves out.
        with torch.inference_mode(mode=False), torch.no_grad():
            output = self.module(ids_L, offsets, *weights)
        return output

    def set_step(self, step: UpdateStep) -> None:
        """Sets the step of lookups from now on; those that were made keep theirs."""
        if step.learning_rate != self._step.learning_rate:
            self.module.set_learning_rate(step.learning_rate * self._scale)
        self._step = step

    def states(self, *, writes: bool) -> list[RowStates]:
        """State of the tables; rows that are cached are written back first.

        Args:
            writes: Whether the state is written to, in the memory behind the cache: rows are no longer cached then.
        """
        self.module.flush()
        if writes:
            self.module.reset_cache_states()
        weights = self.module.split_embedding_weights()
        states = self.module.split_optimizer_states() or [()] * len(weights)
        moments = [{one.name: kept for one, kept in zip(self._moments, of, strict=True)} for of in states]
        marks: list[Any] = [None] * len(weights)
        if self._marks_N is not None:
            marks = list(torch.split(self._marks_N, self._rows_T))
        return [RowStates(*state) for state in zip(weights, moments, marks, strict=True)]


def _offsets(ids_L: torch.Tensor, lengths_FG: torch.Tensor | None = None) -> torch.Tensor:
    """Where bags begin, and the end; without lengths, a bag for each id.

    A GPU's kernel gives a bag to one warp. On a CPU, bags of one id take as long as one bag of all of them.
    """
    if lengths_FG is None:
        return torch.arange(len(ids_L) + 1, device=ids_L.device)
    offsets: torch.Tensor = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths_FG.reshape(-1).long())
    return offsets


def kernel_output(payload: Payload, device: torch.device) -> DType:
    """As what a device's kernels give embeddings out, and take their gradients.

    Where both travel as fp16 or as bf16, a GPU's kernels write and read these themselves, which saves passes over all
    embeddings and changes no number: they add up in fp32, round to the nearest as a cast does, and read gradients that
    are of that format already. On a CPU, the backward pass would add up in fp16.
    """
    is_cast = payload.forward is payload.backward and payload.forward in (DType.FP16, DType.BF16)
    return payload.forward if is_cast and device.type == "cuda" else DType.FP32


def rounds_at_random(dtype: DType, device: torch.device) -> bool:
    """Whether updated weights are rounded up or down at random, with their value as the mean.

    To the nearest, fp16 loses updates below half the gap to the next number, which is 5e-4 of a weight: AdaGrad's
    become that small; bf16 loses more. On a CPU, FBGEMM has nothing else.
    """
    return dtype is not DType.FP32 and device.type == "cuda"


@contextmanager
def _float32_by_default() -> Iterator[None]:
    """FBGEMM makes moments and the learning rate in the default dtype, which the trainer may have set to another."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


def _mark_with_gradient(output: torch.Tensor, marks_N: torch.Tensor, rows_L: torch.Tensor) -> None:
    """Marks the rows of a lookup once its gradient is there, which the kernel updates them with.

    Args:
        output: Of the lookup.
        marks_N: The marks.
        rows_L: The rows.
    """

    def mark(_: torch.Tensor) -> None:
        marks_N[rows_L] = UPDATED

    if output.requires_grad:
        output.register_hook(mark)  # type: ignore[no-untyped-call]


def _location(memory: MemoryPlacement) -> EmbeddingLocation:
    """Where FBGEMM keeps rows on a GPU."""
    if memory.level is MemoryLevel.HBM:
        return EmbeddingLocation.DEVICE
    return EmbeddingLocation.MANAGED_CACHING if memory.cache_bytes else EmbeddingLocation.MANAGED


def _is_filled_ahead(memory: MemoryPlacement) -> bool:
    """Whether FBGEMM can fill the cache before a lookup: those of one policy."""
    return (
        _location(memory) is EmbeddingLocation.MANAGED_CACHING and _CACHE_POLICIES[memory.policy] is CacheAlgorithm.LRU
    )


def update_options(settings: UpdateSettings, scale: float = 1.0) -> dict[str, Any]:
    """FBGEMM's options of updates, but for the learning rate.

    Args:
        settings: Of the updates.
        scale: By which the learning rate is multiplied, and with it a decoupled weight decay.
    """
    options = {"eps": settings.eps * scale, "beta1": settings.beta1, "beta2": settings.beta2}
    if settings.weight_decay:
        is_l2 = settings.weight_decay_mode is WeightDecayMode.L2
        options["weight_decay"] = settings.weight_decay if is_l2 else settings.weight_decay / scale
        options["weight_decay_mode"] = FbgemmDecayMode.L2 if is_l2 else FbgemmDecayMode.DECOUPLE
    return options if settings.max_norm is None else options | {"max_norm": settings.max_norm}


def _cache_options(sizes: Sequence[tuple[int, int]], dtype: DType, memory: MemoryPlacement) -> dict[str, Any]:
    """FBGEMM's options for a set-associative cache of so many bytes, whose lines are as wide as the widest table."""
    if not memory.cache_bytes:
        return {}
    line_bytes = max(dim for _, dim in sizes) * dtype.num_bytes
    return {
        "cache_algorithm": _CACHE_POLICIES[memory.policy],
        "cache_sets": max(1, memory.cache_bytes // (DEFAULT_ASSOC * line_bytes)),
        "prefetch_pipeline": _is_filled_ahead(memory),
    }


def _host_memory(
    sizes: Sequence[tuple[int, int]], optimizer: Optimizer, allocate: Callable[[str, int], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Memory for the weights and moments of a CPU's kernel."""
    numbers = {
        "weights": sum(rows * dim for rows, dim in sizes),
        **{
            f"momentum{number}": sum(rows * moment.width(dim) for rows, dim in sizes)
            for number, moment in enumerate(optimizer.moments, 1)
        },
    }
    return {name: allocate(name, number) for name, number in numbers.items() if number}
