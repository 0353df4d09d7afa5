"""`autoshard train step`: what the store holds is trained, and planning finds it."""

import json
import shutil

import pytest
import typer
from typer.testing import CliRunner

from autoshard.commands.options import as_typer_function
from autoshard.core import DenseLayers
from autoshard.core.dense import DenseKind, DenseShape
from autoshard.core.errors import InvalidOptionError, SampleStoreError
from autoshard.evaluation import evaluate
from autoshard.formats.metasyn import metasyn
from autoshard.formats.stores.collective_samples import (
    COLLECTIVE_SAMPLES,
)
from autoshard.formats.stores.dense_samples import DENSE_SAMPLES
from autoshard.planning import Risk, make_costs, make_plan
from autoshard.whatif.trials import draw_trials, local_topology, plan_trial
from costmodel.registry.promotion import publish_version
from costmodel.registry.publish_options import PublishOptions
from costmodel.registry.versions import Registry
from costmodel.step.collective_model import LearnedCollectives
from costmodel.step.command import train_step
from costmodel.step.comparison import collective_version, dense_version
from costmodel.step.dense_model import LearnedDense
from tests import builders as make


def collective(num_bytes):
    what = make.collective(bytes_per_rank=num_bytes)
    return make.collective_sample(what, nproc=2, latency_ms=0.5 + num_bytes * 1e-6)


def dense(batch_size):
    return make.dense_sample(
        DenseShape(kind=DenseKind.BOTTOM_MLP, batch_size=batch_size, widths=(13, 64, 16)),
        forward_ms=0.1 + batch_size * 1e-3,
        backward_ms=0.2 + batch_size * 2e-3,
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    COLLECTIVE_SAMPLES.write(folder, [collective(2**power) for power in range(10, 26)])
    DENSE_SAMPLES.write(folder, [dense(32 * number) for number in range(1, 20)])
    return folder


def train(*words):
    program = typer.Typer()
    program.command()(as_typer_function(train_step))
    return CliRunner().invoke(program, [*map(str, words), "--json"])


@pytest.fixture(scope="module")
def registry(store, tmp_path_factory, published):
    folder = tmp_path_factory.mktemp("registry")
    outcome = train("--store", store, "--registry", folder)
    assert outcome.exit_code == 0, outcome.output
    assert [one["kind"] for one in published("trained-steps", outcome.stdout)["models"]] == ["collective", "dense"]
    return folder


@pytest.fixture
def task():
    tables = metasyn().scaled(4096)
    (trial,) = draw_trials(1, seed=0, planners=["cost-greedy"], num_tables=(8, 8), batch_sizes=[64])
    return tables, local_topology("cpu", 2, 1 << 30), trial


def copied(registry, tmp_path):
    return Registry(shutil.copytree(registry, tmp_path / "copy"))


#: Tensors that times are proportional to.
SCALES = {"collective": "coefficients", "dense": "terms_F"}


def spoil(models, kind):
    """Has production name a model that predicts twice as long times as it did."""
    stored = models.load(kind, "cpu")
    tensors = {key: value * 2 if key.endswith(SCALES[kind]) else value for key, value in stored.tensors.items()}
    return models.publish(kind, "cpu", tensors, stored.card)


@pytest.mark.parametrize("kind", SCALES)
def test_a_better_model_replaces_the_production_one(registry, store, tmp_path, kind, published):
    models = copied(registry, tmp_path)
    good, bad = models.production_id(kind, "cpu"), spoil(models, kind)
    outcome = train("--store", store, "--registry", models.root)
    (found,) = [one for one in published("trained-steps", outcome.stdout)["models"] if one["kind"] == kind]
    assert (found["id"], found["promoted"]) == (good, True)
    (comparison,) = found["comparisons"]
    assert comparison["against"] == f"version {bad}"
    assert comparison["difference"] < -0.1
    assert models.production_id(kind, "cpu") == good


@pytest.mark.parametrize("kind", SCALES)
def test_a_worse_model_is_not_promoted(registry, store, tmp_path, kind):
    models = copied(registry, tmp_path)
    good = models.production_id(kind, "cpu")
    bad = models.load(kind, "cpu", spoil(models, kind))
    models.roll_back(kind, "cpu")
    if kind == "dense":
        version = dense_version(LearnedDense.from_stored(bad), DENSE_SAMPLES.read(store, "cpu"))
    else:
        version = collective_version(LearnedCollectives.from_stored(bad), COLLECTIVE_SAMPLES.read(store, "cpu"))
    published = publish_version(models, version, PublishOptions())
    assert [one.against for one in published.refused] == [f"version {good}"]
    assert models.production_id(kind, "cpu") == good


def test_a_model_that_lacks_what_was_measured_is_replaced(registry, store, tmp_path):
    models = copied(registry, tmp_path)
    stored = models.load("dense", "cpu")
    models.publish("dense", "cpu", {}, {**stored.card, "bounds": {}})
    outcome = train("--store", store, "--registry", models.root)
    found = json.loads(outcome.stdout)["models"][1]
    assert (found["id"], found["promoted"], found["comparisons"]) == (stored.id, True, [])
    assert "was not fitted to any bottom_mlp" in found["notes"][0]
    assert "was not fitted to any bottom_mlp" in outcome.stderr


def test_nothing_is_published_if_so_asked(store, tmp_path):
    outcome = train("--store", store, "--registry", tmp_path / "none", "--no-publish")
    assert [one["id"] for one in json.loads(outcome.stdout)["models"]] == [None, None]
    assert not (tmp_path / "none").exists()


def test_planning_finds_them_and_says_so(registry, task):
    pool, topology, trial = task
    plan = plan_trial(trial, pool, topology, registry)
    models = plan.provenance.models
    assert models["communication"].startswith("learned:cpu@")
    assert models["dense"].startswith("learned:cpu@")
    assert "step" not in models


def test_planners_can_ask_for_the_upper_end(registry, task):
    pool, topology, trial = task
    tables = plan_trial(trial, pool, topology, registry).tables
    assert isinstance(tables.dense, DenseLayers)
    usual, upper = (make_costs(tables, topology, registry, risk=risk) for risk in (Risk.MEAN, Risk.HIGH))
    plan = make_plan("cost-greedy", make.request(tables, topology, costs=upper, registry=registry))
    assert all(name.endswith("(upper end)") for name in plan.provenance.models.values())
    assert plan.predicted.step_ms.value > evaluate(plan, usual).step_ms.value


def test_says_what_it_lacks(tmp_path, store):
    for words, error, message in (
        (["--registry", tmp_path], InvalidOptionError, "needs a store"),
        (["--store", tmp_path, "--registry", tmp_path], SampleStoreError, "holds no samples of collectives or dense"),
        (["--store", store, "--registry", tmp_path, "--device", "h200"], SampleStoreError, "holds no samples of dev"),
        (["--registry", tmp_path, "--calibrate", 2], InvalidOptionError, "calibrate: must be 0, or at least 4"),
    ):
        outcome = train(*words)
        assert isinstance(outcome.exception, error)
        assert message in str(outcome.exception)
