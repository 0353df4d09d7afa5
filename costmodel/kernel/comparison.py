"""A trained model of kernels against another version of it, by their relative errors on the same samples.

Shape suffixes: S samples.
"""

from __future__ import annotations

import numpy as np

from autoshard.core import KernelCosts
from autoshard.core.costs import CodeArray, MsArray
from autoshard.core.errors import ModelError
from costmodel.kernel.dataset import CostDataset, IndexArray
from costmodel.kernel.learned import LearnedCostModel
from costmodel.kernel.metrics import sum_codes
from costmodel.kernel.training import TrainedCostModel
from costmodel.registry.promotion import TrainedVersion

#: With fewer samples that neither model was trained on, a difference says nothing.
_FEWEST = 10
#: Later than any sample.
_ALWAYS = "9"


def kernel_version(trained: TrainedCostModel) -> TrainedVersion:
    """A model of kernels; it is compared on the samples that neither it nor the other one was trained on.

    Errors on samples of the training are lower: by 1.5 to 2.0 percentage points for a model of 400 samples, three to
    seven times the standard error of the mean difference, while on samples that neither was trained on the same models
    differ by 0.7 at most, and by less than one standard error. Measured on tests/data/samples, all pairs of seeds 0 to
    3, on an EPYC, November 2026.
    """
    model = trained.model

    def difference(other: LearnedCostModel) -> MsArray:
        dataset = trained.held_out.take(unseen_by(other, trained.held_out))
        return kernel_errors(model, dataset) - kernel_errors(other, dataset)

    return TrainedVersion.by_errors(model, difference, "held-out samples")


def unseen_by(model: LearnedCostModel, dataset: CostDataset) -> IndexArray:
    """Indices of the samples that a model was not trained on; of all if it does not say how it chose its own.

    A model of another machine has seen none; one that was calibrated has seen every set that was measured before its
    newest sample.

    Raises:
        ModelError: If they are fewer than a comparison needs.
    """
    training, found_S = model.card.training, np.ones(len(dataset), dtype=np.bool_)
    seed, share = training.get("seed"), training.get("held_out_share")
    own, its = dataset.machine, model.measured_on
    if own is None or its is None or its.is_like(own):
        if "calibrated_from" in training:
            is_before_S = dataset.collected_at_S <= str(training.get("samples_until", _ALWAYS))
            found_S = ~np.isin(dataset.set_S, dataset.set_S[is_before_S])
        elif isinstance(seed, int) and isinstance(share, float):
            found_S = dataset.are_held_out(share, seed)
    if (count := int(found_S.sum())) < _FEWEST:
        raise ModelError(f"only {count} samples were kept from its training too, {_FEWEST} are needed")
    return np.flatnonzero(found_S)


def kernel_errors(model: LearnedCostModel, dataset: CostDataset) -> MsArray:
    """Relative errors of a model's prices, shape (S,).

    Raises:
        ModelError: If no kernel of a shard's kind was measured for the model.
    """
    errors_S: MsArray = np.abs(model.predict_ms(_codes(model, dataset)) / dataset.kernel_ms - 1)
    return errors_S


def priced(model: LearnedCostModel, dataset: CostDataset) -> KernelCosts:
    """A model's prices of samples, with 90% intervals.

    Raises:
        ModelError: If no kernel of a shard's kind was measured for the model.
    """
    return model.predict_parts(_codes(model, dataset))


def _codes(model: LearnedCostModel, dataset: CostDataset) -> CodeArray:
    """Sums of the codes of every sample's shards, shape (S, H)."""
    used_U, shard_N = np.unique(dataset.shard_N, return_inverse=True)
    codes_UH = model.encode([dataset.shards_U[index] for index in used_U.tolist()])
    starts_S = np.cumsum(dataset.num_shards_S) - dataset.num_shards_S
    return sum_codes(codes_UH, shard_N, starts_S)
