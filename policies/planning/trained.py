"""A trained policy as it is published: the weights of its network, and a card."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from autoshard.core.costs import OutsideRange
from autoshard.core.errors import ModelError
from autoshard.formats.documents.kinds import ANY_OBJECT, TEXT, Field, by_name, number_in, optional, tuple_of
from autoshard.planners.space.kinds import FloatArray
from autoshard.planners.space.ways import NUM_PRICES, TaskFeatures, task_inputs
from costmodel.registry.card_fields import ModelCard
from costmodel.registry.models import LearnedModel
from costmodel.registry.versions import Registry, StoredModel, Tensors, find_model
from policies.network import START_CONTEXT, PolicyNetwork, check_weights
from policies.planning.decoding import states

#: What the registry keeps policies under, and the name of those that serve any device.
POLICY_KIND, ANY_DEVICE = "policy", "any"
# Loaded policies are about a tenth of a megabyte each.
_CACHED_POLICIES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCard(ModelCard):
    """All of a policy but the weights of its network.

    Attributes:
        device: Key of the device that it was trained for; `any` for every one.
        training: Options, counts and scores of the training, for information.
        ranges: Least and largest of the tasks that it was trained on, by the names of `task_inputs`.
    """

    #: Changes whenever the network reads something else.
    schema: ClassVar[str] = "autoshard.policy/4"
    fields: ClassVar[tuple[Field, ...]] = (
        Field("device", TEXT),
        Field("training", ANY_OBJECT, "Options, seeds and counts of the training."),
        optional("ranges", by_name(tuple_of(number_in(), number_in())), "Ranges of the training's tasks.", default={}),
    )
    remedy: ClassVar[str] = "`autoshard train policy` makes one that can be read"

    device: str
    training: dict[str, Any]
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)


class TrainedPolicy(LearnedModel[PolicyCard]):
    """A network that chooses how tables are held, and where.

    Args:
        weights: Of the network, numpy's.
        device: Key of the device that it was trained for; `any` for every one.
        training: Options, counts and scores of the training, for information.
        ranges: See `PolicyCard`; none if nobody knows.
        version: In the registry that it comes from, if it does, and whether that came with this package.
    """

    card_type = PolicyCard
    kind = label = POLICY_KIND

    def __init__(
        self,
        *,
        weights: Mapping[str, NDArray[np.float32]],
        device: str = ANY_DEVICE,
        training: Mapping[str, Any],
        ranges: Mapping[str, tuple[float, float]] | None = None,
        version: str = "",
    ) -> None:
        super().__init__(PolicyCard(device=device, training=dict(training), ranges=dict(ranges or {})), version)
        self.network = PolicyNetwork(weights)

    def tensors(self) -> Tensors:
        """Weights of the network."""
        return dict(self.network.weights)

    @classmethod
    def restored(cls, stored: StoredModel, card: PolicyCard) -> TrainedPolicy:
        """See `LearnedModel.restored`."""
        check_weights(stored.tensors, stored.source)
        return cls(
            weights=stored.tensors,
            device=card.device,
            training=card.training,
            ranges=card.ranges,
            version=stored.label,
        )

    @classmethod
    def for_device(cls, root: Path | None, device: str) -> TrainedPolicy:
        """The production policy of a device, or else the one for any device.

        Args:
            root: Folder of the registry; the default one if None. Where it has none, the one that ships is taken.
            device: Key of the device.

        Raises:
            ModelError: If there is none, or it is damaged.
        """
        found = find_model(POLICY_KIND, device, root) or find_model(POLICY_KIND, ANY_DEVICE, root)
        if found is None:
            raise ModelError(
                f"no policy model of {device} or of any device has been published; `autoshard train policy` makes one",
                source=str(Registry(root).root),
            )
        models, name, version = found
        return _load_version(models.root, name, version)

    def outside(self, features: TaskFeatures) -> str:
        """How far a task lies outside of those that the policy was trained on; empty where it does not."""
        inputs = task_inputs(features.task_F)
        faults = [
            OutsideRange(table="", field=name, value=inputs[name], low=low, high=high).fault
            for name, (low, high) in self.card.ranges.items()
            if name in inputs and not low <= inputs[name] <= high
        ]
        return "; ".join(faults)

    def score_ways(self, features: TaskFeatures, ways_WF: FloatArray) -> FloatArray:
        """How likely a long search holds items in each way, before anything is priced: scores of shape (I, W)."""
        order_I = features.order()
        states_NH = states(self.network, features.task_F, features.items_IF[order_I])
        of_state_N1U = self.network.of_state("option", states_NH)[:, None]
        of_context_U = self.network.of_context("option", START_CONTEXT)
        unpriced_WF = np.pad(ways_WF, ((0, 0), (0, NUM_PRICES))).astype(np.float32)
        score_IW = np.empty((len(order_I), len(ways_WF)))
        score_IW[order_I] = self.network.option_scores(unpriced_WF, of_state_N1U, of_context_U)
        return score_IW


def ranges_of(tasks_F: Iterable[NDArray[np.floating]]) -> dict[str, tuple[float, float]]:
    """Least and largest of each of some tasks' inputs, by name.

    Args:
        tasks_F: Features of each task, see `TaskFeatures`.
    """
    inputs = [task_inputs(task_F) for task_F in tasks_F]
    return {name: (min(one[name] for one in inputs), max(one[name] for one in inputs)) for name in inputs[0]}


@lru_cache(maxsize=_CACHED_POLICIES)
def _load_version(root: Path, name: str, version: str) -> TrainedPolicy:
    return TrainedPolicy.load(Registry(root), name, version)
