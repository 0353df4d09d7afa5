import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autoshard.core import DType
from autoshard.core.errors import DeviceError
from bench.kernels.harness import Settings, reference_set
from bench.kernels.measurable import set_bytes
from bench.measuring.arena import Arena, Arenas, free_bytes
from bench.measuring.caches import FALLBACK_CPU_BYTES, CacheFlush, device_cache_bytes, last_level_cache_bytes
from bench.measuring.devices import BenchDevice

CPU = torch.device("cpu")


def write_cache(folder, index, level, size):
    cache = folder / f"index{index}"
    cache.mkdir()
    (cache / "level").write_text(f"{level}\n")
    (cache / "size").write_text(f"{size}\n")


def test_the_last_level_counts_not_the_last_entry(tmp_path):
    for index, (level, size) in enumerate([(1, "48K"), (3, "480M"), (2, "2048K")]):
        write_cache(tmp_path, index, level, size)
    assert last_level_cache_bytes(tmp_path) == 480 * 2**20


@pytest.mark.parametrize("size", [None, "much", ""])
def test_a_machine_that_does_not_tell_gets_a_fallback(size, tmp_path):
    if size is not None:
        write_cache(tmp_path, 0, 3, size)
    assert last_level_cache_bytes(tmp_path) == FALLBACK_CPU_BYTES


def test_a_flush_touches_more_than_the_cache():
    flush = CacheFlush(CPU, cache_bytes=1000)
    assert flush.num_bytes > 1000
    flush()
    assert (flush.buffer == 1).all()  # every byte was read and written


def test_a_flush_is_on_its_device_and_larger_than_its_last_cache(any_device):
    device = torch.device(any_device)
    flush = CacheFlush(device)
    flush()
    assert flush.device.type == device.type
    assert flush.num_bytes > device_cache_bytes(device) > 0


def test_the_cache_of_a_processor_is_its_last_level():
    assert device_cache_bytes(CPU) == last_level_cache_bytes()


def test_pieces_do_not_overlap_until_taken_back():
    arena = Arena(100, CPU)
    first, second = arena.take(10), arena.take(20)
    first.fill_(1.0)
    second.fill_(2.0)
    assert (first == 1).all()
    assert second.data_ptr() % 64 == first.data_ptr() % 64
    arena.clear()
    assert arena.take(10).data_ptr() == first.data_ptr()


def test_memory_is_filled_before_it_is_first_dealt_out():
    arena = Arena(1000, CPU)
    assert (arena.take(1000) != 0).all()


def test_number_formats_do_not_share_memory():
    arenas = Arenas(400, CPU)
    whole, half, moments = arenas.weights(10, DType.FP32), arenas.weights(10, DType.FP16), arenas.moments(10)
    assert (whole.dtype, half.dtype, moments.dtype) == (torch.float32, torch.float16, torch.float32)
    assert len({piece.data_ptr() for piece in (whole, half, moments)}) == 3
    arenas.clear()
    assert arenas.weights(10, DType.FP16).data_ptr() == half.data_ptr()


def test_an_arena_says_what_does_not_fit():
    arena = Arena(100, CPU)
    arena.take(60)
    with pytest.raises(DeviceError, match="456 bytes of weights do not fit in the 400"):
        arena.take(50)


def test_memory_that_the_system_does_not_grant_is_an_error():
    with pytest.raises(DeviceError, match="bytes of memory cannot be reserved"):
        Arena(2**57, CPU)


def test_a_rank_of_60_gb_fits_on_a_gpu_of_80_beside_its_reference(monkeypatch):
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70 * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 9 * 10**9)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 10**9)
    settings = Settings.for_device(BenchDevice(device=cuda, key="h100", name="NVIDIA H100"))
    reference = settings.num_references * set_bytes(reference_set(settings.reference_bags))
    assert reference < 1.1e9
    assert free_bytes(cuda) - reference > 60e9


def test_a_gpus_flush_reads_four_caches_and_leaves_nothing_to_write_back():
    with FakeTensorMode():
        flush = CacheFlush(torch.device("cuda", 0), cache_bytes=100 * 2**20)
        assert flush.num_bytes == 400 * 2**20
        written = flush.buffer._version
        flush()
        assert flush.buffer._version == written
        assert CacheFlush(torch.device("cuda", 0), cache_bytes=50 * 2**20).num_bytes == 256 * 2**20


def test_some_memory_is_free_here():
    assert free_bytes(CPU) > 0
