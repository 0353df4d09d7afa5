"""A trained model of kernels against another version of it, by their relative errors on the same samples.

Shape suffixes: S samples.
"""

from __future__ import annotations

import numpy as np

from autoshard.core import KernelCosts
from autoshard.core.costs import CodeArray, MsArray
from autoshard.core.errors import ModelError
from costmodel.kernel.dataset import CostDataset
from costmodel.kernel.learned import LearnedCostModel
from costmodel.kernel.metrics import sum_codes
from costmodel.kernel.training import TrainedCostModel
from costmodel.registry.promotion import TrainedVersion

#: With fewer samples that neither model was trained on, a difference says nothing.
_FEWEST = 10


def kernel_version(trained: TrainedCostModel) -> TrainedVersion:
    """A model of kernels; it is compared on the samples that neither it nor the other one was trained on.

    Errors on samples of the training are lower: by 1.5 to 2.0 percentage points for a model of 400 samples, three to
    seven times the standard error of the mean difference, while on samples that neither was trained on the same models
    differ by 0.7 at most, and by less than one standard error. Measured on tests/data/samples, all pairs of seeds 0 to
    3, on an EPYC, November 2026.
    """
    model = trained.model

    def difference(other: LearnedCostModel) -> MsArray:
        dataset = unseen_by(other, trained.held_out)
        if len(dataset) < _FEWEST:
            raise ModelError(f"only {len(dataset)} samples were kept from its training too, {_FEWEST} are needed")
        return kernel_errors(model, dataset) - kernel_errors(other, dataset)

    return TrainedVersion.by_errors(model, difference, "held-out samples")


def unseen_by(model: LearnedCostModel, dataset: CostDataset) -> CostDataset:
    """The samples that a model would have kept from its training; all if it does not say how it chose them."""
    training = model.card.training
    seed, share = training.get("seed"), training.get("held_out_share")
    if not isinstance(seed, int) or not isinstance(share, float):
        return dataset
    return dataset.split(share, seed)[1]


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
