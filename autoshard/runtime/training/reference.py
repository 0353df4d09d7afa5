"""The unsharded reference: plain torch on one process, and the comparison of an engine with it.

Nothing here uses FBGEMM, TorchRec or a collective to compute; only initial weights and batches come from where the
engines get theirs.

Shape suffixes: F features, B samples of a local batch, G samples of the global batch, L lookups, C columns of all
features, N rows, D embedding dim.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.nn.functional import embedding, embedding_bag

from autoshard.core import DType, EmbeddingTable, Pooling, RowsBy, ShardingPlan, TableSet
from autoshard.core.errors import DivergedError, InvalidOptionError
from autoshard.core.optimizers import WeightDecayMode
from autoshard.core.quoting import write_bytes
from autoshard.runtime.batch import BatchOfIds, Embedded
from autoshard.runtime.engine.holdings import GroupOrder
from autoshard.runtime.engine.ids.addresses import RowOrderMap
from autoshard.runtime.engine.rows.fused import FusedSettings, rounds_at_random
from autoshard.runtime.releases import all_gather
from autoshard.runtime.results import RunRequest, Verification
from autoshard.runtime.training.dense import DenseModel
from autoshard.runtime.training.step import EmbeddingEngine, TrainingStep
from autoshard.runtime.training.synthetic import IdsOfRanks, Samples, draw_samples, global_samples
from autoshard.runtime.weights import initialise

#: Row ids and columns that have moments of their own.
MomentBlock: TypeAlias = tuple[torch.Tensor, tuple[int, int]]

#: The reference holds every table, and a dense gradient of it, on one process.
MAX_VERIFIED_BYTES = 2**30


class ReferenceEmbeddings:
    """Whole tables in fp32, looked up with `embedding_bag`, updated by `end_step` from their dense gradients.

    Args:
        tables: The tables.
        settings: Of the updates, and the seed of the initial weights.
        blocks: For each table, the rows and columns that are updated by themselves: row-wise moments and norms of
            rows are theirs; left out, those of whole rows.

    Attributes:
        weights: By table.
        moments: By table and name, shape (N, D); of moments that rows have one of, each is repeated.
    """

    def __init__(
        self,
        tables: TableSet,
        settings: FusedSettings,
        *,
        blocks: Mapping[str, Sequence[MomentBlock]] | None = None,
    ) -> None:
        self._tables, self._settings, self._num_steps = tables.tables, settings, 0
        self._blocks: dict[str, Sequence[MomentBlock]] = {
            one.name: [(torch.arange(one.num_embeddings), (0, one.embedding_dim))] for one in tables.tables
        } | dict(blocks or {})
        self.weights: dict[str, torch.Tensor] = {}
        self.moments: dict[str, dict[str, torch.Tensor]] = {}
        self._hits = {one.name: torch.zeros(one.num_embeddings, dtype=torch.bool) for one in tables.tables}
        for table in self._tables:
            weights_ND = torch.empty(table.num_embeddings, table.embedding_dim, dtype=torch.float32)
            initialise(weights_ND, table, settings.seed)
            self.weights[table.name] = weights_ND.requires_grad_()
            self.moments[table.name] = {one.name: torch.zeros_like(weights_ND) for one in table.optimizer.moments}

    def __call__(self, ids: BatchOfIds) -> Embedded:
        """Embeddings of all samples."""
        features = [(table, feature.name) for table in self._tables for feature in table.features]
        limit = self._settings.max_gradient
        pooled, sequences = [torch.empty(ids.batch_size, 0, dtype=torch.float32)], {}
        weights = [None] * len(features) if ids.weights_L is None else ids.per_feature(ids.weights_L)
        for (table, name), feature_ids, lengths, weights_L in zip(
            features, ids.per_feature(ids.ids_L), ids.lengths_FB, weights, strict=True
        ):
            weights_ND = self.weights[table.name]
            if torch.is_grad_enabled():
                self._hits[table.name][feature_ids] = True
            if table.pooling is Pooling.SEQUENCE:
                sequences[name] = embedding(feature_ids, weights_ND)
                continue
            offsets = torch.cumsum(lengths, 0) - lengths
            pooled.append(
                embedding_bag(feature_ids, weights_ND, offsets, mode=table.pooling.value, per_sample_weights=weights_L)
            )
        embedded = Embedded(torch.cat(pooled, dim=1), sequences)
        for one in (embedded.pooled_BC, *sequences.values()):
            if limit is not None and one.requires_grad:
                one.register_hook(lambda gradient: gradient.clamp(-limit, limit))  # type: ignore[no-untyped-call]
        return embedded

    def end_step(self) -> None:
        """Updates the rows of all tables that were looked up, and forgets their gradients.

        Source:
            Row-wise AdaGrad as in Neo Sec. 5.2: the moment of a row grows by the mean of its squared gradient,
            and epsilon is added outside of the root. Adam: Kingma and Ba (2015), Algorithm 1; its decay: Loshchilov and
            Hutter (2019), Algorithm 2; LAMB: You et al. (2020), Algorithm 2, with the identity for phi, row by row.
        """
        self._num_steps += 1
        for table in self._tables:
            for rows_L, columns in self._blocks[table.name]:
                self._update(table, rows_L[self._hits[table.name][rows_L]], slice(*columns))
            self.weights[table.name].grad = None
            self._hits[table.name].zero_()

    @torch.no_grad()
    def _update(self, table: EmbeddingTable, rows_L: torch.Tensor, columns: slice) -> None:
        weights_ND, settings, optimizer = self.weights[table.name], self._settings, table.optimizer
        if weights_ND.grad is None or not len(rows_L):
            return
        rate, decay, t = settings.learning_rate, settings.weight_decay, self._num_steps
        weights_LD, gradient_LD = weights_ND[rows_L, columns], weights_ND.grad[rows_L, columns]
        moments = {name: one[rows_L, columns] for name, one in self.moments[table.name].items()}
        decoupled_LD = rate * decay * weights_LD
        if settings.weight_decay_mode is WeightDecayMode.L2:
            gradient_LD, decoupled_LD = gradient_LD + decay * weights_LD, torch.zeros_like(weights_LD)
        squares_LD = gradient_LD**2
        if optimizer.moments and optimizer.moments[-1].is_per_row:
            squares_LD = squares_LD.mean(dim=1, keepdim=True).expand_as(squares_LD)
        step_LD = gradient_LD
        if optimizer.has_decaying_moments:
            moments["moments"].lerp_(gradient_LD, 1 - settings.beta1)
            moments["second_moments"].lerp_(squares_LD, 1 - settings.beta2)
            unbiased_LD = moments["second_moments"] / (1 - settings.beta2**t)
            step_LD = moments["moments"] / (1 - settings.beta1**t) / (unbiased_LD.sqrt() + settings.eps)
        elif optimizer.moments:
            moments["moments"] += squares_LD
            step_LD = gradient_LD / ((moments["moments"] / settings.moment_scale).sqrt() + settings.eps)
        if optimizer.scales_by_norms:
            whole_LD = step_LD + decay * weights_LD
            unit_LD = torch.nan_to_num(whole_LD / whole_LD.norm(dim=1, keepdim=True))
            changed_LD = weights_LD - rate * weights_LD.norm(dim=1, keepdim=True) * unit_LD
        else:
            changed_LD = weights_LD - decoupled_LD - rate * step_LD
        if settings.max_norm is not None:
            changed_LD = changed_LD.renorm(2, 0, settings.max_norm)
        weights_ND[rows_L, columns] = changed_LD
        for name, one in moments.items():
            self.moments[table.name][name][rows_L, columns] = one


class GroupedReference:
    """Tables that each replica group has of its own, trained on its samples, and averaged every so many steps.

    Args:
        plan: The plan; of its shards only columns matter, which have moments of their own.
        request: Settings of the updates, and the seed.
        num_processes: Processes whose local batches make a global one, in their order.
        row_orders: Row ids in falling access frequency, by table.

    Source:
        2D Algorithm 1.
    """

    def __init__(
        self, plan: ShardingPlan, request: RunRequest, num_processes: int, row_orders: Mapping[str, torch.Tensor]
    ) -> None:
        groups = plan.replica_groups
        order = GroupOrder.of(groups, num_processes)
        self._group_of = [order.group_of(process) for process in range(num_processes)]
        self._tables, self._sync_every, self._num_steps = plan.tables, groups.sync_every, 0
        settings = FusedSettings.of(request, seed=request.seed, moment_scale=groups.moment_scale)
        if settings.max_gradient is not None:
            # Gradients of a copy are those of the mean over all groups until `end_step`.
            settings = replace(settings, max_gradient=settings.max_gradient / groups.num_groups)
        blocks = moment_blocks(plan, row_orders)
        self.copies = [ReferenceEmbeddings(plan.tables, settings, blocks=blocks) for _ in range(groups.num_groups)]

    def __call__(self, ids: BatchOfIds) -> Embedded:
        """Embeddings of all samples, each by the tables of its group."""
        if len(self.copies) == 1:
            return self.copies[0](ids)
        parts = [
            self.copies[group](batch)
            for group, batch in zip(self._group_of, _local_batches(ids, len(self._group_of)), strict=True)
        ]
        names = parts[0].sequences
        sequences = {name: torch.cat([part.sequences[name] for part in parts]) for name in names}
        return Embedded(torch.cat([part.pooled_BC for part in parts]), sequences)

    @torch.no_grad()
    def end_step(self) -> None:
        """Updates every group's tables from the gradients of its own mean loss, and averages them when it is time."""
        for copy in self.copies:
            for weights_ND in copy.weights.values():
                if weights_ND.grad is not None:
                    weights_ND.grad *= len(self.copies)
            copy.end_step()
        self._num_steps += 1
        if len(self.copies) > 1 and self._num_steps % self._sync_every == 0:
            for table in self._tables.tables:
                tensors = [[copy.weights[table.name], *copy.moments[table.name].values()] for copy in self.copies]
                for of in zip(*tensors, strict=True):
                    mean = torch.stack([one.detach() for one in of]).mean(dim=0)
                    for one in of:
                        one.copy_(mean)


def _local_batches(ids: BatchOfIds, num_parts: int) -> list[BatchOfIds]:
    """The equal parts that a global batch is made of."""

    def of_part(part: int, of_L: torch.Tensor) -> torch.Tensor:
        pieces = zip(ids.per_feature(of_L), ids.lengths_FB, strict=True)
        return torch.cat(
            [torch.split(piece, lengths.view(num_parts, -1).sum(1).tolist())[part] for piece, lengths in pieces]
        )

    lengths = torch.chunk(ids.lengths_FB, num_parts, dim=1)
    return [ids.changed(of, partial(of_part, part)) for part, of in enumerate(lengths)]


class Reference:
    """A whole DLRM on one process, trained on global batches.

    Args:
        plan: The plan; of its shards only columns matter, which have moments of their own.
        dense: A model whose layers have the weights to start from; it is not changed.
        request: Settings of the updates, and the seed.
        num_processes: Processes whose local batches make a global one.
        row_orders: Row ids in falling access frequency, by table.
    """

    def __init__(
        self,
        plan: ShardingPlan,
        dense: DenseModel,
        request: RunRequest,
        num_processes: int,
        row_orders: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.embeddings = GroupedReference(plan, request, num_processes, row_orders or {})
        self.dense = dense
        self._train = TrainingStep(self.embeddings, plan.tables, dense, request.learning_rate)

    def step(self, samples: Samples) -> torch.Tensor:
        """Trains on one global batch; returns the vectors of its features before the update, shape (G, C)."""
        return self._train(samples).vectors_BC


def moment_blocks(plan: ShardingPlan, row_orders: Mapping[str, torch.Tensor]) -> dict[str, list[MomentBlock]]:
    """For each table, the row ids and columns of its shards.

    Args:
        plan: The plan.
        row_orders: Row ids in falling access frequency, by table.
    """
    blocks: dict[str, list[MomentBlock]] = {table.name: [] for table in plan.tables.tables}
    for placed in plan.shards:
        shard = placed.shard
        rows_L = torch.arange(shard.rows.start, shard.rows.stop)
        ids_N = row_orders.get(shard.table.name)
        if ids_N is not None and shard.rows.by is RowsBy.ACCESS_RANK:
            all_rows = shard.table.num_embeddings
            ranks_L = RowOrderMap(ids_N, all_rows, torch.device("cpu")).ranks(torch.arange(all_rows))
            rows_L = ((ranks_L >= shard.rows.start) & (ranks_L < shard.rows.stop)).nonzero().squeeze(1)
        blocks[shard.table.name].append((rows_L, shard.columns))
    return blocks


def check_verifiable(tables: TableSet) -> None:
    """Checks that one process can hold the reference.

    Raises:
        InvalidOptionError: If the tables are too large.
    """
    num_bytes = sum(table.num_embeddings * table.embedding_dim * 4 for table in tables.tables)
    if num_bytes > MAX_VERIFIED_BYTES:
        raise InvalidOptionError(
            f"compares with an unsharded model of at most {write_bytes(MAX_VERIFIED_BYTES)}, these tables have "
            f"{write_bytes(num_bytes)}: scale them down",
            field="verify_steps",
        )


def compare(
    engine: EmbeddingEngine,
    training: TrainingStep,
    reference: Reference | None,
    request: RunRequest,
    num_dense: int,
    ranked: Mapping[str, IdsOfRanks] | None = None,
) -> Verification | None:
    """Trains an engine for `request.verify_steps` steps and compares all that it computes with the reference.

    All processes have to call it, right after the engine was made.

    Args:
        engine: The engine.
        training: The step that trains it, over the group of all processes.
        reference: The reference on the process of rank 0, None elsewhere.
        request: Number of steps and seed.
        num_dense: Dense features per sample.
        ranked: Row ids of access ranks, of tables that are cut by these.

    Returns:
        The largest errors on rank 0, None elsewhere.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tables, B, device = engine.owners.tables, engine.local_batch_size, next(training.dense.parameters()).device
    output_error = weight_error = moment_error = dense_error = 0.0

    def drawn(step: int, process: int) -> Samples:
        return draw_samples(tables, num_dense, B, (request.seed, step, process), ranked)

    ahead: deque[Samples] = deque()
    for step in range(request.verify_steps):
        until = min(step + 1 + training.batches_ahead, request.verify_steps)
        ahead += [drawn(one, rank).to(device) for one in range(step + len(ahead), until)]
        vectors_BC = training(ahead.popleft(), tuple(ahead)).vectors_BC
        vectors_GC = vectors_BC.new_empty(world_size * B, vectors_BC.shape[1])
        all_gather(vectors_GC, vectors_BC.contiguous())
        if reference is not None:
            parts = [drawn(step, process) for process in range(world_size)]
            output_error = max(output_error, _error(vectors_GC, reference.step(global_samples(parts))))
    for table in tables.tables:
        state = engine.table_state(table.name)
        if reference is not None:
            weight_error = max(
                weight_error, _error(state.weights_ND, reference.embeddings.copies[0].weights[table.name])
            )
            for name, moments_ND in reference.embeddings.copies[0].moments[table.name].items():
                largest = moments_ND.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
                found_ND = state.expanded(name) / largest.to(device)
                moment_error = max(moment_error, _error(found_ND, moments_ND / largest))
    if reference is None:
        return None
    for own, expected in zip(training.dense.parameters(), reference.dense.parameters(), strict=True):
        dense_error = max(dense_error, _error(own, expected))
    return Verification(
        steps=request.verify_steps,
        output_error=output_error,
        weight_error=weight_error,
        moment_error=moment_error,
        dense_error=dense_error,
        weight_rounding=_rounding(tables, reference, request.verify_steps, device),
    )


def _rounding(tables: TableSet, reference: Reference, steps: int, device: torch.device) -> float:
    """What weights that are held in fp16 are off by if every step rounds the largest one by as much as it can."""
    halves = [reference.embeddings.copies[0].weights[one.name] for one in tables.tables if one.dtype is DType.FP16]
    largest = max((float(weights_ND.detach().abs().max()) for weights_ND in halves), default=0.0)
    gap = torch.finfo(torch.float16).eps * 2.0 ** math.floor(math.log2(largest)) if largest else 0.0
    # The initial weights are rounded to the nearest, updates as `rounds_at_random` has it.
    return gap * (0.5 + steps * (1.0 if rounds_at_random(DType.FP16, device) else 0.5))


@torch.no_grad()
def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (actual.cpu().float() - expected).abs().max().item()
    if not math.isfinite(difference):
        raise DivergedError("the plan and the unsharded reference differ by more than any number: training diverged")
    return difference
