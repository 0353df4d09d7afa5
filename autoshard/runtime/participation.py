"""One process's part in the execution of a plan, and what all of them have to agree on."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autoshard.core import ShardingPlan
from autoshard.core.errors import InputError
from autoshard.core.optimizers import UpdateSettings
from autoshard.runtime.engine.agreement import on_all
from autoshard.runtime.engine.groups import JoinedGroups, device_of
from autoshard.runtime.engine.holdings import Ownership
from autoshard.runtime.ownership import check_levels, check_updates, ownership_of
from autoshard.runtime.releases import all_gather


@dataclass(frozen=True, slots=True, kw_only=True)
class Participation:
    """Which processes execute a plan, and this one's place among them.

    Attributes:
        owners: Who holds what.
        members: The processes of all replica groups.
        group: The processes of its replica group.
        groups: All replica groups.
        device: Where this one has its tables and batches.
        local_batch_size: Usual samples per process and step, which messages have room for.
        order_digests: By table, what its row order is known by.
        node_size: Processes of a node, by the plan's topology; those of a node follow each other.
    """

    owners: Ownership
    members: dist.ProcessGroup
    group: dist.ProcessGroup
    groups: JoinedGroups
    device: torch.device
    local_batch_size: int
    order_digests: Mapping[str, bytes]
    node_size: int

    @classmethod
    def agree(
        cls,
        plan: ShardingPlan,
        settings: UpdateSettings,
        *,
        local_batch_size: int | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        row_orders: Mapping[str, torch.Tensor] | None = None,
        frozen: Collection[str] = (),
    ) -> Participation:
        """Reads the plan and checks that all processes mean the same; all of them have to call it.

        Args:
            plan: The plan.
            settings: Of the updates, the same everywhere.
            local_batch_size: Usual samples per process and step; None for the largest share of the plan's batch.
            group: The processes; None for all.
            device: Where tables and batches are; None for the group's, see `device_of`.
            row_orders: Row ids in falling access frequency, by table.
            frozen: Names of tables that are only looked up.

        Raises:
            InvalidPlanError: If the plan holds tables in a way that is not executed.
            InvalidOptionError: If the optimizer of a table does not have a setting.
            InputError: If there is no process group, this process is not in it, or the processes do not agree.
        """
        members = _members(group)
        device = device or device_of(members)

        def read() -> Ownership:
            owners = ownership_of(plan, members.size(), frozen)
            check_updates(plan.tables, settings)
            check_levels(owners, device)
            return owners

        owners = on_all(read, members, device)
        local_batch_size = local_batch_size or -(-plan.tables.batch_size // members.size())
        orders = {name: _digest(ids.cpu().numpy().tobytes()) for name, ids in sorted((row_orders or {}).items())}
        statements = {
            "plan": (owners.identity, plan.payload, plan.replica_groups),
            "topology": plan.topology,
            "settings": settings,
            "frozen tables": owners.frozen,
            "batch size": local_batch_size,
            "row order": orders,
        }
        check_alike(statements, members, device)
        groups = JoinedGroups.join(plan, members)
        return cls(
            owners=owners,
            members=members,
            group=groups.own,
            groups=groups,
            device=device,
            local_batch_size=local_batch_size,
            order_digests=orders,
            node_size=max(1, members.size() // plan.topology.num_nodes),
        )

    def nodes_of(self, group: dist.ProcessGroup) -> tuple[int, ...]:
        """Node of each process of a group among the members."""
        places = (dist.get_group_rank(self.members, rank) for rank in dist.get_process_group_ranks(group))
        return tuple(place // self.node_size for place in places)

    @property
    def process(self) -> int:
        """Rank of this process in its replica group."""
        return self.group.rank()

    @property
    def feature_names(self) -> list[str]:
        """Features in the plan's order."""
        return [feature.name for table in self.owners.tables.tables for feature in table.features]

    @property
    def feature_dims(self) -> tuple[int, ...]:
        """Their embedding dims, sequences among them."""
        return tuple(table.embedding_dim for table in self.owners.tables.tables for _ in table.features)

    def place_of(self, member: int) -> int:
        """Rank of one of the members in its replica group."""
        order = self.groups.order
        return order.groups[order.group_of(member)].index(member)


def check_alike(statements: Mapping[str, object], members: dist.ProcessGroup, device: torch.device) -> None:
    """Checks that all processes state the same; all of them have to call it, with the same names.

    Args:
        statements: What has to be the same, by its name in messages; compared by `repr`.
        members: The processes.
        device: Where the group's tensors are.

    Raises:
        InputError: If they do not: it names the first thing, and a process that has another one than this.
    """
    digests = [int.from_bytes(_digest(repr(one).encode())[:7], "little") for one in statements.values()]
    own = torch.tensor(digests, dtype=torch.int64, device=device)
    everybody = own.new_empty(members.size() * len(own))
    all_gather(everybody, own, group=members)
    for name, differ_P in zip(statements, (everybody.view(members.size(), -1) != own).T.tolist(), strict=True):
        if any(differ_P):
            raise InputError(
                f"process {differ_P.index(True)} has another {name} than process {members.rank()}; all must have one"
            )


def _members(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The processes.

    Raises:
        InputError: If there are none, or this process is none of them.
    """
    if not dist.is_initialized():
        raise InputError("there is none: call torch.distributed.init_process_group first", field="group")
    if group is not None and not isinstance(group, dist.ProcessGroup):  # what `new_group` gives those outside
        raise InputError(f"process {dist.get_rank()} is not in it, and takes no part", field="group")
    return group or dist.distributed_c10d._get_default_group()


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
