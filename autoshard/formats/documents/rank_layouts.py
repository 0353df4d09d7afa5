"""Names for the replicas that plans use most: `all`, `each` and `each_node`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from autoshard.core import ReplicaGroups, Tier, Topology
from autoshard.core.accepted import MAX_WORLD_SIZE
from autoshard.core.errors import FormatError, InvalidPlanError
from autoshard.core.quoting import shown
from autoshard.core.shard import Replicas
from autoshard.formats.documents.kinds import Kind, Schema, in_context, list_of, one_of, whole_number

#: The name that a tier's replicas are written under, where they match.
_NAME_OF_TIER = {Tier.ROW_WISE: "all", Tier.DATA_PARALLEL: "each", Tier.FLEX: "each_node"}


def _listed(num_ranks: int) -> Kind[Replicas]:
    return list_of(list_of(whole_number(0, num_ranks - 1), 1, num_ranks), 1, num_ranks)


_SCHEMA: Final[Schema] = {"oneOf": [one_of(_NAME_OF_TIER.values()).schema, _listed(MAX_WORLD_SIZE).schema]}
#: What `RankLayouts` reads and writes.
REPLICAS: Final = in_context(_SCHEMA)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayouts:
    """The named replicas of one replica group.

    Attributes:
        group_size: Ranks of the group.
        named: Replicas by name; a name that makes no sense in this group is not there.
    """

    group_size: int
    named: dict[str, Replicas]

    @classmethod
    def of(cls, groups: ReplicaGroups, topology: Topology) -> RankLayouts:
        """The layouts of a group.

        Raises:
            InvalidPlanError: If the groups do not divide the world.
        """
        size = groups.group_size(topology)
        named: dict[str, Replicas] = {"all": (tuple(range(size)),), "each": tuple((rank,) for rank in range(size))}
        try:
            node = groups.ranks_per_node(topology)
        except InvalidPlanError:
            return cls(group_size=size, named=named)  # nodes with unequal shares of a group
        named["each_node"] = tuple(tuple(range(start, start + node)) for start in range(0, size, node))
        return cls(group_size=size, named=named)

    def read(self, value: object, path: str) -> Replicas:
        """Replicas from their name or their list.

        Raises:
            FormatError: If it is neither.
        """
        if not isinstance(value, str):
            return _listed(self.group_size).read(value, path)
        if value not in self.named:
            accepted = ", ".join(self.named)
            raise FormatError(f"must be {accepted} or a list of lists of ranks, got {shown(value)}", field=path)
        return self.named[value]

    def write(self, replicas: Replicas, tier: Tier) -> object:
        """The name of the replicas where the tier has one and they match, else their list."""
        name = _NAME_OF_TIER.get(tier)
        if name is not None and self.named.get(name) == replicas:
            return name
        return [list(replica) for replica in replicas]


#: For the schema of replicas, which is the same for all groups.
ANY_GROUP: Final = RankLayouts(group_size=MAX_WORLD_SIZE, named={})
