"""Other ways to price sets of tables, which the kernel model is compared with; none of them is ever published.

Shape suffixes: S samples, B samples of a batch, U distinct shards, N shards, F features, H width of a code, P pooled
features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from autoshard.core import Exchange, LocalShard, MemoryLevel, Pooling, Update
from autoshard.core.costs import MsArray
from autoshard.core.errors import ModelError
from autoshard.evaluation.analytic import DEVICE_MEMORY, AnalyticCostModel
from autoshard.runtime.processes.threads import intra_op_threads
from costmodel.kernel.dataset import CostDataset
from costmodel.kernel.features import FEATURE_NAMES, INPUT_NAMES, FeatureArray

_HOST_DEVICES = ("cpu",)


def torchrec_kernel_ms(dataset: CostDataset, device: str) -> MsArray:
    """Forward and backward compute that TorchRec's planner expects, added up over the shards of each set; shape (S,).

    Its inputs are those of `TorchRecPlanner`: the device's published bandwidth in place of its constants, and
    whole batches. Shards whose gradients are all-reduced are its `data_parallel` with the kernel `dense`, all others
    `table_wise`. Of access it takes no notice.

    Raises:
        ModelError: If TorchRec is not installed, or has no such model.
    """
    try:
        from torchrec.distributed.planner import constants
        from torchrec.distributed.planner.estimator import estimator, types
    except ImportError as error:
        raise ModelError(f"TorchRec's performance model needs torchrec: {error}") from error
    config = types.HardwarePerfConfig()
    memory = DEVICE_MEMORY.get(device)
    bytes_per_ms = memory.bytes_per_s / 1e3 if memory else constants.HBM_MEM_BW

    def of_shard(shard: LocalShard) -> float:
        is_dense = shard.update is Update.ALL_REDUCED
        sharding_type = "data_parallel" if is_dense else "table_wise"
        context = types.ShardPerfContext(
            **_described(shard),
            sharding_type=sharding_type,
            device_bw=constants.kernel_bw_lookup(
                compute_device="cpu" if device in _HOST_DEVICES else "cuda",
                compute_kernel=_kernel(shard, device),
                hbm_mem_bw=bytes_per_ms,
                ddr_mem_bw=bytes_per_ms if device in _HOST_DEVICES else constants.DDR_MEM_BW,
                hbm_to_ddr_mem_bw=constants.HBM_TO_DDR_MEM_BW,
            ),
            compute_kernel=_kernel(shard, device),
        )
        evaluator = estimator.get_embedding_perf_sharding_evaluator(sharding_type)
        return float(evaluator.compute_fwd_comp(context, config) + evaluator.compute_bwd_comp(context, config))

    return np.asarray(summed(dataset, lambda shards: np.array([of_shard(shard) for shard in shards])), dtype=np.float64)


def _described(shard: LocalShard) -> dict[str, Any]:
    size = float(shard.dtype.num_bytes)
    return {
        "hash_size": shard.num_embeddings,
        "emb_dim": shard.embedding_dim,
        "batch_sizes": [shard.num_bags],
        "num_poolings": [1.0],
        "input_lengths": [shard.pooling_factor],
        "table_data_type_size": size,
        "output_data_type_size": size,
        "is_pooled": shard.pooling is not Pooling.SEQUENCE and shard.output is not Exchange.ROWS,
    }


def _kernel(shard: LocalShard, device: str) -> str:
    if shard.update is Update.ALL_REDUCED:
        return "dense"
    if shard.level is MemoryLevel.HBM or device in _HOST_DEVICES:
        return "fused"
    return "fused_uvm_caching" if shard.cache_bytes else "fused_uvm"


#: Prices the samples of a dataset in milliseconds, forward plus backward, shape (S,); NaN where it cannot.
Pricing = Callable[[CostDataset], MsArray]

#: Lowest price: a nanosecond.
_LEAST_MS: Final = 1e-6
#: A shard that is in fewer samples has no weight of its own in the linear model of tables.
_FEWEST_SAMPLES: Final = 3
_RIDGE: Final = 1e-4

# AutoShard, C.1 and C.2.
_PAPER_FEATURES: Final = 21
_PAPER_CODE: Final = (_PAPER_FEATURES, 128, 32)
_PAPER_HEAD: Final = (32, 64, 1)
_PAPER_BATCH: Final = 512
_PAPER_RATE: Final = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperOptions:
    """Training of AutoShard's network."""

    loss: Literal["squared", "relative"] = "squared"
    """`squared` as in the paper; `relative` is the absolute error over the measured time."""
    bins_of: Literal["rows", "lookups"] = "rows"
    """Unit of the shares in reuse bins; the paper counts rows."""
    num_updates: int = 6000
    """The paper has rounds of 20 updates; their number is not published."""


class PaperNetwork(nn.Module):
    """AutoShard's cost model: 21-128-32 per table, sum, 32-64-1.

    Source:
        AutoShard Sec. 4.2 and C.1.
    """

    def __init__(self) -> None:
        super().__init__()
        inputs, hidden, code = _PAPER_CODE
        self.encoder = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, code))
        code, hidden, outputs = _PAPER_HEAD
        self.head = nn.Sequential(nn.Linear(code, hidden), nn.ReLU(), nn.Linear(hidden, outputs))

    def forward(self, features_UF: Tensor, shard_N: Tensor, start_S: Tensor) -> Tensor:
        """Kernel times of sets of tables, shape (S,)."""
        codes_SH = nn.functional.embedding_bag(shard_N, self.encoder(features_UF), start_S, mode="sum")
        times_S: Tensor = self.head(codes_SH)[:, 0]
        return times_S


def paper_features(shards: Sequence[LocalShard], bins_of: Literal["rows", "lookups"] = "rows") -> FeatureArray:
    """Dimension, rows, pooling factor, size in GB, and 17 reuse bins, not scaled; shape (U, 21).

    Source:
        AutoShard B.2. Differs: bins are those that the access profile expects of a batch, since plans are made before
        their batches are seen.
    """
    return np.array([_paper_features(shard, bins_of) for shard in shards])


# The reports ask for the same shards for every seed and split.
@lru_cache(maxsize=1 << 17)
def _paper_features(shard: LocalShard, bins_of: Literal["rows", "lookups"]) -> tuple[float, ...]:
    bins = shard.access.reuse_bins(shard.num_lookups, of=bins_of)
    amounts = (shard.embedding_dim, shard.num_embeddings, shard.pooling_factor, shard.weight_bytes / 1e9)
    return (*map(float, amounts), *bins.tolist())


def fit_paper_network(train: CostDataset, seed: int, options: PaperOptions | None = None) -> Pricing:
    """AutoShard's network, trained by Adam at its learning rate and batch size; its targets brought to mean 1."""
    options = options or PaperOptions()
    scale_ms = float(train.kernel_ms.mean())
    # The size is not normalised in the paper, nor are the bins, which are shares.
    used_NF = paper_features(train.shards_U, options.bins_of)[train.shard_N][:, :3]
    mean, std = used_NF.mean(axis=0), np.maximum(used_NF.std(axis=0), 1e-9)

    def scaled(dataset: CostDataset) -> NDArray[np.float32]:
        features_UF = paper_features(dataset.shards_U, options.bins_of)
        features_UF[:, :3] = (features_UF[:, :3] - mean) / std
        return features_UF.astype(np.float32)

    with intra_op_threads(1):
        network = _trained_network(train, scaled(train), (train.kernel_ms / scale_ms).astype(np.float32), options, seed)

    def price(dataset: CostDataset) -> MsArray:
        shard_N, starts_S = dataset.shards_of(np.arange(len(dataset)))
        used_U, shard_N = np.unique(shard_N, return_inverse=True)
        with torch.no_grad():
            times_S = network(
                torch.from_numpy(scaled(dataset)[used_U]), torch.from_numpy(shard_N), torch.from_numpy(starts_S)
            )
        return np.maximum(times_S.numpy().astype(np.float64) * scale_ms, _LEAST_MS)

    return price


def _trained_network(
    train: CostDataset,
    features_UF: NDArray[np.float32],
    target_S: NDArray[np.float32],
    options: PaperOptions,
    seed: int,
) -> PaperNetwork:
    rng = np.random.default_rng(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = PaperNetwork()
    optimizer = torch.optim.Adam(network.parameters(), lr=_PAPER_RATE)
    batch_size = min(_PAPER_BATCH, len(train))
    order_S = rng.permutation(len(train))
    for _ in range(options.num_updates):
        if len(order_S) < batch_size:
            order_S = rng.permutation(len(train))
        samples_B, order_S = order_S[:batch_size], order_S[batch_size:]
        shard_N, starts_B = train.shards_of(samples_B)
        used_U, shard_N = np.unique(shard_N, return_inverse=True)
        predicted_B = network(
            torch.from_numpy(features_UF[used_U]), torch.from_numpy(shard_N), torch.from_numpy(starts_B)
        )
        target_B = torch.from_numpy(target_S[samples_B])
        error_B = predicted_B - target_B
        loss = (error_B**2).mean() if options.loss == "squared" else (error_B.abs() / target_B).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network


def fit_table_weights(train: CostDataset) -> Pricing:
    """A linear model with one weight per shard and an intercept, by least squares of relative errors.

    Sets with a shard that is in fewer than three of the samples cannot be priced.
    """
    counts_U = np.bincount(train.shard_N, minlength=len(train.shards_U))
    known = {train.shards_U[index]: place for place, index in enumerate(np.flatnonzero(counts_U >= _FEWEST_SAMPLES))}
    held_SU, is_priced_S = _held(train, known)
    if not known or is_priced_S.sum() < 2:
        return lambda dataset: np.full(len(dataset), np.nan)
    weights_U = _relative_least_squares(held_SU[is_priced_S], train.kernel_ms[is_priced_S])

    def price(dataset: CostDataset) -> MsArray:
        held_SU, is_priced_S = _held(dataset, known)
        return np.where(is_priced_S, np.maximum(held_SU @ weights_U, _LEAST_MS), np.nan)

    return price


def _held(dataset: CostDataset, known: dict[LocalShard, int]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Counts of each known shard by sample, with a 1 for the intercept, and whether all shards of it are known."""
    place_U = np.array([known.get(shard, -1) for shard in dataset.shards_U])
    owner_N = np.repeat(np.arange(len(dataset)), dataset.num_shards_S)
    place_N = place_U[dataset.shard_N]
    is_known_N = place_N >= 0
    held_SU = np.zeros((len(dataset), len(known) + 1))
    held_SU[:, -1] = 1.0
    np.add.at(held_SU, (owner_N[is_known_N], place_N[is_known_N]), 1.0)
    is_priced_S = np.bincount(owner_N, weights=~is_known_N, minlength=len(dataset)) == 0
    return held_SU, is_priced_S


def pooled_features(dataset: CostDataset) -> NDArray[np.float64]:
    """Features of sets: sums over their shards, and the number of shards; shape (S, P)."""
    shard_N, starts_S = dataset.shards_of(np.arange(len(dataset)))
    sums_SF = np.add.reduceat(dataset.features_UF[shard_N], starts_S, axis=0)
    return np.concatenate([sums_SF, np.ones((len(dataset), 1))], axis=1)


def fit_pooled_linear(train: CostDataset) -> Pricing:
    """A linear model of sums of features, with an intercept, by least squares of relative errors."""
    weights_P = _relative_least_squares(pooled_features(train), train.kernel_ms)
    least_ms = float(train.kernel_ms.min())
    return lambda dataset: np.maximum(pooled_features(dataset) @ weights_P, least_ms)


def fit_boosted_trees(train: CostDataset, seed: int, num_iterations: int = 400) -> Pricing:
    """Gradient-boosted trees on sums, means and maxima of features, of the logarithm of the time.

    Raises:
        ModelError: If scikit-learn is not installed.
    """
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        raise ModelError("gradient-boosted trees need scikit-learn") from error
    trees = HistGradientBoostingRegressor(
        max_iter=num_iterations, learning_rate=0.05, early_stopping=False, random_state=seed
    )
    # On a busy machine its threads wait for each other: 320 samples took 45 s with two, 2 s with one.
    with threadpool_limits(1):
        trees.fit(_tree_features(train), np.log(train.kernel_ms))
    return lambda dataset: np.exp(trees.predict(_tree_features(dataset)))


def _tree_features(dataset: CostDataset) -> NDArray[np.float64]:
    shard_N, starts_S = dataset.shards_of(np.arange(len(dataset)))
    inputs_NF = dataset.features_UF[shard_N]
    sums_SF = np.add.reduceat(inputs_NF, starts_S, axis=0)
    means_SF = sums_SF[:, : len(INPUT_NAMES)] / dataset.num_shards_S[:, None]
    highest_SF = np.maximum.reduceat(inputs_NF, starts_S, axis=0)
    # Logarithms of sums of work, so that trees that split anywhere see ratios.
    work_SK = np.log(sums_SF[:, len(INPUT_NAMES) : len(FEATURE_NAMES)] + 1e-9)
    return np.concatenate([sums_SF, means_SF, highest_SF, work_SK], axis=1)


def fit_analytic(device: str) -> Pricing:
    """This project's model from published bandwidths; nothing is fitted."""
    model = AnalyticCostModel.for_device(device)
    return lambda dataset: np.maximum(model.predict_ms(summed(dataset, model.encode)), _LEAST_MS)


def summed(
    dataset: CostDataset, values_of: Callable[[Sequence[LocalShard]], NDArray[np.floating]]
) -> NDArray[np.floating]:
    """Sums over the shards of each sample of the values that `values_of` gives to shards; shape (S, ...)."""
    shard_N, starts_S = dataset.shards_of(np.arange(len(dataset)))
    used_U, place_N = np.unique(shard_N, return_inverse=True)
    values_U = values_of([dataset.shards_U[index] for index in used_U])
    return np.add.reduceat(values_U[place_N], starts_S, axis=0)


def fit_factor(pricing: Pricing, train: CostDataset) -> Pricing:
    """Another model's prices times the one factor that has the smallest mean relative error."""
    factor = smallest_error_factor(pricing(train), train.kernel_ms)
    return lambda dataset: pricing(dataset) * factor


def smallest_error_factor(predicted_ms_S: MsArray, measured_ms_S: MsArray) -> float:
    """The factor f with the smallest mean of |f * predicted - measured| / measured: a weighted median of ratios."""
    ratio_S, weight_S = measured_ms_S / predicted_ms_S, predicted_ms_S / measured_ms_S
    order_S = np.argsort(ratio_S)
    middle = np.searchsorted(np.cumsum(weight_S[order_S]), weight_S.sum() / 2)
    return float(ratio_S[order_S[min(middle, len(order_S) - 1)]])


def _relative_least_squares(values_SP: NDArray[np.float64], kernel_ms_S: MsArray) -> NDArray[np.float64]:
    """Weights P of the least squared relative errors, with a ridge where the samples leave them open."""
    relative_SP = values_SP / kernel_ms_S[:, None]
    scale_P = np.sqrt((relative_SP**2).mean(axis=0))
    scale_P[scale_P == 0] = 1.0
    relative_SP = relative_SP / scale_P
    ridge_PP = _RIDGE * len(relative_SP) * np.eye(relative_SP.shape[1])
    fitted_P: NDArray[np.float64] = np.linalg.solve(relative_SP.T @ relative_SP + ridge_PP, relative_SP.sum(axis=0))
    return fitted_P / scale_P
