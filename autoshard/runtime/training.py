"""One training step of a DLRM, whatever executes its embedding tables.

Shape suffixes: B samples of a local batch, C columns of all features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits

from autoshard.runtime.batch import BatchOfIds
from autoshard.runtime.dense import DenseModel, average_gradients
from autoshard.runtime.ownership import TableOwners
from autoshard.runtime.state import TableState
from autoshard.runtime.synthetic import Samples


class EmbeddingEngine(Protocol):
    """What executes the embedding tables of a plan: looks them up, and trains them in the backward pass."""

    owners: TableOwners
    feature_dims: tuple[int, ...]
    local_batch_size: int

    def __call__(self, ids: BatchOfIds) -> torch.Tensor:
        """Pooled embeddings of the local batch, shape (B, C), features in the plan's order."""
        ...

    def table_state(self, name: str) -> TableState:
        """A table's weights and moments, on every process. All processes have to call it."""
        ...

    def close(self) -> None:
        """Lets go of the tables, before the process group is destroyed."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class StepOutcome:
    """Loss of the local batch, and the pooled embeddings that it was made from."""

    loss: torch.Tensor
    pooled_BC: torch.Tensor


class TrainingStep:
    """Forward, backward and update. Tables update themselves in the backward pass; dense layers take a step of SGD.

    Args:
        look_up: Pooled embeddings of a batch.
        dense: Dense layers.
        learning_rate: Learning rate of the dense layers.
        group: Processes over which dense gradients are averaged; None for a single one.
    """

    def __init__(
        self,
        look_up: Callable[[BatchOfIds], torch.Tensor],
        dense: DenseModel,
        learning_rate: float,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._look_up = look_up
        self._group = group
        self._optimizer = torch.optim.SGD(dense.parameters(), lr=learning_rate)
        self.dense = dense

    def __call__(self, samples: Samples) -> StepOutcome:
        """Trains on one batch."""
        self._optimizer.zero_grad()
        # The bottom layers come first, so that autograd, which goes back in reverse order, sends the embeddings'
        # gradients on their way before it turns to these layers.
        bottom_BD = self.dense.bottom(samples.dense_BN)
        pooled_BC = self._look_up(samples.ids)
        loss = binary_cross_entropy_with_logits(self.dense(bottom_BD, pooled_BC), samples.labels_B)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._group is not None and self._group.size() > 1:
            average_gradients(self.dense, self._group)
        self._optimizer.step()
        return StepOutcome(loss.detach(), pooled_BC.detach())
