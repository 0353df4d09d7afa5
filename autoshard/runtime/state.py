"""The state of one table, gathered from all processes.

Shape suffixes: N rows, D embedding dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from autoshard.core import EmbeddingTable, Optimizer
from autoshard.runtime.engine.holdings import Holding
from autoshard.runtime.engine.ids.addresses import RowOrder
from autoshard.runtime.engine.rows.places import held_chunks
from autoshard.runtime.engine.rows.replicated import TORCH_DTYPES
from autoshard.runtime.participation import Participation


@dataclass(frozen=True, slots=True, eq=False)
class TableState:
    """Weights of a table, and the optimizer's moments, both of shape (N, D).

    Attributes:
        weights_ND: The weights.
        moments_ND: For each weight the moment that its updates are divided by: row-wise AdaGrad has one for a row, or
            for each part of its columns that is a shard. None for SGD.
    """

    weights_ND: torch.Tensor
    moments_ND: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class HeldState:
    """Weights and moments of what one process has of a holding, one row per place.

    Attributes:
        holding: The holding.
        weights_ND: Weights.
        moments: Moments: (N,) row-wise, (N, D) else; None for SGD.
    """

    holding: Holding
    weights_ND: torch.Tensor
    moments: torch.Tensor | None


def gathered_state(
    table: EmbeddingTable, held: list[HeldState], order: RowOrder | None, part: Participation
) -> TableState:
    """Gives every process the state of a table; all of them have to call it.

    Args:
        table: The table.
        held: What this process has of it.
        order: Its row order; None for that of the ids.
        part: The processes.
    """
    shape = (table.num_embeddings, table.embedding_dim)
    weights_ND = torch.zeros(shape, dtype=TORCH_DTYPES[table.dtype], device=part.device)
    moments_ND = None if table.optimizer is Optimizer.SGD else torch.zeros(shape, device=part.device)
    for state in held:
        # One of those who have the same rows gives them.
        if any(part.process in of[1:] for of in state.holding.sync_groups() if len(of) > 1):
            continue
        first, last = state.holding.columns
        for start, rows_L, places_L in held_chunks(state.holding, part.process, order):
            rows_L, places_L = (rows_L + start).to(part.device), places_L.to(part.device)
            weights_ND[rows_L, first:last] = state.weights_ND[places_L].detach()
            if moments_ND is not None and state.moments is not None:
                moments = state.moments.view(len(state.weights_ND), -1)[places_L]
                moments_ND[rows_L, first:last] = moments.expand(-1, last - first).detach()
    dist.all_reduce(weights_ND, group=part.group)
    if moments_ND is not None:
        dist.all_reduce(moments_ND, group=part.group)
    return TableState(weights_ND, moments_ND)
