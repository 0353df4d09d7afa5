"""Replayed plans (`autoshard.replay/1`): printed by `autoshard replay --json`, read by `autoshard show --replayed`."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Final

from autoshard.formats.documents.document import Document
from autoshard.formats.documents.kinds import (
    ANY_TEXT,
    TEXT,
    Field,
    derived,
    list_of,
    number_in,
    or_null,
    record,
    whole_number,
)
from autoshard.results.comparison import MeasuredPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedRank:
    """Kernels of a rank.

    Attributes:
        rank: The rank, numbered within a replica group.
        num_shards: Shards that it holds.
        forward_ms: Measured forward kernel.
        backward_ms: Measured backward kernel with the fused optimizer.
        predicted_ms: Predicted time of both; None without a prediction.
    """

    rank: int
    num_shards: int
    forward_ms: float
    backward_ms: float
    predicted_ms: float | None

    @property
    def kernel_ms(self) -> float:
        """Forward plus backward."""
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """A plan's kernels as a machine ran them, beside the prediction.

    Attributes:
        device: Key of the device, such as `cpu`.
        device_name: Full name of the processor.
        num_rounds: Runs of each rank that were measured.
        num_groups: Groups of ranks that had rounds of their own.
        ceiling_balance: Balance of ranks with identical work in the same rounds.
        predicted_max_kernel_ms: Predicted kernel time of the slowest rank; None without a prediction.
        cost_model: The model that predicted it.
        ranks: One entry per rank of a replica group.
    """

    device: str
    device_name: str
    num_rounds: int
    num_groups: int
    ceiling_balance: float
    predicted_max_kernel_ms: float | None
    cost_model: str | None
    ranks: tuple[ReplayedRank, ...]

    @property
    def measured(self) -> MeasuredPlan:
        """The measured times alone."""
        return MeasuredPlan(
            forward_ms_R=tuple(rank.forward_ms for rank in self.ranks),
            backward_ms_R=tuple(rank.backward_ms for rank in self.ranks),
        )

    @property
    def max_kernel_ms(self) -> float:
        """As of `MeasuredPlan`."""
        return self.measured.max_kernel_ms

    @property
    def balance(self) -> float:
        """As of `MeasuredPlan`."""
        return self.measured.balance

    @property
    def max_error(self) -> float | None:
        """Predicted over measured kernel time of the slowest rank, minus 1."""
        predicted_ms, measured_ms = self.predicted_max_kernel_ms, self.max_kernel_ms
        return None if predicted_ms is None or measured_ms <= 0 else predicted_ms / measured_ms - 1

    @property
    def mean_absolute_error(self) -> float | None:
        """Mean over ranks with work of |predicted / measured - 1|."""
        errors = [
            abs(rank.predicted_ms / rank.kernel_ms - 1)
            for rank in self.ranks
            if rank.predicted_ms is not None and rank.kernel_ms > 0
        ]
        return fmean(errors) if errors else None


_MS: Final = number_in()
_SHARE: Final = number_in(0, 1)
_RANK: Final = record(
    ReplayedRank,
    Field("rank", whole_number(), "The rank, numbered within a replica group."),
    Field("num_shards", whole_number(), "Shards that it holds."),
    Field("forward_ms", _MS, "Measured forward kernel, in ms."),
    Field("backward_ms", _MS, "Measured backward kernel with the fused optimizer, in ms."),
    derived("kernel_ms", _MS, "Both together, in ms."),
    Field("predicted_ms", or_null(_MS), "Predicted kernel time, in ms; null without a prediction."),
)
_MAX_ERROR: Final = "Predicted over measured kernel time of the slowest rank, minus 1; null without a prediction."
_FIELDS: Final = (
    Field("device", TEXT, "Key of the device, such as cpu."),
    Field("device_name", ANY_TEXT, "Full name of the processor."),
    Field("num_rounds", whole_number(), "Runs of each rank that were measured."),
    Field("num_groups", whole_number(), "Groups of ranks with rounds of their own; above 1 where memory is short."),
    derived("max_kernel_ms", _MS, "Measured kernel time of the slowest rank, in ms."),
    derived("balance", _SHARE, "Least over most measured kernel time of a rank (AutoShard)."),
    Field("ceiling_balance", _SHARE, "The same of ranks with identical work; differences above it are noise."),
    Field("predicted_max_kernel_ms", or_null(_MS), "Predicted time of the slowest rank, in ms; null if unpredicted."),
    derived("max_error", or_null(number_in(-1)), _MAX_ERROR),
    derived(
        "mean_absolute_error", or_null(_MS), "Mean over ranks with work of |predicted / measured - 1|; null likewise."
    ),
    Field("cost_model", or_null(TEXT), "The model that predicted; null without a prediction."),
    Field("ranks", list_of(_RANK), "One entry per rank of a replica group."),
)
REPLAY: Final = Document(
    name="replay",
    meaning="What `autoshard replay --json` prints and `autoshard show --replayed` reads: measured kernels of a plan.",
    make=ReplayResult,
    fields=lambda _: _FIELDS,
)
