"""How the parts of a training step make up its time, and what a step model knows beyond the models of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Annotated, Final, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from autoshard.core.accepted import FINITE_AT_LEAST_0
from autoshard.core.choices import Overlap as Overlap
from autoshard.core.declared import Meaning
from autoshard.core.machine import device_family
from autoshard.core.topology import Topology


class StepCollective(StrEnum):
    """A kind of communication in a step, named as `StepTimes` names its time."""

    INPUT = "input"
    """Distribution of lengths and ids, with the host's work for it."""
    FORWARD_EXCHANGE = "forward_exchange"
    BACKWARD_EXCHANGE = "backward_exchange"
    ALL_REDUCE = "all_reduce"
    """Of the dense layers' gradients, and of those of rows that several ranks hold."""
    GROUP_SYNC = "group_sync"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTime:
    """Time of a collective in a step, in milliseconds.

    Source:
        Neo Sec. 8.3 and Fig. 10 for both.
    """

    serialised_ms: Annotated[
        float,
        FINITE_AT_LEAST_0,
        Meaning("From its start to its end; of several that run beside each other, from the first to the last."),
    ]
    exposed_ms: Annotated[
        float, FINITE_AT_LEAST_0, Meaning("By how much the step would be shorter without it; the rest hides.")
    ]


class StepPart(StrEnum):
    """A part of a step that the runtime times by itself; all that is left is `dense`."""

    INPUT = "input"
    FORWARD_KERNEL = "forward_kernel"
    FORWARD_EXCHANGE = "forward_exchange"
    BACKWARD_EXCHANGE = "backward_exchange"
    BACKWARD_KERNEL = "backward_kernel"
    DENSE = "dense"


#: Parts that a rank works through by itself; all others are, or hold, collectives.
KERNEL_PARTS: Final = (StepPart.FORWARD_KERNEL, StepPart.BACKWARD_KERNEL)
#: Parts in which ranks send what they read, or the gradients of it.
EXCHANGE_PARTS: Final[tuple[StepPart, ...]] = (StepPart.INPUT, StepPart.FORWARD_EXCHANGE, StepPart.BACKWARD_EXCHANGE)
#: Parts of which ranks have more or less by what they hold, in the order of a step.
EMBEDDING_PARTS: Final[tuple[StepPart, ...]] = tuple(part for part in StepPart if part is not StepPart.DENSE)
#: Where each of them is on an axis of `EMBEDDING_PARTS`.
PART_INDEX: Final[Mapping[StepPart, int]] = {part: index for index, part in enumerate(EMBEDDING_PARTS)}

#: What a part's time is a weighted sum of, per rank; `plain_coefficients` has the weights where no step model was
#: calibrated. Predicted milliseconds of a model come first. `reading_ms` is what a rank works on what it reads, table
#: by table, `steps` is 1, `kernels` are the fused kernels of a rank, `features` what they serve, `megabytes` what a
#: rank packs and unpacks around an exchange, or, in `dense`, gives the interaction; `row_sums` is 1 where gradients of
#: rows with several replicas are summed: what that takes whatever their bytes; `synced_megabytes` are these bytes.
#: `row_exchanges` and `row_cuts` are 1 where any lookup of the plan is answered with rows, and where any table is cut
#: by rows: every reader goes another way then, whatever else it reads.
PART_FEATURES: Final[dict[StepPart, tuple[str, ...]]] = {
    StepPart.INPUT: ("model_ms", "reading_ms", "steps", "million_ids", "million_lengths", "row_exchanges", "row_cuts"),
    StepPart.FORWARD_KERNEL: ("model_ms", "kernels", "features", "million_lengths"),
    StepPart.FORWARD_EXCHANGE: ("model_ms", "reading_ms", "steps", "megabytes", "row_exchanges", "row_cuts"),
    StepPart.BACKWARD_EXCHANGE: ("model_ms", "reading_ms", "steps", "megabytes", "row_exchanges", "row_cuts"),
    StepPart.BACKWARD_KERNEL: ("model_ms", "kernels", "features"),
    StepPart.DENSE: (
        *("model_ms", "all_reduce_ms", "steps", "million_parameters", "megabytes"),
        *("row_sums", "synced_megabytes"),
    ),
}

#: Features that are times of collectives, by part: what links take, where all others are what ranks work.
WIRE_FEATURES: Final[Mapping[StepPart, str]] = {
    **dict.fromkeys(EXCHANGE_PARTS, "model_ms"),
    StepPart.DENSE: "all_reduce_ms",
}

Coefficients = tuple[float, ...]

#: What the names of models end in that price at the upper end of another's intervals.
UPPER_END = " (upper end)"


def model_basis(name: str) -> str:
    """The model that a step was calibrated with, whichever version of it, from a model's name."""
    return name.removesuffix(UPPER_END).split("@")[0]


#: Milliseconds of the runtime's own work for one of a feature, by device family: what a step takes besides its
#: kernels, its collectives and what it works on each table. That is the distribution of a batch's ids, copies into
#: messages and out of them, the backward pass, the optimizer of dense layers, buckets of gradients. Fitted to what the
#: threads of 52 plans computed in virtual time (2 to 8 ranks; virtual AMD EPYC, 2 cores, torch 2.13, November 2026;
#: docs/results/virtual-time.md); what the input takes in every step to 64 later ones. On GPUs nobody has measured it.
ENGINE_WORK: Final[Mapping[str, Mapping[StepPart, Mapping[str, float]]]] = {
    "cpu": {
        StepPart.INPUT: {"steps": 1.2, "row_exchanges": 0.22, "row_cuts": 0.22},
        StepPart.FORWARD_EXCHANGE: {"steps": 0.6, "megabytes": 0.054, "row_exchanges": 0.54, "row_cuts": 0.12},
        StepPart.BACKWARD_EXCHANGE: {"steps": 0.6, "megabytes": 0.077, "row_exchanges": 0.3},
        StepPart.DENSE: {"steps": 2.4, "row_sums": 0.5, "synced_megabytes": 0.47},
    }
}


def plain_coefficients(part: StepPart, device: str) -> Coefficients:
    """Weights of a part's features without a step model: the models' milliseconds as they are, and `ENGINE_WORK`.

    Args:
        part: The part.
        device: Key of the device, such as `cpu` or `a100`.
    """
    work = ENGINE_WORK.get(device_family(device), {}).get(part, {})
    return tuple(work.get(name, 1.0 if name.endswith("_ms") else 0.0) for name in PART_FEATURES[part])


MsT = TypeVar("MsT", float, NDArray[np.float64])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes(Generic[MsT]):
    """Milliseconds of a step's parts, each at its slowest rank: numbers, or arrays of one shape, of many steps.

    Attributes:
        all_reduce: Of the dense layers' gradients, and of tables that are held in several replicas.
        row_reduce: The part of `all_reduce` that is of such tables.
        overhead: What belongs to no part and hides behind none.
        group_sync: Of weights and optimizer states between replica groups, after the update and so behind nothing.
    """

    input: MsT
    forward_kernel: MsT
    forward_exchange: MsT
    backward_exchange: MsT
    backward_kernel: MsT
    bottom_forward: MsT
    bottom_backward: MsT
    interaction_forward: MsT
    interaction_backward: MsT
    top_forward: MsT
    top_backward: MsT
    all_reduce: MsT
    row_reduce: MsT
    overhead: MsT
    group_sync: MsT

    def only(self) -> StepTimes[float]:
        """Of arrays of one entry, that entry."""
        return StepTimes(**{field.name: np.asarray(getattr(self, field.name)).item() for field in fields(self)})

    def step_ms(self, overlap: Overlap) -> MsT:
        """The whole step.

        Source:
            Neo Appendix B, Eq. 1 for `Overlap.NEO`, and the input distribution, which it leaves out. For
            `Overlap.NEO_PREFETCH` Eq. 1, and the next batch's input distribution from the top perceptron's forward pass
            on (Sec. 4.2). For `Overlap.PIPELINED` Eq. 1 with one stream of computation, behind which only collectives
            hide, and the input distribution of the next batch behind all of it.
        """
        if overlap is Overlap.PIPELINED:
            return _longest(self.input, self._pipelined_ms())
        lookup = self.forward_kernel + self.forward_exchange
        update = self.backward_exchange + self.backward_kernel
        if overlap is Overlap.NONE:
            forward = self.bottom_forward + lookup
            backward = self.top_backward + self.interaction_backward + update + self.bottom_backward + self.all_reduce
        else:
            forward = _longest(self.bottom_forward, lookup)
            behind = _longest(update, self.bottom_backward)
            prefetched = 0 * self.input
            if overlap is Overlap.NEO_PREFETCH:
                prefetched = _longest(prefetched, self.input - self.top_forward)
            top = _longest(self.top_backward + self.interaction_backward, prefetched)
            backward = _longest(top + behind, prefetched + self.all_reduce)
        middle = self.interaction_forward + self.top_forward
        distributed = 0 * self.input if overlap is Overlap.NEO_PREFETCH else self.input
        return distributed + forward + middle + backward + self.overhead + self.group_sync

    def _pipelined_ms(self) -> MsT:
        """The step but for its input distribution, as `Overlap.PIPELINED` has it."""
        forward = self.forward_kernel + _longest(self.bottom_forward, self.forward_exchange)
        behind = _longest(self.bottom_backward, self.backward_exchange)
        # Gradients of replicated rows can only be summed when all of them have come.
        rows = behind + self.row_reduce + self.backward_kernel
        backward = _longest(self.top_backward + self.interaction_backward + rows, self.all_reduce - self.row_reduce)
        return forward + self.interaction_forward + self.top_forward + backward + self.overhead + self.group_sync

    def collectives(self, overlap: Overlap) -> Mapping[StepCollective, CollectiveTime]:
        """Each collective's time, and by how much the step would be shorter without it; of one step."""
        step_ms = self.step_ms(overlap)
        return {
            one: CollectiveTime(
                serialised_ms=float(getattr(self, one.value)),
                exposed_ms=float(step_ms - self._without(one).step_ms(overlap)),
            )
            for one in StepCollective
        }

    def _without(self, collective: StepCollective) -> StepTimes[MsT]:
        changes = {collective.value: 0 * self.input}
        if collective is StepCollective.ALL_REDUCE:
            changes["row_reduce"] = 0 * self.input
        return replace(self, **changes)

    @property
    def dense_layers(self) -> MsT:
        """Perceptrons and interaction, forward and backward."""
        perceptrons = self.bottom_forward + self.bottom_backward + self.top_forward + self.top_backward
        return perceptrons + self.interaction_forward + self.interaction_backward

    @property
    def dense(self) -> MsT:
        """All that the runtime does not time by itself: dense layers, all-reduce, overhead, replica groups."""
        return self.dense_layers + self.all_reduce + self.overhead + self.group_sync


def _longest(one: MsT, other: MsT) -> MsT:
    longest: MsT = np.maximum(one, other)
    return longest


class StepModel(Protocol):
    """What runs of the runtime said about steps: weights of the parts' features, and how far off they are."""

    @property
    def name(self) -> str:
        """What answers say, such as `calibrated:cpu`."""
        ...

    @property
    def overlap(self) -> Overlap:
        """What the runtime overlapped that it was calibrated on."""
        ...

    @property
    def relative_error(self) -> float:
        """Median relative error of steps that it was not calibrated on; 0 where nobody measured it."""
        ...

    def coefficients(self, part: StepPart, basis: str, topology: Topology) -> Coefficients | None:
        """Weights of `PART_FEATURES[part]`; None if it was not calibrated with the model named `basis`.

        Args:
            part: The part.
            basis: What the model of its first feature is called, see `model_basis`.
            topology: Whose steps they are for: weights of times of collectives are of the links of runs.
        """
        ...

    def interval_ms(self, value_ms: float, below_ms: float, above_ms: float) -> tuple[float, float]:
        """Ends of the 90% interval of a step whose parts' intervals add up to that much below and above it."""
        ...
