"""Models that price at the upper end of another model's intervals.

Shape suffixes: N shards or parts of dense layers, S sets of shards, H width of a code, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.core import CommModel, CostModel, CostModels, KernelCosts, LocalShard, Topology
from autoshard.core.costs import (
    CodeArray,
    CollectiveName,
    DenseCostModel,
    DenseCosts,
    EvenCollective,
    KernelFloor,
    LinkBytes,
    MeasuredRange,
    MsArray,
    OutsideRange,
    Risk,
    kernel_floor,
)
from autoshard.core.dense import DenseShape
from autoshard.core.machine import KnowsMachine, MeasuredMachine
from autoshard.core.step import UPPER_END
from autoshard.evaluation.dense_time import AnalyticDenseModel


def at_upper_end(costs: CostModels, device: str) -> CostModels:
    """The same models, each at the upper end of its 90% interval.

    A step model stays as it is: it corrects the upper ends as it corrects the values.

    Args:
        costs: Models.
        device: Key of the device, for dense layers without a model.
    """
    dense = costs.dense or AnalyticDenseModel.for_device(device)
    return replace(
        costs,
        kernel=UpperEndKernels(costs.kernel),
        comm=UpperEndComm(costs.comm),
        dense=UpperEndDense(dense),
        risk=Risk.HIGH,
    )


class _UpperEnd:
    __slots__ = ()
    model: CostModel | CommModel | DenseCostModel

    @property
    def name(self) -> str:
        """What answers say."""
        return self.model.name + UPPER_END

    @property
    def measured_on(self) -> MeasuredMachine | None:
        """That of the model, if it knows it."""
        return self.model.measured_on if isinstance(self.model, KnowsMachine) else None


@dataclass(frozen=True, slots=True)
class UpperEndKernels(_UpperEnd):
    """95th percentiles of kernel times, if the model's intervals hold."""

    model: CostModel

    def notes(self, shards: Sequence[LocalShard]) -> tuple[OutsideRange, ...]:
        """Those of the model, if it has any."""
        return self.model.notes(shards) if isinstance(self.model, MeasuredRange) else ()

    def encode(self, shards: Sequence[LocalShard]) -> CodeArray:
        """Codes of single shards, shape (N, H)."""
        return self.model.encode(shards)

    def predict_ms(self, codes_SH: CodeArray) -> MsArray:
        """Upper ends, shape (S,)."""
        return self.model.predict_parts(codes_SH).high_ms_S

    def predict_parts(self, codes_SH: CodeArray) -> KernelCosts:
        """Forward and backward grow alike; nothing is above the upper end."""
        parts = self.model.predict_parts(codes_SH)
        kernel_ms_S = parts.kernel_ms_S
        growth_S = np.divide(parts.high_ms_S, kernel_ms_S, out=np.ones_like(kernel_ms_S), where=kernel_ms_S > 0)
        return KernelCosts(
            forward_ms_S=parts.forward_ms_S * growth_S,
            backward_ms_S=parts.backward_ms_S * growth_S,
            low_ms_S=parts.low_ms_S,
            high_ms_S=parts.high_ms_S,
        )

    def floor(self, codes_NH: CodeArray) -> KernelFloor:
        """The model's: no upper end is below the value."""
        return replace(kernel_floor(self.model, codes_NH), is_exact=False)


@dataclass(frozen=True, slots=True)
class UpperEndComm(_UpperEnd):
    """95th percentiles of the times of collectives, if the model's intervals hold."""

    model: CommModel

    def links_ms(self, links: LinkBytes, topology: Topology) -> MsArray:
        """Upper end per rank, shape (..., R)."""
        return self.model.bounds_ms("all_to_all", self.model.links_ms(links, topology), topology)[1]

    def collective_ms(self, collective: EvenCollective, num_bytes: float, topology: Topology) -> float:
        """Upper end."""
        value_ms = np.array([self.model.collective_ms(collective, num_bytes, topology)])
        return float(self.model.bounds_ms(collective, value_ms, topology)[1][0])

    def bounds_ms(self, collective: CollectiveName, value_ms: MsArray, topology: Topology) -> tuple[MsArray, MsArray]:
        """Nothing is above the upper end; below it is what the model's interval spans."""
        low, high = self.model.bounds_ms(collective, value_ms, topology)
        span = np.divide(low, high, out=np.ones_like(value_ms), where=high > 0)
        return value_ms * span, value_ms


@dataclass(frozen=True, slots=True)
class UpperEndDense(_UpperEnd):
    """95th percentiles of the times of dense layers, if the model's intervals hold."""

    model: DenseCostModel

    def predict_parts(self, shapes: Sequence[DenseShape]) -> DenseCosts:
        """Forward and backward grow alike."""
        costs = self.model.predict_parts(shapes)
        growth_N = costs.high_ms_N / (costs.forward_ms_N + costs.backward_ms_N)
        return replace(costs, forward_ms_N=costs.forward_ms_N * growth_N, backward_ms_N=costs.backward_ms_N * growth_N)
