"""The learned model as a plugin: how it is loaded (`autoshard.cost_models`), and trained (`autoshard.trainers`)."""

from __future__ import annotations

from pathlib import Path

from autoshard.core import CostModel
from autoshard.plugins import TrainingRound
from costmodel.kernel.learned import LearnedCostModel
from costmodel.registry.versions import Registry


def load_learned_model(registry: Path | None, device: str) -> CostModel | None:
    """See `LearnedModel.in_use`."""
    return LearnedCostModel.in_use(registry, device)


def train_learned_model(store: Path, device: str, registry: Path) -> TrainingRound:
    """Trains a model from one machine's samples of a device, and makes it the production version of a registry.

    Args:
        store: Folder of samples.
        device: Key of the device kind, such as `cpu`.
        registry: Folder of the registry; made when missing.

    Raises:
        SampleStoreError: If there are too few samples, or of several machines and none of the one at hand.
    """
    from autoshard.formats.stores.samples import SampleTable, read_samples
    from costmodel.kernel.dataset import CostDataset
    from costmodel.kernel.training import train_cost_model
    from costmodel.samples import of_one_machine

    table = SampleTable(samples=of_one_machine(read_samples(store, device).samples, device, store))
    trained = train_cost_model(CostDataset.from_samples(table), device=device)
    card = trained.model.card
    trained.model.publish(Registry(registry))
    return TrainingRound(num_samples=int(card.training["num_samples"]), relative_error=card.metrics.relative_error)
