"""The state of one table.

Shape suffixes: N rows, D embedding dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from autoshard.core import DType, Optimizer
from autoshard.runtime.participation import Participation

_TORCH_DTYPE = {DType.FP32: torch.float32, DType.FP16: torch.float16}


@dataclass(frozen=True, slots=True, eq=False)
class TableState:
    """Weights of a table, shape (N, D), and the optimizer's moments: (N,) row-wise, (N, D) else, None for SGD."""

    weights_ND: torch.Tensor
    moments: torch.Tensor | None


def broadcast_state(name: str, own: TableState | None, part: Participation) -> TableState:
    """Gives every process the state of a table; all of them have to call it.

    Args:
        name: Name of the table.
        own: The state, on the table's owner; None elsewhere.
        part: The processes.
    """
    table, owner = part.owners.tables[name], part.owners.owner(name)
    rows, dim = table.num_embeddings, table.embedding_dim
    shapes = {Optimizer.ROWWISE_ADAGRAD: (rows,), Optimizer.ADAGRAD: (rows, dim)}

    def broadcast(value: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=part.device)
        if value is not None:
            tensor.copy_(value.detach().view(shape))
        dist.broadcast(tensor, group=part.group, group_src=owner)
        return tensor

    weights_ND = broadcast(own.weights_ND if own else None, (rows, dim), _TORCH_DTYPE[table.dtype])
    if table.optimizer not in shapes:
        return TableState(weights_ND, None)
    return TableState(weights_ND, broadcast(own.moments if own else None, shapes[table.optimizer], torch.float32))
