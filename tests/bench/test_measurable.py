import pytest

from autoshard.core import DType, MemoryLevel, Optimizer, Pooling, Update
from autoshard.core.errors import InvalidTableError
from bench.kernels.measurable import buffer_bytes, check_measurable, is_measurable, num_draws, set_bytes
from tests import builders as make


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("optimizer", Optimizer.ADAM),
        ("level", MemoryLevel.DDR),
        ("level", MemoryLevel.SSD),
        ("embedding_dim", 6),
    ],
)
def test_what_a_cpu_cannot_run_is_refused_by_name(field, value):
    shard = make.held("wide", **{field: value})
    with pytest.raises(InvalidTableError, match=rf"wide\.{field}: .*{value}"):
        check_measurable(shard, on_cuda=False)
    assert not is_measurable(shard, on_cuda=False)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.INT8])
def test_what_no_device_trains_is_refused_by_name(dtype):
    for on_cuda in (False, True):
        with pytest.raises(InvalidTableError, match=rf"wide\.dtype: .* fp32 or fp16 on .*{dtype}"):
            check_measurable(make.held("wide", dtype=dtype), on_cuda=on_cuda)


@pytest.mark.parametrize(
    "kinds",
    [
        {"dtype": DType.FP16},
        {"pooling": Pooling.SEQUENCE},
        {"optimizer": Optimizer.SGD},
        {"optimizer": Optimizer.ADAGRAD},
        {"update": Update.ALL_REDUCED},
    ],
)
def test_what_every_device_can_run(kinds):
    for on_cuda in (False, True):
        assert is_measurable(make.held(**kinds), on_cuda=on_cuda)


def test_adam_of_fp32_is_what_only_a_gpu_can_run():
    assert is_measurable(make.held(optimizer=Optimizer.ADAM), on_cuda=True)
    for dtype in (DType.FP16, DType.BF16):
        assert not is_measurable(make.held(optimizer=Optimizer.ADAM, dtype=dtype), on_cuda=True)


def test_rows_behind_a_cache_need_its_size():
    with pytest.raises(InvalidTableError, match=r"t\.cache_bytes: must be above 0"):
        check_measurable(make.held(level=MemoryLevel.DDR), on_cuda=True)
    cached = make.held(level=MemoryLevel.DDR, cache_bytes=2**20)
    assert is_measurable(cached, on_cuda=True)
    with pytest.raises(InvalidTableError, match=r"t\.cache_policy: .* got lfu, fp32"):
        check_measurable(make.held(level=MemoryLevel.DDR, cache_bytes=2**20, cache_policy="lfu"), on_cuda=True)
    assert num_draws(cached) > num_draws(make.held()) == 1


@pytest.mark.parametrize("kinds", [{"dtype": DType.BF16}, {"optimizer": Optimizer.ADAM}])
def test_replicas_are_of_the_kinds_that_the_runtime_runs(kinds):
    assert not is_measurable(make.held(update=Update.ALL_REDUCED, **kinds), on_cuda=True)
    assert is_measurable(make.held(update=Update.ALL_REDUCED, dtype=DType.FP16), on_cuda=True)
    with pytest.raises(InvalidTableError, match="fp32 or fp16 with update all_reduced on a GPU, got bf16"):
        check_measurable(make.held(update=Update.ALL_REDUCED, dtype=DType.BF16), on_cuda=True)


@pytest.mark.parametrize("update", list(Update))
def test_memory_counts_optimizer_state(update):
    fused = make.held(num_embeddings=100, embedding_dim=8, update=update)
    assert set_bytes([fused]) == 100 * (32 + 4)
    assert set_bytes([fused, fused]) == 2 * set_bytes([fused])


def test_inputs_are_ids_offsets_and_gradients():
    pooled = make.held(embedding_dim=8, num_bags=16, pooling_factor=2.5)
    assert buffer_bytes([pooled]) == 8 * (40 + 16) + 4 * 8 * 16
    rows = make.held(embedding_dim=8, num_bags=16, pooling_factor=2.5, pooling=Pooling.SEQUENCE)
    assert buffer_bytes([rows]) == 8 * (40 + 16) + 4 * 8 * 40
