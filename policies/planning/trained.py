"""A trained policy as it is published: its network, the cost model whose codes it reads, and a card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from autoshard.core.errors import ModelError
from autoshard.core.quoting import shown
from autoshard.formats.documents.fields import Fields
from costmodel import COST_KIND, CostModelCard, LearnedCostModel, Registry, StoredModel
from costmodel.kernel.predictor import FULL_CODE_WIDTH
from costmodel.kernel.weights import Weights, check_weights
from costmodel.registry.card_fields import optional_number, read_card
from costmodel.registry.versions import PRODUCTION, find_registry
from env import Objective
from policies.choices import Items
from policies.network.network import PlacementNetwork
from policies.network.weights import load_arrays, to_arrays, with_prefix
from policies.planning.tasks import num_splits

#: Changes whenever the environment shows something else: a network reads what it was trained on only.
CARD_SCHEMA = "autoshard.policy/3"
_POLICY_PREFIX, _COST_PREFIX = "policy.", "cost."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyCostModel:
    """The cost model that a policy was trained on.

    Attributes:
        id: Its version in the registry; None if it was trained together with the policy.
    """

    weights: Weights
    card: CostModelCard
    id: str | None = None

    @classmethod
    def load(cls, registry: Registry, device: str) -> PolicyCostModel:
        """The production cost model of a device: the registry's, or the one that comes with this package.

        Raises:
            ModelError: If it is missing or damaged.
        """
        models = find_registry(COST_KIND, device, registry.root) or registry
        stored = models.load(COST_KIND, device)
        return cls(weights=stored.tensors, card=CostModelCard.from_json(stored.card, stored.source), id=stored.id)

    def model(self) -> LearnedCostModel:
        """The model that prices with it."""
        return LearnedCostModel(self.weights, self.card, version=self.id or "")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedPolicy:
    """A network and all that it takes to run it.

    Attributes:
        network: Reads codes and prices of `cost`, and of no other model.
        cost: The cost model.
        training: Options, counts and scores of the training, for information.
        items: What it was trained to place.
        objective: What for.
        memory_fill: Share of all memory that tables of its training took; None for unlimited memory.
        version: In the registry that it comes from, if it does, and whether that came with this package.
    """

    network: PlacementNetwork
    cost: PolicyCostModel
    training: Mapping[str, Any]
    items: Items = Items.TABLES
    objective: Objective = Objective.BALANCE
    memory_fill: float | None = None
    version: str = ""

    @property
    def name(self) -> str:
        """What answers say: `policy:<device>`, and which version it is, if it was published."""
        return f"{self.items.policy_kind}:{self.cost.card.device}" + (f"@{self.version}" if self.version else "")

    def publish(self, registry: Registry) -> str:
        """Makes it the production policy of its device for such items, compared with nothing, and returns its id.

        Raises:
            ModelError: If the registry cannot be written.
        """
        return registry.publish(self.items.policy_kind, self.cost.card.device, *self.content())

    def content(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """What a registry holds of it: tensors by name, and the card."""
        card = {
            "schema": CARD_SCHEMA,
            "device": self.cost.card.device,
            "items": self.items,
            "objective": self.objective,
            "memory_fill": self.memory_fill,
            "max_splits": num_splits(self.items),
            "code_width": self.network.code_width,
            "cost_model": {"id": self.cost.id, "card": self.cost.card.to_json()},
            "training": dict(self.training),
        }
        tensors = {f"{_POLICY_PREFIX}{name}": value for name, value in to_arrays(self.network).items()}
        tensors |= {f"{_COST_PREFIX}{name}": value for name, value in self.cost.weights.items()}
        return tensors, card

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
        policy = _read(stored, stored.source)
        if policy.items is not items:
            raise ModelError(f"must be {items}, got {policy.items}", field="items", source=stored.source)
        if (found := stored.card.get("max_splits", 0)) != num_splits(items):
            raise ModelError(
                f"must be {num_splits(items)} for {items}, got {shown(found)}; "
                f"`autoshard train policy --items {items}` makes one that can be used",
                field="max_splits",
                source=stored.source,
            )
        return policy


def _read(stored: StoredModel, source: str) -> TrainedPolicy:
    return read_card(
        stored.card,
        source,
        schema=CARD_SCHEMA,
        fixed={},
        remedy="`autoshard train policy` makes one that can be read",
        required=("device", "items", "objective", "memory_fill", "code_width", "cost_model", "training"),
        optional=("max_splits",),
        read=lambda fields: _policy_of(fields, stored, source),
    )


def _policy_of(fields: Fields, stored: StoredModel, source: str) -> TrainedPolicy:
    described = fields.fields("cost_model", required=("id", "card"))
    # Its weights are checked here: they come with the policy, and nothing else may have looked at them.
    cost = PolicyCostModel(
        weights=with_prefix(stored.tensors, _COST_PREFIX),
        card=CostModelCard.from_json(described.mapping("card"), f"{source}, cost_model"),
        id=None if described["id"] is None else described.text("id"),
    )
    check_weights(cost.weights, cost.card.encoder_hidden, f"{source}, cost_model")
    network = PlacementNetwork(fields.whole("code_width", minimum=FULL_CODE_WIDTH, maximum=FULL_CODE_WIDTH))
    load_arrays(network, with_prefix(stored.tensors, _POLICY_PREFIX), source)
    return TrainedPolicy(
        network=network,
        cost=cost,
        training=fields.mapping("training"),
        items=fields.choice("items", Items, Items.TABLES),
        objective=fields.choice("objective", Objective, Objective.BALANCE),
        memory_fill=optional_number(fields, "memory_fill", maximum=1e6),
        version=stored.label,
    )
