"""Which kinds of shards a device can run, told without FBGEMM."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.core import DType, LocalShard, MemoryLevel, Optimizer, Update
from autoshard.core.declared import Role, undecided
from autoshard.core.errors import InvalidTableError
from autoshard.core.tables import KernelTraits

#: On a CPU, and of replicas, all but the last.
_GPU_OPTIMIZERS = (Optimizer.SGD, Optimizer.ROWWISE_ADAGRAD, Optimizer.ADAGRAD, Optimizer.ADAM)
_ID_BYTES, _GRADIENT_BYTES = 8, 4
#: Batches that runs take turns among where rows live behind a cache.
_CACHED_DRAWS = 8


def check_measurable(shard: LocalShard, *, on_cuda: bool) -> None:
    """Raises unless the benchmark can measure shards of this kind.

    FBGEMM (1.6 on an H200) trains no bf16 weights, and runs Adam on a GPU alone and for fp32; a CPU has no memory to
    cache either, nor has the runtime for replicas.

    Args:
        shard: The shard.
        on_cuda: Whether it would run on a GPU.

    Raises:
        InvalidTableError: If it cannot, naming the field.
    """
    fused = shard.update is Update.FUSED
    fused_on_cuda = fused and on_cuda
    accepted: dict[str, Sequence[object]] = {
        "dtype": (DType.FP32,) if shard.optimizer is Optimizer.ADAM else (DType.FP32, DType.FP16),
        "optimizer": _GPU_OPTIMIZERS if fused_on_cuda else _GPU_OPTIMIZERS[:-1],
        "level": (MemoryLevel.HBM, MemoryLevel.DDR) if fused_on_cuda else (MemoryLevel.HBM,),
    }
    for name, values in accepted.items():
        if getattr(shard, name) not in values:
            kinds = " or ".join(map(str, values))
            where = "a GPU" if on_cuda else "a CPU"
            updates = "" if fused else f" with update {shard.update}"
            raise InvalidTableError(
                f"the benchmark measures {kinds}{updates} on {where}, got {getattr(shard, name)}",
                field=f"{shard.table}.{name}",
            )
    for name in undecided(shard, (*accepted, "pooling"), Role.PRICE, of=KernelTraits):
        raise InvalidTableError(
            f"the benchmark does not measure it, got {getattr(shard, name)}", field=f"{shard.table}.{name}"
        )
    if shard.embedding_dim % 4:
        raise InvalidTableError(
            f"must be a multiple of 4, got {shard.embedding_dim}", field=f"{shard.table}.embedding_dim"
        )
    if shard.level is MemoryLevel.DDR and shard.cache_bytes <= 0:
        raise InvalidTableError(
            f"must be above 0 for rows in host memory, got {shard.cache_bytes}", field=f"{shard.table}.cache_bytes"
        )
    if shard.level is MemoryLevel.DDR and (shard.cache_policy != "lru" or shard.cache_dtype is not None):
        raise InvalidTableError(
            "the benchmark measures caches that drop least recently used rows and hold them as they are stored, got "
            f"{shard.cache_policy}, {shard.cache_dtype or shard.dtype}",
            field=f"{shard.table}.cache_policy",
        )


def is_measurable(shard: LocalShard, *, on_cuda: bool) -> bool:
    """Whether the benchmark can measure shards of this kind."""
    try:
        check_measurable(shard, on_cuda=on_cuda)
    except InvalidTableError:
        return False
    return True


def num_draws(shard: LocalShard) -> int:
    """Different batches that runs of a shard take turns among."""
    return _CACHED_DRAWS if shard.level is MemoryLevel.DDR else 1


def buffer_bytes(shards: Sequence[LocalShard]) -> int:
    """Memory of a set's ids and of the gradients that it is given, which last as long as its group."""
    return sum(
        int(
            num_draws(shard)
            * (
                _ID_BYTES * (shard.num_lookups + shard.num_bags)
                + _GRADIENT_BYTES * shard.embedding_dim * (shard.num_bags if shard.is_pooled else shard.num_lookups)
            )
        )
        for shard in shards
    )


def set_bytes(shards: Sequence[LocalShard]) -> int:
    """Memory that a set takes while it is measured: weights and optimizer state."""
    return sum(shard.memory_bytes for shard in shards)
