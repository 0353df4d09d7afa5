"""Training of the learned cost model from measured sets of shards.

Shape suffixes: S samples, B samples of a batch, U distinct shards, N shards, F features, H width of a code, O outputs
(forward, backward).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

import autoshard
from autoshard.core.accepted import AT_LEAST_1, Range
from autoshard.core.errors import SampleStoreError
from autoshard.runtime.processes.threads import intra_op_threads
from costmodel.kernel.card import CostModelCard
from costmodel.kernel.dataset import CostDataset, IndexArray
from costmodel.kernel.features import FeatureScaling
from costmodel.kernel.learned import LearnedCostModel
from costmodel.kernel.loss import missing_growth, prediction_loss
from costmodel.kernel.metrics import assess
from costmodel.kernel.network import CostNetwork
from costmodel.kernel.predictor import CostPredictor
from costmodel.kernel.weights import ENCODER_HIDDEN, Weights

#: With fewer, the share that is held out says nothing about accuracy.
MIN_SAMPLES = 50

#: Options that the card tells of, beside the schedule.
_CARD_OPTIONS = ("batch_size", "learning_rate", "beta2", "weight_decay", "least_share", "held_out_share")

Advance = Callable[[float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """How the network is trained, by Adam with decoupled weight decay on relative errors."""

    num_updates: int = 5000
    """Batches of samples, in a new random order after each pass over all. Few samples are seen more often than many:
    training takes as long, and gains from it."""
    batch_size: int = 256
    """Samples per update."""
    learning_rate: float = 1e-2
    """The highest one: the rate rises at first, and then falls to 0 along a cosine."""
    beta2: float = 0.98
    """Adam's decay of squared gradients."""
    weight_decay: float = 0.5
    """Share of the weights that is taken off, per unit of learning rate."""
    least_share: float = 0.8
    """Share of its own time that a shard must add to any set; less is penalised. 0 for nothing of the kind."""
    encoder_hidden: tuple[int, ...] = ENCODER_HIDDEN
    """Widths of the encoder's hidden layers."""
    held_out_share: float = 0.2
    """Share of samples that are kept from training, to measure accuracy and the interval."""

    def __post_init__(self) -> None:
        AT_LEAST_1.check_fields(self, "num_updates", "batch_size")
        Range(above=0, below=1).check_fields(self, "learning_rate", "beta2", "held_out_share")
        Range(at_least=0, below=1).check_fields(self, "weight_decay", "least_share")

    @property
    def schedule(self) -> dict[str, object]:
        """Which samples each update sees, as cards have it."""
        return {"kind": "shuffled", "num_updates": self.num_updates}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedCostModel:
    """A trained model, ready to be published or used.

    Attributes:
        held_out: The samples that were kept from training.
    """

    model: LearnedCostModel
    held_out: CostDataset


def train_cost_model(
    dataset: CostDataset,
    *,
    device: str,
    options: TrainingOptions | None = None,
    seed: int = 0,
    advance: Advance = lambda _: None,
) -> TrainedCostModel:
    """Trains a network on a random part of the samples and measures it on the rest.

    Args:
        dataset: Measured sets.
        device: Key of the device kind that they were measured on.
        options: How to train; the defaults when left out.
        seed: Same seed and samples, same weights (on the same machine).
        advance: Told how many updates have just been done.

    Raises:
        SampleStoreError: If there are fewer than MIN_SAMPLES samples.
    """
    options = options or TrainingOptions()
    if len(dataset) < MIN_SAMPLES:
        raise SampleStoreError(
            f"training needs at least {MIN_SAMPLES} samples, there are {len(dataset)}: "
            "collect more with `autoshard collect`"
        )
    rng = np.random.default_rng(seed)
    train_part, held_out = dataset.split(options.held_out_share, seed)
    scaling = FeatureScaling.fit(train_part.features_UF[train_part.shard_N])
    scale_ms = float(train_part.kernel_ms.mean())
    features_UF = scaling.apply(train_part.features_UF)
    with intra_op_threads(1):
        weights = _fit(train_part, features_UF, scale_ms, options, rng, advance)
    predictor = CostPredictor(weights, encoder_hidden=options.encoder_hidden, scaling=scaling, scale_ms=scale_ms)
    metrics, interval = assess(predictor, held_out)
    card = CostModelCard(
        device=device,
        coverage=dataset.coverage,
        encoder_hidden=options.encoder_hidden,
        scaling=scaling,
        scale_ms=scale_ms,
        metrics=metrics,
        interval=interval,
        training={
            "num_samples": len(train_part),
            "seed": seed,
            "schedule": options.schedule,
            **{name: getattr(options, name) for name in _CARD_OPTIONS},
            "version": autoshard.__version__,
        },
        measured_on=dataset.machine,
    )
    return TrainedCostModel(model=LearnedCostModel(weights, card), held_out=held_out)


def _fit(
    dataset: CostDataset,
    features_UF: NDArray[np.float32],
    scale_ms: float,
    options: TrainingOptions,
    rng: np.random.Generator,
    advance: Advance,
) -> Weights:
    """The weights of a network that is trained on a data set, whose features have been scaled."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.integers(2**31)))
        network = CostNetwork(options.encoder_hidden)
    network.start_from(dataset.mean_work, dataset.mean_latency_ms / scale_ms)
    return descend(network, dataset, features_UF, scale_ms, options, rng, advance)


def descend(
    network: CostNetwork,
    dataset: CostDataset,
    features_UF: NDArray[np.float32],
    scale_ms: float,
    options: TrainingOptions,
    rng: np.random.Generator,
    advance: Advance = lambda _: None,
    *,
    pull: float = 0.0,
) -> Weights:
    """The weights of a network after training it further from where it stands.

    Args:
        network: Is changed.
        dataset: Measured sets.
        features_UF: Scaled features of its distinct shards.
        scale_ms: Milliseconds per unit of the network's outputs.
        options: How to train.
        rng: Decides which samples each update sees.
        advance: Receives the number of updates just done.
        pull: Loss per squared distance of all weights from where they stood; 0 for none.
    """
    latency_SO = (dataset.latency_ms_SO / scale_ms).astype(np.float32)
    origin = [parameter.detach().clone() for parameter in network.parameters()]
    optimizer = torch.optim.AdamW(
        _parameter_groups(network, options.weight_decay),
        lr=options.learning_rate,
        betas=(0.9, options.beta2),
        fused=True,
    )
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: _annealed(update / options.num_updates))
    for samples_B in sample_batches(len(dataset), options, rng):
        shard_N, starts_B = dataset.shards_of(samples_B)
        used_U, shard_N = np.unique(shard_N, return_inverse=True)
        codes_UH = network.encoder(torch.from_numpy(features_UF[used_U]))
        shards, starts = torch.from_numpy(shard_N), torch.from_numpy(starts_B)
        predicted_BO, log_spread_B = network.predict_ms(codes_UH, shards, starts)
        loss = prediction_loss(predicted_BO, log_spread_B, torch.from_numpy(latency_SO[samples_B]))
        if options.least_share > 0:
            loss = loss + missing_growth(network, codes_UH, shards, starts, predicted_BO, options.least_share, rng)
        if pull > 0:
            moved = ((now - start).square().sum() for now, start in zip(network.parameters(), origin, strict=True))
            loss = loss + pull * torch.stack(list(moved)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
        advance(1)
    return {name: tensor.numpy() for name, tensor in network.state_dict().items()}


def sample_batches(num_samples: int, options: TrainingOptions, rng: np.random.Generator) -> Iterator[IndexArray]:
    """Indices of the samples of each update."""
    batch_size = min(options.batch_size, num_samples)
    order, start = rng.permutation(num_samples), 0
    for _ in range(options.num_updates):
        # What is left at the end of an order is too little for a batch; the next order has it again.
        if start + batch_size > num_samples:
            order, start = rng.permutation(num_samples), 0
        yield order[start : start + batch_size]
        start += batch_size


def _parameter_groups(network: CostNetwork, weight_decay: float) -> list[dict[str, object]]:
    """Matrices decay, biases do not: the bias of a price is its level, which is far from 0."""
    matrices = [parameter for parameter in network.parameters() if parameter.ndim > 1]
    biases = [parameter for parameter in network.parameters() if parameter.ndim <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": biases, "weight_decay": 0.0}]


def _annealed(done: float) -> float:
    """Share of the highest learning rate after a share of the training: up for a tenth, then down to 0."""
    if done < 0.1:
        return 0.04 + 0.96 * done / 0.1
    return 0.5 + 0.5 * float(np.cos(np.pi * (done - 0.1) / 0.9))
