"""The models and the machine that stand for those of two-dimensional sparse parallelism, whose details are not told.

What the paper says is taken as it is; what it does not say is chosen, once for all of its tables, and marked so.

Shape suffixes: N tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from autoshard.core import (
    AccessProfile,
    DenseLayers,
    EmbeddingTable,
    Feature,
    Level,
    Link,
    MemoryBytes,
    TableSet,
    Topology,
)

FloatArray = NDArray[np.float64]

#: A row-wise AdaGrad moment; weights are fp32.
_STATE_BYTES, _WEIGHT_BYTES = 4, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperModel:
    """A model of the paper's scale.

    Attributes:
        name: The paper's name for it.
        total_bytes: Tables with their moments: Sec. 4, "total embedding table size".
        hbm_bytes: Memory of a rank for tables and a batch's lookups, of the 80 GB of an A100; the dense layers, their
            optimizer and activations have the rest. Chosen, ExFM's between what Table 1's 8 groups and what full model
            parallelism over 2,048 ranks needs.
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
    num_tables: int
    mean_pooling: float
    pooling_deviation: float
    dense: DenseLayers
    size_deviation: float = 0.6
    dims: tuple[int, ...] = (32, 64, 128)
    alpha: float = 1.05

    def tables(self, batch_size: int) -> TableSet:
        """Its tables: evenly spaced quantiles of the distributions, paired at random, always alike."""
        rng = np.random.default_rng(0)
        normal = NormalDist()
        quantiles_N = np.array([normal.inv_cdf((index + 0.5) / self.num_tables) for index in range(self.num_tables)])
        pooling_N = _scaled(np.exp(self.pooling_deviation * quantiles_N), self.mean_pooling * self.num_tables)
        dims_N = rng.permutation(np.resize(self.dims, self.num_tables))
        rows_N = np.exp(self.size_deviation * rng.permutation(quantiles_N))
        row_bytes_N = dims_N * _WEIGHT_BYTES + _STATE_BYTES
        rows_N = _scaled(rows_N * row_bytes_N, self.total_bytes) / row_bytes_N
        tables = tuple(
            EmbeddingTable(
                name=f"t{index}",
                num_embeddings=round(rows),
                embedding_dim=int(dim),
                features=(Feature(name=f"f{index}", pooling_factor=float(pooling)),),
                access=AccessProfile.zipf(round(rows), self.alpha),
            )
            for index, (rows, dim, pooling) in enumerate(zip(rows_N, dims_N, pooling_N, strict=True))
        )
        return TableSet(batch_size=batch_size, tables=tables, dense=self.dense)


CTR: Final = PaperModel(
    name="CTR",
    total_bytes=0.5e12,
    hbm_bytes=40_000_000_000,
    num_tables=1000,
    mean_pooling=20.0,
    pooling_deviation=1.25,
    dense=DenseLayers(num_dense_features=1000, bottom_mlp=(512, 64), top_mlp=(768, 512, 1), interaction="concat"),
)

EXFM: Final = PaperModel(
    name="ExFM",
    total_bytes=1.7e12,
    hbm_bytes=19_500_000_000,
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
        card_bytes_per_s: What a rank's port reaches of a network card of 200 Gbit/s (25 GB/s): 24 GB/s, as NVIDIA's
            engineers say (NVIDIA/nccl issue 412). Cards as in Neo, Table 2, and FlexShard, Sec. 5.
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
    latencies_s: tuple[float, float, float] = field(default=(1e-5, 2e-5, 1e-4))

    def topology(self, world_size: int, hbm_bytes: int) -> Topology:
        """So many ranks of it, with that much memory each."""
        host_port, card = self.host_speedup * self.card_bytes_per_s, self.card_bytes_per_s
        ports = (host_port, card, card * self.between_buildings)
        sizes = [self.host_ranks, min(world_size, self.building_ranks)]
        if world_size > self.building_ranks:
            sizes.append(world_size)
        levels = []
        for index, (size, inner) in enumerate(zip(sizes, (1, *sizes), strict=False)):
            # A ring over n units, each of which a host's ranks have added up among themselves.
            units = size if index == 0 else size // self.host_ranks
            shared = 1 if index == 0 else self.host_ranks
            all_reduce = ports[index] * shared / (2 * (units - 1) / units)
            latency_s = self.latencies_s[index]
            levels.append(
                Level(
                    name=("host", "building", "buildings")[index],
                    size=size,
                    all_to_all=Link(bytes_per_s=ports[index], latency_s=latency_s),
                    all_reduce=Link(bytes_per_s=all_reduce, latency_s=latency_s),
                )
            )
            assert size % inner == 0
        return Topology(
            world_size=world_size,
            device=self.device,
            memory_bytes=MemoryBytes(hbm=hbm_bytes),
            levels=tuple(levels),
        )


MACHINE: Final = PaperMachine()


def _scaled(values_N: FloatArray, total: float) -> FloatArray:
    return values_N * (total / float(values_N.sum()))
