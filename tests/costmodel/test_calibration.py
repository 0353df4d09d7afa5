"""Calibrated models: what few samples change, what none leave, intervals from the first sample on, the command."""

import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from autoshard.core.choices import Device
from autoshard.core.errors import ModelError, SampleStoreError
from autoshard.core.machine import MeasuredMachine
from autoshard.formats import load_tables
from autoshard.formats.stores.measured_samples import MACHINE_COLUMNS
from autoshard.formats.stores.samples import read_samples, write_samples
from autoshard.hardware import this_processor
from autoshard.planning import machine_note
from costmodel.kernel.calibrate_command import (
    CalibrateOptions,
    _usual_scale,
    calibrated_version,
    known_models,
    refresh_in_use,
    scale_for,
)
from costmodel.kernel.calibration import (
    FARTHEST,
    CalibrationOptions,
    calibrate,
    drift_of,
    nearest_base,
    refreshed,
    scaled_to,
    uncalibrated,
)
from costmodel.kernel.comparison import kernel_errors
from costmodel.kernel.learned import LearnedCostModel
from costmodel.kernel.metrics import PricedSamples
from costmodel.registry.listing import listed_versions
from costmodel.registry.promotion import publish_version
from costmodel.registry.publish_options import PublishOptions
from costmodel.registry.versions import SHIPPED_VARIABLE, Registry

QUICK = CalibrationOptions.of_updates(150)
#: Where it does not matter how well a model is fitted.
FEWEST = replace(CalibrationOptions.of_updates(15), num_folds=2)


@pytest.fixture(scope="module")
def slower(dataset):
    """The samples as a machine measures them whose forward pass takes 3 times and whose backward pass 5 times."""
    return replace(dataset, latency_ms_SO=dataset.latency_ms_SO * [3.0, 5.0], machine=MeasuredMachine(device_name="B"))


@pytest.fixture(scope="module")
def base(trained):
    return trained.model


def error_of(model, dataset):
    return np.mean(PricedSamples.of(model.predictor, dataset).errors_S)


def coverage_of(model, dataset):
    priced = PricedSamples.of(model.predictor, dataset)
    low_S, high_S = model.card.interval.factors(priced.spread_S)
    return np.mean((low_S <= priced.ratio_S) & (priced.ratio_S <= high_S))


def predicted_ms(model, dataset):
    return PricedSamples.of(model.predictor, dataset).ms_SO


class TestCalibrate:
    def test_a_slower_machine_is_met_with_forty_samples(self, base, slower):
        found = calibrate(base, slower.take(np.arange(40)), options=QUICK, seed=1)
        rest = slower.take(np.arange(40, len(slower)))
        at_home = error_of(base, replace(rest, latency_ms_SO=rest.latency_ms_SO / [3.0, 5.0]))
        assert error_of(base, rest) > 0.7
        assert error_of(found.model, rest) < 2 * at_home
        assert coverage_of(found.model, rest) > 0.75

    def test_the_card_says_what_it_is_of(self, base, slower):
        found = calibrate(base, slower.take(np.arange(40)), device="cpu:b", options=FEWEST)
        card = found.model.card
        assert (card.device, card.measured_on) == ("cpu:b", MeasuredMachine(device_name="B"))
        assert card.training["num_samples"] == card.metrics.num_samples == 40
        assert card.training["calibrated_from"] == base.version_id
        assert card.metrics.relative_error == pytest.approx(found.priced.errors_S.mean())
        assert type(card).from_json(card.to_json(), "card") == card

    def test_it_is_deterministic(self, base, slower):
        first, again = (calibrate(base, slower.take(np.arange(20)), options=FEWEST, seed=4).model for _ in range(2))
        assert first.card == again.card
        assert all((first.tensors()[name] == again.tensors()[name]).all() for name in first.tensors())

    def test_updates_are_counted(self, base, slower):
        done = []
        calibrate(base, slower.take(np.arange(20)), options=FEWEST, advance=done.append)
        assert sum(done) == FEWEST.num_updates(20)
        assert CalibrationOptions().num_updates(0) == 0

    def test_one_sample_scales_and_its_interval_is_wide(self, base, slower):
        found = calibrate(base, slower.take(np.array([3])), options=QUICK)
        spread_S = PricedSamples.of(found.model.predictor, slower).spread_S
        low_S, high_S = found.model.card.interval.factors(spread_S)
        assert np.median(low_S) < 1 / 3
        assert np.median(high_S) > 3
        assert error_of(found.model, slower) < error_of(base, slower)

    def test_kinds_of_either_are_priced(self, base, slower):
        coverage = replace(base.card.coverage, kinds=("fused/hbm/fp16/sgd/sum",))
        other = LearnedCostModel(base.tensors(), replace(base.card, coverage=coverage))
        found = calibrate(other, slower.take(np.arange(5)), options=FEWEST)
        assert found.model.card.coverage.kinds == ("fused/hbm/fp16/sgd/sum", *slower.coverage.kinds)

    def test_a_repeated_set_is_in_one_fold(self, base, slower):
        twice = slower.take(np.repeat(np.arange(12), 2))
        found = calibrate(base, twice, options=FEWEST)
        assert (found.priced.ms_SO[::2] == found.priced.ms_SO[1::2]).all()


def test_a_refreshed_model_is_the_same_at_another_speed(base, slower):
    model = calibrate(base, slower.take(np.arange(40)), options=FEWEST).model
    later = replace(slower.take(np.arange(40, 80)), latency_ms_SO=slower.latency_ms_SO[40:80] * 1.25)
    found = refreshed(model, later)
    ratio_SO = predicted_ms(found, later) / predicted_ms(model, later)
    assert np.median(later.kernel_ms / predicted_ms(found, later).sum(axis=1)) == pytest.approx(1, abs=0.02)
    assert np.ptp(ratio_SO, axis=0) == pytest.approx([0, 0], abs=0.05)
    assert found.card.training["refreshed_on"] == 40
    assert model.card.interval.drift < found.card.interval.drift
    assert found.card.interval.drift < refreshed(model, later.take(np.arange(5))).card.interval.drift
    assert found.card.training["calibrated_from"] == model.card.training["calibrated_from"]
    # However often: what an earlier refresh could not tell is not in the intervals of a later one.
    assert refreshed(found, later).card.interval.drift == pytest.approx(found.card.interval.drift, rel=0.01)
    assert type(found.card).from_json(found.card.to_json(), "card") == found.card


def test_intervals_hold_when_the_machine_is_slower_an_hour_later(base, slower):
    model = calibrate(base, slower.take(np.arange(40)), options=QUICK).model
    rest = slower.take(np.arange(40, len(slower)))
    later = replace(rest, latency_ms_SO=rest.latency_ms_SO * np.exp(drift_of(slower) * 0.7))
    of_the_hour = LearnedCostModel(
        model.tensors(), replace(model.card, interval=replace(model.card.interval, drift=0.0))
    )
    assert coverage_of(of_the_hour, later) < coverage_of(model, later)
    assert coverage_of(model, later) > 0.75


def test_machines_drift_as_their_speeds_of_one_minute_differ(slower):
    steady, restless = (drift_of(replace(slower, speed_spread=spread)) for spread in (0.0, 0.06))
    assert 0.05 < steady < 0.1 < restless


def test_scaling_is_one_factor_per_pass(base, slower):
    model = scaled_to(base, slower)
    ratio_SO = predicted_ms(model, slower) / predicted_ms(base, slower)
    assert np.median(slower.latency_ms_SO / predicted_ms(model, slower), axis=0) == pytest.approx([1, 1], rel=0.05)
    assert np.median(ratio_SO[:, 1] / ratio_SO[:, 0]) == pytest.approx(5 / 3, rel=0.2)


def test_without_samples_prices_stay_and_intervals_are_those_of_any_machine(base, dataset):
    model = uncalibrated(base)
    assert predicted_ms(model, dataset).tolist() == predicted_ms(base, dataset).tolist()
    low_S, high_S = model.card.interval.factors(PricedSamples.of(model.predictor, dataset).spread_S)
    assert np.log(high_S) == pytest.approx(np.full(len(dataset), FARTHEST), rel=1e-6)
    assert np.log(low_S) == pytest.approx(np.full(len(dataset), -FARTHEST), rel=1e-6)


def test_the_nearest_model_is_the_most_proportional_one(base, slower):
    other = LearnedCostModel({name: value * 0.5 for name, value in base.tensors().items()}, base.card)
    assert nearest_base((other, base), slower) is base


@pytest.fixture
def own_samples(samples, tmp_path):
    """The samples, as if they had been measured on the machine at hand."""
    here = this_processor()
    facts = {name: getattr(here, name) for name in ("device_name", *MACHINE_COLUMNS)}
    folder = tmp_path / "samples"
    write_samples(folder, [replace(one, sample_id="", set_id="", **facts) for one in samples.samples])
    return folder


@pytest.mark.parametrize(
    ("tables", "scale"), [("criteo-kaggle", 1), ("mlperf-dlrm-v2", range(16, 4096))], ids=["kaggle", "mlperf"]
)
def test_long_sets_are_divided_so_that_a_minute_holds_enough(tables, scale, base):
    found = scale_for(load_tables(tables), (base,))
    assert found in (scale if isinstance(scale, range) else (scale,))
    assert found.bit_count() == 1


@pytest.mark.parametrize(
    ("device", "num_gpus", "is_divided"), [("auto", 0, True), ("auto", 1, False), ("cpu", 1, True), ("cuda", 1, False)]
)
def test_nothing_is_divided_where_a_gpu_measures(device, num_gpus, is_divided, base, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    monkeypatch.setattr("costmodel.kernel.calibrate_command.known_models", lambda *_: (base,))
    options = CalibrateOptions(tables="mlperf-dlrm-v2", device=Device(device))
    assert (_usual_scale(options, Registry(Path("nowhere"))) > 1) == is_divided


class TestRegistries:
    @pytest.fixture(autouse=True)
    def shipped(self, tmp_path, monkeypatch):
        monkeypatch.setenv(SHIPPED_VARIABLE, str(tmp_path / "shipped"))
        return Registry(tmp_path / "shipped")

    def test_known_models_are_of_the_family(self, base, shipped, tmp_path):
        models = Registry(tmp_path / "registry")
        with pytest.raises(ModelError, match="no model of cpu is known to start from"):
            known_models(models, "cpu")
        version = base.publish(shipped)
        models.publish("cost", "cpu:b", base.tensors(), replace(base.card, device="cpu:b", scale_ms=1.5).to_json())
        models.publish("cost", "a100", base.tensors(), replace(base.card, device="a100").to_json())
        assert {model.card.device for model in known_models(models, "cpu")} == {"cpu", "cpu:b"}
        assert version in {model.version_id for model in known_models(models, "cpu:c")}

    def test_one_name_has_models_of_several_machines(self, base, shipped, tmp_path, monkeypatch):
        models = Registry(tmp_path / "registry")
        made = Registry(shipped.root, author="autoshard")
        versions = {}
        for scale_ms, core in ((1.0, "intel-6-143-avx512"), (4.0, "amd-25-17-avx512")):
            machine = MeasuredMachine(device_name="Processor", core=core, cache_bytes=2**25)
            card = replace(base.card, scale_ms=scale_ms, measured_on=machine)
            versions[core] = LearnedCostModel(base.tensors(), card).publish(made)
        assert {model.version_id for model in known_models(models, "cpu")} == set(versions.values())
        assert len(known_models(models, "cpu")) == 2
        newest = versions["amd-25-17-avx512"]
        for core, expected in (*versions.items(), ("arm-0x41-0xd40-sve", newest)):
            here = MeasuredMachine(device_name="Processor", core=core, cache_bytes=2**25)
            monkeypatch.setattr("autoshard.hardware.this_processor", lambda here=here: here)
            in_use = LearnedCostModel.in_use(models.root, "cpu")
            assert in_use.version_id == expected
            used = [item.id for item in listed_versions(models) if item.used]
            assert used == [expected]
            assert (machine_note(in_use, "cpu") == "") is (core in versions)

    def test_a_calibrated_model_stands_for_the_one_that_it_came_from(self, base, slower, shipped, tmp_path):
        models = Registry(tmp_path / "registry")
        version = base.publish(shipped)
        (start,) = known_models(models, "cpu")
        calibrate(start, slower.take(np.arange(8)), options=FEWEST).model.publish(models)
        assert [model.version_id for model in known_models(models, "cpu")] == [version]

    def test_one_whose_origin_is_gone_is_no_start(self, base, slower, shipped, tmp_path):
        models = Registry(tmp_path / "registry")
        former = base.publish(shipped)
        (start,) = known_models(models, "cpu")
        calibrate(start, slower.take(np.arange(8)), options=FEWEST).model.publish(models)
        version = LearnedCostModel(base.tensors(), replace(base.card, scale_ms=1.5)).publish(shipped)
        shutil.rmtree(shipped.root / "cost" / "cpu" / former)
        assert [model.version_id for model in known_models(models, "cpu")] == [version]

    def test_it_replaces_the_shipped_model_where_it_is_better(self, base, slower, shipped, tmp_path):
        models = Registry(tmp_path / "registry")
        base.publish(shipped)
        (start,) = known_models(models, "cpu")
        version = calibrated_version(calibrate(start, slower.take(np.arange(40)), options=QUICK))
        published = publish_version(models, version, PublishOptions(registry=models.root))
        (comparison,) = published.comparisons
        assert comparison.difference < -0.5
        assert models.production_id("cost", "cpu") == published.id
        again = publish_version(
            models,
            calibrated_version(calibrate(start, slower.take(np.arange(50)), options=FEWEST)),
            PublishOptions(registry=models.root),
        )
        assert "it was calibrated, too" in again.notes[0]
        assert models.production_id("cost", "cpu") == again.id

    def test_it_is_compared_on_samples_that_neither_was_trained_on(self, trained, dataset, tmp_path):
        models = Registry(tmp_path / "registry")
        version = trained.model.publish(models)
        start = LearnedCostModel.load(models, "cpu", version)
        calibration = calibrate(start, dataset, options=FEWEST)
        (comparison,) = publish_version(
            models, calibrated_version(calibration), PublishOptions(registry=models.root)
        ).comparisons
        is_held_out_S = np.isin(dataset.set_S, trained.held_out.set_S)
        expected_S = (calibration.priced.errors_S - kernel_errors(start, dataset))[is_held_out_S]
        assert comparison.num_pairs == len(trained.held_out)
        # So are its error and its interval.
        assert calibration.model.card.metrics.num_samples == len(trained.held_out)
        assert calibration.model.card.metrics.relative_error == pytest.approx(
            calibration.priced.errors_S[is_held_out_S].mean()
        )
        assert comparison.difference == pytest.approx(expected_S.mean())

    def test_a_refresh_scales_what_is_in_use(self, base, own_samples, shipped, tmp_path):
        models = Registry(tmp_path / "registry")
        LearnedCostModel(base.tensors(), replace(base.card, measured_on=MeasuredMachine(device_name="B"))).publish(
            shipped
        )
        since = min(one.collected_at for one in read_samples(own_samples).samples)
        with pytest.raises(ModelError, match=r"--refresh scales a model of .*, and learned:cpu@.* is of B: run"):
            refresh_in_use(own_samples, "cpu", models, since=since)
        machine = read_samples(own_samples).machine
        # Half as slow as the samples: another day, say.
        card = replace(base.card, measured_on=machine, scale_ms=base.card.scale_ms / 2)
        former = LearnedCostModel(base.tensors(), card).publish(models)
        model, version = refresh_in_use(own_samples, "cpu", models, since=since)
        assert model.card.training["refreshed_by"] == pytest.approx(2, rel=0.1)
        published = publish_version(models, version, PublishOptions(registry=models.root))
        assert published.comparisons[0].difference < -0.3
        assert models.production_id("cost", "cpu") == published.id != former
        with pytest.raises(SampleStoreError, match="none of its 400 samples was measured now on this machine"):
            refresh_in_use(own_samples, "cpu", models, since=datetime.now(UTC))

    @pytest.mark.slow
    def test_the_command_measures_fits_and_goes_on(self, base, shipped, tmp_path, run, own_samples, published):
        base.publish(shipped)
        # Samples that are surely not noisy: what is measured here may be, on a busy machine.
        registry, own = tmp_path / "registry", own_samples
        arguments = ["calibrate", "--registry", registry, "--store", own, "--seconds", 2, "--updates", 20, "--json"]
        results = []
        for _ in range(2):
            results.append(published("calibrated", run(*arguments)[0]))
        first, again = results
        samples = read_samples(own).samples
        assert len(samples) == 400 + first["num_measured"] + again["num_measured"]
        assert len(samples) > 400
        assert samples[-1].memory_bytes > 0
        assert again["training"]["num_samples"] >= first["training"]["num_samples"] >= 400
        assert again["training"]["calibrated_from"] == first["training"]["calibrated_from"]
        model = LearnedCostModel.load(Registry(registry), "cpu", first["id"])
        assert model.card.training == first["training"]
        assert model.card.measured_on.memory_bytes_per_s > 1e8
        arguments = ["calibrate", "--refresh", "--registry", registry, "--store", own, "--json"]
        refresh = published("calibrated", run(*arguments)[0])
        assert refresh["training"]["refreshed_from"] == again["id"]
        assert refresh["training"]["refreshed_on"] >= 3

    @pytest.mark.slow
    def test_the_table_says_what_was_fitted(self, base, shipped, tmp_path, run, own_samples):
        version = base.publish(shipped)
        arguments = ["--store", own_samples, "--seconds", 1, "--updates", 40, "--registry", tmp_path / "registry"]
        shown = run("calibrate", *arguments)[0]
        for text in ("mean relative error", "90% interval holds", version, "measured on", "in topologies", "GB/s"):
            assert text in shown

    @pytest.mark.slow
    def test_without_a_model_to_start_from(self, tmp_path, run):
        arguments = ["--store", tmp_path / "samples", "--seconds", 1, "--registry", tmp_path / "registry"]
        assert "no model of cpu is known to start from" in run("calibrate", *arguments, code=1)[1]
