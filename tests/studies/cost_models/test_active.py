import json
import shutil

import pytest

from autoshard.core.errors import FormatError, InvalidOptionError, SampleStoreError, UnknownNameError
from autoshard.formats.stores.samples import read_samples, write_samples
from costmodel.kernel.training import CostTrainingOptions
from studies.cost_models.active import (
    SCHEMA,
    ActiveOptions,
    Progress,
    Round,
    active_folder,
    collect,
    read_progress,
    run_active_loop,
)
from studies.cost_models.active_report import active_result, curve_figure


@pytest.fixture
def own_store(store, tmp_path):
    return shutil.copytree(store, tmp_path / "samples")


@pytest.fixture
def make_options(own_store):
    def make(**changes):
        training = CostTrainingOptions(num_updates=30, batch_size=64)
        # Too short to collect anything: what is trained on is what the store holds.
        usual = {"store": own_store, "seconds": 1.0, "device": "cpu", "training": training, "compare_random": False}
        return ActiveOptions(**usual | changes)

    return make


@pytest.fixture
def progress():
    rounds = [
        Round(arm=arm, num_samples=size, relative_error=error, mae_ms=0.1, kendall_tau=0.9, collect_s=10.0)
        for arm, size, error in (
            ("uncertain", 100, 0.1),
            ("random", 100, 0.1),
            ("uncertain", 200, 0.05),
            ("random", 210, 0.07),
        )
    ]
    return Progress(device="cpu", held_out=("a", "b"), rounds=tuple(rounds))


class TestWithoutCollecting:
    def test_held_out_sets_are_never_trained_on(self, make_options, own_store):
        said = []
        progress, trained = run_active_loop(make_options(), said.append)
        samples = read_samples(own_store, "cpu").samples
        num_held_out = sum(sample.set_id in progress.held_out for sample in samples)
        (found,) = progress.rounds
        assert len(progress.held_out) == 80
        assert found.num_samples == len(samples) - num_held_out
        counts = trained.model.card.training["num_samples"] + trained.model.card.metrics.num_samples
        assert counts == found.num_samples
        assert len(said) == 1
        assert f"{found.num_samples} samples, held-out error {found.relative_error:.2%}" in said[0]

    def test_a_later_loop_goes_on(self, make_options, own_store, samples):
        first, _ = run_active_loop(make_options(), str)
        assert run_active_loop(make_options(seed=5), str)[0] == first

        more = [sample for sample in samples.samples[:40] if sample.set_id not in first.held_out][:10]
        write_samples(
            own_store,
            [type(sample)(**{**fields_of(sample), "forward_ms": sample.forward_ms * 1.01}) for sample in more],
        )
        later, _ = run_active_loop(make_options(), str)
        assert later.rounds[:1] == first.rounds
        assert later.rounds[1].num_samples == first.rounds[0].num_samples + 10
        assert later.held_out == first.held_out

    def test_random_has_a_store_of_its_own(self, make_options, own_store):
        progress, _ = run_active_loop(make_options(compare_random=True), str)
        first, second = progress.of("uncertain"), progress.of("random")
        assert first[0].relative_error == second[0].relative_error
        copy = active_folder(own_store, "cpu") / "random"
        assert len(read_samples(copy, "cpu")) == len(read_samples(own_store, "cpu"))

    def test_damaged_progress_is_named(self, make_options, own_store):
        file = active_folder(own_store, "cpu") / "rounds.json"
        file.parent.mkdir()
        file.write_text("{", encoding="utf-8")
        with pytest.raises(FormatError, match=r"rounds\.json.*delete it"):
            run_active_loop(make_options(), str)

    @pytest.mark.parametrize(("change", "field"), [({"seconds": 0.0}, "seconds"), ({"rounds": 0}, "rounds")])
    def test_options_that_make_no_sense(self, make_options, change, field):
        with pytest.raises(InvalidOptionError, match=field):
            make_options(**change)


def fields_of(sample):
    return {name: getattr(sample, name) for name in sample.__dataclass_fields__}


def test_what_the_collector_refuses_is_passed_on(make_options, own_store):
    with pytest.raises(UnknownNameError, match="no-such-tables"):
        collect(own_store, "random", 5.0, make_options(tables="no-such-tables"), None)


class TestReport:
    def test_curves(self, progress):
        figure = curve_figure(progress)
        assert [list(curve.x) for curve in figure.data] == [[100, 200], [100, 210]]
        assert [list(curve.y) for curve in figure.data] == [[10, 5], [10, pytest.approx(7)]]

    def test_numbers(self, progress, tmp_path):
        result = active_result(progress)
        file = tmp_path / "rounds.json"
        file.write_text(json.dumps(result.document), encoding="utf-8")
        assert read_progress(file) == progress
        assert result.document["schema"] == SCHEMA
        assert result.document["rounds"][3]["relative_error"] == 0.07
        assert read_progress(tmp_path / "none.json") is None


@pytest.mark.slow
class TestWithCollector:
    """Real measurements on this machine's CPU."""

    def test_from_an_empty_store(self, tmp_path):
        training = CostTrainingOptions(num_updates=100, batch_size=64)
        options = ActiveOptions(
            store=tmp_path / "store",
            seconds=240.0,
            device="cpu",
            rounds=1,
            compare_random=False,
            scale=1024,
            max_tables=4,
            training=training,
        )
        progress, _ = run_active_loop(options, str)
        sizes = [found.num_samples for found in progress.rounds]
        assert len(sizes) == 2
        assert sizes[0] < sizes[1]
        sources = {sample.source for sample in read_samples(tmp_path / "store", "cpu").samples}
        assert "uncertain" in sources

    def test_too_little_time(self, tmp_path):
        options = ActiveOptions(store=tmp_path / "store", seconds=15.0, device="cpu", rounds=10)
        with pytest.raises(SampleStoreError):
            run_active_loop(options, str)
