"""A trained policy as it is published: its network, the cost model whose codes it reads, and a card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from autoshard.core.errors import ModelError
from autoshard.core.quoting import shown
from autoshard.formats.documents.kinds import (
    ANY_OBJECT,
    ANYTHING,
    TEXT,
    Field,
    number_in,
    one_of,
    optional,
    or_null,
    record,
    whole_number,
)
from costmodel import LearnedCostModel, Registry, StoredModel
from costmodel.kernel.predictor import FULL_CODE_WIDTH
from costmodel.registry.card_fields import ModelCard
from costmodel.registry.models import LearnedModel
from costmodel.registry.versions import PRODUCTION, Tensors, find_model
from env import Objective
from policies.choices import Items
from policies.network.network import PlacementNetwork
from policies.network.weights import load_arrays, to_arrays, with_prefix
from policies.planning.tasks import num_splits

_POLICY_PREFIX, _COST_PREFIX = "policy.", "cost."


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModelPart:
    """The cost model that a policy was trained on.

    Attributes:
        id: Its version in the registry; null if it was trained together with the policy.
        card: Its card.
    """

    id: str | None
    card: dict[str, Any]


_COST_MODEL: Final = record(CostModelPart, Field("id", or_null(TEXT)), Field("card", ANY_OBJECT))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCard(ModelCard):
    """All of a policy but the weights of its network and of its cost model.

    Attributes:
        device: Key of the device that plans are for.
        items: What the policy places: `tables`, `row_groups` or `tiers`.
        objective: What it was trained for: `balance`, `max_kernel` or `step`.
        memory_fill: Share of all memory that the tables of its training took; null for unlimited memory.
        max_splits: How often an item may be split, one split within the other; may be left out for 0.
        code_width: Numbers per code of a shard that the network reads.
        cost_model: The cost model that it was trained on: `id` and `card`; its weights are stored with the policy's.
        training: Options, counts and scores of the training, for information.
    """

    #: Changes whenever the environment shows something else: a network reads what it was trained on only.
    schema: ClassVar[str] = "autoshard.policy/3"
    fields: ClassVar[tuple[Field, ...]] = (
        Field("device", TEXT),
        Field("items", one_of(Items)),
        Field("objective", one_of(Objective)),
        Field("memory_fill", or_null(number_in(0, 1e6))),
        optional("max_splits", ANYTHING),
        Field("code_width", whole_number(FULL_CODE_WIDTH, FULL_CODE_WIDTH)),
        Field("cost_model", _COST_MODEL),
        Field("training", ANY_OBJECT, "Options, seeds and counts of the training."),
    )
    remedy: ClassVar[str] = "`autoshard train policy` makes one that can be read"

    device: str
    items: Items
    objective: Objective
    memory_fill: float | None
    max_splits: object = 0
    code_width: int
    cost_model: CostModelPart
    training: dict[str, Any]


class TrainedPolicy(LearnedModel[PolicyCard]):
    """A network and all that it takes to run it.

    Args:
        network: Reads codes and prices of `cost`, and of no other model.
        cost: The cost model; its version is its id in the registry, empty if it was trained together with the policy.
        training: Options, counts and scores of the training, for information.
        items: What it was trained to place.
        objective: What for.
        memory_fill: Share of all memory that tables of its training took; None for unlimited memory.
        version: In the registry that it comes from, if it does, and whether that came with this package.
    """

    card_type = PolicyCard

    def __init__(
        self,
        *,
        network: PlacementNetwork,
        cost: LearnedCostModel,
        training: Mapping[str, Any],
        items: Items = Items.TABLES,
        objective: Objective = Objective.BALANCE,
        memory_fill: float | None = None,
        version: str = "",
    ) -> None:
        card = PolicyCard(
            device=cost.card.device,
            items=items,
            objective=objective,
            memory_fill=memory_fill,
            max_splits=num_splits(items),
            code_width=network.code_width,
            cost_model=CostModelPart(id=cost.version or None, card=cost.card.to_json()),
            training=dict(training),
        )
        super().__init__(card, version)
        self.kind = self.label = items.policy_kind
        self.network, self.cost = network, cost

    def tensors(self) -> Tensors:
        """Weights of the network, and of its cost model."""
        tensors = {f"{_POLICY_PREFIX}{name}": value for name, value in to_arrays(self.network).items()}
        return tensors | {f"{_COST_PREFIX}{name}": value for name, value in self.cost.tensors().items()}

    @classmethod
    def load(
        cls, registry: Registry, device: str, version: str = PRODUCTION, *, items: Items = Items.TABLES
    ) -> TrainedPolicy:
        """The policy of a device from a registry.

        Raises:
            ModelError: If it is missing, damaged, of other items or of another schema; the text names the file.
        """
        return cls.from_stored(registry.load(items.policy_kind, device, version), items=items)

    @classmethod
    def from_stored(cls, stored: StoredModel, *, items: Items = Items.TABLES) -> TrainedPolicy:
        """The policy of a registry's version.

        Raises:
            ModelError: If it is damaged, of other items or of another schema.
        """
        policy = super().from_stored(stored)
        if policy.card.items is not items:
            raise ModelError(f"must be {items}, got {policy.card.items}", field="items", source=stored.source)
        if (found := stored.card.get("max_splits", 0)) != num_splits(items):
            raise ModelError(
                f"must be {num_splits(items)} for {items}, got {shown(found)}; "
                f"`autoshard train policy --items {items}` makes one that can be used",
                field="max_splits",
                source=stored.source,
            )
        return policy

    @classmethod
    def restored(cls, stored: StoredModel, card: PolicyCard) -> TrainedPolicy:
        """See `LearnedModel.restored`."""
        cost = StoredModel(
            id=card.cost_model.id or "",
            tensors=with_prefix(stored.tensors, _COST_PREFIX),
            card=card.cost_model.card,
            source=f"{stored.source}, cost_model",
        )
        # Its weights are checked here: they come with the policy, and nothing else may have looked at them.
        model = LearnedCostModel.from_stored(cost)
        network = PlacementNetwork(card.code_width)
        load_arrays(network, with_prefix(stored.tensors, _POLICY_PREFIX), stored.source)
        return cls(
            network=network,
            cost=model,
            training=card.training,
            items=card.items,
            objective=card.objective,
            memory_fill=card.memory_fill,
            version=stored.label,
        )


def load_cost_model(models: Registry, device: str) -> LearnedCostModel:
    """The production cost model of a device, for a policy to be trained on; it goes by its id, whoever made it.

    Raises:
        ModelError: If neither the registry nor this package has one, or it is damaged.
    """
    kind = LearnedCostModel.kind
    registry, name, version = find_model(kind, device, models.root) or (models, device, PRODUCTION)
    stored = registry.load(kind, name, version)
    return LearnedCostModel.from_stored(replace(stored, is_shipped=False))
