"""One training step of a DLRM, whatever executes its embedding tables.

Shape suffixes: B samples of a local batch, C columns of all features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits

from autoshard.core import Pooling, TableSet
from autoshard.runtime.batch import BatchOfIds, Embedded
from autoshard.runtime.engine.holdings import Ownership
from autoshard.runtime.state import TableState
from autoshard.runtime.training.dense import DenseModel, average_gradients
from autoshard.runtime.training.synthetic import Samples


class TrainedEmbeddings(Protocol):
    """Embedding tables that are looked up and trained."""

    def __call__(self, ids: BatchOfIds) -> Embedded:
        """Embeddings of a batch, features in the plan's order."""
        ...

    def end_step(self) -> None:
        """Ends a training step, after the backward pass. All processes have to call it."""
        ...


class EmbeddingEngine(TrainedEmbeddings, Protocol):
    """Executes the embedding tables of a plan: looks them up, and trains them in the backward pass."""

    owners: Ownership
    feature_dims: tuple[int, ...]
    local_batch_size: int

    def sent_bytes(self) -> dict[str, float]:
        """Bytes that this process has sent since it was made, by `SENT`; empty where the engine does not count."""
        ...

    def table_state(self, name: str) -> TableState:
        """A table's weights and moments, on every process. All processes have to call it."""
        ...

    def close(self) -> None:
        """Lets go of the tables, before the process group is destroyed."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class StepOutcome:
    """Loss of the local batch, and the vectors of all features that it was made from."""

    loss: torch.Tensor
    vectors_BC: torch.Tensor


class FeatureVectors:
    """One vector for each sample and feature: pooled embeddings as they are, and sums over sequences.

    Rows of a sequence count by their place in it, the first whole, the second half, and so on, so that it matters
    where they come.

    Args:
        tables: Tables of the features.
    """

    def __init__(self, tables: TableSet) -> None:
        self._features = [(feature.name, table) for table in tables.tables for feature in table.features]
        self._has_sequences = any(table.pooling is Pooling.SEQUENCE for table in tables.tables)

    def __call__(self, embedded: Embedded, ids: BatchOfIds) -> torch.Tensor:
        """Vectors of all features side by side, shape (B, C)."""
        if not self._has_sequences:
            return embedded.pooled_BC
        vectors, column = [], 0
        for (name, table), lengths_B in zip(self._features, ids.lengths_FB, strict=True):
            if table.pooling is Pooling.SEQUENCE:
                vectors.append(_weighted_sums(embedded.sequences[name], lengths_B))
            else:
                vectors.append(embedded.pooled_BC[:, column : column + table.embedding_dim])
                column += table.embedding_dim
        return torch.cat(vectors, dim=1)


def _weighted_sums(rows_LD: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    lengths_B = lengths_B.long()
    sample_L = torch.repeat_interleave(torch.arange(len(lengths_B), device=rows_LD.device), lengths_B)
    place_L = torch.arange(len(rows_LD), device=rows_LD.device) - (lengths_B.cumsum(0) - lengths_B)[sample_L]
    weighted_LD = rows_LD / (place_L + 1)[:, None]
    return rows_LD.new_zeros(len(lengths_B), rows_LD.shape[1]).index_add(0, sample_L, weighted_LD)


class TrainingStep:
    """Forward, backward and update. Tables update themselves in the backward pass; dense layers take a step of SGD.

    Args:
        embeddings: Looks up a batch, and is trained in the backward pass and by `end_step`.
        tables: Tables of its features.
        dense: Dense layers.
        learning_rate: Learning rate of the dense layers.
        group: Processes over which dense gradients are averaged; None for a single one.
    """

    def __init__(
        self,
        embeddings: TrainedEmbeddings,
        tables: TableSet,
        dense: DenseModel,
        learning_rate: float,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._embeddings, self._vectors = embeddings, FeatureVectors(tables)
        self._group = group
        self._optimizer = torch.optim.SGD(dense.parameters(), lr=learning_rate)
        self.dense = dense

    def __call__(self, samples: Samples) -> StepOutcome:
        """Trains on one batch."""
        self._optimizer.zero_grad()
        # The bottom layers come first, so that autograd, which goes back in reverse order, sends the embeddings'
        # gradients on their way before it turns to these layers.
        bottom_BD = self.dense.bottom(samples.dense_BN)
        vectors_BC = self._vectors(self._embeddings(samples.ids), samples.ids)
        loss = binary_cross_entropy_with_logits(self.dense(bottom_BD, vectors_BC), samples.labels_B)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._group is not None and self._group.size() > 1:
            average_gradients(self.dense, self._group)
        self._embeddings.end_step()
        self._optimizer.step()
        return StepOutcome(loss.detach(), vectors_BC.detach())
