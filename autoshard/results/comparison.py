"""What a report shows beside the prediction: measured kernel times, and planners side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint

from autoshard.core import ShardingPlan
from autoshard.core.errors import AutoshardError


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlan:
    """Kernel times of a plan's ranks as this machine ran them, in milliseconds per step."""

    forward_ms_R: tuple[float, ...]
    backward_ms_R: tuple[float, ...]
    """Backward kernel with the fused optimizer."""

    @property
    def kernel_ms_per_rank(self) -> tuple[float, ...]:
        """Forward plus backward of each rank."""
        return tuple(f + b for f, b in zip(self.forward_ms_R, self.backward_ms_R, strict=True))

    @property
    def max_kernel_ms(self) -> float:
        """Kernel time of the slowest rank."""
        return max(self.kernel_ms_per_rank)

    @property
    def balance(self) -> float:
        """Ratio of min to max over ranks of kernel time (AutoShard Sec. 4.3); 1 when nothing takes time."""
        slowest = self.max_kernel_ms
        return min(self.kernel_ms_per_rank) / slowest if slowest > 0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPlan:
    """One planner's line of a comparison.

    Attributes:
        planner: Its name.
        planning_s: Wall-clock seconds that it took.
        plan: The plan with its prediction; None when the planner found none.
        failure: Why there is no plan.
        measured: Kernel times measured by replaying the plan, if it was replayed.
        measured_noise: Share of a measured time by which ranks with identical work differed in the same rounds.
    """

    planner: str
    planning_s: float
    plan: ShardingPlan | None = None
    failure: AutoshardError | None = None
    measured: MeasuredPlan | None = None
    measured_noise: float = 0.0

    @property
    def predicted_max_ms(self) -> float | None:
        """Predicted kernel time of the slowest rank."""
        return self.plan.predicted.max_kernel_ms if self.plan and self.plan.predicted else None

    @property
    def prediction_error(self) -> float | None:
        """Predicted over measured kernel time of the slowest rank, minus 1."""
        if self.measured is None or self.predicted_max_ms is None or self.measured.max_kernel_ms <= 0:
            return None
        return self.predicted_max_ms / self.measured.max_kernel_ms - 1


class Comparison(tuple[ComparedPlan, ...]):
    """Planners on one task, one row each."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """What notebooks show; drawn by the reports, by name, which stand above this package."""
        return str(EntryPoint(name="html", value="autoshard.report.notebooks:comparison_html", group="").load()(self))


def speedups_over(baseline: str, rows: Sequence[ComparedPlan]) -> Mapping[str, float]:
    """How many times faster each planner's slowest rank is than that of the planner named `baseline`.

    Measured times are compared when every plan was measured, else predicted ones.

    Returns:
        Planner to factor (above 1 is faster); empty when the baseline is not among the rows or has no plan.
    """
    planned = [row for row in rows if row.plan is not None]
    measured = all(row.measured for row in planned)
    slowest_ms = {
        row.planner: row.measured.max_kernel_ms if measured and row.measured else row.predicted_max_ms
        for row in planned
    }
    baseline_ms = slowest_ms.get(baseline)
    return {name: baseline_ms / ms for name, ms in slowest_ms.items() if ms} if baseline_ms else {}
