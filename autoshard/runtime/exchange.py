"""How ids and pooled embeddings travel between processes.

Shape suffixes: F features, P processes, B samples of a local batch, G samples of the global batch (P * B),
L lookups, O columns of one process's output (sum of the dims of its features), C columns of all features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autoshard.core.errors import InputError
from autoshard.runtime.batch import BatchOfIds
from autoshard.runtime.timing import Part, StepTimer

Run = tuple[int, int, int]
"""Adjacent columns: (process, first column, column after the last)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireOrder:
    """The order in which features travel: process by process, each in the order of its fused kernels.

    Attributes:
        features_of_P: For each process, the features that it serves.
        dim_F: Embedding dim of each feature.
    """

    features_of_P: tuple[tuple[int, ...], ...]
    dim_F: tuple[int, ...]

    @property
    def features(self) -> tuple[int, ...]:
        """Features in the order of travel."""
        return tuple(feature for features in self.features_of_P for feature in features)

    @property
    def num_features(self) -> tuple[int, ...]:
        """Features that each process serves."""
        return tuple(len(features) for features in self.features_of_P)

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns that each process sends back."""
        return tuple(sum(self.dim_F[feature] for feature in features) for features in self.features_of_P)

    def gathering_runs(self) -> tuple[Run, ...]:
        """Columns of the processes' outputs that make the output of all features, in its order."""
        place = {}
        for process, features in enumerate(self.features_of_P):
            column = 0
            for feature in features:
                place[feature] = (process, column, column + self.dim_F[feature])
                column += self.dim_F[feature]
        return _merged([place[feature] for feature in range(len(self.dim_F))])

    def scattering_runs(self) -> tuple[tuple[Run, ...], ...]:
        """For each process, the columns of the output of all features that make its own."""
        start_F = [0]
        for dim in self.dim_F:
            start_F.append(start_F[-1] + dim)
        return tuple(
            _merged([(process, start_F[feature], start_F[feature + 1]) for feature in features])
            for process, features in enumerate(self.features_of_P)
        )


def _merged(runs: Sequence[Run]) -> tuple[Run, ...]:
    merged: list[Run] = []
    for process, start, stop in runs:
        if merged and merged[-1][0] == process and merged[-1][2] == start:
            merged[-1] = (process, merged[-1][1], stop)
        else:
            merged.append((process, start, stop))
    return tuple(merged)


@dataclass(frozen=True, slots=True, eq=False)
class ServedIds:
    """What one process looks up for the global batch.

    Attributes:
        lengths_FG: Bag lengths of the features that it serves, int64.
        ids_L: Ids, feature by feature and bag by bag.
        num_ids_F: Ids of each feature, on the host.
    """

    lengths_FG: torch.Tensor
    ids_L: torch.Tensor
    num_ids_F: tuple[int, ...]


class InputExchange:
    """Sends every process the ids of the features that it serves: one all-to-all of lengths, one of ids.

    Args:
        order: Order of travel.
        group: The processes.
        device: Where batches are.
    """

    def __init__(self, order: WireOrder, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._num_features_P = order.num_features
        self._num_processes = len(order.features_of_P)
        self._num_served = order.num_features[group.rank()]
        self._send_order = _permutation(order.features, device)
        by_feature = [
            process * self._num_served + feature
            for feature in range(self._num_served)
            for process in range(self._num_processes)
        ]
        self._served_order = _permutation(by_feature, device)

    def __call__(self, batch: BatchOfIds) -> ServedIds:
        """Exchanges one batch; every process calls it with a batch of the same size.

        Raises:
            InputError: If the lengths do not add up to the number of ids.
        """
        P, served, B = self._num_processes, self._num_served, batch.batch_size
        lengths_FB, ids_L = _permuted(self._send_order, batch.lengths_FB.to(torch.int32), batch.ids_L)
        lengths_NB = lengths_FB.new_empty((P * served, B))
        sent = [count * B for count in self._num_features_P]
        dist.all_to_all_single(lengths_NB.view(-1), lengths_FB.view(-1), [served * B] * P, sent, self._group)
        # The one place where the host waits for the device: it has to know how many ids go where.
        sums = torch.cat([lengths_FB.sum(1), lengths_NB.sum(1)]).tolist()
        sent_ids, received = sums[: len(lengths_FB)], sums[len(lengths_FB) :]
        if sum(sent_ids) != len(ids_L):
            raise InputError(f"add up to {sum(sent_ids)}, but there are {len(ids_L)} ids", field="lengths")
        served_L = ids_L.new_empty(sum(received))
        dist.all_to_all_single(
            served_L,
            ids_L,
            _block_sums(received, [served] * P),
            _block_sums(sent_ids, self._num_features_P),
            self._group,
        )
        lengths_NB, served_L = _permuted(self._served_order, lengths_NB, served_L)
        num_ids_F = tuple(sum(received[feature::served]) for feature in range(served))
        return ServedIds(lengths_NB.view(served, P * B).long(), served_L, num_ids_F)


def _permutation(order: Sequence[int], device: torch.device) -> torch.Tensor | None:
    if list(order) == list(range(len(order))):
        return None
    return torch.tensor(order, dtype=torch.int32, device=device)


def _permuted(
    order: torch.Tensor | None, lengths_NB: torch.Tensor, ids_L: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if order is None:
        return lengths_NB.contiguous(), ids_L.contiguous()
    lengths, ids, _ = torch.ops.fbgemm.permute_2D_sparse_data(order, lengths_NB, ids_L, None, len(ids_L))
    return lengths, ids


def _block_sums(values: Sequence[int], block_sizes: Sequence[int]) -> list[int]:
    sums, start = [], 0
    for size in block_sizes:
        sums.append(sum(values[start : start + size]))
        start += size
    return sums


class OutputExchange:
    """Sends pooled embeddings from those who looked them up to those whose samples they belong to, and back.

    Gradients are divided by the number of processes: each process's loss is the mean over its own batch, so the
    tables see the gradient of the mean over the global batch. TorchRec does the same.

    Args:
        order: Order of travel.
        group: The processes.
        timer: Where to count the time.
    """

    def __init__(self, order: WireOrder, group: dist.ProcessGroup, timer: StepTimer) -> None:
        self.group = group
        self.timer = timer
        self.rank = group.rank()
        self.widths = order.widths
        self._gathering = order.gathering_runs()
        self._scattering = order.scattering_runs()

    def __call__(self, pooled_GO: torch.Tensor) -> torch.Tensor:
        """Pooled embeddings of the local batch, shape (B, C), in the plan's order of features."""
        return _Exchanged.apply(pooled_GO, self)  # type: ignore[no-untyped-call, no-any-return]

    def forward(self, pooled_GO: torch.Tensor) -> torch.Tensor:
        """Distributes outputs."""
        B = len(pooled_GO) // len(self.widths)
        received = self._swapped(pooled_GO.reshape(-1), B, to_owners=False)
        blocks_P = [part.view(B, width) for part, width in zip(self._parts(received, B), self.widths, strict=True)]
        return torch.cat([blocks_P[process][:, start:stop] for process, start, stop in self._gathering], dim=1)

    def backward(self, gradient_BC: torch.Tensor) -> torch.Tensor:
        """Collects their gradients, shape (G, O)."""
        B = len(gradient_BC)
        sent = gradient_BC.new_empty(B * sum(self.widths))
        for part, width, runs in zip(self._parts(sent, B), self.widths, self._scattering, strict=True):
            if runs:
                torch.cat([gradient_BC[:, start:stop] for _, start, stop in runs], dim=1, out=part.view(B, width))
        received = self._swapped(sent, B, to_owners=True)
        P = len(self.widths)
        return received.div_(P).view(P * B, self.widths[self.rank])

    def _swapped(self, sent: torch.Tensor, B: int, *, to_owners: bool) -> torch.Tensor:
        own = [B * self.widths[self.rank]] * len(self.widths)
        all_widths = [B * width for width in self.widths]
        receives, sends = (own, all_widths) if to_owners else (all_widths, own)
        received = sent.new_empty(sum(receives))
        dist.all_to_all_single(received, sent, receives, sends, self.group)
        return received

    def _parts(self, flat: torch.Tensor, B: int) -> tuple[torch.Tensor, ...]:
        return torch.split(flat, [B * width for width in self.widths])


class _Exchanged(torch.autograd.Function):
    """`OutputExchange` as one autograd node, so that its backward pass is one collective and no bookkeeping."""

    @staticmethod
    def forward(ctx: Any, pooled_GO: torch.Tensor, exchange: OutputExchange) -> torch.Tensor:
        ctx.exchange = exchange
        with exchange.timer.measure(Part.FORWARD_EXCHANGE):
            return exchange.forward(pooled_GO)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        exchange: OutputExchange = ctx.exchange
        with exchange.timer.measure(Part.BACKWARD_EXCHANGE):
            return exchange.backward(gradients[0]), None
