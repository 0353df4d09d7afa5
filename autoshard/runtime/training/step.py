"""One training step of a DLRM, whatever executes its embedding tables.

Shape suffixes: B samples of a local batch, C columns of all features.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits

from autoshard.core import Pooling, TableSet
from autoshard.core.step import Overlap
from autoshard.runtime.batch import BatchOfIds, Embedded
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.groups import own_group
from autoshard.runtime.engine.holdings import Ownership
from autoshard.runtime.engine.ids.prefetch import Prefetched
from autoshard.runtime.state import TableState
from autoshard.runtime.timing import StepTimer, phase
from autoshard.runtime.training.dense import DenseModel
from autoshard.runtime.training.gradients import GradientBuckets
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
    """What a step computed of the local batch.

    Attributes:
        loss: Its mean loss, times the batch's weight.
        logits_B: What the model predicted.
        vectors_BC: The vectors of all features that it predicted from.
        asked: How many processes asked for something in this step, see `TrainingStep.asks`; shape (1,).
    """

    loss: torch.Tensor
    logits_B: torch.Tensor
    vectors_BC: torch.Tensor
    asked: torch.Tensor | None = None


class FeatureVectors:
    """One vector for each sample and feature: pooled embeddings as they are, and sums over sequences.

    Rows of a sequence count by their place in it, the first whole, the second half, and so on, so that it matters
    where they come.

    Args:
        tables: Tables of the features.
    """

    def __init__(self, tables: TableSet) -> None:
        features = [(feature.name, table) for table in tables.tables for feature in table.features]
        #: Row of the lengths of each sequence, by name; pooled ones that lie side by side are None.
        self._parts: list[tuple[str, int] | None] = []
        #: Columns of pooled features that lie side by side.
        self._widths: list[int] = []
        for row, (name, table) in enumerate(features):
            if table.pooling is Pooling.SEQUENCE:
                self._parts.append((name, row))
            elif self._parts and self._parts[-1] is None:
                self._widths[-1] += table.embedding_dim
            else:
                self._parts.append(None)
                self._widths.append(table.embedding_dim)

    def __call__(self, embedded: Embedded, ids: BatchOfIds) -> torch.Tensor:
        """Vectors of all features side by side, shape (B, C)."""
        if self._parts == [None]:
            return embedded.pooled_BC
        # Of a split, the backward pass fills the gradient once; of slices, once for each.
        pooled = iter(torch.split(embedded.pooled_BC, self._widths, dim=1))
        return torch.cat(
            [
                next(pooled) if part is None else _weighted_sums(embedded.sequences[part[0]], ids.lengths_FB[part[1]])
                for part in self._parts
            ],
            dim=1,
        )


def _weighted_sums(rows_LD: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    lengths_B = lengths_B.long()
    samples = torch.arange(len(lengths_B), device=rows_LD.device)
    sample_L = torch.repeat_interleave(samples, lengths_B, output_size=len(rows_LD))
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
        buckets: Averages the dense layers' gradients; None for a single process.

    Attributes:
        dense: The dense layers.
        optimizer: Their optimizer.
        batches_ahead: How many of the next batches a step takes.
        asks: Whether this process asks the others for something, such as to end; all get to know how many do.
    """

    def __init__(
        self,
        embeddings: TrainedEmbeddings,
        tables: TableSet,
        dense: DenseModel,
        learning_rate: float,
        buckets: GradientBuckets | None = None,
    ) -> None:
        self._embeddings, self._vectors, self._buckets = embeddings, FeatureVectors(tables), buckets
        #: Where gradients are looked at.
        self._sharded = embeddings if isinstance(embeddings, ShardedEmbeddings) else None
        self.optimizer = torch.optim.SGD(dense.parameters(), lr=learning_rate)
        self.dense, self.batches_ahead, self.asks = dense, 0, False

    def __call__(self, samples: Samples, following: Sequence[Samples] = ()) -> StepOutcome:
        """Trains on one batch.

        Args:
            samples: The batch; the first that followed in the call before, if any did.
            following: The next ones, up to `batches_ahead`.
        """
        self.optimizer.zero_grad()
        bottom_BD, embedded = self.embed(samples, following)
        vectors_BC = self._vectors(embedded, samples.ids)
        with phase("interaction and top layers"):
            logits_B = self.dense(bottom_BD, vectors_BC)
        # The mean over no samples is no number.
        reduction = "mean" if len(samples.labels_B) else "sum"
        loss = binary_cross_entropy_with_logits(logits_B, samples.labels_B, reduction=reduction)
        if samples.weight != 1:
            loss = loss * samples.weight
        asked = None
        if self._buckets is not None:
            self._buckets.asks = self.asks
        trained = loss if self._sharded is None else self._sharded.guard.of_loss(loss)
        with phase("backward"):
            trained.backward()  # type: ignore[no-untyped-call]
        if self._buckets is not None:
            with phase("mean of dense gradients"):
                asked = self._buckets.average()
        if self._sharded is not None:
            self._sharded.guard.keep_from_layers(self._sharded.verdict, self.dense)
        self._embeddings.end_step()
        with phase("dense optimizer"):
            self.optimizer.step()
        return StepOutcome(loss.detach(), logits_B.detach(), vectors_BC.detach(), asked)

    @property
    def num_bad(self) -> int:
        """Steps with a loss or gradients that were not finite; the host waits for the device."""
        return 0 if self._sharded is None else self._sharded.guard.num_bad

    def embed(self, samples: Samples, following: Sequence[Samples]) -> tuple[torch.Tensor, Embedded]:
        """The bottom layers' output, shape (B, D), and the embeddings of a batch."""
        del following  # Its ids are sent when it is trained on.
        # The bottom layers come first, so that autograd, which goes back in reverse order, sends the embeddings'
        # gradients on their way before it turns to these layers.
        with phase("bottom layers"):
            bottom_BD = self.dense.bottom(samples.dense_BN)
        return bottom_BD, self._embeddings(samples.ids)


class PipelinedStep(TrainingStep):
    """The same step with the same results, whose communication hides behind its computation.

    Ids of the next batch travel during the whole step, embeddings during the bottom layers' forward pass, their
    gradients during its backward pass.

    Args:
        embeddings: As `TrainingStep`; the thin engine's.
        tables: As `TrainingStep`.
        dense: As `TrainingStep`.
        learning_rate: As `TrainingStep`.
        buckets: As `TrainingStep`; they leave early.

    Source:
        Neo Sec. 4.2.
    """

    def __init__(
        self,
        embeddings: ShardedEmbeddings,
        tables: TableSet,
        dense: DenseModel,
        learning_rate: float,
        buckets: GradientBuckets,
    ) -> None:
        super().__init__(embeddings, tables, dense, learning_rate, buckets)
        self._pipelined, self.batches_ahead = embeddings, embeddings.batches_ahead
        self._prefetched: deque[Prefetched] = deque()

    def embed(self, samples: Samples, following: Sequence[Samples]) -> tuple[torch.Tensor, Embedded]:
        """As `TrainingStep`; prefetches what follows."""
        started = self._pipelined.start(self._prefetched.popleft() if self._prefetched else samples.ids)
        self._prefetched += [self._pipelined.prefetch(one.ids) for one in following[len(self._prefetched) :]]
        with phase("bottom layers"):
            bottom_BD = self.dense.bottom(samples.dense_BN)
        embedded = started.wait()
        assert isinstance(embedded, Embedded), "of a batch that is no keyed tensor"
        return bottom_BD, embedded


def distributed_step(
    embeddings: EmbeddingEngine,
    tables: TableSet,
    dense: DenseModel,
    learning_rate: float,
    *,
    overlap: Overlap = Overlap.NONE,
    timer: StepTimer | None = None,
) -> TrainingStep:
    """The step of all processes; all of them have to call it.

    Args:
        embeddings: The embedding tables; the thin engine's if anything overlaps.
        tables: Tables of their features.
        dense: Dense layers.
        learning_rate: Learning rate of the dense layers.
        overlap: What overlaps.
        timer: Where to count the time; None for nowhere.
    """
    timer = timer or StepTimer(torch.device("cpu"), enabled=False)
    if overlap is Overlap.NONE:
        world = dist.distributed_c10d._get_default_group()
        return TrainingStep(embeddings, tables, dense, learning_rate, GradientBuckets(dense, world, timer))
    assert isinstance(embeddings, ShardedEmbeddings), "only the thin engine overlaps"
    # Collectives of one group of NCCL wait for each other, so these have a group of their own.
    group = own_group([range(dist.get_world_size())], "dense")
    buckets = GradientBuckets(dense, group, timer, early=True)
    return PipelinedStep(embeddings, tables, dense, learning_rate, buckets)
