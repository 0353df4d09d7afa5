"""What errors of predictions have in common, fitted from samples that training did not see.

Shape suffixes: S samples, U distinct shards, M shards as the samples hold them, A kinds of effects.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from scipy import sparse
from scipy.optimize import nnls

from autoshard.core.costs import KernelErrors
from autoshard.evaluation.uncertainty.set_errors import SetErrors
from costmodel.kernel.card import Interval
from costmodel.kernel.dataset import CostDataset
from costmodel.kernel.metrics import MsArray, PricedSamples, set_codes
from costmodel.kernel.predictor import CostPredictor

#: With fewer samples kept from training, errors are taken to be what the interval says, each set's its own.
_MIN_SAMPLES = 20
#: Sets that were measured again from which on they tell how far a measurement is off by itself.
_MIN_REPEATS = 5
#: Half widths of a 90% interval that are a standard deviation of a normal distribution; and what a median absolute
#: difference is multiplied by for one.
_OF_INTERVAL, _OF_MEDIAN = 1 / 1.645, 1.4826
#: Standard deviations beyond which an error counts as this one: few that are far off would decide all.
_FARTHEST = 4.0
#: Mean square of what pairs of samples have in common by an effect, below which they do not tell it.
_LEAST_TOLD = 1e-6


def held_out_errors(
    predictor: CostPredictor, interval: Interval, held_out: PricedSamples, dataset: CostDataset
) -> KernelErrors:
    """Errors of a trained network.

    Args:
        predictor: The network.
        interval: Of its predictions.
        held_out: Samples that were kept from its training, priced by it.
        dataset: All samples, which say how far a measurement is off by itself.
    """
    noise = measurement_noise(dataset, half_widths_of(interval, predictor.spread(set_codes(predictor, dataset))))
    return fitted_errors(predictor, interval, held_out, noise)


def fitted_errors(predictor: CostPredictor, interval: Interval, kept: PricedSamples, noise: float) -> KernelErrors:
    """Fits the standard deviations of effects to the errors of predictions.

    Products of the errors of two samples are compared with what the samples have in common, over all pairs.

    Args:
        predictor: Prices shards alone.
        interval: Of the predictions.
        kept: Samples with predictions that were made without them.
        noise: See `measurement_noise`.

    Source:
        Haseman and Elston, The investigation of linkage between a quantitative trait and a marker locus (Behavior
        Genetics, 1972): regression of products on common shares. Differs: several shares at once, none below 0.
    """
    num_samples = len(kept.dataset)
    if num_samples < _MIN_SAMPLES:
        return KernelErrors(table=0.0, kind=0.0, company=_OF_INTERVAL)
    half_width_S = half_widths_of(interval, kept.spread_S)
    off_S = np.log(kept.ratio_S) / half_width_S
    off_S = off_S - np.median(off_S)
    farthest = _FARTHEST * _OF_MEDIAN * float(np.median(np.abs(off_S)))
    off_S = np.clip(off_S, -farthest, farthest)
    # What all samples have in common is left out on both sides: no plan is better for it.
    off_S = off_S - off_S.mean()
    alike = _unscaled(predictor, kept.dataset).parts(KernelErrors(table=1.0, kind=1.0, company=1.0))
    loads = [load for _, load in alike]
    common_AA = np.array([[_common(one, other) for other in loads] for one in loads])
    found_A = np.array([np.square(one.T @ off_S).sum() - noise**2 * _size(one) for one in loads])
    # What all samples share alike, such as the kind where there is one only, is in none of the centred products.
    is_told_A = common_AA.diagonal() > _LEAST_TOLD * num_samples**2
    variance_A = np.zeros(len(loads))
    variance_A[is_told_A], _ = nnls(common_AA[np.ix_(is_told_A, is_told_A)], np.maximum(found_A, 0.0)[is_told_A])
    table, kind, company = np.sqrt(variance_A).tolist()
    return KernelErrors(table=table, kind=kind, company=company)


def measurement_noise(dataset: CostDataset, half_width_S: MsArray) -> float:
    """Standard deviation of a measurement by itself, in half widths; 0 where too few sets were measured again.

    Args:
        dataset: All samples, those of training too: two measurements of a set differ whatever the model says.
        half_width_S: Half the width of the logarithm of each sample's 90% interval.
    """
    order_S = np.argsort(dataset.set_S, kind="stable")
    is_repeat_S = dataset.set_S[order_S][1:] == dataset.set_S[order_S][:-1]
    if is_repeat_S.sum() < _MIN_REPEATS:
        return 0.0
    change_S = np.diff(np.log(dataset.kernel_ms[order_S]))[is_repeat_S]
    return _OF_MEDIAN * float(np.median(np.abs(change_S / half_width_S[order_S][1:][is_repeat_S]))) / np.sqrt(2)


def half_widths_of(interval: Interval, spread_S: MsArray) -> MsArray:
    """Half the width of the logarithm of intervals without drift, shape (S,)."""
    low_S, high_S = replace(interval, drift=0.0).factors(spread_S)
    half_width_S: MsArray = np.maximum(np.log(high_S / low_S) / 2, np.finfo(np.float64).tiny)
    return half_width_S


def _common(one: sparse.csr_array, other: sparse.csr_array) -> float:
    """Sum over all pairs of samples of the products of what they have in common by either load, both centred."""
    count = one.shape[0]
    products = one.T @ other
    sums, others = np.asarray(one.sum(axis=0)), np.asarray(other.sum(axis=0))
    crossed = float(sums @ (products @ others))
    return float(products.power(2).sum()) - 2 * crossed / count + float(sums @ sums) * float(others @ others) / count**2


def _size(load: sparse.csr_array) -> float:
    """Sum over samples of what each has in common with itself, centred."""
    sums = np.asarray(load.sum(axis=0))
    return float(load.power(2).sum()) - float(sums @ sums) / load.shape[0]


def _unscaled(predictor: CostPredictor, dataset: CostDataset) -> SetErrors:
    """What the sets of samples have in common, as if all their intervals had half widths of 1."""
    alone_ms_U = predictor.predict(predictor.encode(dataset.features_UF)).sum(axis=1)
    held = [dataset.shards_U[index] for index in dataset.shard_N.tolist()]
    return SetErrors.of(
        owner_M=np.repeat(np.arange(len(dataset)), dataset.num_shards_S),
        tables_M=[shard.table for shard in held],
        kinds_M=[shard.kernel_kind for shard in held],
        alone_ms_M=alone_ms_U[dataset.shard_N],
        half_width_X=np.ones(len(dataset)),
        sets_X=dataset.set_S.tolist(),
    )
