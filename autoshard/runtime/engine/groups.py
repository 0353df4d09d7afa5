"""Replica groups: groups of processes that each hold all tables, and average them now and then.

Two-dimensional sparse parallelism (2D Sec. 3 and Algorithm 1).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Generic, TypeVar, cast

import torch
import torch.distributed as dist

from autoshard.core import ShardingPlan
from autoshard.core.errors import ExecutionError
from autoshard.runtime.clock import clock_of
from autoshard.runtime.engine.holdings import GroupOrder

#: What is said of embeddings without process groups.
CLOSED = "the embeddings are closed, their plan was replaced, or their process group is destroyed: look up anew"

GroupT = TypeVar("GroupT", bound=dist.ProcessGroup | None)


@dataclass(frozen=True, slots=True, eq=False)
class JoinedGroups:
    """The replica groups as one process sees them.

    Attributes:
        order: Which processes make them up.
        own: The processes of this one's group.
        peers: Those that hold copies of its rows; None where there is one group.
        world_ranks: Ranks in the world of each group.
    """

    order: GroupOrder
    own: dist.ProcessGroup
    peers: dist.ProcessGroup | None
    world_ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def join(cls, plan: ShardingPlan, group: dist.ProcessGroup) -> JoinedGroups:
        """Makes the process groups; all processes of `group` have to call it.

        Args:
            plan: The whole plan.
            group: All processes.
        """
        order = GroupOrder.of(plan.replica_groups, group.size())
        ranks = [dist.get_global_rank(group, process) for process in range(group.size())]
        world_ranks = tuple(tuple(ranks[process] for process in one) for one in order.groups)
        if len(order.groups) == 1:
            return cls(order, group, None, world_ranks)
        own = own_group(world_ranks)
        peers = own_group(list(zip(*world_ranks, strict=True)))
        return cls(order, own, peers, world_ranks)

    def of_thread(self) -> tuple[JoinedGroups, int]:
        """The same processes in groups that no other thread uses; all processes have to call it.

        Returns:
            The groups, and their number: when its thread has ended, each process gives it to `end_thread`.
        """
        number = torch.tensor(max([*_of_threads], default=-1) + 1, device=device_of(self.own))
        for group in (self.own, self.peers):
            if group is not None:  # elsewhere threads of closed embeddings may not have ended yet
                dist.all_reduce(number, op=dist.ReduceOp.MAX, group=group)
        purpose = f"thread {int(number)}"
        own, peers = own_group(self.world_ranks, purpose), self.peers
        if peers is not None:
            peers = own_group(list(zip(*self.world_ranks, strict=True)), purpose)
        _of_threads.add(int(number))
        return replace(self, own=own, peers=peers), int(number)


class WeakGroup(Generic[GroupT]):
    """An attribute that is a process group, or None, and does not keep the group alive.

    gloo's threads end with the last reference to their group. `destroy_process_group` drops torch's own; a group that
    lives on ends while the interpreter exits, and where a thread of it drops a tensor then, the process aborts. What a
    trainer keeps of a step (a loss, a batch on its way) refers to the exchanges, so these refer to groups like this.

    Raises:
        ExecutionError: If the group has been destroyed, or the attribute deleted.
    """

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __set__(self, owner: object, group: GroupT) -> None:
        owner.__dict__[self._name] = None if group is None else weakref.ref(group)

    def __delete__(self, owner: object) -> None:
        owner.__dict__[self._name] = lambda: None

    def __get__(self, owner: object, _: type) -> GroupT:
        known: Callable[[], GroupT | None] | None = owner.__dict__[self._name]
        if known is None:
            return cast(GroupT, None)
        group = known()
        if group is None:
            raise ExecutionError(CLOSED)
        return group


#: Numbers of the groups that threads of this process use.
_of_threads: set[int] = set()
#: Process groups that were made, with the world that they are of: making one takes gloo tens of milliseconds.
_made: dict[tuple[str, tuple[int, ...]], tuple[weakref.ref[dist.ProcessGroup], weakref.ref[dist.ProcessGroup] | None]]
_made = {}


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where a group's collectives take tensors from: the CPU or, if its backend is NCCL, the current CUDA device."""
    if dist.get_backend(group) != "nccl":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def group_of_ranks(ranks: Sequence[int], purpose: str = "") -> dist.ProcessGroup | None:
    """The process group of some ranks of the world, made once; None for processes that are none of them.

    All processes of the world have to call it, in the same order.

    Args:
        ranks: The ranks.
        purpose: Collectives for different purposes run beside each other, each in a group of its own.
    """
    world, key = dist.distributed_c10d._get_default_group(), (purpose, tuple(ranks))
    if key not in _made or _made[key][0]() is not world:
        backend = world._get_backend(device_of(world))
        # Else a group waits half an hour for a process that is gone, whatever the world's timeout is.
        with clock_of(world).idle():
            made = dist.new_group(list(ranks), timeout=backend.options._timeout)
        _made[key] = (weakref.ref(world), weakref.ref(made) if isinstance(made, dist.ProcessGroup) else None)
    known = _made[key][1]
    return None if known is None else known()


def group_beside(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A new group of the same processes, None for all, whose collectives come in an order of their own.

    All of the processes have to call it, and to destroy it.
    """
    ranks = None if group is None else dist.get_process_group_ranks(group)
    group = group or dist.distributed_c10d._get_default_group()
    timeout = group._get_backend(device_of(group)).options._timeout
    made: dist.ProcessGroup = dist.new_group(ranks, timeout, use_local_synchronization=ranks is not None)
    return made


def end_thread(number: int) -> None:
    """Lets another thread use the groups of a thread that has ended.

    Args:
        number: As `JoinedGroups.of_thread` gives it.
    """
    _of_threads.discard(number)


def release_world() -> None:
    """Makes torch's differentiable collectives forget the default group; None is what means it there.

    Their module has it in default arguments for good if it is first imported after `init_process_group`, as TorchRec
    and `DistributedDataParallel` do. So has TorchRec 1.6's module of planners, in those of methods.
    """
    for name in ("torch.distributed.nn.functional", "torchrec.distributed.planner.planners"):
        found = vars(sys.modules[name]) if name in sys.modules else {}
        classes = [one for one in found.values() if isinstance(one, type) and one.__module__ == name]
        for value in (value for of in (found, *map(vars, classes)) for value in of.values()):
            if isinstance(value, FunctionType) and value.__defaults__:
                kept = (None if isinstance(one, dist.ProcessGroup) else one for one in value.__defaults__)
                value.__defaults__ = tuple(kept)


def own_group(world_ranks: Sequence[Sequence[int]], purpose: str = "") -> dist.ProcessGroup:
    """The process group that this process is in, of several that part the world; all processes have to call it.

    Args:
        world_ranks: Ranks in the world of each group.
        purpose: As `group_of_ranks` has it.
    """
    made = [group_of_ranks(ranks, purpose) for ranks in world_ranks]
    [own] = [one for one in made if one is not None]
    return own
