"""Models and a machine in place of those of two-dimensional sparse parallelism, whose details are not published.

Published figures are used as they are; all others are chosen, once for all of the paper's tables, and marked so.

Shape suffixes: N tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from autoshard.core import (
    AccessProfile,
    DenseLayers,
    EmbeddingTable,
    Feature,
    ImpliedOrder,
    Level,
    Link,
    MemoryBytes,
    TableSet,
    Topology,
)
from studies.papers.drawn import normal_quantiles, scaled_to

_LEVELS = ("host", "building", "buildings")
#: Numbers of rows that tables have; those of one size have one access curve.
_NUM_SIZES = 100
#: A row-wise AdaGrad moment; weights are fp32.
_STATE_BYTES, _WEIGHT_BYTES = 4, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperModel:
    """A model of the paper's scale.

    Attributes:
        name: The paper's name for it.
        total_bytes: Tables with their moments: Sec. 4, "total embedding table size".
        hbm_bytes: Memory of a rank in which the planner has to place tables and a batch's inputs and outputs. Chosen,
            ExFM's between what Table 1's 8 groups and what full model parallelism over 2,048 ranks needs.
        other_bytes: Memory of a rank that has nothing to do with tables: dense layers, their optimizer and activations,
            the framework. Chosen so that the largest errors of Table 1's peaks above and below are as large.
        num_tables: ExFM: "more than 4000" (Sec. 2.2); CTR: chosen.
        mean_pooling: Lookups per sample and table in the mean. Chosen.
        pooling_deviation: Standard deviation of their logarithms, which are normal. Chosen for the imbalance ratio of
            full model parallelism in Table 1.
        dense: Chosen: as many parameters as make the dense layers' time that of Table 1's steps, about.
        size_deviation: Standard deviation of the logarithms of the tables' rows. Chosen.
        dims: Embedding dims, as many tables of each. Chosen.
        alpha: Zipf exponent of the accesses. Chosen.
    """

    name: str
    total_bytes: float
    hbm_bytes: int
    other_bytes: float
    num_tables: int
    mean_pooling: float
    pooling_deviation: float
    dense: DenseLayers
    size_deviation: float = 0.6
    dims: tuple[int, ...] = (32, 64, 128)
    alpha: float = 1.05

    def tables(self, batch_size: int) -> TableSet:
        """Its tables, always alike, with that many samples per step."""
        return TableSet(batch_size=batch_size, tables=_drawn_tables(self), dense=self.dense)


@lru_cache(maxsize=2)
def _drawn_tables(model: PaperModel) -> tuple[EmbeddingTable, ...]:
    """Evenly spaced quantiles of the distributions, paired at random."""
    rng, count = np.random.default_rng(0), model.num_tables
    pooling_N = np.exp(model.pooling_deviation * normal_quantiles(count))
    pooling_N = scaled_to(pooling_N, model.mean_pooling * count)
    dims_N = rng.permutation(np.resize(model.dims, count))
    sizes_N = np.exp(model.size_deviation * np.resize(normal_quantiles(_NUM_SIZES), count))
    row_bytes_N = dims_N * _WEIGHT_BYTES + _STATE_BYTES
    rows_N = scaled_to(rng.permutation(sizes_N) * row_bytes_N, model.total_bytes) / row_bytes_N
    curve_of = {rows: AccessProfile.zipf(rows, model.alpha) for rows in sorted({round(rows) for rows in rows_N})}
    return tuple(
        EmbeddingTable(
            row_order=ImpliedOrder.BY_ID,
            name=f"t{index}",
            num_embeddings=round(rows),
            embedding_dim=int(dim),
            features=(Feature(name=f"f{index}", pooling_factor=float(pooling)),),
            access=curve_of[round(rows)],
        )
        for index, (rows, dim, pooling) in enumerate(zip(rows_N, dims_N, pooling_N, strict=True))
    )


CTR: Final = PaperModel(
    name="CTR",
    total_bytes=0.5e12,
    hbm_bytes=40_000_000_000,
    other_bytes=27.2e9,
    num_tables=1000,
    mean_pooling=20.0,
    pooling_deviation=1.25,
    dense=DenseLayers(num_dense_features=1000, bottom_mlp=(512, 64), top_mlp=(768, 512, 1), interaction="concat"),
)

EXFM: Final = PaperModel(
    name="ExFM",
    total_bytes=1.7e12,
    hbm_bytes=44_000_000_000,
    other_bytes=39.4e9,
    num_tables=4000,
    mean_pooling=60.0,
    pooling_deviation=0.85,
    dense=DenseLayers(
        num_dense_features=1000, bottom_mlp=(512, 64), top_mlp=(8192, 8192, 4096, 1), interaction="concat"
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperMachine:
    """A cluster of A100 in three nested levels: hosts, buildings, and all buildings.

    Attributes:
        device: Prices kernels and dense layers by published bandwidths. The paper does not name its GPU.
        card_bytes_per_s: Bandwidth that a rank's port reaches of a network card of 200 Gbit/s (25 GB/s): 24 GB/s, by
            NVIDIA's engineers (NVIDIA/nccl issue 412). Cards as in Neo, Table 2, and FlexShard, Sec. 5.
        host_speedup: Intra-host communication is "7x" faster (Sec. 5).
        building_ranks: Ranks of a building. At 4,096 "cross-building communication is triggered" (Sec. 4.3), at 2,048
            it is not.
        between_buildings: Share of a port's bandwidth that is left between buildings. Chosen.
        latencies_s: By level. Chosen.
    """

    device: str = "a100"
    card_bytes_per_s: float = 24e9
    host_speedup: float = 7.0
    host_ranks: int = 8
    building_ranks: int = 2048
    between_buildings: float = 0.5
    latencies_s: tuple[float, float, float] = (1e-5, 2e-5, 1e-4)

    def topology(self, world_size: int, hbm_bytes: int) -> Topology:
        """So many ranks of it, with that much memory each."""
        host_port, card = self.host_speedup * self.card_bytes_per_s, self.card_bytes_per_s
        ports = (host_port, card, card * self.between_buildings)
        sizes = [self.host_ranks, min(world_size, self.building_ranks)]
        if world_size > self.building_ranks:
            sizes.append(world_size)
        levels = []
        for name, size, port, latency_s in zip(_LEVELS, sizes, ports, self.latencies_s, strict=False):
            # A ring over hosts, whose ranks have added up among themselves; over ranks within one.
            shared = 1 if size == self.host_ranks else self.host_ranks
            passing = 2 * (size // shared - 1) / (size // shared)
            levels.append(
                Level(
                    name=name,
                    size=size,
                    all_to_all=Link(bytes_per_s=port, latency_s=latency_s),
                    all_reduce=Link(bytes_per_s=port * shared / passing, latency_s=latency_s),
                )
            )
        return Topology(
            world_size=world_size,
            device=self.device,
            memory_bytes=MemoryBytes(hbm=hbm_bytes),
            levels=tuple(levels),
        )


MACHINE: Final = PaperMachine()
