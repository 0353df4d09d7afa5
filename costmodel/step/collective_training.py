"""Fits the model of collectives to a store's samples.

Shape suffixes: S samples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.core import Level, Link, MemoryBytes, Topology
from autoshard.core.costs import CollectiveName
from autoshard.core.errors import ModelError
from autoshard.evaluation.communication import link_bytes
from autoshard.formats.stores.collective_samples import CollectiveSample, GroupLevel, Splits
from autoshard.formats.stores.drift import divide_out_drift
from autoshard.formats.stores.measured_samples import machine_of
from costmodel.samples import newest
from costmodel.step.collective_curve import CollectiveCurve, CurvePoints, passing_bytes
from costmodel.step.collective_model import COLLECTIVES, LINKS, CollectiveCard, Curves, LearnedCollectives
from costmodel.step.regression import NUM_FOLDS, FloatArray, check_samples, error_metrics, folds_of, quantile_bounds

#: A curve has up to ten coefficients, most of them drawn to zero.
MIN_SAMPLES = 8
#: All-to-alls one way that a link needs, for its model to tell them from those both ways.
_MIN_ONE_WAY = 4
#: Times are sorted into so many classes, each with an interval of its own, if each gets enough samples.
_NUM_CLASSES = 3
_MIN_PER_CLASS = 20
#: Without samples of whole worlds: links of nodes and between them are different hardware, but a reduction is one
#: stage after the other.
_DEFAULT_ALONGSIDE = {"all_to_all": 0.0, "reduce_scatter": 1.0, "all_gather": 1.0, "all_reduce": 1.0}
#: Interval of collectives that nobody measured, as of published bandwidths.
_UNMEASURED = (0.0, 0.4, 4.0)


#: A link and a collective: what has a curve of its own.
_Key = tuple[str, CollectiveName]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """Predictions of samples that the curve was not fitted to."""

    predicted_ms_S: FloatArray
    ratio_S: FloatArray
    """Measured over predicted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedCollectives:
    """A fitted model, ready to be published or used.

    Attributes:
        model: The model.
        measured: All samples.
        keys: Link and collective of each curve.
        held_out_errors_S: Relative errors of curves that were fitted to other samples, of `samples`.
    """

    model: LearnedCollectives
    measured: tuple[CollectiveSample, ...]
    keys: tuple[_Key, ...]
    held_out_errors_S: FloatArray

    @property
    def samples(self) -> tuple[CollectiveSample, ...]:
        """Those that curves were fitted to, curve after curve."""
        places = _places(self.measured)
        return tuple(self.measured[place] for key in self.keys for place in places[key])

    @property
    def fitted_errors_S(self) -> FloatArray:  # noqa: N802 - a shape suffix
        """Relative errors of the model itself, shape (S,)."""
        return self.errors_S(self.model)

    def errors_S(self, model: LearnedCollectives) -> FloatArray:  # noqa: N802 - a shape suffix
        """Relative errors of a model's prices of `samples`, shape (S,).

        Raises:
            ModelError: If the model has no curve of a link and collective.
        """
        points = _points(self.measured, model.card.both_ways)
        return np.concatenate(
            [np.abs(model.curve(*key).predict(points[key]) / points[key].measured_ms_S - 1) for key in self.keys]
        )


def train_collective_model(samples: Sequence[CollectiveSample]) -> TrainedCollectives:
    """Fits curves to samples of one device; intervals come from samples held out, a fifth at a time.

    Latencies are divided by those of the reference collective in the same rounds.

    Raises:
        ModelError: If samples are of several devices or backends, too few, or not finite.
    """
    check_samples(samples, alike=("device", "backend"), positive=("latency_ms", "reference_ms"))
    both_ways = {link: _both_ways(link, samples) for link in LINKS}
    points = _points(samples, both_ways)
    curves: dict[_Key, CollectiveCurve] = {}
    held: dict[_Key, _Held] = {}
    for link in LINKS:
        for name in COLLECTIVES:
            known = points.get((link, name))
            if known is not None and len(known) >= MIN_SAMPLES:
                curves[link, name] = CollectiveCurve.fit(name, known)
                held[link, name] = _cross_validated(name, known)
    if not curves:
        raise ModelError(f"needs at least {MIN_SAMPLES} samples of one collective, got {len(samples)}", field="samples")
    alongside: dict[str, float] = {name: _alongside(name, samples, curves, both_ways) for name in COLLECTIVES}
    together = {name: _joined([held[key] for key in curves if key[1] == name]) for _, name in curves}
    held_out_errors_S = np.abs(1.0 / _joined(list(held.values())).ratio_S - 1.0)
    card = CollectiveCard(
        device=samples[0].device,
        backend=samples[0].backend,
        alongside=alongside,
        both_ways=both_ways,
        bounds={name: _bounds(together[name]) if name in together else (_UNMEASURED,) for name in COLLECTIVES},
        metrics=error_metrics(held_out_errors_S),
        training={
            "num_samples": len(samples),
            "samples_until": newest(samples),
            "num_ranks": sorted({sample.group_size for sample in samples}),
            "num_folds": NUM_FOLDS,
        },
        measured_on=machine_of(samples),
    )
    return TrainedCollectives(
        model=LearnedCollectives(curves, card),
        measured=tuple(samples),
        keys=tuple(curves),
        held_out_errors_S=held_out_errors_S,
    )


def _corrected_ms(samples: Sequence[CollectiveSample]) -> FloatArray:
    """Latencies with the machine's drift divided out, arrangement by arrangement: each has a reference of its own."""
    latency_ms_S = np.array([one.latency_ms for one in samples])
    reference_ms_S = np.array([one.reference_ms for one in samples])
    arrangement_S2 = np.array([(one.nproc, one.node_size) for one in samples])
    for arrangement in np.unique(arrangement_S2, axis=0):
        alike_S = (arrangement_S2 == arrangement).all(axis=1)
        latency_ms_S[alike_S] = divide_out_drift(latency_ms_S[alike_S], reference_ms_S[alike_S])
    return latency_ms_S


def _places(samples: Sequence[CollectiveSample]) -> dict[_Key, list[int]]:
    """Places of the samples of each link and collective; none of whole worlds, nor of no bytes."""
    places: dict[_Key, list[int]] = defaultdict(list)
    for place, sample in enumerate(samples):
        level = sample.collective.level
        if level is not GroupLevel.WORLD and max(sample.max_sent_bytes, sample.max_received_bytes) > 0:
            places[level.value, _name(sample)].append(place)
    return places


def _points(samples: Sequence[CollectiveSample], both_ways: Mapping[str, float]) -> dict[_Key, CurvePoints]:
    corrected_S = _corrected_ms(samples)
    found = {}
    for (link, name), places in _places(samples).items():
        rows = []
        for place in places:
            sample = samples[place]
            passing = float(max(sample.max_sent_bytes, sample.max_received_bytes))
            if name == "all_to_all":
                passing = float(passing_bytes(np.array(passing), np.array(_bytes_back(sample)), both_ways[link]))
            rows.append((passing, sample.group_size, sample.nproc, corrected_S[place]))
        found[link, name] = _curve_points(np.array(rows, dtype=np.float64))
    return found


def _bytes_back(sample: CollectiveSample) -> float:
    """What the rank that sends most receives, or the other way round: an equal part of what the others send.

    That is so of two ranks, of equal splits and of those one way; of unequal splits of more ranks it is the mean.
    """
    busiest, others = max(sample.max_sent_bytes, sample.max_received_bytes), sample.group_size - 1
    return min(float(busiest), max(0.0, sample.group_size * sample.mean_sent_bytes - busiest) / others)


def _both_ways(link: str, samples: Sequence[CollectiveSample]) -> float:
    """The share of the bytes back that adds to those one way, by which held-out all-to-alls are predicted best.

    0 where too few were measured one way.
    """
    of_link = [one for one in samples if one.collective.level.value == link and _name(one) == "all_to_all"]
    num_one_way = sum(one.collective.splits is Splits.ONE_WAY for one in of_link)
    if num_one_way < _MIN_ONE_WAY or len(of_link) < MIN_SAMPLES:
        return 0.0
    errors = {}
    for share in np.linspace(0.0, 1.0, 11).tolist():
        points = _points(of_link, {link: share})[link, "all_to_all"]
        errors[share] = float(np.mean(np.abs(np.log(_cross_validated("all_to_all", points).ratio_S))))
    return min(errors, key=lambda share: errors[share])


def _curve_points(rows_S4: FloatArray) -> CurvePoints:
    return CurvePoints(
        num_bytes_S=rows_S4[:, 0], group_S=rows_S4[:, 1], world_S=rows_S4[:, 2], measured_ms_S=rows_S4[:, 3]
    )


def _name(sample: CollectiveSample) -> CollectiveName:
    return next(name for name in COLLECTIVES if name == sample.collective.operator.value)


def _cross_validated(name: CollectiveName, points: CurvePoints) -> _Held:
    fold_S = folds_of(len(points))
    predicted_S = np.empty(len(points))
    for fold in range(NUM_FOLDS):
        curve = CollectiveCurve.fit(name, points.only(fold_S != fold))
        predicted_S[fold_S == fold] = curve.predict(points.only(fold_S == fold))
    return _Held(predicted_ms_S=predicted_S, ratio_S=points.measured_ms_S / np.maximum(predicted_S, 1e-9))


def _joined(parts: Sequence[_Held]) -> _Held:
    return _Held(
        predicted_ms_S=np.concatenate([part.predicted_ms_S for part in parts]),
        ratio_S=np.concatenate([part.ratio_S for part in parts]),
    )


def _bounds(held: _Held) -> tuple[tuple[float, float, float], ...]:
    count = max(1, min(_NUM_CLASSES, len(held.ratio_S) // _MIN_PER_CLASS))
    order = np.argsort(held.predicted_ms_S)
    rows = []
    for members in np.array_split(order, count):
        low, high = quantile_bounds(held.ratio_S[members])
        rows.append((float(held.predicted_ms_S[members].max()), low, high))
    return tuple(rows)


def _alongside(
    name: CollectiveName, samples: Sequence[CollectiveSample], curves: Curves, both_ways: dict[str, float]
) -> float:
    """The share of the shorter time that adds to the longer one, from collectives of whole worlds."""
    fallback = _DEFAULT_ALONGSIDE[name]
    worlds = [
        (sample, measured_ms)
        for sample, measured_ms in zip(samples, _corrected_ms(samples), strict=True)
        if sample.collective.level is GroupLevel.WORLD and _name(sample) == name
    ]
    if len(worlds) < MIN_SAMPLES or any((link, name) not in curves for link in LINKS):
        return fallback
    errors = {}
    for share in np.linspace(0.0, 1.0, 11):
        card = CollectiveCard(
            device="",
            backend="",
            alongside=dict.fromkeys(COLLECTIVES, float(share)),
            both_ways=both_ways,
            bounds={},
            metrics={},
            training={},
        )
        model = LearnedCollectives(curves, card)
        ratios = [_world_ms(model, sample) / measured_ms for sample, measured_ms in worlds]
        errors[float(share)] = float(np.mean(np.abs(np.log(ratios))))
    return min(errors, key=lambda share: errors[share])


def _world_ms(model: LearnedCollectives, sample: CollectiveSample) -> float:
    link = Link(bytes_per_s=1e9)
    levels = tuple(
        Level(name=name, size=size, all_to_all=link, all_reduce=link)
        for name, size in (("node", sample.node_size), ("cluster", sample.nproc))
    )
    topology = Topology(world_size=sample.nproc, device=sample.device, memory_bytes=MemoryBytes(hbm=1), levels=levels)
    name = _name(sample)
    if name == "all_to_all":
        # Bytes of the busiest rank to each of its peers: the file has sums only.
        busiest = max(sample.max_sent_bytes, sample.max_received_bytes) / (sample.nproc - 1)
        sent_RR = np.full((sample.nproc, sample.nproc), busiest)
        if sample.collective.splits is Splits.ONE_WAY:
            sent_RR[1:] = 0.0
        np.fill_diagonal(sent_RR, 0.0)
        return float(model.links_ms(link_bytes(sent_RR, topology), topology).max())
    return model.collective_ms(name, float(sample.collective.bytes_per_rank), topology)
