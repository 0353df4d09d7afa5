"""Time that one shard adds to the fused kernels of its rank, from published speeds."""

from __future__ import annotations

from autoshard.core import Exchange, LocalShard, Update
from autoshard.evaluation.cached_rows import LFU, CacheTraffic, TransferSpeeds, transfer_seconds
from autoshard.evaluation.device_memory import DeviceMemory

ID_BYTES = 8
GRADIENT_BYTES = 4
#: A radix sort of 64-bit ids in four passes reads and writes each id with its position.
SORT_BYTES_PER_ID = 4 * 2 * (8 + 4)


def kernel_seconds(shard: LocalShard, memory: DeviceMemory) -> tuple[float, float]:
    """Seconds that a shard adds to its rank's forward and backward kernels, launches left out.

    Forward reads ids, offsets and the rows: from the memory where they are not in the device's cache, which starts
    empty, and writes the output. Backward reads the gradient, groups the lookups by row, and reads and writes each
    distinct row with its optimizer state; where an all-reduce comes before the update, it writes the gradient of
    every row instead; of placed shards, what `LocalShard.written_rows` counts. Rows behind a cache in the device's
    memory are fetched before, and written back after (`transfer_seconds`).

    Args:
        shard: Of any kind.
        memory: The device's.

    Source:
        Roofline of a memory-bound kernel, as Neo Appendix B and TorchRec's planner have it. Differs: rows that repeat
        come from the cache, the backward pass is counted instead of taken as twice the forward pass, and on CPUs the
        waits for single accesses are added.
    """
    num_distinct = shard.access.expected_distinct(shard.num_lookups)
    fetch_s, store_s = transfer_seconds(shard, TransferSpeeds.of_device(memory))
    forward_s = _lookup_seconds(shard, memory, num_distinct)
    backward_s = _gradient_seconds(shard, memory) + _update_seconds(shard, memory, num_distinct)
    return forward_s + fetch_s, backward_s + store_s


def _lookup_seconds(shard: LocalShard, memory: DeviceMemory, num_distinct: float) -> float:
    row_bytes = _whole_accesses(shard.embedding_dim * shard.dtype.num_bytes, memory)
    from_memory = _first_reads(shard, memory.cache_bytes // row_bytes, num_distinct)
    from_cache = max(shard.num_lookups - from_memory, 0.0)
    return (
        shard.num_lookups * memory.lookup_s
        + (shard.num_lookups + shard.num_bags) * ID_BYTES / memory.bytes_per_s
        + from_memory * row_bytes / memory.gather_bytes_per_s
        + from_cache * row_bytes / memory.cache_bytes_per_s
        + _output_bytes(shard) / _output_bytes_per_s(memory)
    )


def _first_reads(shard: LocalShard, num_cached_rows: int, num_distinct: float) -> float:
    """Rows read from memory where a batch's own rows are all that the cache holds: it starts empty."""
    if num_cached_rows >= num_distinct:
        return num_distinct
    found = CacheTraffic.of(shard.access, num_lookups=shard.num_lookups, num_cached_rows=num_cached_rows, policy=LFU)
    hot_distinct = max(num_distinct - found.num_missed, 0.0)
    return hot_distinct + shard.num_lookups * (1 - found.hit_rate)


def _gradient_seconds(shard: LocalShard, memory: DeviceMemory) -> float:
    """Reading the gradient of the output, once from memory and then from the cache, and grouping lookups by row."""
    repeats = max(shard.num_lookups - _num_outputs(shard), 0.0)
    gradient_bytes = shard.embedding_dim * GRADIENT_BYTES
    sort_s = memory.sort_s or SORT_BYTES_PER_ID / memory.gather_bytes_per_s
    return (
        _output_bytes(shard) / _output_bytes_per_s(memory)
        + repeats * gradient_bytes / memory.cache_bytes_per_s
        + shard.num_lookups * sort_s
        + _num_outputs(shard) * memory.bag_s
    )


def _update_seconds(shard: LocalShard, memory: DeviceMemory, num_distinct: float) -> float:
    if shard.update is Update.ALL_REDUCED:
        return shard.num_gradient_rows * shard.embedding_dim * GRADIENT_BYTES / _output_bytes_per_s(memory)
    row_bytes = _whole_accesses(shard.embedding_dim * shard.dtype.num_bytes, memory)
    row_s = memory.update_s + 2 * row_bytes / memory.gather_bytes_per_s
    state_bytes = shard.optimizer.state_bytes_per_row(shard.embedding_dim)
    if state_bytes:
        row_s += memory.state_s + 2 * _whole_accesses(state_bytes, memory) / memory.gather_bytes_per_s
    return num_distinct * row_s


def _num_outputs(shard: LocalShard) -> float:
    return shard.num_lookups if shard.output is Exchange.ROWS else float(shard.num_bags)


def _output_bytes(shard: LocalShard) -> float:
    return _num_outputs(shard) * shard.embedding_dim * GRADIENT_BYTES


def _output_bytes_per_s(memory: DeviceMemory) -> float:
    return memory.output_bytes_per_s or memory.gather_bytes_per_s


def _whole_accesses(num_bytes: int, memory: DeviceMemory) -> int:
    return -(-num_bytes // memory.access_bytes) * memory.access_bytes
