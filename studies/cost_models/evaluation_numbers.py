"""Numbers of an evaluation: accuracy of each method, the noise floor, and where the kernel model errs.

Shape suffixes: S samples of a store, T samples that are priced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from autoshard.core import DType, MemoryLevel, Optimizer, Pooling, Update
from autoshard.core.costs import MsArray
from autoshard.formats.stores.samples import Sample
from costmodel.kernel.dataset import CostDataset
from costmodel.kernel.metrics import held_out_metrics
from studies.cost_models.evaluation import FULL, KERNEL, METHODS, Evaluation, Priced, SplitResult
from studies.cost_models.evidence import SplitKind
from studies.frame import Summary

SCHEMA: Final = "autoshard.cost_report/1"
#: Upper ends of the groups of sets by number of tables.
TABLE_GROUPS: Final = (1, 3, 6, 10, 15, 10**6)
#: Nominal coverages of intervals that are tested.
LEVELS: Final = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
#: Fewest sets for an order, or a group.
_FEWEST = 5
#: Mean absolute deviation over standard deviation of normally distributed values.
_MEAN_PER_SIGMA: Final = float(np.sqrt(2 / np.pi))
_OPTION_NAMES = (
    *("paper_updates", "tree_iterations", "num_seeds"),
    *("ablation_seeds", "ablation_updates", "unseen_share"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Accuracy of a method on a kind of sets, over all seeds."""

    num_sets: float
    """Sets per seed."""
    num_priced: float
    """Those that the method has a price for; all else is about them."""
    mae_ms: Summary
    mse_ms2: Summary
    relative_error: Summary
    kendall_tau: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseFloor:
    """Mean relative error of a model that predicts every set's true time.

    Attributes:
        num_sets: Sets that were measured more than once.
        repeated: From how far measurements of the same set lie apart; None for too few.
        within: From the spread of the rounds of single samples: the error of their mean, were rounds independent.
        kernel_error: The kernel model's error on held-out samples of the sets that were measured more than once.
    """

    num_sets: int
    repeated: float | None
    within: float
    kernel_error: float | None

    @property
    def ratio(self) -> float | None:
        """The kernel model's error over the noise of the same samples."""
        return None if not self.repeated or self.kernel_error is None else self.kernel_error / self.repeated


#: Results of one kind of sets: their split, and whether their tables were seen.
Part = tuple[SplitKind, str]
PARTS: Final[Mapping[Part, str]] = {
    (SplitKind.RANDOM, "held_out"): "seen tables, all sets",
    (SplitKind.RANDOM, "common"): "seen tables, sets that all methods can price",
    (SplitKind.HALF, "held_out"): "half of the tables, seen",
    (SplitKind.HALF, "unseen"): "half of the tables, unseen",
    (SplitKind.MIXED, "held_out"): "a tenth unseen: sets without these",
    (SplitKind.MIXED, "unseen"): "a tenth unseen: sets with some of these",
}


def accuracies(evaluation: Evaluation) -> dict[Part, dict[str, Accuracy]]:
    """Accuracy of each method on each kind of sets; what it cannot price at all is left out."""
    measured_S = evaluation.evidence.dataset.kernel_ms
    found: dict[Part, dict[str, Accuracy]] = {}
    for part in PARTS:
        splits = [split for split in evaluation.splits if split.kind is part[0]]
        for method in METHODS:
            priced = [prices[method] for split in splits if method in (prices := _priced(split, part[1]))]
            accuracy = _accuracy(priced, measured_S)
            if accuracy is not None:
                found.setdefault(part, {})[method] = accuracy
    return found


def _priced(split: SplitResult, where: str) -> Mapping[str, Priced]:
    if where != "common":
        return split.held_out if where == "held_out" else split.unseen
    finite_MT = [np.isfinite(priced.ms_T) for priced in split.held_out.values()]
    is_common_T = np.logical_and.reduce(finite_MT)
    return {
        method: Priced(samples_T=priced.samples_T[is_common_T], ms_T=priced.ms_T[is_common_T])
        for method, priced in split.held_out.items()
    }


def _accuracy(priced: Sequence[Priced], measured_S: MsArray) -> Accuracy | None:
    metrics = []
    for one in priced:
        is_finite_T = np.isfinite(one.ms_T)
        if is_finite_T.sum() >= _FEWEST:
            metrics.append(held_out_metrics(one.ms_T[is_finite_T], measured_S[one.samples_T[is_finite_T]]))
    if not metrics:
        return None
    names = ("mae_ms", "mse_ms2", "relative_error", "kendall_tau")
    return Accuracy(
        num_sets=float(np.mean([len(one.ms_T) for one in priced])),
        num_priced=float(np.mean([item.num_samples for item in metrics])),
        **{name: Summary.of([getattr(item, name) for item in metrics]) for name in names},
    )


def unseen_ratios(evaluation: Evaluation, kind: SplitKind) -> dict[str, Summary]:
    """Mean relative error on unseen tables over that on seen ones, by method; over the seeds of one kind of split."""
    measured_S = evaluation.evidence.dataset.kernel_ms
    found: dict[str, Summary] = {}
    for method in METHODS:
        ratios = []
        for split in evaluation.splits:
            if split.kind is kind and method in split.held_out and method in split.unseen:
                seen, unseen = (_accuracy([part[method]], measured_S) for part in (split.held_out, split.unseen))
                if seen is not None and unseen is not None:
                    ratios.append(unseen.relative_error.mean / seen.relative_error.mean)
        if ratios:
            found[method] = Summary.of(ratios)
    return found


def relative_errors(evaluation: Evaluation) -> tuple[NDArray[np.int64], MsArray]:
    """Samples that random splits held out, and the kernel model's signed relative errors on them, over all seeds."""
    measured_S = evaluation.evidence.dataset.kernel_ms
    priced = [split.held_out[KERNEL] for split in evaluation.splits if split.kind is SplitKind.RANDOM]
    samples_T = np.concatenate([one.samples_T for one in priced])
    return samples_T, np.concatenate([one.ms_T for one in priced]) / measured_S[samples_T] - 1


def noise_floor(evaluation: Evaluation) -> NoiseFloor:
    """Noise of the samples, and the kernel model's error on those of them that were measured more than once."""
    evidence, dataset = evaluation.evidence, evaluation.evidence.dataset
    _, set_S = np.unique(dataset.set_S, return_inverse=True)
    counts_S = np.bincount(set_S)[set_S]
    is_repeated_S = counts_S > 1
    mean_S = np.bincount(set_S, dataset.kernel_ms)[set_S] / counts_S
    # Means of n measurements follow each of them; n / (n - 1) undoes that for variances.
    off_S = np.abs(dataset.kernel_ms / mean_S - 1) * np.sqrt(counts_S / np.maximum(counts_S - 1, 1))
    samples_T, error_T = relative_errors(evaluation)
    tested_T = is_repeated_S[samples_T]
    return NoiseFloor(
        num_sets=len(np.unique(dataset.set_S[is_repeated_S])),
        repeated=float(off_S[is_repeated_S].mean()) if is_repeated_S.sum() >= _FEWEST else None,
        within=float(np.mean([_own_noise(sample) for sample in evidence.samples])),
        kernel_error=float(np.abs(error_T[tested_T]).mean()) if tested_T.any() else None,
    )


def _own_noise(sample: Sample) -> float:
    """Expected relative error of the mean of a sample's rounds."""
    squared = (sample.forward_ms * sample.forward_spread) ** 2 + (sample.backward_ms * sample.backward_spread) ** 2
    return float(_MEAN_PER_SIGMA * np.sqrt(squared) / sample.kernel_ms / np.sqrt(sample.num_rounds))


def errors_by(evaluation: Evaluation, label_of: Callable[[Sample], Sequence[str]]) -> dict[str, tuple[float, int]]:
    """Mean relative error of the kernel model, and number of held-out samples, by labels that samples carry."""
    samples_T, error_T = relative_errors(evaluation)
    groups: dict[str, list[float]] = {}
    for sample, error in zip(samples_T.tolist(), np.abs(error_T).tolist(), strict=True):
        for label in label_of(evaluation.evidence.samples[sample]):
            groups.setdefault(label, []).append(error)
    return {label: (float(np.mean(errors)), len(errors)) for label, errors in sorted(groups.items())}


def errors_by_tables(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    """Mean relative error by method and number of tables, on the sets that random splits held out."""
    dataset = evaluation.evidence.dataset
    found: dict[str, dict[str, float]] = {}
    for method in METHODS:
        priced = [
            split.held_out[method]
            for split in evaluation.splits
            if split.kind is SplitKind.RANDOM and method in split.held_out
        ]
        if not priced:
            continue
        samples_T = np.concatenate([one.samples_T for one in priced])
        error_T = np.abs(np.concatenate([one.ms_T for one in priced]) / dataset.kernel_ms[samples_T] - 1)
        group_T = np.searchsorted(TABLE_GROUPS, dataset.num_shards_S[samples_T])
        for group, label in enumerate(table_group_names()):
            chosen_T = error_T[(group_T == group) & np.isfinite(error_T)]
            if len(chosen_T) >= _FEWEST:
                found.setdefault(method, {})[label] = float(chosen_T.mean())
    return found


def table_group_names() -> tuple[str, ...]:
    """`1`, `2-3` and so on."""
    starts = (0, *TABLE_GROUPS[:-1])
    names = [
        str(stop) if start + 1 == stop else f"{start + 1}-{stop}"
        for start, stop in zip(starts, TABLE_GROUPS, strict=True)
    ]
    return (*names[:-1], f"{starts[-1] + 1} or more")


def source_of(sample: Sample) -> tuple[str, ...]:
    """Strategy that chose its set."""
    return (sample.source,)


def traits_of(sample: Sample) -> tuple[str, ...]:
    """Kinds of shards of a set, beside pooled sums of fp32 rows in device memory with row-wise AdaGrad."""
    found: set[str] = set()
    for shard in sample.local_shards:
        if not shard.is_pooled:
            found.add("rows, not pooled")
        elif shard.pooling is Pooling.MEAN:
            found.add("mean")
        if shard.dtype is not DType.FP32:
            found.add(str(shard.dtype))
        if shard.update is Update.ALL_REDUCED:
            found.add("gradients all-reduced")
        elif shard.optimizer is not Optimizer.ROWWISE_ADAGRAD:
            found.add(str(shard.optimizer))
        if shard.level is not MemoryLevel.HBM:
            found.add("behind a cache")
        if shard.pooling_factor < 1:
            found.add("under 1 lookup per bag")
    return tuple(sorted(found)) or ("plain",)


def interval_coverages(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    """Share of measurements within the interval, by nominal coverage, for seen and for unseen tables.

    Ends come from every other held-out sample of seen tables; the rest, and all samples with unseen tables, test them.
    """
    measured_S = evaluation.evidence.dataset.kernel_ms
    within: dict[str, dict[float, list[float]]] = {}
    for split in evaluation.splits:
        off_T = _off(split.held_out[KERNEL], measured_S)
        tests = {"seen tables": off_T[1::2]} if split.kind is SplitKind.RANDOM else {}
        if split.unseen:
            tests[f"unseen tables, {split.kind}"] = _off(split.unseen[KERNEL], measured_S)
        for level in LEVELS:
            low, high = np.quantile(off_T[::2], ((1 - level) / 2, (1 + level) / 2))
            for name, tested_T in tests.items():
                share = float(((tested_T >= low) & (tested_T <= high)).mean())
                within.setdefault(name, {}).setdefault(level, []).append(share)
    return {
        name: {f"{level:g}": float(np.mean(shares)) for level, shares in by_level.items()}
        for name, by_level in within.items()
    }


def _off(priced: Priced, measured_S: MsArray) -> MsArray:
    assert priced.spread_T is not None
    return np.log(measured_S[priced.samples_T] / priced.ms_T) / priced.spread_T


def ablation_errors(evaluation: Evaluation) -> dict[str, Summary]:
    """Mean relative error without each group of features, the full model first."""
    removed = dict.fromkeys([FULL, *(result.removed for result in evaluation.ablation)])
    return {
        name: Summary.of(errors)
        for name in removed
        if (errors := [result.relative_error for result in evaluation.ablation if result.removed == name])
    }


def sizes(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    """Samples that splits trained on, held out and had with unseen tables, and tables per set of the tests; means."""
    dataset = evaluation.evidence.dataset
    found: dict[str, dict[str, float]] = {}
    for kind in SplitKind:
        splits = [split for split in evaluation.splits if split.kind is kind]
        if splits:
            found[kind.value] = {
                "num_splits": len(splits),
                "trained": _mean([split.num_trained for split in splits]),
                "held_out": _mean([len(split.held_out[KERNEL].samples_T) for split in splits]),
                "held_out_tables_per_set": _tables_per_set(dataset, [split.held_out for split in splits]),
                "unseen": _mean([len(split.unseen[KERNEL].samples_T) if split.unseen else 0 for split in splits]),
                "unseen_tables_per_set": _tables_per_set(dataset, [split.unseen for split in splits if split.unseen]),
            }
    return found


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _tables_per_set(dataset: CostDataset, priced: Sequence[Mapping[str, Priced]]) -> float:
    counts = [dataset.num_shards_S[one[KERNEL].samples_T] for one in priced]
    return float(np.mean(np.concatenate(counts))) if counts else 0.0


def to_document(evaluation: Evaluation) -> dict[str, Any]:
    """All numbers as a JSON object."""
    options, evidence = evaluation.options, evaluation.evidence
    noise = noise_floor(evaluation)
    first = evidence.samples[0]
    training = {name: getattr(options.training, name) for name in ("batch_size", "learning_rate", "held_out_share")}
    missing = {method: text for split in evaluation.splits for method, text in split.missing.items()}
    stated = [
        split.stated_coverage
        for split in evaluation.splits
        if split.kind is SplitKind.RANDOM and split.stated_coverage is not None
    ]
    return {
        "schema": SCHEMA,
        "device": evaluation.device,
        "device_names": sorted({sample.device_name for sample in evidence.samples}),
        "versions": {
            "torch": first.torch_version,
            "fbgemm": first.fbgemm_version,
            "autoshard": first.autoshard_version,
        },
        "num_samples": len(evidence.dataset),
        "num_left_out": evidence.num_left_out,
        "options": {
            **{name: getattr(options, name) for name in _OPTION_NAMES},
            "training": {**training, "schedule": options.training.schedule},
        },
        "sizes": sizes(evaluation),
        "skipped": {kind.value: text for kind, text in evaluation.skipped.items()},
        "missing": missing,
        "accuracy": {
            f"{kind}.{where}": {method: asdict(accuracy) for method, accuracy in by_method.items()}
            for (kind, where), by_method in accuracies(evaluation).items()
        },
        "unseen_over_seen": {
            kind.value: {method: asdict(ratio) for method, ratio in unseen_ratios(evaluation, kind).items()}
            for kind in (SplitKind.HALF, SplitKind.MIXED)
        },
        "noise": {**asdict(noise), "ratio": noise.ratio},
        "by_tables": errors_by_tables(evaluation),
        "by_source": _grouped(errors_by(evaluation, source_of)),
        "by_kind": _grouped(errors_by(evaluation, traits_of)),
        "interval_coverage": interval_coverages(evaluation),
        "stated_coverage": float(np.mean(stated)) if stated else None,
        "ablation": {name: asdict(errors) for name, errors in ablation_errors(evaluation).items()},
    }


def _grouped(errors: Mapping[str, tuple[float, int]]) -> dict[str, dict[str, float]]:
    return {label: {"relative_error": error, "num_samples": number} for label, (error, number) in errors.items()}
