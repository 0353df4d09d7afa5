"""`autoshard train step`: what the store holds is trained, and planning finds it."""

import json
import logging
import shutil
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from autoshard.commands.options import as_typer_function
from autoshard.core import DenseLayers
from autoshard.core.dense import DenseKind, DenseShape
from autoshard.core.errors import InvalidOptionError, SampleStoreError
from autoshard.evaluation import evaluate
from autoshard.evaluation.communication import link_bytes
from autoshard.formats.metasyn import metasyn
from autoshard.formats.stores.collective_samples import COLLECTIVE_SAMPLES, GroupLevel, Operator
from autoshard.formats.stores.dense_samples import DENSE_SAMPLES
from autoshard.hardware import this_processor
from autoshard.planning import Risk, machine_notes, make_costs, make_plan
from autoshard.whatif.trials import draw_trials, local_topology, plan_trial
from costmodel.registry.promotion import publish_version
from costmodel.registry.publish_options import PublishOptions
from costmodel.registry.versions import Registry
from costmodel.step.collective_model import LearnedCollectives
from costmodel.step.collective_training import train_collective_model
from costmodel.step.command import train_step
from costmodel.step.comparison import collective_version, dense_version
from costmodel.step.dense_model import LearnedDense
from costmodel.step.dense_training import train_dense_model
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
    return models.publish(kind, "cpu", doubled(stored.tensors, kind), stored.card)


def doubled(tensors, kind):
    """Fits of twice as long times."""
    return {key: value * 2 if key.endswith(SCALES[kind]) else value for key, value in tensors.items()}


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
        layers = train_dense_model(DENSE_SAMPLES.read(store, "cpu"))
        version = dense_version(replace(layers, model=LearnedDense.from_stored(bad)))
    else:
        moved = train_collective_model(COLLECTIVE_SAMPLES.read(store, "cpu"))
        version = collective_version(replace(moved, model=LearnedCollectives.from_stored(bad)))
    published = publish_version(models, version, PublishOptions())
    assert [one.against for one in published.worse] == [f"version {good}"]
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


def noisy(samples, names, seed, later):
    """The samples some days later, off by a tenth either way."""
    rng = np.random.default_rng(seed)
    return [
        replace(
            one,
            collected_at=one.collected_at + timedelta(days=later),
            **{name: getattr(one, name) * float(np.exp(rng.normal(0, 0.1))) for name in names},
        )
        for one in samples
    ]


@pytest.mark.parametrize("kind", SCALES)
def test_errors_are_of_samples_that_a_fit_has_not_seen_but_where_the_other_has(store, tmp_path, kind):
    """Against a model of earlier samples fits count held out, against one of the same samples as they are."""
    if kind == "dense":
        made, train_on, version = DENSE_SAMPLES.read(store), train_dense_model, dense_version
        names = ("forward_ms", "backward_ms")
    else:
        made, train_on, version = COLLECTIVE_SAMPLES.read(store), train_collective_model, collective_version
        names = ("latency_ms",)
    earlier, now = (train_on(noisy(made, names, seed, later=seed)) for seed in (0, 1))
    for other, expected_S in ((earlier, now.held_out_errors_S), (now, now.errors_S(now.model))):
        models = Registry(tmp_path / str(other is now))
        tensors = doubled(other.model.tensors(), kind)
        stored = models.load(kind, "cpu", models.publish(kind, "cpu", tensors, other.model.card.to_json()))
        spoilt = type(now.model).from_stored(stored)
        expected = float(np.mean(expected_S - now.errors_S(spoilt)))
        assert version(now).compare(stored).difference == pytest.approx(expected)
    assert now.held_out_errors_S.mean() > now.errors_S(now.model).mean()
    assert now.held_out_errors_S.mean() == pytest.approx(now.model.card.metrics["relative_error"])


def test_what_is_not_measured_again_keeps_its_fits(registry, tmp_path):
    models = copied(registry, tmp_path)
    store = tmp_path / "store"
    layer = DenseShape(kind=DenseKind.TOP_MLP, batch_size=64, widths=(32, 1))
    DENSE_SAMPLES.write(store, [make.dense_sample(replace(layer, batch_size=64 * size)) for size in range(1, 20)])
    gather = make.collective(Operator.ALL_GATHER, GroupLevel.ACROSS_NODES)
    COLLECTIVE_SAMPLES.write(
        store, [make.collective_sample(replace(gather, bytes_per_rank=2**size)) for size in range(10, 26)]
    )
    before = LearnedDense.load(models, "cpu"), LearnedCollectives.load(models, "cpu")
    outcome = train("--store", store, "--registry", models.root, "--force")
    assert f"dense cpu: too few samples of bottom_mlp.fp32; the fits of {before[0].name} stay" in outcome.stderr
    layers, collectives = LearnedDense.load(models, "cpu"), LearnedCollectives.load(models, "cpu")
    assert layers.card.training["carried_over"] == ["bottom_mlp.fp32"]
    assert layers.card.bounds.keys() == {"bottom_mlp.fp32", "top_mlp.fp32"}
    shapes = [one.shape for one in map(dense, (64, 512))]
    assert layers.predict_parts(shapes).forward_ms_N.tolist() == before[0].predict_parts(shapes).forward_ms_N.tolist()
    assert collectives.card.training["carried_over"] == ["node.all_to_all"]
    assert collectives.card.bounds["all_to_all"] == before[1].card.bounds["all_to_all"]
    two = make.topology(2)
    links = link_bytes(np.array([[0.0, 1e6], [1e6, 0.0]]), two)
    assert collectives.links_ms(links, two).tolist() == before[1].links_ms(links, two).tolist()
    # Trained again on the same samples, it is the same version.
    found = json.loads(train("--store", store, "--registry", models.root).stdout)["models"]
    assert [one["id"] for one in found] == [collectives.version_id, layers.version_id]


def test_samples_of_other_machines_train_no_model(store, tmp_path):
    here, mixed = this_processor(), tmp_path / "mixed"
    for samples in (COLLECTIVE_SAMPLES, DENSE_SAMPLES):
        made = samples.read(store)
        samples.write(mixed, [replace(one, device_name=here.device_name, sample_id="") for one in made])
        samples.write(mixed, [replace(one, device_name="Abacus", sample_id="") for one in made[:15]])
    for key, name, count in (("cpu", here.device_name, (16, 19)), ("cpu:abacus", "Abacus", (15, 15))):
        outcome = train("--store", mixed, "--registry", tmp_path / key, "--device", key)
        assert outcome.exit_code == 0, outcome.output
        found = json.loads(outcome.stdout[outcome.stdout.index("{") :])["models"]
        assert tuple(one["training"]["num_samples"] for one in found) == count
        assert "samples are left out, which other machines measured" in outcome.stderr
        for model in (LearnedCollectives, LearnedDense):
            assert model.load(Registry(tmp_path / key), "cpu").card.measured_on.device_name == name


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


def test_planning_says_which_prices_are_of_another_machine(registry, task, tmp_path, caplog):
    pool, topology, trial = task
    models, here = copied(registry, tmp_path), this_processor()
    for model in (LearnedDense.load(models, "cpu"), LearnedCollectives.load(models, "cpu")):
        machine = replace(model.card.measured_on, device_name="Abacus" if model.kind == "dense" else here.device_name)
        models.publish(model.kind, "cpu", model.tensors(), replace(model.card, measured_on=machine).to_json())
    with caplog.at_level(logging.WARNING):
        plan = plan_trial(trial, pool, topology, models.root)
    note = f"{LearnedDense.load(models, 'cpu').name}: prices are of Abacus, this machine is {here}; "
    note += "`autoshard train step` fits them to samples"
    assert note in caplog.text
    assert note in plan.provenance.models["machine_notes"]
    assert "collective" not in plan.provenance.models["machine_notes"]
    # Keys of single machines have no names, which is all that older samples say.
    costs = make_costs(plan.tables, topology, models.root)
    assert not [one for one in machine_notes(costs, "cpu:amd-25-17-avx512") if "Abacus" in one]
    upper = make_costs(plan.tables, topology, models.root, risk=Risk.HIGH)
    assert note.replace(": prices", " (upper end): prices") in machine_notes(upper, "cpu")


def test_cards_of_before_know_no_machine(registry, tmp_path):
    models = copied(registry, tmp_path)
    for kind in (LearnedDense, LearnedCollectives):
        stored = models.load(kind.kind, "cpu")
        card = {name: value for name, value in stored.card.items() if name != "measured_on"}
        models.publish(kind.kind, "cpu", stored.tensors, card)
        assert kind.load(models, "cpu").measured_on is None


def test_planners_can_ask_for_the_upper_end(registry, task):
    pool, topology, trial = task
    tables = plan_trial(trial, pool, topology, registry).tables
    assert isinstance(tables.dense, DenseLayers)
    usual, upper = (make_costs(tables, topology, registry, risk=risk) for risk in (Risk.MEAN, Risk.HIGH))
    plan = make_plan("cost-greedy", make.request(tables, topology, costs=upper, registry=registry))
    assert all(plan.provenance.models[kind].endswith("(upper end)") for kind in ("kernel", "communication", "dense"))
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
