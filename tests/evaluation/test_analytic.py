"""The analytic kernel model: bytes counted by hand over published bandwidths."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.core import AccessProfile, DType, Exchange, LocalShard, MemoryLevel, Optimizer, Update
from autoshard.core.errors import ModelError
from autoshard.evaluation import DEVICE_MEMORY, AnalyticCostModel
from autoshard.evaluation.analytic import kernel_bytes

SHARD = LocalShard(
    table="t",
    num_embeddings=10**9,
    embedding_dim=32,
    num_bags=100,
    pooling_factor=5.0,
    access=AccessProfile.uniform(10**9),
)


def test_counts_bytes():
    # 500 lookups, all distinct among 10^9 rows (to 2.5e-7), rows of 128 bytes, one moment of 4 bytes per row.
    # Forward: 500 x (128 + 8 id) + 100 x 8 offsets + 100 x 128 output = 81,600.
    # Backward: 500 x (128 gradient + 96 sorting) + 500 x 2 x (128 + 4) = 244,000.
    assert kernel_bytes(SHARD) == pytest.approx((81_600, 244_000), rel=1e-5)


def test_rows_that_repeat_are_written_once():
    hot = replace(SHARD, num_embeddings=1, access=AccessProfile.uniform(1))
    # As above, with 1 distinct row instead of 500.
    assert kernel_bytes(hot) == pytest.approx((81_600, 500 * 224 + 264))


@pytest.mark.parametrize(
    ("changes", "forward", "backward"),
    [
        ({"output": Exchange.ROWS}, 500 * 136 + 800 + 500 * 128, 244_000),
        ({"dtype": DType.FP16}, 500 * 72 + 800 + 12_800, 500 * 224 + 500 * 2 * 68),
        ({"optimizer": Optimizer.ADAM}, 81_600, 500 * 224 + 500 * 2 * (128 + 256)),
        ({"update": Update.ALL_REDUCED}, 81_600, 500 * 224 + 500 * 128),
        ({"pooling_factor": 0.0}, 800 + 12_800, 0),
    ],
)
def test_counts_bytes_of_other_kinds(changes, forward, backward):
    assert kernel_bytes(replace(SHARD, **changes)) == pytest.approx((forward, backward), rel=1e-5)


def test_prices_over_the_published_bandwidth():
    model = AnalyticCostModel.for_device("a100")
    parts = model.price_parts(model.encode([SHARD]))
    # 81,600 bytes / 1,555 GB/s = 52.5 ns, 244,000 bytes = 156.9 ns, and 10 microseconds for each launch.
    assert parts.forward_ms_S == pytest.approx([0.01 + 5.25e-5], rel=1e-3)
    assert parts.backward_ms_S == pytest.approx([0.01 + 1.569e-4], rel=1e-3)


def test_sets_share_the_launches():
    model = AnalyticCostModel.for_device("cpu")
    codes = model.encode([SHARD] * 3)
    alone_ms = model.price(codes)[0]
    launches_ms = 2 * DEVICE_MEMORY["cpu"].launch_ms
    together_ms = model.price(codes.sum(axis=0, keepdims=True))[0]
    assert together_ms == pytest.approx(launches_ms + 3 * (alone_ms - launches_ms), rel=1e-5)
    assert model.price(np.zeros((1, codes.shape[1]), dtype=np.float32)).tolist() == [0.0]


def test_is_labelled_and_its_interval_wide():
    model = AnalyticCostModel.for_device("h100")
    assert model.name == "analytic:h100"
    parts = model.price_parts(model.encode([SHARD]))
    assert (parts.low_ms_S < 0.5 * parts.kernel_ms_S).all()
    assert (parts.high_ms_S > 5 * parts.kernel_ms_S).all()


@pytest.mark.parametrize(
    ("device", "bytes_per_s"), [("v100", 900e9), ("a100", 1555e9), ("h100", 3.35e12), ("h200", 4.8e12)]
)
def test_bandwidths_are_those_of_the_datasheets(device, bytes_per_s):
    memory = DEVICE_MEMORY[device]
    assert memory.bytes_per_s == bytes_per_s
    assert "datasheet" in memory.source


def test_refuses_unknown_devices_and_memories():
    with pytest.raises(ModelError, match=r"no bandwidth is known for 'abacus': .* cpu, v100"):
        AnalyticCostModel.for_device("abacus")
    with pytest.raises(ModelError, match="prices rows in hbm only, not in ssd"):
        AnalyticCostModel.for_device("cpu").encode([replace(SHARD, level=MemoryLevel.SSD)])
