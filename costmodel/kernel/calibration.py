"""Calibrates the cost model of one machine to another one, from few samples measured there.

Forward and backward times are scaled first; then all weights are trained further, and pulled back to the scaled ones:
with few samples the model stays near that of the other machine, with thousands it becomes one of its own.

Shape suffixes: S samples, F folds, O outputs (forward, backward), K kinds of work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

import autoshard
from autoshard.core.accepted import AT_LEAST_1, FINITE_AT_LEAST_0
from autoshard.core.errors import ModelError
from autoshard.runtime.processes.threads import intra_op_threads
from costmodel.kernel.card import Interval, TrainedCoverage
from costmodel.kernel.comparison import unseen_by
from costmodel.kernel.dataset import CostDataset, IndexArray
from costmodel.kernel.errors import fitted_errors, half_widths_of, measurement_noise
from costmodel.kernel.learned import LearnedCostModel
from costmodel.kernel.metrics import PricedSamples
from costmodel.kernel.network import CostNetwork
from costmodel.kernel.training import Advance, CostTrainingOptions, descend
from costmodel.kernel.weights import NUM_OUTPUTS, OVERHEAD, layer_name

#: Logarithm of the factor by which kernels of a machine that nobody measured may take longer or shorter than those of
#: the model's own: of the sets of docs/data, the Xeon's and the EPYC's, nine in ten differ by less from what the model
#: of the other machine says (`python -m studies calibrate`).
FARTHEST = float(np.log(5.75))

#: Of the drift between hours (`drift_of`): that of a machine that is steady within a minute, and how much more one that
#: is not drifts. The Xeon of docs/data is steady to 0.9% within a minute; of its minutes 50 to 75 minutes apart, nine
#: in ten pairs differ by up to 8%. The EPYC is steady to 5.9%; minutes 15 to 30 minutes apart differ by up to 19%.
LEAST_DRIFT, DRIFT_PER_SPREAD = 0.08, 3.0
#: Half the width of a normal distribution's 90% interval, in standard deviations; and a median's standard error, times
#: the root of the number of samples, over their median absolute deviation.
_HALF_OF_90, _OF_MEDIAN = 1.645, 1.2533 * 1.4826

_PRICES = layer_name("encoder.log_prices", 0, "bias")
_SPREAD_WEIGHTS, _SPREAD_BIAS = layer_name("doubt", 1, "weight"), layer_name("doubt", 1, "bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationOptions:
    """How a model is calibrated."""

    least_updates: int = 500
    """Updates with few samples; one more for each four. More fit few samples too well."""
    most_updates: int = 2000
    """Updates with many samples."""
    learning_rate: float = 3e-2
    """The highest one."""
    pull: float = 1.0
    """Loss per squared distance from the scaled weights, times the number of samples."""
    num_folds: int = 4
    """Parts of the samples, each predicted by a model that is calibrated on the others: errors and intervals come from
    these predictions."""
    fold_share: float = 0.4
    """Updates of such a model, as a share of the others'."""

    def __post_init__(self) -> None:
        AT_LEAST_1.check_fields(self, "least_updates", "most_updates", "num_folds")
        FINITE_AT_LEAST_0.check_fields(self, "pull", "fold_share")

    @classmethod
    def of_updates(cls, updates: int | None) -> CalibrationOptions:
        """The defaults, with so many updates however many samples there are; None for the usual ones."""
        return cls() if updates is None else cls(least_updates=updates, most_updates=updates)

    def training(self, num_samples: int, share: float = 1.0) -> CostTrainingOptions:
        """How the network is trained further on so many samples, with a share of the usual updates."""
        updates = min(self.least_updates + num_samples // 4, self.most_updates)
        return CostTrainingOptions(
            num_updates=max(1, round(share * updates)),
            batch_size=min(256, max(64, num_samples // 8)),
            learning_rate=self.learning_rate,
            weight_decay=0.0,
        )

    def num_updates(self, num_samples: int) -> int:
        """Updates of a calibration, those of its folds included."""
        folds = _num_folds(num_samples, self) * self.training(num_samples, self.fold_share).num_updates
        return folds + self.training(num_samples).num_updates if num_samples else 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calibration:
    """A calibrated model, and what its folds predicted.

    Attributes:
        model: The model.
        priced: The samples, each as the model priced it that was calibrated on the other folds.
    """

    model: LearnedCostModel
    priced: PricedSamples


def calibrate(
    base: LearnedCostModel,
    dataset: CostDataset,
    *,
    device: str | None = None,
    options: CalibrationOptions | None = None,
    seed: int = 0,
    advance: Advance = lambda _: None,
) -> Calibration:
    """Calibrates a model to the machine of some samples.

    Args:
        base: The model of another machine.
        dataset: Sets measured on this one; one sample is enough, and the interval then says how little that is.
        device: Key of the device that the model is for; the base's when left out.
        options: How; the defaults when left out.
        seed: Same seed and samples, same weights (on the same machine).
        advance: Receives the number of updates just done, of `CalibrationOptions.num_updates`.
    """
    options = options or CalibrationOptions()
    with intra_op_threads(1):
        priced = _out_of_fold(base, dataset, options, seed, advance)
        fitted = _fitted(base, dataset, options.training(len(dataset)), options.pull, seed, advance)
    # A base that was trained on some of the samples itself knows these, calibrated with them or without.
    judged = priced.take(_unseen_by(base, dataset))
    interval = replace(judged.interval(farthest=FARTHEST), drift=drift_of(dataset))
    noise = measurement_noise(dataset, half_widths_of(interval, priced.spread_S))
    card = replace(
        fitted.card,
        device=device or base.card.device,
        coverage=_joined(base.card.coverage, dataset.coverage),
        metrics=judged.metrics(),
        interval=interval,
        training=_training_of(base, dataset, options, seed),
        measured_on=dataset.machine,
        errors=fitted_errors(fitted.predictor, interval, priced, noise),
    )
    return Calibration(model=LearnedCostModel(fitted.tensors(), card), priced=priced)


def _unseen_by(base: LearnedCostModel, dataset: CostDataset) -> IndexArray:
    """Indices of the samples that a base was not trained on; of all where these are too few to judge by."""
    try:
        return unseen_by(base, dataset)
    except ModelError:
        return np.arange(len(dataset))


def uncalibrated(base: LearnedCostModel) -> LearnedCostModel:
    """A model for a machine that nobody measured: the prices of its own, and intervals for any machine."""
    weights = dict(base.tensors())
    for name in (_SPREAD_WEIGHTS, _SPREAD_BIAS):
        weights[name] = np.zeros_like(weights[name])  # all spreads are 1
    return LearnedCostModel(
        weights, replace(base.card, interval=Interval(low=-FARTHEST, high=FARTHEST), errors=None), base.version
    )


def scaled_to(base: LearnedCostModel, dataset: CostDataset) -> LearnedCostModel:
    """The base with its times multiplied by what the median sample takes more, forward and backward apart.

    The unit of the network's outputs takes the factor of their sum, so that its inputs stay those that it knows; the
    prices take what forward and backward differ from that.
    """
    priced = PricedSamples.of(base.predictor, dataset)
    factor = float(np.median(priced.ratio_S))
    factor_O = np.median(dataset.latency_ms_SO / priced.ms_SO, axis=0) / factor
    log_factor_O = np.log(factor_O).astype(np.float32)
    weights = dict(base.tensors())
    prices_OK = weights[_PRICES].reshape(NUM_OUTPUTS, -1) + log_factor_O[:, None]
    weights |= {_PRICES: prices_OK.flatten(), OVERHEAD: weights[OVERHEAD] + log_factor_O}
    return LearnedCostModel(weights, replace(base.card, scale_ms=base.card.scale_ms * factor), base.version)


def refreshed(model: LearnedCostModel, now: CostDataset) -> LearnedCostModel:
    """A model of this machine at the speed that it has now: as `scaled_to`, with intervals for the hours after it.

    Few samples tell the speed less well, which the intervals allow for.

    Args:
        model: Of this machine.
        now: Sets measured just now, whatever they are; drift is divided out of them to the middle of their own time.
    """
    scaled = scaled_to(model, now)
    # Of a model that was refreshed before, without what that refresh could not tell.
    between_hours = float(model.card.training.get("drift_between_hours", model.card.interval.drift))
    training = {
        **model.card.training,
        "drift_between_hours": between_hours,
        "refreshed_from": model.version_id,
        "refreshed_on": len(now),
        "refreshed_by": scaled.card.scale_ms / model.card.scale_ms,
    }
    off_S = np.log(PricedSamples.of(scaled.predictor, now).ratio_S)
    of_median = _HALF_OF_90 * _OF_MEDIAN * float(np.median(np.abs(off_S))) / len(now) ** 0.5
    drift = float(np.hypot(max(between_hours, drift_of(now)), of_median))
    interval = replace(model.card.interval, drift=drift)
    return LearnedCostModel(scaled.tensors(), replace(scaled.card, training=training, interval=interval))


def drift_of(dataset: CostDataset) -> float:
    """Half the width of the logarithm of the 90% interval of what a machine's kernels take an hour later over now.

    No store of a minute tells of hours; but machines whose speed changes within a minute do so between hours, too.
    """
    return float(np.hypot(LEAST_DRIFT, DRIFT_PER_SPREAD * dataset.speed_spread))


def nearest_base(bases: tuple[LearnedCostModel, ...], dataset: CostDataset) -> LearnedCostModel:
    """The model, of at least one, whose prices are nearest to being proportional to what was measured."""

    def unlikeness(model: LearnedCostModel) -> float:
        log_ratio_S = np.log(PricedSamples.of(model.predictor, dataset).ratio_S)
        return float(np.mean(np.abs(log_ratio_S - np.median(log_ratio_S))))

    return min(bases, key=unlikeness)


def _training_of(
    base: LearnedCostModel, dataset: CostDataset, options: CalibrationOptions, seed: int
) -> dict[str, Any]:
    training = options.training(len(dataset))
    return {
        "calibrated_from": base.version_id,
        "base_machine": "" if base.measured_on is None else base.measured_on.device_name,
        "num_samples": len(dataset),
        "samples_until": max(dataset.collected_at_S.tolist()),
        "seed": seed,
        "schedule": training.schedule,
        "batch_size": training.batch_size,
        "learning_rate": options.learning_rate,
        "pull": options.pull,
        "num_folds": options.num_folds,
        "version": autoshard.__version__,
    }


def _out_of_fold(
    base: LearnedCostModel, dataset: CostDataset, options: CalibrationOptions, seed: int, advance: Advance
) -> PricedSamples:
    """The samples, each priced by a model that was calibrated without it; a single set by the base."""
    by_base = PricedSamples.of(base.predictor, dataset)
    ms_SO, spread_S = by_base.ms_SO.copy(), by_base.spread_S.copy()
    training = options.training(len(dataset), options.fold_share)
    for inside_S, outside_S in _folds(dataset, options, seed):
        fitted = _fitted(base, dataset.take(inside_S), training, options.pull, seed, advance)
        found = PricedSamples.of(fitted.predictor, dataset.take(outside_S))
        ms_SO[outside_S], spread_S[outside_S] = found.ms_SO, found.spread_S
    return replace(by_base, ms_SO=ms_SO, spread_S=spread_S)


def _folds(dataset: CostDataset, options: CalibrationOptions, seed: int) -> Iterator[tuple[IndexArray, IndexArray]]:
    """Samples to calibrate on and samples to predict, of each fold; all samples of a set are in one fold."""
    sets, set_S = np.unique(dataset.set_S, return_inverse=True)
    count = _num_folds(len(sets), options)
    fold_S = (np.random.default_rng(seed).permutation(len(sets)) % max(count, 1))[set_S]
    for fold in range(count):
        yield np.flatnonzero(fold_S != fold), np.flatnonzero(fold_S == fold)


def _num_folds(num_sets: int, options: CalibrationOptions) -> int:
    return min(options.num_folds, num_sets) if num_sets > 1 else 0


def _fitted(
    base: LearnedCostModel,
    dataset: CostDataset,
    training: CostTrainingOptions,
    pull: float,
    seed: int,
    advance: Advance,
) -> LearnedCostModel:
    """The base scaled to the samples and trained further on them, with the spreads that it had."""
    scaled = scaled_to(base, dataset)
    card = scaled.card
    network = CostNetwork(card.encoder_hidden)
    network.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in scaled.tensors().items()})
    # Which sets are predicted well differs little between machines, and a few samples tell less of it than the base
    # knows: a spread that they train falls to nothing on them.
    network.doubt.requires_grad_(False)
    weights = descend(
        network,
        dataset,
        card.scaling.apply(dataset.features_UF),
        card.scale_ms,
        training,
        np.random.default_rng(seed),
        advance,
        pull=pull / len(dataset),
    )
    return LearnedCostModel(weights, card)


def _joined(first: TrainedCoverage, second: TrainedCoverage) -> TrainedCoverage:
    """What either of two models has seen."""
    return TrainedCoverage(
        kinds=tuple(sorted({*first.kinds, *second.kinds})),
        num_tables=_span(first.num_tables, second.num_tables),
        ranges={name: _span(ends, second.ranges[name]) for name, ends in first.ranges.items()},
    )


def _span(first: tuple[Any, Any], second: tuple[Any, Any]) -> tuple[Any, Any]:
    return min(first[0], second[0]), max(first[1], second[1])
