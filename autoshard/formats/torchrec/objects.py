"""Entries of TorchRec's plans as its own objects.

Entries are written through TorchRec's public constructors. They are read by the names of their attributes alone, so
that records of a file (`stored_plans`) do as well as TorchRec's objects.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from autoshard.core import DType, Payload
from autoshard.core.errors import InvalidPlanError
from autoshard.core.quoting import shown
from autoshard.formats.torchrec.sharding import Block, ComputeKernel, TableSharding, TorchRecType, refused

#: Settings of kernels, which entries of TorchRec's plans have from constraints as they are.
KERNEL_SETTINGS = ("enforce_hbm", "stochastic_rounding", "bounds_check_mode", "output_dtype")
#: Rows of a cache over those of a rank where nobody says it (`UVM_CACHING_RATIO` of TorchRec, and FBGEMM's default).
CACHE_LOAD_FACTOR = 0.2
#: Values of FBGEMM's `CacheAlgorithm`.
_CACHE_ALGORITHMS = {"lru": 0, "lfu": 1}
#: Values of TorchRec's `DataType`.
_DATA_TYPES = {DType.FP32: "FP32", DType.FP16: "FP16", DType.BF16: "BF16", DType.INT8: "INT8"}
#: What travels by the `output_dtype` of all tables: embeddings, and their gradients in the same number format.
PAYLOADS = tuple(
    payload for payload in (Payload(forward=dtype, backward=dtype) for dtype in _DATA_TYPES) if payload.can_be_summed
)


def parameter_sharding(sharding: TableSharding, *, device_type: str, node_size: int, payload: Payload) -> Any:
    """A table's `ParameterSharding`.

    Args:
        sharding: What it says.
        device_type: `cuda` or `cpu`: where shards are placed.
        node_size: Ranks of a node.
        payload: Number formats on the wire, one of `PAYLOADS`.
    """
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
    from torchrec.distributed.types import ParameterSharding

    spec = None
    if sharding.sharding_type is not TorchRecType.DATA_PARALLEL:
        spec = EnumerableShardingSpec(
            [
                ShardMetadata(
                    shard_offsets=[block.rows[0], block.columns[0]],
                    shard_sizes=[block.rows[1] - block.rows[0], block.columns[1] - block.columns[0]],
                    placement=_placement(device_type, block.rank, node_size),
                )
                for block in sharding.blocks
            ]
        )
    return ParameterSharding(
        sharding_type=sharding.sharding_type.value,
        compute_kernel=sharding.kernel.value,
        ranks=[block.rank for block in sharding.blocks],
        sharding_spec=spec,
        cache_params=cache_params(sharding),
        output_dtype=output_dtype(payload),
    )


@lru_cache(maxsize=1 << 17)
def _placement(device_type: str, rank: int, node_size: int) -> Any:
    """Where a rank's shards are; parsed once, since tables split over many ranks name each of them."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torchrec.distributed.sharding_plan import placement

    return ShardMetadata(
        shard_offsets=[0], shard_sizes=[1], placement=placement(device_type, rank, node_size)
    ).placement


def cache_params(sharding: TableSharding) -> Any:
    """A table's `CacheParams`; None without a cache."""
    if sharding.cache_load_factor is None:
        return None
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
    from torchrec.distributed.types import CacheParams
    from torchrec.modules.embedding_configs import DataType

    precision = _DATA_TYPES[DType(sharding.cache_dtype)] if sharding.cache_dtype else None
    return CacheParams(
        algorithm=CacheAlgorithm(_CACHE_ALGORITHMS[sharding.cache_policy]),
        load_factor=sharding.cache_load_factor,
        precision=DataType(precision) if precision else None,
    )


def output_dtype(payload: Payload) -> Any:
    """TorchRec's `DataType` of embeddings by which a plan's payload, one of `PAYLOADS`, travels; None for fp32."""
    from torchrec.modules.embedding_configs import DataType

    return None if payload.forward is DType.FP32 else DataType(_DATA_TYPES[payload.forward])


def table_sharding(entry: Any, num_rows: int, embedding_dim: int, *, world_size: int, field: str) -> TableSharding:
    """What a `ParameterSharding` says.

    Of caches, what is left out is TorchRec's and FBGEMM's default.

    Args:
        entry: The entry.
        num_rows: Rows of its table.
        embedding_dim: Columns of its table.
        world_size: Ranks.
        field: Place in the plan, for errors.

    Raises:
        NotInTorchRecError: If it is of a sharding type or a compute kernel that plans cannot say.
        InvalidPlanError: If its ranks and shards contradict each other.
    """
    sharding_type = _named(TorchRecType, entry.sharding_type, f"{field}.sharding_type")
    if sharding_type is TorchRecType.DATA_PARALLEL:
        whole = ((0, num_rows), (0, embedding_dim))
        blocks = tuple(Block(rank=rank, rows=whole[0], columns=whole[1]) for rank in range(world_size))
        return TableSharding(sharding_type=sharding_type, blocks=blocks, kernel=ComputeKernel.DENSE)
    kernel = _named(ComputeKernel, entry.compute_kernel, f"{field}.compute_kernel")
    load_factor, policy, precision = None, "lru", None
    if kernel is ComputeKernel.FUSED_UVM_CACHING:
        load_factor, policy, precision = _cache(entry.cache_params, f"{field}.cache_params")
    return TableSharding(
        sharding_type=sharding_type,
        blocks=_blocks(entry, world_size, field),
        kernel=kernel,
        cache_load_factor=load_factor,
        cache_policy=policy,
        cache_dtype=precision,
    )


def unsized_cache(entry: Any) -> bool:
    """Whether the kernel of a `ParameterSharding` has a cache whose load factor is left out."""
    is_cached = entry.compute_kernel == ComputeKernel.FUSED_UVM_CACHING
    return is_cached and getattr(entry.cache_params, "load_factor", None) is None


def payload_of(settings: Iterable[Any]) -> Payload | None:
    """The number format of all embeddings on the wire, by entries or constraints of their tables.

    Args:
        settings: What has an `output_dtype`; fp32 where it is left out.

    Returns:
        None if there are several, or one that is not summed on the wire.
    """
    usual = _DATA_TYPES[DType.FP32]
    given = [getattr(getattr(one, "output_dtype", None), "value", usual) for one in settings]
    return next((one for one in PAYLOADS if all(name == _DATA_TYPES[one.forward] for name in given)), None)


def _named(kinds: Any, value: object, field: str) -> Any:
    accepted = [str(kind) for kind in kinds]
    if value not in accepted:
        raise refused(f"plans are read with {', '.join(accepted)}; got {shown(value)}", field)
    return kinds(value)


def _blocks(entry: Any, world_size: int, field: str) -> tuple[Block, ...]:
    shards = getattr(entry.sharding_spec, "shards", None)
    ranks = entry.ranks
    if not shards or not ranks or len(shards) != len(ranks):
        raise InvalidPlanError("must have a rank for each of its shards", field=f"{field}.ranks")
    blocks = []
    for rank, shard in zip(ranks, shards, strict=True):
        if type(rank) is not int or not 0 <= rank < world_size:
            raise InvalidPlanError(f"must be ranks in [0, {world_size}), got {shown(rank)}", field=f"{field}.ranks")
        sizes = [*shard.shard_offsets, *shard.shard_sizes]
        if len(sizes) != 4 or any(type(size) is not int or size < 0 for size in sizes):
            raise InvalidPlanError(
                f"must have offsets and sizes of rows and columns, got {sizes[:8]}",
                field=f"{field}.sharding_spec",
            )
        row, column, num_rows, num_columns = sizes
        blocks.append(Block(rank=rank, rows=(row, row + num_rows), columns=(column, column + num_columns)))
    return tuple(blocks)


def _cache(params: Any, field: str) -> tuple[float, str, str | None]:
    """Load factor, policy and number format; those left out are the defaults."""
    load_factor = getattr(params, "load_factor", None)
    if load_factor is None:
        load_factor = CACHE_LOAD_FACTOR
    if not 0 < load_factor <= 1:
        raise refused(f"plans are read with a load factor of the cache in (0, 1]; got {shown(load_factor)}", field)
    algorithm = getattr(getattr(params, "algorithm", None), "value", _CACHE_ALGORITHMS["lru"])
    policy = next(name for name, value in _CACHE_ALGORITHMS.items() if value == algorithm)
    precision = getattr(getattr(params, "precision", None), "value", None)
    dtypes = {name: str(dtype) for dtype, name in _DATA_TYPES.items()}
    if precision is not None and precision not in dtypes:
        raise refused(f"plans are read with caches of {', '.join(dtypes)}; got {shown(precision)}", field)
    return float(load_factor), policy, dtypes[precision] if precision is not None else None
