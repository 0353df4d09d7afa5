"""Training of the learned cost model from measured sets of shards.

Shape suffixes: B samples of a batch, U distinct shards, F features.
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
from autoshard.runtime.processes.learners import Learners
from autoshard.runtime.processes.threads import intra_op_threads
from costmodel.kernel.card import CostModelCard
from costmodel.kernel.dataset import CostDataset, IndexArray
from costmodel.kernel.errors import held_out_errors
from costmodel.kernel.features import FeatureScaling
from costmodel.kernel.learned import LearnedCostModel
from costmodel.kernel.metrics import PricedSamples
from costmodel.kernel.network import CostNetwork
from costmodel.kernel.predictor import CostPredictor
from costmodel.kernel.updates.batches import DeviceSamples, SetBatch
from costmodel.kernel.updates.progress import CostProgress, OnCostProgress, Throughput
from costmodel.kernel.weights import ENCODER_HIDDEN, Weights

#: With fewer, the share that is held out says nothing about accuracy.
MIN_SAMPLES = 50

#: Options that the card tells of, beside the schedule.
_CARD_OPTIONS = ("batch_size", "learning_rate", "beta2", "weight_decay", "least_share", "held_out_share")

#: Updates between two reports of progress.
REPORT_EVERY = 100

Advance = Callable[[float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTrainingOptions:
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
    options: CostTrainingOptions | None = None,
    seed: int = 0,
    advance: Advance = lambda _: None,
    learners: Learners | None = None,
    on_progress: OnCostProgress = lambda _: None,
) -> TrainedCostModel:
    """Trains a network on a random part of the samples and measures it on the rest.

    Network, features and batches are on the device of `learners`. Of several processes, each takes its share of every
    batch; their gradients are averaged, so that all of them end with the same weights.

    Args:
        dataset: Measured sets.
        device: Key of the device kind that they were measured on.
        options: How to train; the defaults when left out.
        seed: Same seed and samples, same weights (on the same machine).
        advance: Told how many updates have just been done.
        learners: Processes that train together, and this one's device; alone on the CPU when left out.
        on_progress: Receives loss and throughput every `REPORT_EVERY` updates, and after the last one.

    Raises:
        SampleStoreError: If there are fewer than MIN_SAMPLES samples.
    """
    options, learners = options or CostTrainingOptions(), learners or Learners()
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
    fit = CostFit(train_part, scale_ms, options, rng, learners)
    with intra_op_threads(1):
        weights = fit.run(features_UF, advance, on_progress)
    predictor = CostPredictor(weights, encoder_hidden=options.encoder_hidden, scaling=scaling, scale_ms=scale_ms)
    judged = PricedSamples.of(predictor, held_out)
    interval = judged.interval()
    errors = held_out_errors(predictor, interval, judged, dataset)
    card = CostModelCard(
        device=device,
        coverage=dataset.coverage,
        encoder_hidden=options.encoder_hidden,
        scaling=scaling,
        scale_ms=scale_ms,
        metrics=judged.metrics(),
        interval=interval,
        training={
            "num_samples": len(train_part),
            "seed": seed,
            "schedule": options.schedule,
            **{name: getattr(options, name) for name in _CARD_OPTIONS},
            "version": autoshard.__version__,
        },
        measured_on=dataset.machine,
        errors=errors,
    )
    return TrainedCostModel(model=LearnedCostModel(weights, card), held_out=held_out)


class CostFit:
    """The training of one network.

    Args:
        dataset: Samples to learn from.
        scale_ms: Unit of latencies.
        options: How to train.
        rng: Source of weights and batches, in the same state in all processes.
        learners: Processes that train together.
        network: Trained further from where it stands; a new one when left out.
        pull: Loss per squared distance of all weights from where they stood; 0 for none.
    """

    def __init__(
        self,
        dataset: CostDataset,
        scale_ms: float,
        options: CostTrainingOptions,
        rng: np.random.Generator,
        learners: Learners,
        network: CostNetwork | None = None,
        pull: float = 0.0,
    ) -> None:
        self._dataset, self._scale_ms, self._options = dataset, scale_ms, options
        self._rng, self._learners = rng, learners
        network = network or _new_network(dataset, scale_ms, options, rng)
        self.network = network.to(learners.device)
        self._pull = pull
        self._origin = [parameter.detach().clone() for parameter in self.network.parameters()] if pull else []
        self.optimizer = torch.optim.AdamW(
            _parameter_groups(self.network, options.weight_decay),
            lr=options.learning_rate,
            betas=(0.9, options.beta2),
            fused=True,
        )
        self._rate = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda update: _annealed(update / options.num_updates)
        )

    def run(self, features_UF: NDArray[np.float32], advance: Advance, on_progress: OnCostProgress) -> Weights:
        """The weights after all updates; of the data set's features, scaled."""
        options, rank, world_size = self._options, self._learners.rank, self._learners.world_size
        samples = DeviceSamples(self._dataset, features_UF, self._scale_ms, self._learners.device)
        # What shards are left out is drawn by each process for its own samples.
        draws = self._rng if world_size == 1 else np.random.default_rng([int(self._rng.integers(2**31)), rank])
        throughput = Throughput()
        for number, samples_B in enumerate(sample_batches(len(self._dataset), options, self._rng), start=1):
            mine_B = samples_B[rank::world_size]
            # Losses are means over samples: the mean of gradients is that of the whole batch, however it is parted.
            weight = len(mine_B) * world_size / len(samples_B)
            loss = self.update(samples.batch(mine_B, draws if options.least_share else None), weight)
            throughput.add(len(samples_B))
            advance(1)
            if number % REPORT_EVERY == 0 or number == options.num_updates:
                rate = float(self._rate.get_last_lr()[0])
                speed = throughput.samples_per_s
                on_progress(CostProgress(num_updates=number, loss=float(loss), learning_rate=rate, samples_per_s=speed))
        return {name: tensor.cpu().numpy() for name, tensor in self.network.state_dict().items()}

    def update(self, batch: SetBatch, weight: float = 1.0) -> torch.Tensor:
        """Makes one update, and returns the loss before it; `weight` is that of this process's samples."""
        loss = batch.loss(self.network, self._options.least_share)
        if self._pull:
            pairs = zip(self.network.parameters(), self._origin, strict=True)
            loss = loss + self._pull * torch.stack([(now - start).square().sum() for now, start in pairs]).sum()
        self.optimizer.zero_grad()
        (weight * loss).backward()
        self._learners.average_gradients(self.network.parameters())
        self.optimizer.step()
        self._rate.step()
        return loss.detach()


def _new_network(
    dataset: CostDataset, scale_ms: float, options: CostTrainingOptions, rng: np.random.Generator
) -> CostNetwork:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.integers(2**31)))
        network = CostNetwork(options.encoder_hidden)
    network.start_from(dataset.mean_work, dataset.mean_latency_ms / scale_ms)
    return network


def descend(
    network: CostNetwork,
    dataset: CostDataset,
    features_UF: NDArray[np.float32],
    scale_ms: float,
    options: CostTrainingOptions,
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
    fit = CostFit(dataset, scale_ms, options, rng, Learners(), network, pull)
    return fit.run(features_UF, advance, lambda _: None)


def sample_batches(num_samples: int, options: CostTrainingOptions, rng: np.random.Generator) -> Iterator[IndexArray]:
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
