"""AutoShard's Table 3: cost models that know one half of the tables, tried on sets of ten tables of either half."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Final

import numpy as np

from autoshard.core.errors import InvalidOptionError
from autoshard.formats.stores.samples import read_samples
from autoshard.report.images import Section
from autoshard.report.wording import write_ms
from autoshard.table import Table
from costmodel import LearnedCostModel, Registry
from costmodel.kernel.dataset import CostDataset
from costmodel.kernel.metrics import held_out_metrics, predict
from costmodel.kernel.training import CostTrainingOptions, train_cost_model
from studies.cost_models.baselines import PaperOptions, Pricing, fit_paper_network
from studies.cost_models.evidence import half_of_tables, plain_sets, unseen_shares
from studies.frame import Numbers, Summary
from studies.policies.charts import Panel, bar_chart
from studies.policies.lab import EvaluationSettings, Figure, Found, Lab, Part
from studies.policies.scores import write_seeds

#: AutoShard's Table 3: tables of a test set, and test sets.
_SET_TABLES: Final = 10
_MOST_SETS: Final = 100

SEEN, UNSEEN = "seen", "unseen"
KERNEL, PRINTED, LOOKUPS = "kernel model", "AutoShard's network as printed", "AutoShard's network, bins of lookups"
_PAPER: Final = ("AutoShard's paper, on a GPU", "1.321", "3.408", "3.061", "10.835")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HalfSamples:
    """Measured sets of whole tables by what a cost model that knows half of the tables may see of them.

    Attributes:
        seen: Sets of seen tables alone; training holds out a part of them.
        unseen: Sets of unseen tables alone; sets of both kinds of tables are left out.
        unseen_names: Names of the unseen tables.
    """

    seen: CostDataset
    unseen: CostDataset
    unseen_names: frozenset[str]

    @classmethod
    @cache  # all parts of a seed ask for the same
    def of(cls, store: Path, device: str, seed: int) -> HalfSamples:
        """The plain sets of a store, parted by a seed; tables that were measured together stay together."""
        dataset = CostDataset.from_samples(plain_sets(read_samples(store, device)))
        names = half_of_tables(dataset, seed)
        share_S = unseen_shares(dataset, names)
        return cls(
            seen=dataset.take(np.flatnonzero(share_S == 0)),
            unseen=dataset.take(np.flatnonzero(share_S == 1)),
            unseen_names=names,
        )


def half_samples(lab: Lab, seed: int) -> HalfSamples:
    """The samples of the lab's store, parted by a seed.

    Raises:
        InvalidOptionError: If the lab has no store.
    """
    if lab.settings.store is None:
        raise InvalidOptionError("needs the folder of samples that cost models are trained from", field="--store")
    return HalfSamples.of(lab.settings.store, lab.settings.device, seed)


def blind_lab(lab: Lab, seed: int) -> Lab:
    """A lab whose cost model was trained on sets of the seen tables alone; the model is trained if it is not there."""
    folder = lab.folder / "blind" / f"{seed}"
    registry = Registry(folder / "models")
    if registry.production_id(LearnedCostModel.kind, lab.settings.device) is None:
        samples = half_samples(lab, seed).seen
        options = CostTrainingOptions(num_updates=lab.settings.cost_updates)
        train_cost_model(samples, device=lab.settings.device, options=options, seed=seed).model.publish(registry)
    return Lab(replace(lab.settings, registry=registry.root), folder)


def _run_seed(seed: int, lab: Lab) -> Numbers:
    """Errors of each cost model on held-out sets of seen tables, and on sets of unseen ones."""
    samples = half_samples(lab, seed)
    # Parts the samples as the training of the kernel model does.
    train, held_out = samples.seen.split(CostTrainingOptions().held_out_share, seed)
    tests = {SEEN: _sets_of_ten(held_out, seed), UNSEEN: _sets_of_ten(samples.unseen, seed)}
    return {method: _errors(fit(), tests) for method, fit in _methods(lab, seed, train).items()}


def _methods(lab: Lab, seed: int, train: CostDataset) -> Mapping[str, Callable[[], Pricing]]:
    # As many updates over those of the kernel model as in the study `cost-models`.
    printed = PaperOptions(num_updates=2 * lab.settings.cost_updates)

    def kernel() -> Pricing:
        predictor = blind_lab(lab, seed).cost.predictor
        return lambda dataset: predict(predictor, dataset).sum(axis=1)

    return {
        KERNEL: kernel,
        PRINTED: partial(fit_paper_network, train, seed, printed),
        LOOKUPS: partial(fit_paper_network, train, seed, replace(printed, bins_of="lookups")),
    }


def _sets_of_ten(dataset: CostDataset, seed: int) -> CostDataset:
    """Up to a hundred random sets of ten tables."""
    ten_T = np.flatnonzero(dataset.num_shards_S == _SET_TABLES)
    return dataset.take(np.random.default_rng(seed).permutation(ten_T)[:_MOST_SETS])


def _errors(pricing: Pricing, tests: Mapping[str, CostDataset]) -> Numbers:
    found = {}
    for name, test in tests.items():
        if not len(test):
            raise InvalidOptionError(f"has no set of {_SET_TABLES} {name} tables", field="--store")
        metrics = held_out_metrics(pricing(test), test.kernel_ms)
        found[name] = {
            "num_sets": metrics.num_samples,
            "mae_ms": metrics.mae_ms,
            "mse_ms2": metrics.mse_ms2,
            "relative_error": metrics.relative_error,
        }
    return found


def _parts(settings: EvaluationSettings) -> Sequence[Part]:
    if settings.store is None:
        return []
    return [Part(f"seed-{seed}", partial(_run_seed, seed)) for seed in range(settings.num_seeds)]


def _show(found: Found, settings: EvaluationSettings) -> Section:
    seeds = list(found.values())

    def over_seeds(method: str, half: str, name: str) -> Summary:
        return Summary.of([numbers[method][half][name] for numbers in seeds])

    lines = []
    for method in (KERNEL, PRINTED, LOOKUPS):
        cells = [_spread(over_seeds(method, half, name)) for half in (SEEN, UNSEEN) for name in ("mae_ms", "mse_ms2")]
        relative = [f"{over_seeds(method, half, 'relative_error').mean:.2%}" for half in (SEEN, UNSEEN)]
        lines.append((method, *cells, *relative))
    bars = {
        half: {method: over_seeds(method, half, "mae_ms") for method in (KERNEL, PRINTED, LOOKUPS)}
        for half in (SEEN, UNSEEN)
    }
    num_sets = {half: {numbers[KERNEL][half]["num_sets"] for numbers in seeds} for half in (SEEN, UNSEEN)}
    counts = {
        half: " to ".join(str(size) for size in sorted({min(sizes), max(sizes)})) for half, sizes in num_sets.items()
    }
    return Section(
        title=FIGURE.title,
        caption="Cost models are trained on measured sets of one half of the tables: whole tables of one kind of "
        f"kernel and one batch. They are tried on {counts[SEEN]} held-out sets of {_SET_TABLES} of these tables and on "
        f"{counts[UNSEEN]} sets of {_SET_TABLES} tables of the other half, all measured. Means and deviations over "
        f"{write_seeds(settings.num_seeds)}, each with halves of its own draw; {settings.cost_updates:,} updates of "
        f"the kernel model, {2 * settings.cost_updates:,} of the networks. Milliseconds are those of another machine "
        "than the paper's: compare training with testing.",
        figure=bar_chart([Panel(title="mean absolute error, ms", bars=bars)]),
        tables=(
            Table(
                columns=(
                    *("cost model", "MAE (training), ms", "MSE (training), ms²", "MAE (testing), ms"),
                    *("MSE (testing), ms²", "relative (training)", "relative (testing)"),
                ),
                rows=(*lines, (*_PAPER, "", "")),
                caption=f"Sets of {_SET_TABLES} tables: of the half that models were trained on, and of the other",
            ),
        ),
    )


def _spread(summary: Summary) -> str:
    return f"{write_ms(summary.mean)} ± {write_ms(summary.deviation)}"


FIGURE = Figure(name="table3", title="Costs of unseen tables (AutoShard, Table 3)", parts=_parts, show=_show)
