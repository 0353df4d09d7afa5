"""Models trained while samples are collected: real measurements, real trainings of few updates."""

import shutil
import time
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.core.errors import InvalidOptionError
from autoshard.formats.stores.samples import read_samples
from autoshard.plugins import TrainingRound, find_trainer
from bench.collecting.collection import CollectedSamples
from bench.collecting.options import CollectOptions, SampleKind
from bench.collecting.retraining import collect_and_train
from bench.collecting.termination import Terminated

SAMPLES = Path(__file__).parents[1] / "data" / "samples"


@pytest.fixture
def options(tmp_path):
    return CollectOptions(store=tmp_path / "store", seconds=1.0, retrain=2, device="cpu")


def collected(asked, stretches, **counts):
    stretches.append(asked.registry)
    counts = {"added": {"random": 3}, "timed_share": 0.5, "num_noisy": 1, **counts}
    return CollectedSamples(kind=SampleKind.KERNELS, device="cpu", **counts)


def test_each_stretch_asks_the_model_of_the_one_before(options):
    stretches, trained = [], []

    def train(store, device, registry):
        trained.append((store, device, registry))
        registry.mkdir(parents=True, exist_ok=True)
        return TrainingRound(num_samples=3, relative_error=0.1)

    done = collect_and_train(options, "cpu", time.monotonic() + 1, lambda asked, _: collected(asked, stretches), train)
    registry = options.store / "models-cpu"
    assert stretches == [None, registry, registry]
    assert trained == [(options.store, "cpu", registry)] * 2
    assert (done.added, done.num_noisy, done.timed_share) == ({"random": 9}, 3, 0.5)


def test_stretches_share_the_time_that_is_left(options):
    ends = []

    def collect(asked, until):
        ends.append(until)
        return collected(asked, [])

    deadline = time.monotonic() + 300
    collect_and_train(options, "cpu", deadline, collect, lambda *_: TrainingRound(num_samples=1, relative_error=0.0))
    assert ends == sorted(ends)
    assert ends[-1] == pytest.approx(deadline)


def test_sigterm_ends_it_after_its_stretch(options):
    stretches = []
    done = collect_and_train(
        options, "cpu", time.monotonic() + 1, lambda asked, _: collected(asked, stretches, is_terminated=True), None
    )
    assert done.is_terminated
    assert len(stretches) == 1


def test_sigterm_during_training_keeps_what_was_collected(options):
    def train(*_):
        raise Terminated

    done = collect_and_train(options, "cpu", time.monotonic() + 1, lambda asked, _: collected(asked, []), train)
    assert done.is_terminated
    assert done.added == {"random": 3}


def test_too_few_samples_leave_the_model_as_it_is(options, capsys):
    stretches = []
    trainer = find_trainer("--retrain")
    collect_and_train(options, "cpu", time.monotonic() + 1, lambda asked, _: collected(asked, stretches), trainer)
    assert stretches == [None] * 3
    assert capsys.readouterr().err.count("No model is trained yet") == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"retrain": -1}, "retrain: must be at least 0, got -1"),
        ({"seconds": None, "num_samples": 5}, "retrain: needs --seconds"),
        ({"kinds": "dense"}, "retrain: needs --seconds, and kernels"),
        ({"ray": True}, "retrain: cannot be used with --ray"),
        ({"registry": Path("models")}, "retrain: cannot be used with --registry"),
        ({"retrain": 0, "ray": True, "kinds": "kernels,dense"}, "kinds: must be kernels with --ray, got"),
        ({"kinds": "kernels,kernels"}, "kinds: must be some of kernels, dense, collectives, each once"),
        ({"strategies": "random=0"}, "strategies: must be names of strategies"),
    ],
)
def test_options_that_make_no_sense(tmp_path, changes, message):
    with pytest.raises(InvalidOptionError, match=message):
        CollectOptions(**{"store": tmp_path, "seconds": 1.0, "retrain": 1, **changes})


@pytest.mark.slow
def test_the_command_chooses_by_what_was_learned(tmp_path, capsys):
    # With samples to start from: on a busy machine most of a minute's samples are too noisy to train on.
    store = shutil.copytree(SAMPLES, tmp_path / "store")
    options = ("--scale", 1024, "--max-tables", 4, "--device", "cpu", "--rounds", 3, "--seconds", 60, "--retrain", 1)
    assert main(["collect", "--store", str(store), *map(str, options)]) == 0
    assert "held-out error" in capsys.readouterr().err
    assert "uncertain" in {sample.source for sample in read_samples(store, "cpu").samples}
