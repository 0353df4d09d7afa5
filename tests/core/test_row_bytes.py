"""Bytes of stored rows are those that FBGEMM's kernels hold."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from autoshard.core import DType, Optimizer, RowRange, Shard, weight_row_bytes
from tests.builders import table

NUM_ROWS = 1000
DIMS = (4, 8, 12, 16, 20, 32, 64, 100, 128, 256)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", DType)
def test_rows_that_are_trained(dtype, dim):
    place = (EmbeddingLocation.HOST, ComputeDevice.CPU)
    weights = SplitTableBatchedEmbeddingBagsCodegen(
        [(NUM_ROWS, dim, *place)], weights_precision=SparseType(dtype.value)
    ).weights_host
    held = weights.numel() * weights.element_size()
    assert held == NUM_ROWS * weight_row_bytes(dtype, Optimizer.SGD, dim)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16, DType.INT8])
def test_rows_that_are_only_read(dtype, dim):
    specs = [("t", NUM_ROWS, dim, SparseType(dtype.value), EmbeddingLocation.DEVICE)]
    kernel = IntNBitTableBatchedEmbeddingBagsCodegen(specs, device=torch.device("meta"))
    kernel.initialize_weights()
    assert kernel.weights_dev.numel() == NUM_ROWS * weight_row_bytes(dtype, Optimizer.NONE, dim)


def test_every_column_shard_has_scales_of_its_own():
    whole = table("t", NUM_ROWS, 64, dtype=DType.INT8, optimizer=Optimizer.SGD)
    rows = RowRange(start=0, stop=NUM_ROWS)
    parts = [Shard(table=whole, rows=rows, columns=columns) for columns in ((0, 32), (32, 48), (48, 64))]
    assert [part.storage_bytes for part in parts] == [40_000, 24_000, 24_000]
    assert whole.storage_bytes == Shard.whole(whole).storage_bytes == 72_000
