"""The learned model of collectives.

Shape suffixes: R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar, Final, get_args

import numpy as np

from autoshard.core import Link, Topology
from autoshard.core.costs import CollectiveName, EvenCollective, LinkBytes, MsArray
from autoshard.core.errors import FormatError, ModelError
from autoshard.core.machine import MeasuredMachine
from autoshard.evaluation.communication import over_shared_links
from autoshard.formats.documents.kinds import (
    ANY_OBJECT,
    TEXT,
    Field,
    Kind,
    list_of,
    number_in,
    optional,
    record,
    tuple_of,
)
from autoshard.formats.documents.machine_json import MACHINE
from costmodel.registry.card_fields import MAX_BOUND, MAX_METRIC, METRICS, ModelCard
from costmodel.registry.models import LearnedModel
from costmodel.registry.versions import StoredModel
from costmodel.step.collective_curve import CollectiveCurve, passing_bytes
from costmodel.step.regression import FloatArray

COLLECTIVES: Final[tuple[CollectiveName, ...]] = get_args(CollectiveName)
#: Rows of an interval's bounds.
_MAX_BOUNDS = 1000
#: Inside a node, and between nodes.
LINKS: Final = ("node", "across_nodes")

Curves = Mapping[tuple[str, CollectiveName], CollectiveCurve]


_Bounds = tuple[tuple[float, float, float], ...]
#: Up to so many milliseconds: ends of an interval over the prediction.
_BOUNDS_ROW: Final = tuple_of(number_in(0, MAX_METRIC), number_in(0, 1), number_in(1, MAX_BOUND))


def _by_collective(kind: Kind[Any]) -> Kind[dict[str, Any]]:
    return record(dict, *(Field(name, kind) for name in COLLECTIVES), parts=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCard(ModelCard):
    """All of a model of collectives but its curves.

    Attributes:
        device: Key of the device kind that was measured.
        backend: `gloo` or `nccl`.
        alongside: For each collective, the share of the shorter of a node's time and that between nodes that does not
            hide behind the longer: 0 for links that work side by side, 1 for one after the other.
        both_ways: For each link, the share of the fewer bytes of those that a rank sends and receives in an all-to-all
            that does not hide behind the more: 0 for links that carry both ways side by side, 1 for one after the
            other.
        bounds: For each collective, (up to ms, low, high): ends of the 90% interval over the predicted time, for times
            up to so many milliseconds, rising.
        metrics: Accuracy on held-out samples, for information.
        training: Counts and options, and `samples_until`, the time of the newest sample.
        measured_on: The machine of the samples, as far as they say; None on older cards.
    """

    schema: ClassVar[str] = "autoshard.collective-model/1"
    fields: ClassVar[tuple[Field, ...]] = (
        Field("device", TEXT),
        Field("backend", TEXT),
        Field("alongside", _by_collective(number_in(0, 1))),
        optional("both_ways", record(dict, *(Field(name, number_in(0, 1)) for name in LINKS), parts=dict)),
        Field("bounds", _by_collective(list_of(_BOUNDS_ROW, 1, _MAX_BOUNDS))),
        Field("metrics", METRICS, "Accuracy, by the name of the measure."),
        Field("training", ANY_OBJECT, "Options, seeds and counts of the training."),
        optional("measured_on", MACHINE, "The machine of the samples.", default=None),
    )

    device: str
    backend: str
    alongside: dict[str, float]
    bounds: dict[str, _Bounds]
    metrics: dict[str, float]
    training: dict[str, Any]
    both_ways: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LINKS, 0.0))
    measured_on: MeasuredMachine | None = None

    def __post_init__(self) -> None:
        for name, rows in self.bounds.items():
            if any(left[0] > right[0] for left, right in pairwise(rows)):
                raise FormatError("must be of rising milliseconds", field=f"bounds.{name}")


class LearnedCollectives(LearnedModel[CollectiveCard]):
    """Prices collectives with curves that were fitted to measured ones.

    Bytes inside a node take the node's curve, bytes that leave it the other one; links that nobody measured are priced
    by the topology's latency and bandwidth. Ranks of a node may be relabelled, and nodes as well.

    Args:
        curves: By link (`node`, `across_nodes`) and collective.
        card: What they are of.
        version: Of the registry that they come from, if they do, and whether that came with this package.
    """

    kind = "collective"
    card_type = CollectiveCard

    def __init__(self, curves: Curves, card: CollectiveCard, version: str = "") -> None:
        super().__init__(card, version)
        self._curves = dict(curves)

    @classmethod
    def restored(cls, stored: StoredModel, card: CollectiveCard) -> LearnedCollectives:
        """See `LearnedModel.restored`."""
        curves = {
            (link, name): CollectiveCurve.restored(name, stored.tensors, f"{link}.{name}.")
            for link in LINKS
            for name in COLLECTIVES
            if any(key.startswith(f"{link}.{name}.") for key in stored.tensors)
        }
        return cls(curves, card, stored.label)

    def tensors(self) -> dict[str, FloatArray]:
        """What is stored of the curves."""
        return {
            f"{link}.{name}.{key}": value
            for (link, name), curve in self._curves.items()
            for key, value in curve.tensors().items()
        }

    def completed_by(self, other: LearnedCollectives) -> LearnedCollectives:
        """The model with another one's curves of the links and collectives that it has none of itself.

        Of such a collective, the other one knows how far links overlap. Intervals of one that both have a curve of are
        the wider ones.
        """
        lacking = sorted(other._curves.keys() - self._curves.keys())
        if not lacking or other.card.backend != self.card.backend:
            return self
        own, its = self.card, other.card
        names, known = {name for _, name in lacking}, {name for _, name in self._curves}
        card = replace(
            own,
            alongside={**own.alongside, **{name: its.alongside[name] for name in names}},
            both_ways={
                link: (its if (link, "all_to_all") in lacking else own).both_ways[link] for link in own.both_ways
            },
            bounds={
                **own.bounds,
                **{name: its.bounds[name] for name in names - known},
                **{name: _widened(own.bounds[name], its.bounds[name]) for name in names & known},
            },
            training={**own.training, "carried_over": [f"{link}.{name}" for link, name in lacking]},
        )
        return LearnedCollectives({**other._curves, **self._curves}, card)

    def curve(self, link: str, collective: CollectiveName) -> CollectiveCurve:
        """What prices a collective within a node or across nodes.

        Raises:
            ModelError: If it was not measured.
        """
        if (link, collective) not in self._curves:
            raise ModelError(f"was not fitted to any {collective} of link {link}", field="collective")
        return self._curves[link, collective]

    def links_ms(self, links: LinkBytes, topology: Topology) -> MsArray:
        """Time per rank of an all-to-all, by what leaves and reaches ranks; shape (..., R)."""
        links, both_ways = over_shared_links(links, topology), self.card.both_ways
        inside_R = passing_bytes(links.leaving_LR[0], links.arriving_LR[0], both_ways["node"])
        leaving_R, arriving_R = links.leaving_LR[1:].sum(axis=0), links.arriving_LR[1:].sum(axis=0)
        outside_R = passing_bytes(leaving_R, arriving_R, both_ways["across_nodes"])
        return self._both("all_to_all", inside_R, outside_R, topology)

    def collective_ms(self, collective: EvenCollective, num_bytes: float, topology: Topology) -> float:
        """Time of a collective in which all ranks put in as much, by its larger buffer.

        It runs inside nodes, then between them with what a node's ranks share.
        """
        if num_bytes <= 0 or topology.world_size == 1:
            return 0.0
        local, nodes = topology.local_world_size, topology.num_nodes
        # What would leave a rank if there were infinitely many.
        leaving_bytes = 2.0 * num_bytes if collective == "all_reduce" else num_bytes
        inside = np.array(leaving_bytes * (local - 1) / local)
        outside = np.array(leaving_bytes * (nodes - 1) / nodes / local)
        return float(self._both(collective, inside, outside, topology))

    def bounds_ms(self, collective: CollectiveName, value_ms: MsArray, topology: Topology) -> tuple[MsArray, MsArray]:
        """Ends of the 90% intervals of held-out samples, wider for numbers of ranks that were not measured.

        Each doubling outside the measured numbers widens them by their own width once more, on the logarithm.
        """
        rows = self.card.bounds[collective]
        at = np.minimum(np.searchsorted([upto for upto, _, _ in rows], value_ms), len(rows) - 1)
        known = [curve for (_, name), curve in self._curves.items() if name == collective]
        outside = min((curve.octaves_outside(topology.world_size) for curve in known), default=1.0)
        low, high = (np.array([row[end] for row in rows])[at] ** (1.0 + outside) for end in (1, 2))
        return np.asarray(value_ms * low), np.asarray(value_ms * high)

    def _both(self, collective: CollectiveName, inside: MsArray, outside: MsArray, topology: Topology) -> MsArray:
        local, nodes, world = topology.local_world_size, topology.num_nodes, topology.world_size
        peers = world - local if collective == "all_to_all" else nodes - 1
        near = self._link_ms(collective, 0, inside, local, topology)
        far = self._link_ms(collective, 1, outside, 1 + peers, topology) if nodes > 1 else np.zeros_like(near)
        return np.asarray(np.maximum(near, far) + self.card.alongside[collective] * np.minimum(near, far))

    def _link_ms(
        self, collective: CollectiveName, link: int, num_bytes: MsArray, group: int, topology: Topology
    ) -> MsArray:
        curve = self._curves.get((LINKS[link], collective))
        if curve is not None:
            return curve.ms(num_bytes, group, topology.world_size)
        level = topology.levels[0 if link == 0 else -1]
        published: Link = level.all_to_all if collective == "all_to_all" else level.all_reduce
        # An all-reduce's published bandwidth is that of its buffer, half of what leaves a rank.
        doubled = 0.5 if collective == "all_reduce" else 1.0
        seconds = published.latency_s + doubled * num_bytes / published.bytes_per_s
        return np.where(num_bytes > 0, seconds * 1e3, 0.0)


def _widened(rows: _Bounds, others: _Bounds) -> _Bounds:
    """Bounds that hold what either of two collectives' do, whichever time of the other."""
    low, high = min(row[1] for row in others), max(row[2] for row in others)
    return tuple((upto_ms, min(low, own_low), max(high, own_high)) for upto_ms, own_low, own_high in rows)
