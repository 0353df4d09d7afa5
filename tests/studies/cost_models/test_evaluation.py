import json
from dataclasses import replace

import numpy as np
import pytest

from autoshard.core import DType
from autoshard.core.errors import InvalidOptionError, SampleStoreError
from autoshard.formats.stores.samples import SampleTable
from autoshard.table import Table
from costmodel.kernel.training import CostTrainingOptions, train_cost_model
from studies.cost_models.compare import accuracy_table, evaluation_result
from studies.cost_models.evaluation import (
    FULL,
    KERNEL,
    METHODS,
    REMOVALS,
    Evaluation,
    EvaluationOptions,
    Priced,
    SplitResult,
    evaluate_methods,
)
from studies.cost_models.evaluation_numbers import (
    accuracies,
    interval_coverages,
    noise_floor,
    table_group_names,
    to_document,
    unseen_ratios,
)
from studies.cost_models.evidence import (
    Evidence,
    Split,
    SplitKind,
    half_of_tables,
    plain_sets,
    some_tables,
    unseen_shares,
)

OPTIONS = EvaluationOptions(
    training=CostTrainingOptions(num_updates=60),
    paper_updates=5,
    tree_iterations=5,
    num_seeds=1,
    ablation_seeds=1,
    ablation_updates=20,
    num_workers=1,
)


@pytest.fixture(scope="module")
def evaluation(samples):
    return evaluate_methods(samples, OPTIONS)


@pytest.fixture(scope="module")
def document(evaluation):
    return to_document(evaluation)


class TestSplits:
    def test_half_has_sets_of_one_half_alone(self, dataset):
        split = Split.of(dataset, SplitKind.HALF, 3, 0.1)
        names = [
            {shard.table for part in [dataset.take(samples)] for shard in used_shards(part)}
            for samples in (split.pool, split.unseen)
        ]
        assert all(names)
        assert not names[0] & names[1]

    def test_tables_that_were_measured_together_stay_together(self, dataset):
        """As if the samples came from four files, each with tables of its own."""
        owner_N = np.repeat(np.arange(len(dataset)), dataset.num_shards_S)
        named = tuple(
            replace(dataset.shards_U[shard], table=f"file{owner % 4}.t{place % 50}")
            for place, (owner, shard) in enumerate(zip(owner_N, dataset.shard_N, strict=True))
        )
        apart = replace(
            dataset,
            shards_U=named,
            features_UF=dataset.features_UF[dataset.shard_N],
            shard_N=np.arange(len(named)),
        )
        names = {shard.table for shard in named}
        chosen = set()
        for seed in range(6):
            half = half_of_tables(apart, seed)
            assert len(half) == pytest.approx(len(names) / 2, rel=0.02)
            assert len({name.partition(".")[0] for name in half}) == 2
            split = Split.of(apart, SplitKind.HALF, seed, 0.1)
            assert len(split.pool) + len(split.unseen) == len(apart)
            chosen.add(half)
        assert len(chosen) > 1

    def test_tables_that_were_all_measured_together_are_parted_anyhow(self, dataset):
        """Few sets are then of either half alone."""
        crossing = dataset.take(np.arange(40))
        shards = [replace(shard, table=f"t{index % 7}") for index, shard in enumerate(crossing.shards_U)]
        crossing = replace(crossing, shards_U=tuple(shards))
        assert len(half_of_tables(crossing, 0)) in (3, 4)

    def test_mixed_trains_without_the_unseen_tables(self, dataset):
        split = Split.of(dataset, SplitKind.MIXED, 3, 0.1)
        assert len(split.pool) + len(split.unseen) == len(dataset)
        seen = {shard.table for shard in used_shards(dataset.take(split.pool))}
        for sample in split.unseen[:20]:
            held = {shard.table for shard in used_shards(dataset.take(np.array([sample])))}
            assert held - seen or unseen_shares(dataset, some_tables(dataset, 0.1, 3))[sample] > 0

    def test_another_seed_is_another_choice(self, dataset):
        first, again, other = (unseen_shares(dataset, some_tables(dataset, 0.5, seed)) for seed in (0, 0, 1))
        assert np.array_equal(first, again)
        assert not np.array_equal(first, other)
        assert 0.4 < first.mean() < 0.6


class TestPlainSets:
    def test_one_kernel_and_one_batch_are_left(self, samples):
        """The stored samples are all plain; a third of them becomes something else."""
        first, second, third, *others = samples.samples
        odd = (
            replace(first, shards=(with_shard(first.shards[0], num_bags=7), *first.shards[1:])),
            replace(second, shards=(*second.shards[:-1], with_shard(second.shards[-1], dtype=DType.FP16))),
            replace(third, source="slices"),
        )
        assert plain_sets(replace(samples, samples=(*odd, *others))).samples == tuple(others)

    def test_no_samples_stay_none(self):
        assert len(plain_sets(SampleTable(samples=()))) == 0


def with_shard(measured, **changes):
    return replace(measured, shard=replace(measured.shard, **changes))


def used_shards(dataset):
    return [dataset.shards_U[index] for index in np.unique(dataset.shard_N)]


class TestEvaluation:
    @pytest.mark.smoke
    def test_every_method_is_tried(self, samples):
        options, done = replace(OPTIONS, training=CostTrainingOptions(num_updates=5), ablation_updates=2), []
        evaluation = evaluate_methods(SampleTable(samples=samples.samples[:100]), options, done.append)
        assert sum(done) == pytest.approx(1)
        split = next(split for split in evaluation.splits if split.kind is SplitKind.RANDOM)
        assert set(split.held_out) | set(split.missing) == set(METHODS)
        assert not set(split.missing) - {"torchrec"}

    def test_the_kernel_model_is_the_one_that_is_published(self, evaluation, dataset):
        """What a report says of it is what its card says, so that all methods learned from the same samples."""
        trained = train_cost_model(dataset, device="cpu", options=OPTIONS.training, seed=0)
        found = accuracies(evaluation)[SplitKind.RANDOM, "held_out"][KERNEL]
        assert found.relative_error.mean == pytest.approx(trained.model.card.metrics.relative_error, rel=1e-6)
        assert found.num_sets == trained.model.card.metrics.num_samples

    def test_what_is_too_little_is_said(self, evaluation, document):
        """400 sets of some ten tables: hardly any lies within half of the pool."""
        assert set(evaluation.skipped) == {SplitKind.HALF}
        assert "samples of seen tables" in document["skipped"]["half"]

    def test_ablation_has_every_group(self, document):
        assert list(document["ablation"]) == [FULL, *REMOVALS]
        assert document["ablation"]["work"]["mean"] > document["ablation"][FULL]["mean"]

    def test_too_few_samples(self, samples):
        with pytest.raises(SampleStoreError, match="at least 50"):
            evaluate_methods(SampleTable(samples=samples.samples[:20]), OPTIONS)

    @pytest.mark.parametrize(
        ("change", "field"), [({"num_seeds": 0}, "num_seeds"), ({"unseen_share": 1.0}, "unseen_share")]
    )
    def test_options_that_make_no_sense(self, change, field):
        with pytest.raises(InvalidOptionError, match=field):
            replace(OPTIONS, **change)


@pytest.mark.slow
def test_processes_find_the_same(samples, evaluation):
    options = replace(OPTIONS, num_workers=2)
    assert to_document(evaluate_methods(samples, options)) == to_document(evaluation)


class TestNumbers:
    """On predictions whose errors are known."""

    @pytest.fixture
    def known(self, evaluation):
        """Seen tables are predicted 10% too high, every other sample too low; unseen ones 30% too high."""
        evidence = evaluation.evidence
        measured = evidence.dataset.kernel_ms
        seen, unseen = np.arange(0, 200), np.arange(200, 400)
        sign = np.where(np.arange(200) % 4 < 2, 1, -1)
        ones = np.ones(200)
        split = {
            "seed": 0,
            "num_trained": 320,
            "missing": {},
            "interval": (-1.0, 1.0),
            "stated_coverage": 0.9,
            "held_out": {
                KERNEL: Priced(samples_T=seen, ms_T=measured[seen] * (1 + 0.1 * sign), spread_T=ones),
                "singles": Priced(samples_T=seen, ms_T=np.where(seen < 50, measured[seen] * 1.5, np.nan)),
            },
        }
        unseen_prices = {KERNEL: Priced(samples_T=unseen, ms_T=measured[unseen] * 1.3, spread_T=ones)}
        splits = (
            SplitResult(kind=SplitKind.RANDOM, unseen={}, **split),
            SplitResult(kind=SplitKind.HALF, unseen=unseen_prices, **split),
        )
        return Evaluation(
            device="cpu",
            evidence=evidence,
            options=OPTIONS,
            splits=splits,
            ablation=(),
            skipped={SplitKind.MIXED: "none"},
        )

    def test_accuracy(self, known):
        found = accuracies(known)
        assert found[SplitKind.RANDOM, "held_out"][KERNEL].relative_error.mean == pytest.approx(0.1)
        partly = found[SplitKind.RANDOM, "held_out"]["singles"]
        assert (partly.num_priced, partly.num_sets) == (50, 200)
        assert partly.kendall_tau.mean == pytest.approx(1)
        assert found[SplitKind.RANDOM, "common"][KERNEL].num_sets == 50

    def test_unseen_over_seen(self, known):
        assert unseen_ratios(known, SplitKind.HALF)[KERNEL].mean == pytest.approx(3)
        assert unseen_ratios(known, SplitKind.MIXED) == {}

    def test_intervals(self, known):
        found = interval_coverages(known)
        assert found["seen tables"]["0.9"] == 1
        assert found["unseen tables, half"]["0.9"] == 0

    def test_tables_show_what_has_no_price(self, known):
        text = accuracy_table(to_document(known), "random.held_out").to_markdown()
        assert "| kernel model | 10.00% ± 0.00 |" in text
        assert "| linear, one weight per table | n/a |" in text


def test_noise_floor_of_known_noise(samples):
    """400 sets measured twice with 5% noise: a perfect model is off by 0.05 * sqrt(2 / pi)."""
    rng = np.random.default_rng(0)
    twice = tuple(
        replace(sample, forward_ms=sample.forward_ms * factor, backward_ms=sample.backward_ms * factor)
        for sample in samples.samples
        for factor in 1 + 0.05 * rng.standard_normal(2)
    )
    evidence = Evidence.of(SampleTable(samples=twice))
    everything = np.arange(len(twice))
    priced = Priced(samples_T=everything, ms_T=evidence.dataset.kernel_ms * 1.08, spread_T=np.ones(len(twice)))
    split = SplitResult(
        kind=SplitKind.RANDOM,
        seed=0,
        num_trained=1,
        held_out={KERNEL: priced},
        unseen={},
        missing={},
        interval=(-1.0, 1.0),
        stated_coverage=None,
    )
    noise = noise_floor(
        Evaluation(device="cpu", evidence=evidence, options=OPTIONS, splits=(split,), ablation=(), skipped={})
    )
    assert noise.num_sets >= 390
    assert noise.repeated == pytest.approx(0.05 * np.sqrt(2 / np.pi), rel=0.1)
    assert noise.ratio == pytest.approx(0.08 / noise.repeated)


class TestReport:
    def test_document_is_json(self, document):
        assert json.loads(json.dumps(document, allow_nan=False)) == document

    def test_every_method_has_a_line_in_every_table_of_accuracy(self, evaluation):
        report = evaluation_result(evaluation).page
        tables = report.sections[0].tables
        assert tables[0].caption == "Seen tables, all sets"
        for table in tables:
            assert isinstance(table, Table)
            assert [line[0] for line in table.lines] == list(METHODS.values())
        titles = [section.title for section in report.sections]
        assert "Unseen tables" in titles
        assert "What each group of features is worth" in titles

    def test_markdown_has_the_documents_numbers(self, evaluation, document):
        text = evaluation_result(evaluation).to_markdown()
        error = document["accuracy"]["random.held_out"][KERNEL]["relative_error"]["mean"]
        assert f"| kernel model | {error:.2%} ± 0.00" in text
        assert "Too few samples for it" in text

    def test_groups_of_tables(self):
        assert table_group_names() == ("1", "2-3", "4-6", "7-10", "11-15", "16 or more")
