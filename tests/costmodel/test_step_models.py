"""Calibrated steps: weights that runs were made with are found, registries give back what they got, real runs work."""

import json
from dataclasses import replace

import numpy as np
import pytest

from autoshard.core import GroupLayout, Level, Link, ReplicaGroups
from autoshard.core.errors import ModelError
from autoshard.core.machine import MeasuredMachine
from autoshard.core.step import KERNEL_PARTS, PART_FEATURES, WIRE_FEATURES, Overlap, StepPart, plain_coefficients
from autoshard.evaluation import price_step
from autoshard.formats.metasyn import metasyn
from autoshard.planning import machine_notes, plan_costs
from autoshard.whatif.trials import LOPSIDED, MeasuredStep, draw_trials, local_topology, plan_task, plan_trial
from costmodel.registry.promotion import publish_version
from costmodel.registry.publish_options import PublishOptions
from costmodel.registry.versions import Registry
from costmodel.step.calibration import (
    MIN_PLANS,
    CalibrationRun,
    _interval_scale,
    calibrate_step,
    run_calibration,
    step_errors,
)
from costmodel.step.comparison import step_version
from costmodel.step.model import CalibratedStep, StepCard, links_of
from costmodel.step.regression import fit_nonnegative, quantile_bounds
from tests import builders as make

COSTS = make.costs()
#: What synthetic runs take, in the order of `PART_FEATURES`.
TRUTH = {
    StepPart.INPUT: (1.5, 1.2, 1.9, 3.0, 0.0, 0.0, 0.0),
    StepPart.FORWARD_KERNEL: (1.2, 0.0, 0.02, 0.0),
    StepPart.FORWARD_EXCHANGE: (0.8, 1.0, 0.7, 0.3, 0.0, 0.0),
    StepPart.BACKWARD_EXCHANGE: (0.9, 1.0, 0.7, 0.5, 0.0, 0.0),
    StepPart.BACKWARD_KERNEL: (1.4, 0.0, 0.0),
    StepPart.DENSE: (1.3, 1.0, 4.0, 0.0, 0.0, 6.0, 0.0),
}


@pytest.fixture(scope="module")
def pool():
    return metasyn().scaled(4096)


@pytest.fixture(scope="module")
def plans(pool):
    topology = local_topology("cpu", 2, 1 << 30)
    trials = draw_trials(12, seed=5, planners=["random", LOPSIDED], num_tables=(8, 60))
    return [plan_trial(trial, pool, topology, None) for trial in trials]


def is_wire(part):
    """Which features of a part are times of collectives, shape (F,)."""
    return np.array([name == WIRE_FEATURES.get(part) for name in PART_FEATURES[part]])


def synthetic(plan, noise):
    """A run that takes exactly what the truth says, but for `noise`."""
    work = price_step(plan, COSTS).work
    times = {part: work[part] @ TRUTH[part] * noise for part in StepPart}
    parts = {part: float(times_R.max()) for part, times_R in times.items()}
    measured = MeasuredStep(step_ms=sum(parts.values()), part_ms=parts, work_ms_R=kernels_of(times))
    return CalibrationRun(plan=plan, costs=COSTS, measured=measured)


def kernels_of(times):
    """What ranks take for their kernels, as runs in real time tell it."""
    ranks = zip(*(np.asarray(times[part]).tolist() for part in KERNEL_PARTS), strict=True)
    return tuple(dict(zip(KERNEL_PARTS, of_rank, strict=True)) for of_rank in ranks)


@pytest.fixture(scope="module")
def runs(plans):
    rng = np.random.default_rng(0)
    return [synthetic(plan, float(np.exp(rng.normal(0, 0.02)))) for plan in plans]


@pytest.fixture(scope="module")
def model(runs):
    return calibrate_step(runs, "cpu")


class TestCalibration:
    def test_steps_are_what_they_take(self, model, runs):
        for run in runs:
            price = price_step(run.plan, replace(run.costs, step=model))
            assert price.step_ms.value == pytest.approx(run.measured.step_ms, rel=0.15)
            assert price.overlap is Overlap.NONE
        assert model.card.metrics["median_error"] < 0.05
        assert model.card.metrics["share_within_15_percent"] >= 0.9

    def test_it_is_better_than_the_parts_as_they_are(self, model, runs):
        plain = [abs(price_step(run.plan, COSTS).step_ms.value / run.measured.step_ms - 1) for run in runs]
        assert np.median(plain) > 3 * model.card.metrics["median_error"]

    def test_intervals_hold_runs_that_it_has_not_seen(self, model, runs):
        rng = np.random.default_rng(1)
        held = 0
        for run in runs:
            fresh = synthetic(run.plan, float(np.exp(rng.normal(0, 0.02))))
            step = price_step(run.plan, replace(COSTS, step=model)).step_ms
            held += step.low <= fresh.measured.step_ms <= step.high
        assert held >= 0.8 * len(runs)

    def test_one_disturbed_run_hardly_matters(self, runs):
        late = replace(runs[3], measured=synthetic(runs[3].plan, 3.0).measured)
        model = calibrate_step([*runs[:3], late, *runs[4:]], "cpu")
        error = [
            abs(price_step(run.plan, replace(COSTS, step=model)).step_ms.value / run.measured.step_ms - 1)
            for run in runs
        ]
        assert np.median(error) < 0.08

    def test_times_of_exchanges_that_a_quick_rank_saw_do_not_matter(self, runs, model):
        # A rank that sends little is done early: what the step waits for others counts to all else.
        quick = []
        for run in runs:
            parts = dict(run.measured.part_ms)
            for part in (StepPart.INPUT, StepPart.FORWARD_EXCHANGE, StepPart.BACKWARD_EXCHANGE):
                parts[StepPart.DENSE] += 0.9 * parts[part]
                parts[part] *= 0.1
            quick.append(replace(run, measured=replace(run.measured, part_ms=parts)))
        assert calibrate_step(quick, "cpu").fitted == model.fitted

    def test_kernels_of_all_replica_groups_count(self, pool):
        topology = local_topology("cpu", 4, 1 << 30)
        groups = ReplicaGroups(num_groups=2, layout=GroupLayout.WITHIN_NODES, sync_every=2)
        runs = []
        for seed in range(MIN_PLANS):
            tables = replace(pool.sample(8, seed), batch_size=64)
            plan = plan_task("cost-greedy", tables, local_topology("cpu", 2, 1 << 30), 0)
            plan = replace(plan, topology=topology, replica_groups=groups, predicted=None)
            price = price_step(plan, COSTS)
            kernels = np.stack([price.work[part][:, 0] for part in KERNEL_PARTS], axis=1)
            # Kernels of the first group were not timed, those of the second take twice what the model says.
            measured_R2 = np.concatenate([0 * kernels, 2 * kernels])
            parts = {part: price.part_ms(part) for part in StepPart}
            times = dict(zip(KERNEL_PARTS, measured_R2.T, strict=True))
            measured = MeasuredStep(step_ms=sum(parts.values()), part_ms=parts, work_ms_R=kernels_of(times))
            runs.append(CalibrationRun(plan=plan, costs=COSTS, measured=measured))
        weights = calibrate_step(runs, "cpu").fitted[StepPart.BACKWARD_KERNEL, "analytic:cpu"]
        predicted_R = price.work[StepPart.BACKWARD_KERNEL] @ weights
        np.testing.assert_allclose(predicted_R, 2 * kernels[:, 1], rtol=0.1)

    def test_runs_of_one_plan_are_held_out_together(self, plans):
        """Each plan takes a factor of its own: its other runs do not tell how far off a new plan's price is."""
        factors = np.exp(np.random.default_rng(2).normal(0, 0.3, 6))
        once = [synthetic(plan, factor) for plan, factor in zip(plans[:6], factors, strict=True)]
        smaller = [replace(run.plan, tables=replace(run.plan.tables, batch_size=64)) for run in once]
        often = [*once, *(synthetic(plan, factor) for plan, factor in zip(smaller, factors, strict=True)), *once, *once]
        single, several = (calibrate_step(runs, "cpu") for runs in (once, often))
        assert (several.card.metrics["num_runs"], several.card.metrics["num_plans"]) == (24, 6)
        assert several.card.metrics["median_error"] > 0.7 * single.card.metrics["median_error"]
        assert several.card.interval_scale > 0.7 * single.card.interval_scale
        assert step_errors(often, "cpu").shape == step_errors(often, "cpu", single).shape == (6,)

    def test_intervals_count_plans_and_the_next_one_in(self):
        # Of 19 plans the 18th; four more runs of the quickest plan move nothing.
        offsets, plans_S = np.arange(19.0), np.arange(19)
        assert _interval_scale(offsets, plans_S) == 17.0
        assert _interval_scale(np.append(offsets, [0.0] * 4), np.append(plans_S, [0] * 4)) == 17.0

    def test_without_evidence_models_stay_as_they_are(self, plans):
        # Runs that take exactly what the models say.
        plain = []
        for plan in plans[:6]:
            price = price_step(plan, COSTS)
            measured = MeasuredStep(
                step_ms=price.step_ms.value,
                part_ms={part: price.part_ms(part) for part in StepPart},
                work_ms_R=kernels_of({part: price.work[part][:, 0] for part in KERNEL_PARTS}),
            )
            plain.append(CalibrationRun(plan=plan, costs=COSTS, measured=measured))
        model = calibrate_step(plain, "cpu")
        for part in KERNEL_PARTS:
            weights = model.fitted[part, "analytic:cpu"]
            assert weights == pytest.approx(plain_coefficients(part, "cpu"), abs=1e-3), part
        for run in plain:
            price = price_step(run.plan, replace(COSTS, step=model))
            assert price.step_ms.value == pytest.approx(run.measured.step_ms, rel=0.01)

    def test_times_of_collectives_are_of_the_links_of_the_runs(self, model, plans):
        """Processes of one machine send through its memory, which says nothing of the links between nodes."""
        here = plans[0].topology
        assert links_of(here) <= set(model.card.links)
        node = here.levels[0]
        slow = Link(bytes_per_s=1e8, latency_s=1e-4)
        across = Level(name="cluster", size=2 * node.size, all_to_all=slow, all_reduce=slow)
        cluster = replace(here, world_size=across.size, levels=(node, across))
        more = replace(here, world_size=8, levels=(replace(node, size=8),))
        for (part, basis), weights in model.fitted.items():
            assert model.coefficients(part, basis, here) == model.coefficients(part, basis, more) == weights
            elsewhere, wire = np.array(model.coefficients(part, basis, cluster)), is_wire(part)
            assert elsewhere[~wire] == pytest.approx(np.array(weights)[~wire])
            assert elsewhere[wire] == pytest.approx(1.0)

    def test_work_that_virtual_time_tells_rank_by_rank_is_what_parts_are_fitted_to(self, plans):
        found = []
        for plan in plans[:6]:
            price = price_step(plan, COSTS)
            # Collectives take what their model says; ranks work twice of all that they are thought to.
            plain = {part: np.array(plain_coefficients(part, "cpu")) for part in StepPart}
            own = {
                part: 2 * np.where(is_wire(part), 0, price.work[part]) @ plain[part] * np.ones(2) for part in StepPart
            }
            work = tuple({part: float(ms_R[rank]) for part, ms_R in own.items()} for rank in range(2))
            measured = MeasuredStep(step_ms=2 * price.step_ms.value, part_ms={}, work_ms_R=work)
            found.append(CalibrationRun(plan=plan, costs=COSTS, measured=measured))
        model = calibrate_step(found, "cpu")
        for (part, _), weights in model.fitted.items():
            expected = np.where(is_wire(part), 1, 2) * plain_coefficients(part, "cpu")
            work = price_step(plans[0], COSTS).work[part]
            np.testing.assert_allclose(work @ weights, work @ expected, rtol=0.05)
            assert np.array(weights)[is_wire(part)] == pytest.approx(1.0)

    def test_refuses_what_cannot_be_fitted(self, runs):
        with pytest.raises(ModelError, match="runs of at least 4 plans to calibrate on, got 6 of 3"):
            calibrate_step([*runs[:3], *runs[:3]], "cpu")
        in_virtual_time = replace(runs[0].measured, work_ms_R=(dict.fromkeys(StepPart, 1.0),) * 2)
        with pytest.raises(ModelError, match="all be in real time, or all in virtual time"):
            calibrate_step([replace(runs[0], measured=in_virtual_time), *runs[1:]], "cpu")
        broken = replace(runs[0], measured=replace(runs[0].measured, step_ms=float("nan")))
        with pytest.raises(ModelError, match="step_ms: must be finite"):
            calibrate_step([broken, *runs[1:]], "cpu")


class TestPromotion:
    def compare(self, old, new, runs, tmp_path):
        registry = Registry(tmp_path)
        old.publish(registry)
        return publish_version(registry, step_version(new, runs), PublishOptions())

    @pytest.mark.parametrize("num_seen", [0, 4])
    def test_plans_that_the_other_side_was_not_fitted_to_are_held_out(self, plans, num_seen, tmp_path):
        rng = np.random.default_rng(7)
        fresh = [synthetic(plan, float(np.exp(rng.normal(0, 0.02)))) for plan in plans[:8]]
        # Of plans of its own alone, or of some of these.
        old = calibrate_step(fresh[:num_seen] or [synthetic(plan, 1.1) for plan in plans[8:]], "cpu")
        new = calibrate_step(fresh, "cpu")
        published = self.compare(old, new, fresh, tmp_path)
        (comparison,) = published.comparisons
        assert (comparison.num_pairs, comparison.of, published.alias) == (8, "plans", "production")
        own_P = [*step_errors(fresh, "cpu", new)[:num_seen], *step_errors(fresh, "cpu")[num_seen:]]
        assert comparison.difference == pytest.approx(np.mean(own_P - step_errors(fresh, "cpu", old)))
        assert new.card.metrics["mean_error"] == pytest.approx(step_errors(fresh, "cpu").mean())

    def test_a_calibration_on_few_disturbed_runs_is_refused(self, model, plans, tmp_path):
        few = [synthetic(plan, noise) for plan, noise in zip(plans[:6], (1.0, 1.0, 1.0, 1.0, 1.0, 1.5), strict=True)]
        published = self.compare(model, calibrate_step(few, "cpu"), few, tmp_path)
        assert published.worse
        assert Registry(tmp_path).production_id(CalibratedStep.kind, "cpu") != published.id


class TestRegistry:
    def test_round_trip(self, model, runs, tmp_path):
        registry = Registry(tmp_path)
        version = model.publish(registry)
        loaded = CalibratedStep.load(registry, "cpu")
        assert (loaded.card, loaded.fitted) == (model.card, model.fitted)
        assert loaded.name == f"calibrated:cpu@{version} (overlap: none)"
        # What planning finds.
        assert plan_costs(runs[0].plan, tmp_path).step.name == loaded.name

    def test_planning_says_that_runs_are_of_another_machine(self, model, runs, tmp_path):
        card = replace(model.card, measured_on=MeasuredMachine(device_name="Abacus"))
        CalibratedStep(model.fitted, card).publish(Registry(tmp_path))
        costs = plan_costs(runs[0].plan, tmp_path)
        [note] = [one for one in machine_notes(costs, "cpu") if one.startswith("calibrated:cpu@")]
        assert note.startswith(f"{costs.step.name}: prices are of Abacus, this machine is ")
        assert note.endswith("; `autoshard train step --calibrate N` fits them to runs")
        # Keys of single machines have no names.
        assert "Abacus" not in str(machine_notes(costs, "cpu:amd-25-17-avx512"))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"schema": "autoshard.step-model/9"}, "schema: must be autoshard"),
            ({"features": {}}, "features: was trained on other features"),
            ({"overlap": "all"}, "overlap: must be one of none, neo, neo_prefetch, pipelined"),
            ({"interval_scale": -1.0}, "interval_scale"),
            ({"metrics": {"mae": "small"}}, "metrics.mae: must be a finite number"),
            ({"engine": None}, "engine: must be a text"),
        ],
    )
    def test_refuses_foreign_cards(self, model, tmp_path, change, message):
        Registry(tmp_path).publish(CalibratedStep.kind, "cpu", model.tensors(), model.card.to_json() | change)
        with pytest.raises(ModelError, match=message):
            CalibratedStep.load(Registry(tmp_path), "cpu")

    @pytest.mark.parametrize(
        ("key", "weights"),
        [
            ("input/learned:cpu", [1.0]),
            ("input/learned:cpu", [1e300] * 4),
            ("input/learned:cpu", [1] * 4),
            ("input/learned:cpu", [np.nan] * 4),
            ("nothing/x", [1.0]),
            ("input", [1.0] * 4),
        ],
    )
    def test_refuses_impossible_weights(self, model, tmp_path, key, weights):
        Registry(tmp_path).publish(CalibratedStep.kind, "cpu", {key: np.array(weights)}, model.card.to_json())
        with pytest.raises(ModelError):
            CalibratedStep.load(Registry(tmp_path), "cpu")

    def test_cards_are_json(self, model):
        written = json.loads(json.dumps(model.card.to_json()))
        assert StepCard.from_json(written, "card") == model.card


class TestRegression:
    def test_finds_the_truth_and_never_goes_below_zero(self):
        rng = np.random.default_rng(0)
        features_SF = rng.uniform(0, 10, (200, 4))
        truth_F = np.array([2.0, 0.0, 0.5, 1.0])
        measured_S = features_SF @ truth_F * np.exp(rng.normal(0, 0.01, 200))
        fitted_F = fit_nonnegative(features_SF, measured_S, strength_F=1e-6)
        np.testing.assert_allclose(fitted_F, truth_F, atol=0.05)
        assert (fit_nonnegative(np.stack([measured_S, features_SF[:, 0]], 1), measured_S / 2) >= 0).all()

    def test_unused_features_keep_their_prior(self):
        features_SF = np.array([[1.0, 0.0], [2.0, 0.0]])
        fitted_F = fit_nonnegative(features_SF, np.array([3.0, 6.0]), np.array([1.0, 0.7]), 1e-6)
        np.testing.assert_allclose(fitted_F, [3.0, 0.7], rtol=1e-3)

    def test_intervals_count_the_next_sample_in(self):
        # Of 39 samples the outer 5% ends are the 2nd and the 38th; of 5, the first and the last.
        assert quantile_bounds(np.arange(1, 40) / 20) == (0.1, 1.9)
        assert quantile_bounds(np.array([0.9, 1.0, 1.1, 0.8, 1.3])) == (0.8, 1.3)


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_real_runs_calibrate(pool, tmp_path):
    """Plans of two processes: parts add up, and the model that is fitted to them prices them."""
    topology = local_topology("cpu", 2, 1 << 30)
    trials = draw_trials(MIN_PLANS, seed=3, planners=["random", LOPSIDED], num_tables=(8, 16), batch_sizes=[64, 128])
    done = []
    planned = (plan_trial(trial, pool, topology, tmp_path) for trial in trials)
    seeds = [trial.seed for trial in trials]
    runs = run_calibration(planned, seeds, registry=tmp_path, steps=5, advance=done.append)
    assert sum(done) == len(runs) == MIN_PLANS
    for run in runs:
        assert sum(run.measured.part_ms.values()) == pytest.approx(run.measured.step_ms, rel=1e-6)
        assert set(run.measured.part_ms) == set(PART_FEATURES)
        assert all(ms >= 0 for ms in run.measured.part_ms.values())
    model = calibrate_step(runs, "cpu")
    assert all(price_step(run.plan, replace(run.costs, step=model)).step_ms.value > 0 for run in runs)
