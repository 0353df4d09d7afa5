"""What differs between the releases of torch (2.11 to 2.13) and FBGEMM (1.6 to 1.8) that are used: one door to both.

Shape suffixes: N rows, D embedding dim, T tables.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen

GroupT = TypeVar("GroupT")

# What FBGEMM and its hooks tell of themselves on a GPU, which no user can change.
for _note in ("TBE B200 optimization", "Full backward hook is firing", r"\s*\S*\s*\[FBGEMM_GPU\] NOTE"):
    warnings.filterwarnings("ignore", message=_note)

# torch 2.13 renamed them, and warns of the old names; older releases have those only.
#: Gathers equal pieces of all processes into one tensor: `all_gather(output, input, group=None, async_op=False)`.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
#: Sums over processes, of which each keeps an equal piece: `reduce_scatter(output, input, op, group, async_op)`.
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def under_new_names(group: type[GroupT]) -> type[GroupT]:
    """A process group with the names under which torch 2.13 calls collectives, beside those of older releases."""
    newer = {
        "all_to_all_single": "alltoall_base",
        "all_gather_single": "_allgather_base",
        "reduce_scatter_single": "_reduce_scatter_base",
        "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
        "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    }
    for name, older in newer.items():
        setattr(group, name, getattr(group, older))
    return group


def fused_embedding(
    specs_T: Sequence[tuple[Any, ...]], host_memory: Mapping[str, torch.Tensor] | None = None, **options: Any
) -> SplitTableBatchedEmbeddingBagsCodegen:
    """FBGEMM's table-batched embedding with the optimizer in its backward pass.

    Args:
        specs_T: Rows, columns, location and device of each table.
        host_memory: Zeroed memory for `weights` and, with a moment, `momentum1` of all tables on a CPU, each of one
            dimension; None where FBGEMM allocates it. FBGEMM 1.8 takes it; what older releases allocated is replaced.
        options: Of FBGEMM's constructor.
    """
    memory = dict(host_memory or {})
    if not memory or "preallocated_host_buffers" in inspect.signature(SplitTableBatchedEmbeddingBagsCodegen).parameters:
        taken = {"preallocated_host_buffers": memory} if memory else {}
        return SplitTableBatchedEmbeddingBagsCodegen(specs_T, **taken, **options)
    module = SplitTableBatchedEmbeddingBagsCodegen(specs_T, **options)
    for name, piece in memory.items():
        setattr(module, f"{name}_host", torch.nn.Parameter(piece))
    return module
