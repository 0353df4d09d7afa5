"""A process group whose collectives really exchange, over gloo, and take what a model of the wire says.

Shape suffixes: N processes of the group.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo

from autoshard.core.costs import MsArray
from autoshard.core.errors import ExecutionError
from autoshard.runtime.releases import under_new_names
from autoshard.runtime.virtual.clock import CoreToken, VirtualClock, physical_cores
from autoshard.runtime.virtual.meeting import NUM_SLOTS, Meeting, SharedLinks
from autoshard.runtime.virtual.wire import Operation, Wire

#: Name of the backend in torch.distributed.
BACKEND = "virtual"
#: File of the links.
_LINKS = "links"


class VirtualMachine:
    """The machine that a rank has in virtual time: a core, and a wire to the others.

    Args:
        folder: Shared by all processes, for as long as they run.
        local_rank: Number of this process on this machine.
        num_ranks: Processes.

    Attributes:
        clock: Of its threads.
        wire: What collectives take; nothing until it is set.
        num_cores: Cores of this machine that processes take turns on.
    """

    def __init__(self, folder: Path, local_rank: int, num_ranks: int) -> None:
        cores = physical_cores()
        core = cores[local_rank % len(cores)]
        os.sched_setaffinity(0, {core})  # before gloo's threads, which inherit it
        torch.set_num_threads(1)
        self.folder, self.num_cores = folder, len(cores)
        self._links: SharedLinks | None = None
        if local_rank == 0:
            self._links = SharedLinks(folder / _LINKS, num_ranks, is_first=True)
        self._num_ranks = num_ranks
        self.clock = VirtualClock(CoreToken(folder / f"core.{core}"))
        self.wire: Wire | None = None
        dist.Backend.register_backend(BACKEND, self._group, extended_api=True, devices=["cpu"])

    @property
    def links(self) -> SharedLinks:
        """Of all ranks; there once all processes have met."""
        if self._links is None:
            self._links = SharedLinks(self.folder / _LINKS, self._num_ranks, is_first=False)
        return self._links

    def _group(self, options: Any, _: object) -> VirtualGroup:
        return VirtualGroup(self, options)


@dataclass(slots=True, eq=False)
class _Collective:
    """A collective under way.

    Attributes:
        number: In the group.
        work_s: What this rank's processor computes for it, before it ends.
        inner: Gloo's.
        ends_s: When it ends for this rank; None until that is known.
    """

    number: int
    work_s: float
    inner: Any = None
    ends_s: float | None = None


#: Its stubs name several ways to call each collective, of which torch.distributed uses one.
_ProcessGroup: Any = dist.ProcessGroup


@under_new_names
class VirtualGroup(_ProcessGroup):  # type: ignore[misc]
    """Collectives on a clock. One begins when its last process has come and the group's one before has ended.

    Links of ranks are shared by all groups.

    Args:
        machine: This process's.
        options: Of torch.distributed.
    """

    def __init__(self, machine: VirtualMachine, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        self._machine, self.clock = machine, machine.clock
        self._inner: Any = ProcessGroupGloo(options.store, rank, size, timeout=options.timeout)
        # torch finds a group's name and options by its backend.
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._inner)
        file = machine.folder / f"meeting.{options.group_id}"
        if rank == 0:
            self._meeting = Meeting(file, rank, size, 1 + size, is_first=True)
            options.store.set("meeting", "is there")
        else:
            options.store.wait(["meeting"])
            self._meeting = Meeting(file, rank, size, 1 + size, is_first=False)
        self._ranks = tuple(options.global_ranks_in_group) or tuple(range(size))
        self._rank, self._size = rank, size
        self._under_way: list[_Collective] = []
        self._number = 0
        self._begins, self._hears = threading.Lock(), threading.Lock()

    @property
    def sums_on_the_way(self) -> bool:
        """Whether a reduce-scatter is one on the wire: not where it was measured of CPUs, which send all and add up."""
        wire = self._machine.wire
        return wire is None or not wire.is_of_processors

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        """The name of the backend."""
        return BACKEND

    def _get_backend(self, _: torch.device) -> Any:
        return self._inner

    def shutdown(self) -> None:
        """Nothing: gloo ends with the group."""

    def abort(self) -> None:
        """Nothing, as `shutdown`."""

    def begin(self, operation: Operation, bytes_N: MsArray, start: Callable[[], Any]) -> VirtualWork:
        """Begins a collective.

        Args:
            operation: Its kind.
            bytes_N: What this process sends to each; but for an all-to-all, what it puts in, and zeros.
            start: Begins to exchange.
        """
        if self._under_way and self._number - self._under_way[0].number >= NUM_SLOTS // 2:
            with self.clock.idle():
                self._hear(self._under_way[0])
        with self.clock.uncounted() as now_s, self._begins:
            wire = self._machine.wire
            collective = _Collective(self._number, 0.0 if wire is None else wire.work_s(operation, bytes_N))
            self._number += 1
            self._under_way.append(collective)
            all_told = self._meeting.come(collective.number, np.concatenate([[now_s], bytes_N]))
            if all_told is not None:
                self._meeting.end(collective.number, self._ends_s(operation, all_told))
            collective.inner = start()
        return VirtualWork(self, collective)

    def end(self, collective: _Collective) -> float:
        """Waits until a collective has ended; returns the time at which it does, for this rank."""
        collective.inner.wait()
        collective.inner = None
        return self._hear(collective)

    def _hear(self, collective: _Collective) -> float:
        """When a collective ends, once all have come to it."""
        with self._hears:
            if collective.ends_s is None:
                collective.ends_s = self._meeting.wait(collective.number)
                self.clock.charge(collective.ends_s - collective.work_s, collective.work_s)
                self._under_way.remove(collective)
            return collective.ends_s

    def _ends_s(self, operation: Operation, all_told: MsArray) -> MsArray:
        """When a collective ends for each rank, by what they told; shape (N,)."""
        begins_s, wire = max(float(all_told[:, 0].max()), self._meeting.ended_s), self._machine.wire
        if wire is None:
            return np.full(self._size, begins_s)
        told = (operation, all_told[:, 1:], self._ranks)
        later_s = self._machine.links.carry(wire.level(self._ranks), self._ranks, begins_s, wire.in_use_s(*told))
        return begins_s + later_s + wire.seconds(*told)

    def _put_in(self, num_bytes: float) -> MsArray:
        bytes_N = np.zeros(self._size)
        bytes_N[0] = num_bytes
        return bytes_N

    def alltoall_base(
        self, output: torch.Tensor, given: torch.Tensor, out_split: Sequence[int], in_split: Sequence[int], options: Any
    ) -> VirtualWork:
        """Pieces of a tensor, one for each process, along its first dimension."""
        sizes = np.array(list(in_split) or [len(given) // self._size] * self._size, dtype=np.float64)
        bytes_N = sizes * (given.nbytes / max(1, len(given)))
        bytes_N[self._rank] = 0.0

        def start() -> Any:
            return self._inner.alltoall_base(output, given, list(out_split), list(in_split), options)

        return self.begin(Operation.ALL_TO_ALL, bytes_N, start)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> VirtualWork:
        """Sums, or other reductions, of all processes, on all of them."""
        put_in = self._put_in(sum(one.nbytes for one in tensors))
        return self.begin(Operation.ALL_REDUCE, put_in, lambda: self._inner.allreduce(tensors, options))

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> VirtualWork:
        """What one process has, on all of them; priced as a gather of what it has."""
        put_in = self._put_in(sum(one.nbytes for one in tensors) / self._size)
        return self.begin(Operation.ALL_GATHER, put_in, lambda: self._inner.broadcast(tensors, options))

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, options: Any) -> VirtualWork:
        """What all processes have, in one tensor of all of them."""

        def start() -> Any:
            return self._inner._allgather_base(output, given, options)

        return self.begin(Operation.ALL_GATHER, self._put_in(given.nbytes), start)

    def allgather(self, outputs: Any, given: list[torch.Tensor], options: Any) -> VirtualWork:
        """The same, in a tensor for each process."""
        put_in = self._put_in(sum(one.nbytes for one in given))
        return self.begin(Operation.ALL_GATHER, put_in, lambda: self._inner.allgather(outputs, given, options))

    def gather(self, outputs: Any, given: list[torch.Tensor], options: Any) -> VirtualWork:
        """The same on one process; priced as if all had it."""
        put_in = self._put_in(sum(one.nbytes for one in given))
        return self.begin(Operation.ALL_GATHER, put_in, lambda: self._inner.gather(outputs, given, options))

    def _reduce_scatter_base(self, output: torch.Tensor, given: torch.Tensor, options: Any) -> VirtualWork:
        """Sums of all processes, of which each has an equal piece."""

        def start() -> Any:
            return self._inner._reduce_scatter_base(output, given, options)

        return self.begin(Operation.REDUCE_SCATTER, self._put_in(given.nbytes), start)

    def reduce_scatter(self, outputs: Any, given: list[list[torch.Tensor]], options: Any) -> VirtualWork:
        """Sums of all processes, of which each has a piece of its own."""
        put_in = self._put_in(sum(one.nbytes for pieces in given for one in pieces))
        return self.begin(Operation.REDUCE_SCATTER, put_in, lambda: self._inner.reduce_scatter(outputs, given, options))

    def barrier(self, opts: Any = None) -> VirtualWork:  # torch gives it by this name
        """Waits for all processes, and takes no time besides."""
        return self.begin(Operation.ALL_REDUCE, self._put_in(0.0), lambda: self._inner.barrier(opts))

    def _has_no_price(self, *_: object, **__: object) -> NoReturn:
        """Refuses a collective.

        Raises:
            ExecutionError: In any case.
        """
        raise ExecutionError("virtual time has no price for this collective of torch.distributed")

    send = recv = recv_anysource = reduce = scatter = alltoall = _has_no_price
    allreduce_coalesced = allgather_coalesced = _has_no_price
    allgather_into_tensor_coalesced = reduce_scatter_tensor_coalesced = _has_no_price


class VirtualWork(dist._Work):  # type: ignore[name-defined,misc]
    """A collective under way, for whoever waits for it.

    Its future is done when `wait` returns: what waits for the future alone, as `DistributedDataParallel` does, would
    wait for ever.

    Args:
        group: The group.
        collective: The collective.
    """

    def __init__(self, group: VirtualGroup, collective: _Collective) -> None:
        super().__init__()
        self._group, self._collective = group, collective
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        self._is_done = False

    def wait(self, timeout: object = None) -> bool:  # noqa: ARG002 - torch's
        """Waits until it has ended, and sets the thread's clock forward to that."""
        if self._is_done:
            return True
        clock = self._group.clock
        with clock.idle():
            ends_s = self._group.end(self._collective)
            self._is_done = True
            if self._future is not None:
                with clock.at(ends_s):  # what is called back
                    self._future.set_result([])
            clock.set_forward(ends_s)
        return True

    def is_completed(self) -> bool:
        """Whether somebody has waited for it."""
        return self._is_done

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future that is done when it has ended, and somebody has waited."""
        if self._future is None:
            self._future = torch.futures.Future()
            if self._is_done:
                self._future.set_result([])
        return self._future
