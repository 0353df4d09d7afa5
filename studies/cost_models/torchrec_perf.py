"""TorchRec's analytic performance model, as a baseline of the cost model.

Shape suffixes: S samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from autoshard.core import Exchange, LocalShard, MemoryLevel, Pooling, Update
from autoshard.core.costs import MsArray
from autoshard.core.errors import ModelError
from autoshard.evaluation.analytic import DEVICE_MEMORY
from costmodel.kernel.dataset import CostDataset
from studies.cost_models.baselines import summed

_HOST_DEVICES = ("cpu",)


def torchrec_kernel_ms(dataset: CostDataset, device: str) -> MsArray:
    """Forward and backward compute that TorchRec's planner expects, added up over the shards of each set; shape (S,).

    Its inputs are those of `TorchRecPlanner`: the device's published bandwidth in place of its constants, and
    whole batches. Shards whose gradients are all-reduced are its `data_parallel` with the kernel `dense`, all others
    `table_wise`. Of access it takes no notice.

    Raises:
        ModelError: If TorchRec is not installed, or has no such model.
    """
    try:
        from torchrec.distributed.planner import constants
        from torchrec.distributed.planner.estimator import estimator, types
    except ImportError as error:
        raise ModelError(f"TorchRec's performance model needs torchrec: {error}") from error
    config = types.HardwarePerfConfig()
    memory = DEVICE_MEMORY.get(device)
    bytes_per_ms = memory.bytes_per_s / 1e3 if memory else constants.HBM_MEM_BW

    def of_shard(shard: LocalShard) -> float:
        is_dense = shard.update is Update.ALL_REDUCED
        sharding_type = "data_parallel" if is_dense else "table_wise"
        context = types.ShardPerfContext(
            **_described(shard),
            sharding_type=sharding_type,
            device_bw=constants.kernel_bw_lookup(
                compute_device="cpu" if device in _HOST_DEVICES else "cuda",
                compute_kernel=_kernel(shard, device),
                hbm_mem_bw=bytes_per_ms,
                ddr_mem_bw=bytes_per_ms if device in _HOST_DEVICES else constants.DDR_MEM_BW,
                hbm_to_ddr_mem_bw=constants.HBM_TO_DDR_MEM_BW,
            ),
            compute_kernel=_kernel(shard, device),
        )
        evaluator = estimator.get_embedding_perf_sharding_evaluator(sharding_type)
        return float(evaluator.compute_fwd_comp(context, config) + evaluator.compute_bwd_comp(context, config))

    return np.asarray(summed(dataset, lambda shards: np.array([of_shard(shard) for shard in shards])), dtype=np.float64)


def _described(shard: LocalShard) -> dict[str, Any]:
    size = float(shard.dtype.num_bytes)
    return {
        "hash_size": shard.num_embeddings,
        "emb_dim": shard.embedding_dim,
        "batch_sizes": [shard.num_bags],
        "num_poolings": [1.0],
        "input_lengths": [shard.pooling_factor],
        "table_data_type_size": size,
        "output_data_type_size": size,
        "is_pooled": shard.pooling is not Pooling.SEQUENCE and shard.output is not Exchange.ROWS,
    }


def _kernel(shard: LocalShard, device: str) -> str:
    if shard.update is Update.ALL_REDUCED:
        return "dense"
    if shard.level is MemoryLevel.HBM or device in _HOST_DEVICES:
        return "fused"
    return "fused_uvm_caching" if shard.cache_bytes else "fused_uvm"
