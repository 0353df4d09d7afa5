"""Rows of replicas that a batch hits: each process tells all processes that hold them, beside the ids that it asks for.

So all holders know which gradients meet before there are any, and a backward pass does not wait for sizes.

Shape suffixes: S slots or holdings of a request, L lookups, U distinct rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autoshard.core import GradSync
from autoshard.runtime.engine.holdings import KernelKey, OwnerRequest, Ownership
from autoshard.runtime.engine.ids.distinct import Distinct
from autoshard.runtime.engine.ids.messages import Request
from autoshard.runtime.engine.staging import staged


@dataclass(frozen=True, slots=True, eq=False)
class KernelSlots:
    """What one process asks another's kernel of replicas for.

    Attributes:
        key: The kernel.
        slots: Of the request's sums or, if the kernel gives out rows, of its holdings of rows; they lie side by side.
        is_pooled: Whether the kernel gives out sums.
        bases_S: First row in the kernel of each one's holding.
    """

    key: KernelKey
    slots: range
    is_pooled: bool
    bases_S: torch.Tensor

    def rows(self, request: Request) -> torch.Tensor:
        """Rows of the kernel that a request looks up, shape (L,)."""
        ids_L, counts = request.ids_L, request.counts
        if self.is_pooled:
            ids_L, counts = request.sums.ids_L, request.sums.counts_N
        at, of = sum(counts[: self.slots.start]), counts[self.slots.start : self.slots.stop]
        bases_L = torch.repeat_interleave(self.bases_S, staged(of, self.bases_S.device), output_size=sum(of))
        return ids_L[at : at + sum(of)] + bases_L


def replica_slots(
    asked: OwnerRequest, ownership: Ownership, owner: int, device: torch.device
) -> tuple[KernelSlots, ...]:
    """The part of a request that replicas of a process answer, kernel by kernel."""
    found = []
    for is_pooled, indices in ((True, [slot.holding for slot in asked.sums]), (False, asked.rows)):
        holdings = [ownership.holdings[index] for index in indices]
        for key in dict.fromkeys(one.kernel_key for one in holdings if one.is_replicated):
            slots = [slot for slot, one in enumerate(holdings) if one.kernel_key == key]
            first_rows = ownership.first_rows(key, owner)
            bases_S = torch.tensor([first_rows[indices[slot]] for slot in slots], device=device)
            found.append(KernelSlots(key, range(slots[0], slots[-1] + 1), is_pooled, bases_S))
    return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class HitRows:
    """Rows of a kernel of replicas whose gradients a step sums over processes.

    Attributes:
        key: The kernel.
        all_U: Rows that any process hits, rising.
        by_holder: Those that are looked up in the copy of each process that holds them; none but where gradients of
            these travel (`GradSync.ALL_GATHER`).
    """

    key: KernelKey
    all_U: torch.Tensor
    by_holder: tuple[torch.Tensor, ...]


class HitExchange:
    """What a process tells the holders of replicas of their rows that its batch hits, and what it is told.

    Args:
        ownership: Who holds what.
        reader: This process.
        device: Where batches are.

    Attributes:
        told: For each process the kernels whose rows it is told of, each with the process whose copy is looked up.
        heard: The same of what each process tells this one.
    """

    def __init__(self, ownership: Ownership, reader: int, device: torch.device) -> None:
        processes = range(ownership.num_processes)
        self.told = [ownership.hits(reader, holder) for holder in processes]
        self.heard = [ownership.hits(other, reader) for other in processes]
        asked = [(ownership.asked(reader, owner), owner) for owner in processes]
        #: Of what each process is asked for, and last of this one's own replicas.
        self._slots = [
            (owner, replica_slots(of, ownership, owner, device))
            for of, owner in (*asked, (ownership.local(reader), reader))
        ]
        self._read = tuple(dict.fromkeys(one for of in self.told for one in of))
        self._distinct_read = Distinct([ownership.kernel_rows(*one) for one in self._read], device)
        self._holders = {key: ownership.holders(key, reader) for key, _ in (one for of in self.heard for one in of)}
        #: Kernels here, with the process whose copy is looked up, or None for that of any.
        self._met: list[tuple[KernelKey, int | None]] = []
        for key, holders in self._holders.items():
            way = ownership.holdings[ownership.of_kernel(key, reader)[0]].grad_sync
            self._met += [(key, None), *((key, one) for one in holders if way is GradSync.ALL_GATHER)]
        self._distinct_met = Distinct([ownership.kernel_rows(key, reader) for key, _ in self._met], device)

    def of(self, requests: Sequence[Request]) -> list[tuple[torch.Tensor, ...]]:
        """For each process the rows that it is told of, each once; the host waits for how many they are.

        Args:
            requests: What each process is asked for, and last what this one reads of its own replicas.
        """
        if not self._read:
            return [()] * len(self.told)
        rows = {
            (one.key, owner): one.rows(request)
            for request, (owner, slots) in zip(requests, self._slots, strict=True)
            for one in slots
        }
        distinct, _ = self._distinct_read([rows[one] for one in self._read])
        found = dict(zip(self._read, distinct, strict=True))
        return [tuple(found[one] for one in of) for of in self.told]

    def num_told(self, hits: Sequence[Sequence[torch.Tensor]]) -> int:
        """Rows that processes are told of, those that several are told of once."""
        told = zip(self.told, hits, strict=True)
        return sum({one: len(rows_U) for of, rows in told for one, rows_U in zip(of, rows, strict=True)}.values())

    def met(self, heard: Sequence[Sequence[torch.Tensor]]) -> tuple[HitRows, ...]:
        """Rows whose gradients meet here; the host waits for how many they are.

        Args:
            heard: What each process tells this one.
        """
        if not self._met:
            return ()
        pieces: dict[tuple[KernelKey, int | None], list[torch.Tensor]] = {one: [] for one in self._met}
        for of, told in zip(self.heard, heard, strict=True):
            for (key, owner), rows_U in zip(of, told, strict=True):
                for place in ((key, None), (key, owner)):
                    if place in pieces:
                        pieces[place].append(rows_U)
        distinct, _ = self._distinct_met([torch.cat(of) for of in pieces.values()])
        found = dict(zip(self._met, distinct, strict=True))
        return tuple(
            HitRows(key, found[key, None], tuple(found[key, one] for one in holders if (key, one) in found))
            for key, holders in self._holders.items()
        )
