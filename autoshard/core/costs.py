"""What a cost model is: an additive code per shard, and a price for a sum of codes.

Shape suffixes: N shards or parts of dense layers, S sets of shards, H width of a code, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from autoshard.core.choices import Risk as Risk
from autoshard.core.dense import DenseShape
from autoshard.core.shard import LocalShard
from autoshard.core.step import StepModel
from autoshard.core.topology import Topology

CodeArray = NDArray[np.float32]
MsArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCosts:
    """Predicted kernel times of S sets of shards, in milliseconds."""

    forward_ms_S: MsArray
    backward_ms_S: MsArray
    """Backward kernel with the fused optimizer."""
    low_ms_S: MsArray
    """Lower end of the 90% interval of forward plus backward."""
    high_ms_S: MsArray

    @property
    def kernel_ms_S(self) -> MsArray:  # noqa: N802 - a shape suffix
        """Forward plus backward."""
        return self.forward_ms_S + self.backward_ms_S


@runtime_checkable
class CostModel(Protocol):
    """Prices sets of shards that one rank runs in a fused kernel.

    A set is priced from the sum of its shards' codes, so that adding or removing a shard costs one vector
    addition. An empty set costs 0. Prices do not depend on the order of shards, and are finite and not negative.
    """

    @property
    def name(self) -> str:
        """What answers say, such as `learned:cpu` or `analytic:a100`."""
        ...

    def encode(self, shards: Sequence[LocalShard]) -> CodeArray:
        """Codes of single shards, shape (N, H).

        Raises:
            ModelError: If a shard is of a kind that the model cannot price.
        """
        ...

    def predict_ms(self, codes_SH: CodeArray) -> MsArray:
        """Kernel time, forward plus backward, of sets given by the sums of their codes; shape (S,)."""
        ...

    def predict_parts(self, codes_SH: CodeArray) -> KernelCosts:
        """As `predict_ms`, with forward and backward apart and with intervals."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFloor:
    """Times that no set of shards takes less than, in milliseconds: what each shard adds, and a base for each kernel.

    Attributes:
        forward_ms_N: Of single shards, shape (N,).
        backward_ms_N: The same of the backward kernels.
        kernel_N: Number of the fused kernel that each shard runs in; all alike where prices know of one only.
        forward_base_ms: Of each kernel that some shard of a set runs in.
        backward_base_ms: The same of the backward kernels.
        is_proven: Whether it holds for every set; else it is an estimate.
        is_exact: Whether sets take exactly this.
    """

    forward_ms_N: MsArray
    backward_ms_N: MsArray
    kernel_N: NDArray[np.int64]
    forward_base_ms: float
    backward_base_ms: float
    is_proven: bool = True
    is_exact: bool = False


@runtime_checkable
class LinearBelow(Protocol):
    """A cost model that states a linear function which no price is below, so that bounds of plans can be proven."""

    def floor(self, codes_NH: CodeArray) -> KernelFloor:
        """What shards add at least, from their codes; times are linear in the codes, so that sums of codes do, too."""
        ...


def kernel_floor(model: CostModel, codes_NH: CodeArray) -> KernelFloor:
    """The floor that a model states, or the prices of shards alone as an estimate.

    Fused kernels may take less than the sum of their shards alone, so the latter proves nothing.
    """
    if isinstance(model, LinearBelow):
        return model.floor(codes_NH)
    alone = model.predict_parts(codes_NH)
    return KernelFloor(
        forward_ms_N=alone.forward_ms_S,
        backward_ms_N=alone.backward_ms_S,
        kernel_N=np.zeros(len(codes_NH), dtype=np.int64),
        forward_base_ms=0.0,
        backward_base_ms=0.0,
        is_proven=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideRange:
    """A shard outside the range that a cost model was trained on.

    Attributes:
        table: The shard's table.
        field: Field of the shard that lies furthest outside.
        value: Its value.
        low: Least value of the training's shards.
        high: Their largest.
    """

    table: str
    field: str
    value: float
    low: float
    high: float

    @property
    def fault(self) -> str:
        """The value and the range: `num_bags 65,536, trained on 8 to 1,024`."""
        return f"{self.field} {_written(self.value)}, trained on {_written(self.low)} to {_written(self.high)}"

    @property
    def excess(self) -> float:
        """How many times the value is above the range, or the range above the value; above 1."""
        ends = (self.value, self.high) if self.value > self.high else (self.low, self.value)
        return ends[0] / ends[1] if ends[1] else float("inf")


def _written(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.4g}"


@runtime_checkable
class MeasuredRange(Protocol):
    """A cost model that knows what it was trained on."""

    def notes(self, shards: Sequence[LocalShard]) -> tuple[OutsideRange, ...]:
        """Which of the shards lie outside the range that the model was trained on, and how; one note for each."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelErrors:
    """Errors of a cost model's prices, by what they come from: standard deviations of independent normal effects.

    The logarithm of a set's measured over its predicted time is half the width of the logarithm of its 90% interval,
    `drift` left out, times the sum of the effects: of its tables and of its kinds of kernels, each weighted by its
    share of the shards' times alone, and one of the set. An effect of a table is the same in every set that holds a
    part of it.

    Attributes:
        table: Of a table.
        kind: Of a kind of kernel (`LocalShard.kernel_kind`).
        company: Of a set, for what its shards cost beside each other.
        drift: Half the width of the logarithm of the 90% interval of what all kernels take alike at other hours. Sets'
            intervals include it; no set is better for it, so that it is no effect. Cards have it in `interval` alone.
    """

    table: float
    kind: float
    company: float
    drift: float = 0.0


@runtime_checkable
class KnowsErrors(Protocol):
    """A cost model with errors on record."""

    @property
    def errors(self) -> KernelErrors | None:
        """Its errors on samples kept from training; None where nobody measured them."""
        ...


def recorded_errors(model: CostModel) -> KernelErrors | None:
    """A model's errors, if it has any on record."""
    return model.errors if isinstance(model, KnowsErrors) else None


#: Collectives in which all ranks put in as much, by torch.distributed's names.
EvenCollective = Literal["reduce_scatter", "all_gather", "all_reduce"]
#: All collectives by these names.
CollectiveName = Literal["all_to_all", EvenCollective]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkBytes:
    """What ranks send and receive over the links of each of L levels; any axes may stand before the ranks'.

    Bytes between two ranks travel over the innermost level that holds both.
    """

    leaving_LR: MsArray
    """Bytes that leave each rank, shape (L, ..., R)."""
    arriving_LR: MsArray

    def __add__(self, other: LinkBytes) -> LinkBytes:
        """What both send, in one message."""
        return LinkBytes(
            leaving_LR=self.leaving_LR + other.leaving_LR, arriving_LR=self.arriving_LR + other.arriving_LR
        )


class CommModel(Protocol):
    """Prices collectives over all ranks of a topology."""

    @property
    def name(self) -> str:
        """What answers say."""
        ...

    def links_ms(self, links: LinkBytes, topology: Topology) -> MsArray:
        """Time per rank of an all-to-all, by what leaves and reaches ranks; shape (..., R), or 1 for R alike."""
        ...

    def collective_ms(self, collective: EvenCollective, num_bytes: float, topology: Topology) -> float:
        """Time of a collective in which all ranks put in as much.

        Args:
            collective: Its name.
            num_bytes: Of each rank's larger buffer: the input of a reduce-scatter, the output of an all-gather.
            topology: Of the ranks.
        """
        ...

    def bounds_ms(self, collective: CollectiveName, value_ms: MsArray, topology: Topology) -> tuple[MsArray, MsArray]:
        """Lower and upper ends of the 90% intervals of predicted times, both of the shape of `value_ms`."""
        ...


@runtime_checkable
class KnowsAffine(Protocol):
    """A model of collectives that states whether bounds of plans can be proven by it."""

    @property
    def is_affine(self) -> bool:
        """Whether each collective takes a latency, where anything is in it, and a time that is linear in its bytes.

        By level, where bytes travel over several; the slower of links that work at the same time counts.
        """
        ...


def is_affine(model: CommModel) -> bool:
    """Whether a model of collectives states that its times are affine; one that says nothing does not."""
    return isinstance(model, KnowsAffine) and model.is_affine


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseCosts:
    """Predicted times of N parts of dense layers, in milliseconds."""

    forward_ms_N: MsArray
    backward_ms_N: MsArray
    low_ms_N: MsArray
    """Lower end of the 90% interval of forward plus backward."""
    high_ms_N: MsArray


class DenseCostModel(Protocol):
    """Prices perceptrons and interactions on a rank's local batch."""

    @property
    def name(self) -> str:
        """What answers say, such as `learned:cpu` or `analytic:a100`."""
        ...

    def predict_parts(self, shapes: Sequence[DenseShape]) -> DenseCosts:
        """Forward and backward of each part by itself: finite, above 0."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModels:
    """What a plugin has for all but the kernels of a step; None for what it has not."""

    comm: CommModel | None = None
    dense: DenseCostModel | None = None
    step: StepModel | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModels:
    """The models that price a plan.

    Attributes:
        kernel: Prices embedding kernels.
        comm: Prices collectives.
        dense: Prices dense layers; None for the analytic model of the plan's device.
        step: What runs of the runtime said about whole steps; None for the parts as they are.
        risk: Whether the models price at the mean or at the 95th percentile.
    """

    kernel: CostModel
    comm: CommModel
    dense: DenseCostModel | None = None
    step: StepModel | None = None
    risk: Risk = Risk.MEAN


def set_costs(model: CostModel, sets: Sequence[Sequence[LocalShard]]) -> KernelCosts:
    """Prices several sets of shards at once."""
    flat = [shard for shards in sets for shard in shards]
    codes_NH = model.encode(flat)
    owner = np.repeat(np.arange(len(sets)), [len(shards) for shards in sets])
    codes_SH = np.zeros((len(sets), codes_NH.shape[1]), dtype=np.float32)
    np.add.at(codes_SH, owner, codes_NH)
    return model.predict_parts(codes_SH)
