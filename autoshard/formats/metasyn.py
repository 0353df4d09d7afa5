"""A synthetic pool of 856 tables with the published statistics of AutoShard's MetaSyn.

The dataset itself is gigabytes of ids; what is published about it in small is enough to plan by: Table 1 and
Figure 13 of the paper, and the reuse histogram that comes with the dataset.

Shape suffixes: T tables, C reuse classes (the 17 bins).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from autoshard.core import (
    NUM_REUSE_BINS,
    REUSE_BIN_MIDDLES,
    AccessProfile,
    EmbeddingTable,
    Feature,
    ImpliedOrder,
    TableSet,
)
from autoshard.core.access import FloatArray, IntArray

NUM_TABLES = 856
BATCH_SIZE = 65_536
MAX_ROWS = 12_543_670
MEAN_ROWS = 4_107_458
MAX_POOLING_FACTOR = 193.0
#: Lookups of one batch: a mean pooling factor of 15.81, which the paper cuts to 15.
NUM_LOOKUPS = 887_017_990
#: Share of these lookups that goes to rows of each reuse bin.
LOOKUP_SHARES = (
    *(0.069, 0.044, 0.068, 0.101, 0.121, 0.104, 0.073, 0.058, 0.052),
    *(0.050, 0.049, 0.048, 0.048, 0.043, 0.031, 0.023, 0.019),
)
EMBEDDING_DIMS = (16, 32)

#: How differently skewed tables are: standard deviation of a table's tilt, in nats per doubling of reuse.
TILT_DEVIATION = 0.35


def metasyn(seed: int = 0) -> TableSet:
    """Generates the pool.

    - Rows are `max * u ** p` with u uniform and p set by bisection so that the mean is the published one: seven of
      ten tables have millions of rows, one in ten more than ten million; one table has a single row.
    - Pooling factors are drawn from a power law with exponent 2, cut off at the published maximum and shifted so
      that the mean is the measured one; nine of ten are below 50, one is 0. They do not depend on the rows.
    - Every table has its own access profile, made of AutoShard's 17 reuse bins: the pool's shares, tilted towards
      rare or frequent rows by a normally distributed exponent. Iterative proportional fitting then scales tables
      and bins in turn, so that each table keeps its lookups and the pool keeps the measured share of every bin.
    - Dimensions are drawn from {16, 32}, as the paper does; the dataset has none.

    Weights are fp32 where the paper has fp16, since FBGEMM's backward pass on a CPU is about four times slower with
    fp16 weights and less exact.

    Args:
        seed: Same seed, same pool.

    Source:
        AutoShard Table 1, Sec. 5.1, A.2 and Fig. 13; reuse histogram of 2021/fbgemm_t856_bs65536.pt in
        facebookresearch/dlrm_datasets (MIT).
    """
    rng = np.random.default_rng(seed)
    rows_T = _draw_rows(rng)
    lookups_T = _draw_lookups(rng)
    shares_TC = _draw_reuse(rows_T, lookups_T, rng)
    dims_T = rng.choice(EMBEDDING_DIMS, size=NUM_TABLES)
    tables = []
    for index in range(NUM_TABLES):
        name, num_rows, num_lookups = f"{index:03d}", int(rows_T[index]), int(lookups_T[index])
        if num_lookups:
            access = AccessProfile.from_reuse_bins(
                num_rows, shares_TC[index].tolist(), of="lookups", num_lookups=num_lookups
            )
        else:
            access = AccessProfile.uniform(num_rows)
        tables.append(
            EmbeddingTable(
                name=f"t{name}",
                num_embeddings=num_rows,
                embedding_dim=int(dims_T[index]),
                features=(Feature(name=f"f{name}", pooling_factor=num_lookups / BATCH_SIZE),),
                access=access,
                row_order=ImpliedOrder.BY_ID,
            )
        )
    return TableSet(batch_size=BATCH_SIZE, tables=tuple(tables))


def _draw_rows(rng: np.random.Generator) -> IntArray:
    """Rows of the tables, shape (T,)."""
    uniform_T = _spread_uniform(rng)
    power = _bisect(lambda p: -float(np.mean(MAX_ROWS * uniform_T**p)), -MEAN_ROWS, 0.1, 100.0)
    return np.maximum(np.rint(MAX_ROWS * uniform_T**power), 1).astype(np.int64)


def _draw_lookups(rng: np.random.Generator) -> IntArray:
    """Lookups of one batch, shape (T,)."""
    uniform_T = _spread_uniform(rng)

    def quantiles(shift: float) -> FloatArray:
        """Of the density that is proportional to (f + shift) ** -2 on [0, maximum]."""
        return np.asarray(shift / (1 - uniform_T * (1 - shift / (MAX_POOLING_FACTOR + shift))) - shift)

    mean = NUM_LOOKUPS / BATCH_SIZE / NUM_TABLES
    shift = _bisect(lambda s: float(quantiles(s).mean()), mean, 1e-3, 1e3)
    return np.rint(quantiles(shift) * BATCH_SIZE).astype(np.int64)


def _draw_reuse(rows_T: IntArray, lookups_T: IntArray, rng: np.random.Generator) -> FloatArray:
    """Lookups by table and reuse class, shape (T, C); rows sum to a table's lookups, columns to the pool's."""
    reuse_C = np.array(REUSE_BIN_MIDDLES)
    tilt_T = rng.normal(0.0, TILT_DEVIATION, NUM_TABLES)
    lookups_TC = np.exp(np.outer(tilt_T, np.arange(NUM_REUSE_BINS))) * _class_shares()
    # A row of a small table is looked up at least as often as the table's mean row: no rarer class has room.
    fits_TC = reuse_C >= (lookups_T / rows_T)[:, None]
    fits_TC[:, -1] = True
    lookups_TC *= fits_TC & (lookups_T > 0)[:, None]
    wanted_C = lookups_T.sum() * _class_shares()
    for _ in range(200):
        lookups_TC *= wanted_C / lookups_TC.sum(axis=0)
        lookups_TC *= (lookups_T / np.maximum(lookups_TC.sum(axis=1), 1e-300))[:, None]
    return np.asarray(lookups_TC)


def _class_shares() -> FloatArray:
    """Shares of rate classes, shape (C,), that are seen as `LOOKUP_SHARES` in a batch.

    A row with a mean of 3 lookups is seen 0 to 8 times in one batch, so the classes are the measured bins with this
    (Poisson) blur undone, by Richardson's and Lucy's iteration. Rows seen once are mostly far below one lookup.
    """
    seen_C = np.array(LOOKUP_SHARES) / sum(LOOKUP_SHARES)
    alike = AccessProfile.uniform(1)
    blur_CC = np.stack([alike.reuse_bins(reuse, of="lookups") for reuse in REUSE_BIN_MIDDLES])
    blur_CC[0] = np.eye(NUM_REUSE_BINS)[0]
    shares_C = seen_C.copy()
    for _ in range(100):
        shares_C *= blur_CC @ (seen_C / (shares_C @ blur_CC))
    return np.asarray(shares_C / shares_C.sum())


def _spread_uniform(rng: np.random.Generator) -> FloatArray:
    """Uniform draws, shape (T,), of which one is 0 and one is 1, in random order."""
    uniform_T = rng.random(NUM_TABLES)
    uniform_T[:2] = 0.0, 1.0
    return rng.permutation(uniform_T)


def _bisect(rising: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return low
