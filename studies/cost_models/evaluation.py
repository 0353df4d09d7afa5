"""Trains the kernel model and its rivals on parts of the samples, and prices the rest with each.

Some are without a group of their features, as in AutoShard's Table 2.

Shape suffixes: S samples of a store, T samples that are priced, N shards of all samples, U distinct shards, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Final

import numpy as np

from autoshard.core import AccessProfile, DType, Exchange, MemoryLevel, Optimizer, Pooling, Update
from autoshard.core.costs import MsArray
from autoshard.core.errors import ExecutionError, InvalidOptionError, ModelError
from autoshard.formats.stores.samples import SampleTable
from costmodel.kernel.dataset import CostDataset, IndexArray
from costmodel.kernel.features import FEATURE_NAMES, NUM_INPUTS
from costmodel.kernel.metrics import PricedSamples
from costmodel.kernel.predictor import CostPredictor
from costmodel.kernel.training import MIN_SAMPLES, CostTrainingOptions, train_cost_model
from studies.cost_models import baselines
from studies.cost_models.baselines import PaperOptions, Pricing, torchrec_kernel_ms
from studies.cost_models.evidence import Evidence, Split, SplitKind

#: The model as it is, beside those that lack something.
FULL: Final = "nothing"

Removal = Callable[[CostDataset], CostDataset]


def _without_dimension(dataset: CostDataset) -> CostDataset:
    dim = _middle(dataset, "embedding_dim")
    return dataset.with_features_of(replace(shard, embedding_dim=dim) for shard in dataset.shards_U)


def _without_rows(dataset: CostDataset) -> CostDataset:
    """The access profile stays: how often rows are hit is the features of the distribution."""
    rows = _middle(dataset, "num_embeddings")
    return dataset.with_features_of(replace(shard, num_embeddings=rows) for shard in dataset.shards_U)


def _without_pooling_factor(dataset: CostDataset) -> CostDataset:
    pooling_factor = float(np.median([shard.pooling_factor for shard in dataset.shards_U]))
    return dataset.with_features_of(replace(shard, pooling_factor=pooling_factor) for shard in dataset.shards_U)


def _without_size(dataset: CostDataset) -> CostDataset:
    return _constant(dataset, [FEATURE_NAMES.index("log_weight_mib")])


def _without_distribution(dataset: CostDataset) -> CostDataset:
    return dataset.with_features_of(
        replace(shard, access=AccessProfile.uniform(shard.num_embeddings)) for shard in dataset.shards_U
    )


def _without_batch(dataset: CostDataset) -> CostDataset:
    bags = _middle(dataset, "num_bags")
    return dataset.with_features_of(replace(shard, num_bags=bags) for shard in dataset.shards_U)


def _without_kinds(dataset: CostDataset) -> CostDataset:
    return dataset.with_features_of(
        replace(
            shard,
            dtype=DType.FP32,
            pooling=Pooling.SUM,
            optimizer=Optimizer.ROWWISE_ADAGRAD,
            output=Exchange.PARTIAL_SUMS,
            update=Update.FUSED,
            level=MemoryLevel.HBM,
            cache_bytes=0,
        )
        for shard in dataset.shards_U
    )


def _without_work(dataset: CostDataset) -> CostDataset:
    """Leaves a network that predicts times from properties of shards, as AutoShard's does."""
    return _constant(dataset, range(NUM_INPUTS, len(FEATURE_NAMES)))


#: Removed groups of features, by their names in reports; the first five are AutoShard's. All that follows from a
#: removed feature goes with it: without the pooling factor, lookups and distinct rows are those of a middling one.
REMOVALS: Final[Mapping[str, Removal]] = {
    "dimension": _without_dimension,
    "rows (hash size)": _without_rows,
    "pooling factor": _without_pooling_factor,
    "table size": _without_size,
    "access distribution": _without_distribution,
    "batch size": _without_batch,
    "kinds of kernels": _without_kinds,
    "work": _without_work,
}


def without(dataset: CostDataset, removed: str) -> CostDataset:
    """The dataset with a group of features alike for all shards; FULL for none of them."""
    return dataset if removed == FULL else REMOVALS[removed](dataset)


def _middle(dataset: CostDataset, name: str) -> int:
    return round(float(np.median([getattr(shard, name) for shard in dataset.shards_U])))


def _constant(dataset: CostDataset, columns: range | list[int]) -> CostDataset:
    features_UF = dataset.features_UF.copy()
    # 1, so that prices per unit of work are times.
    features_UF[:, columns] = 1.0
    return replace(dataset, features_UF=features_UF)


KERNEL: Final = "kernel_model"
#: Compared methods, in the order of the tables.
METHODS: Final[Mapping[str, str]] = {
    KERNEL: "kernel model",
    "autoshard": "AutoShard's network, squared error",
    "autoshard_lookups": "AutoShard's network, squared error, bins of lookups",
    "autoshard_best": "AutoShard's network, relative error, bins of lookups",
    "singles": "sum of single tables",
    "singles_scaled": "sum of single tables, one factor",
    "table_weights": "linear, one weight per table",
    "pooled_linear": "linear, pooled features",
    "boosted_trees": "gradient-boosted trees, pooled features",
    "torchrec": "TorchRec's performance model, one factor",
    "analytic": "analytic model",
    "analytic_scaled": "analytic model, one factor",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions:
    """Amounts of training. The defaults take some minutes for a few thousand samples on two free cores."""

    training: CostTrainingOptions = field(default_factory=CostTrainingOptions)
    """Of the kernel model."""
    paper_updates: int = 6000
    """Updates of AutoShard's network."""
    tree_iterations: int = 400
    """Trees that are boosted."""
    num_seeds: int = 3
    """Splits of each kind."""
    ablation_seeds: int = 2
    """Trainings without each group of features; 0 for none."""
    ablation_updates: int = 3000
    """Updates of each of these, and of the full model that they are compared with."""
    unseen_share: float = 0.1
    """Share of tables that mixed splits keep from training."""
    num_workers: int = 2
    """Processes; 1 for this one."""

    def __post_init__(self) -> None:
        for name in ("paper_updates", "tree_iterations", "num_seeds", "ablation_updates", "num_workers"):
            if getattr(self, name) < 1:
                raise InvalidOptionError(f"must be at least 1, got {getattr(self, name)}", field=name)
        if self.ablation_seeds < 0:
            raise InvalidOptionError(f"must be at least 0, got {self.ablation_seeds}", field="ablation_seeds")
        if not 0 < self.unseen_share < 1:
            raise InvalidOptionError(f"must be in (0, 1), got {self.unseen_share}", field="unseen_share")

    @classmethod
    def quick(cls, training: CostTrainingOptions | None = None) -> EvaluationOptions:
        """One seed, a tenth of the updates: for a first look."""
        base = training or CostTrainingOptions()
        updates = max(1, base.num_updates // 10)
        return cls(
            training=replace(base, num_updates=updates),
            paper_updates=updates,
            tree_iterations=100,
            num_seeds=1,
            ablation_seeds=1,
            ablation_updates=updates,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Priced:
    """Prices of some samples by one method.

    Attributes:
        samples_T: Which samples.
        ms_T: NaN where the method has no price.
        spread_T: The kernel model's spreads, to which its intervals are in proportion; None for others.
    """

    samples_T: IndexArray
    ms_T: MsArray
    spread_T: MsArray | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitResult:
    """Prices of all methods on one split.

    Attributes:
        num_trained: Samples that they learned from.
        held_out: Prices of sets of seen tables, by method; none of them was trained on.
        unseen: Prices of sets with unseen tables, by method; empty for random splits.
        missing: Methods that could not be tried, with the reason.
        interval: Ends of the kernel model's 90% interval, in spreads.
        stated_coverage: Share of its own held-out samples within, by the model's card.
    """

    kind: SplitKind
    seed: int
    num_trained: int
    held_out: Mapping[str, Priced]
    unseen: Mapping[str, Priced]
    missing: Mapping[str, str]
    interval: tuple[float, float]
    stated_coverage: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationResult:
    """Mean relative error on held-out sets of the kernel model without some features."""

    removed: str
    seed: int
    relative_error: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """All that was found about the samples of one device.

    Attributes:
        skipped: Kinds of splits that the samples were too few for, with what was there.
    """

    device: str
    evidence: Evidence
    options: EvaluationOptions
    splits: tuple[SplitResult, ...]
    ablation: tuple[AblationResult, ...]
    skipped: Mapping[SplitKind, str]


def evaluate_methods(
    table: SampleTable, options: EvaluationOptions | None = None, advance: Callable[[float], None] = lambda _: None
) -> Evaluation:
    """Compares all methods on the samples of one device.

    Args:
        table: The samples.
        options: How much to train.
        advance: Receives the share of the work after each part of it.

    Raises:
        SampleStoreError: If there are fewer samples than training needs.
        ExecutionError: If a process that trains was killed.
    """
    options = options or EvaluationOptions()
    evidence = Evidence.of(table)
    device = table.samples[0].device
    splits, skipped = _splits(evidence.dataset, options)
    removals = [FULL, *REMOVALS] if options.ablation_seeds else []
    ablations = [(removed, seed) for removed in removals for seed in range(options.ablation_seeds)]
    tasks: list[_Task] = [*splits, *ablations]
    found: dict[int, SplitResult | AblationResult] = {}
    for index, result in _results(tasks, _Shared(dataset=evidence.dataset, device=device, options=options)):
        found[index] = result
        advance(1 / len(tasks))
    results = [found[index] for index in range(len(tasks))]
    return Evaluation(
        device=device,
        evidence=evidence,
        options=options,
        splits=tuple(result for result in results if isinstance(result, SplitResult)),
        ablation=tuple(result for result in results if isinstance(result, AblationResult)),
        skipped=skipped,
    )


#: A split, or what an ablation removes and its seed.
_Task = Split | tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shared:
    """Data that all tasks share; each process receives it once."""

    dataset: CostDataset
    device: str
    options: EvaluationOptions

    def run(self, task: _Task) -> SplitResult | AblationResult:
        if isinstance(task, Split):
            return run_split(self.dataset, task, self.device, self.options)
        return run_ablation(self.dataset, *task, self.device, self.options)


#: In a process that trains: what it was started with.
_shared: list[_Shared] = []


def _start(shared: _Shared) -> None:
    _shared.append(shared)


def _run_shared(task: _Task) -> SplitResult | AblationResult:
    return _shared[0].run(task)


def _results(tasks: Sequence[_Task], shared: _Shared) -> Iterator[tuple[int, SplitResult | AblationResult]]:
    """Runs tasks, in processes if there are to be several; yields each task's number and result as they end."""
    if shared.options.num_workers == 1:
        yield from ((index, shared.run(task)) for index, task in enumerate(tasks))
        return
    # Not by fork: threads of torch and scikit-learn would not live on in the children.
    with ProcessPoolExecutor(
        shared.options.num_workers, mp_context=get_context("spawn"), initializer=_start, initargs=(shared,)
    ) as pool:
        index_of = {pool.submit(_run_shared, task): index for index, task in enumerate(tasks)}
        try:
            for future in as_completed(index_of):
                yield index_of[future], future.result()
        except BrokenProcessPool as error:
            raise ExecutionError("a process that trained was killed; is there too little memory?") from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _splits(dataset: CostDataset, options: EvaluationOptions) -> tuple[list[Split], dict[SplitKind, str]]:
    splits: list[Split] = []
    skipped: dict[SplitKind, str] = {}
    for kind in SplitKind:
        several = [Split.of(dataset, kind, seed, options.unseen_share) for seed in range(options.num_seeds)]
        pool, unseen = min(len(split.pool) for split in several), min(len(split.unseen) for split in several)
        if kind is SplitKind.RANDOM or (pool >= MIN_SAMPLES and unseen > 0):
            splits += several
        else:
            skipped[kind] = f"{pool} samples of seen tables alone, {unseen} to test on"
    return splits, skipped


def run_split(dataset: CostDataset, split: Split, device: str, options: EvaluationOptions) -> SplitResult:
    """Trains every method on the split's training part and prices its tests."""
    pool, seed = dataset.take(split.pool), split.seed
    # `train_cost_model` parts the pool like this, too, so that all methods learn from the same samples.
    train, held_out = pool.split(options.training.held_out_share, seed)
    trained = train_cost_model(pool, device=device, options=options.training, seed=seed)
    predictor = trained.model.predictor
    parts = {"held_out": split.pool[np.isin(pool.set_S, held_out.set_S)], "unseen": split.unseen}
    found: dict[str, dict[str, Priced]] = {name: {} for name in parts}
    missing: dict[str, str] = {}
    tests = {name: dataset.take(samples_T) for name, samples_T in parts.items() if len(samples_T)}
    for name, test in tests.items():
        priced = PricedSamples.of(predictor, test)
        found[name][KERNEL] = Priced(samples_T=parts[name], ms_T=priced.kernel_ms_S, spread_T=priced.spread_S)
    for method, fit in _rivals(train, seed, predictor, device, options).items():
        try:
            pricing = fit()
            for name, test in tests.items():
                found[name][method] = Priced(samples_T=parts[name], ms_T=pricing(test))
        except ModelError as error:
            missing[method] = error.message
    interval = trained.model.card.interval
    return SplitResult(
        kind=split.kind,
        seed=seed,
        num_trained=len(train),
        held_out=found["held_out"],
        unseen=found["unseen"],
        missing=missing,
        interval=(interval.low, interval.high),
        stated_coverage=interval.coverage,
    )


def run_ablation(
    dataset: CostDataset, removed: str, seed: int, device: str, options: EvaluationOptions
) -> AblationResult:
    """Trains the kernel model without a group of features."""
    training = replace(options.training, num_updates=options.ablation_updates)
    trained = train_cost_model(without(dataset, removed), device=device, options=training, seed=seed)
    return AblationResult(removed=removed, seed=seed, relative_error=trained.model.card.metrics.relative_error)


def _rivals(
    train: CostDataset, seed: int, predictor: CostPredictor, device: str, options: EvaluationOptions
) -> dict[str, Callable[[], Pricing]]:
    squared = PaperOptions(num_updates=options.paper_updates)
    relative = replace(squared, loss="relative", bins_of="lookups")

    def singles(dataset: CostDataset) -> MsArray:
        ms_U = predictor.predict(predictor.encode(dataset.features_UF)).sum(axis=1)
        shard_N, starts_S = dataset.shards_of(np.arange(len(dataset)))
        summed_S: MsArray = np.add.reduceat(ms_U[shard_N], starts_S)
        return summed_S

    def torchrec(dataset: CostDataset) -> MsArray:
        return torchrec_kernel_ms(dataset, device)

    return {
        "autoshard": lambda: baselines.fit_paper_network(train, seed, squared),
        "autoshard_lookups": lambda: baselines.fit_paper_network(train, seed, replace(squared, bins_of="lookups")),
        "autoshard_best": lambda: baselines.fit_paper_network(train, seed, relative),
        "singles": lambda: singles,
        "singles_scaled": lambda: baselines.fit_factor(singles, train),
        "table_weights": lambda: baselines.fit_table_weights(train),
        "pooled_linear": lambda: baselines.fit_pooled_linear(train),
        "boosted_trees": lambda: baselines.fit_boosted_trees(train, seed, options.tree_iterations),
        "torchrec": lambda: baselines.fit_factor(torchrec, train),
        "analytic": lambda: baselines.fit_analytic(device),
        "analytic_scaled": lambda: baselines.fit_factor(baselines.fit_analytic(device), train),
    }
