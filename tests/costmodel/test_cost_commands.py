import json
import re
import shutil
from dataclasses import fields, replace

import pyarrow.parquet as pq
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from autoshard.cli import main
from autoshard.core.machine import MeasuredMachine
from autoshard.formats.stores.sample_store import damaged_samples
from autoshard.formats.stores.samples import read_samples, write_samples
from autoshard.hardware import this_processor
from costmodel.kernel.learned import LearnedCostModel
from costmodel.plugin import train_learned_model
from costmodel.registry.versions import SHIPPED_VARIABLE, Registry


@pytest.fixture
def own_store(store, tmp_path):
    return shutil.copytree(store, tmp_path / "samples")


@pytest.fixture
def registry(tmp_path):
    return tmp_path / "registry"


def train(store, registry, *arguments):
    return main(["train", "cost", "--store", str(store), "--registry", str(registry), "--updates", "60", *arguments])


def damage(store, change):
    (file,) = store.rglob("*.parquet")
    table = pq.read_table(file, partitioning=None)
    pq.write_table(change(table), file)


def test_train_cost_publishes_a_model(store, registry, capsys, published):
    assert train(store, registry, "--json", "--seed", "3") == 0
    result = published("trained-cost", capsys.readouterr().out)
    model = LearnedCostModel.load(Registry(registry), "cpu")
    assert model.card.metrics.relative_error == result["metrics"]["relative_error"]
    assert result["metrics"]["num_samples"] + result["training"]["num_samples"] == 400
    assert (result["alias"], result["promoted"], result["comparisons"], result["notes"]) == ("production", True, [], [])
    assert (result["kind"], result["name"]) == ("cost", "cpu")
    assert result["coverage"]["ranges"]["num_bags"] == [1024, 1024]
    assert result["training"]["seed"] == 3
    assert Registry(registry).production_id("cost", "cpu") == result["id"]

    assert train(store, registry, "--json", "--seed", "3") == 0
    assert json.loads(capsys.readouterr().out)["id"] == result["id"]


def of_machine(samples, machine):
    """Samples that were measured on a machine."""
    facts = {item.name: getattr(machine, item.name) for item in fields(machine)}
    return [replace(one, **facts) for one in samples]


@pytest.mark.slow
def test_samples_of_other_machines_train_no_model(samples, registry, tmp_path, capsys):
    here, abacus = this_processor(), MeasuredMachine(device_name="Abacus")
    mixed = tmp_path / "mixed"
    write_samples(mixed, of_machine(samples.samples[:90], abacus))
    write_samples(mixed, of_machine(samples.samples[90:170], here))
    for arguments, count, machine in (([], 80, here), (["--device", "cpu:abacus"], 90, abacus)):
        assert train(mixed, registry, "--json", "--force", *arguments) == 0
        out, err = capsys.readouterr()
        metrics, training = (json.loads(out)[name] for name in ("metrics", "training"))
        assert metrics["num_samples"] + training["num_samples"] == count
        assert f"{170 - count} of 170 samples are left out, which other machines measured" in err
        assert LearnedCostModel.load(Registry(registry), "cpu").measured_on == machine
    train_learned_model(mixed, "cpu", registry)
    assert LearnedCostModel.load(Registry(registry), "cpu").measured_on == here


def test_samples_of_one_other_machine_do_and_of_several_do_not(samples, registry, tmp_path, capsys):
    elsewhere = tmp_path / "elsewhere"
    write_samples(elsewhere, of_machine(samples.samples[:90], MeasuredMachine(device_name="Abacus")))
    assert train(elsewhere, registry) == 0
    write_samples(elsewhere, of_machine(samples.samples[90:95], MeasuredMachine(device_name="Babbage")))
    capsys.readouterr()
    assert train(elsewhere, registry) == 1
    said = "none of its 95 samples was measured on the machine at hand; --device names one of: cpu:abacus, cpu:babbage"
    assert said in capsys.readouterr().err
    assert train(elsewhere, registry, "--device", "cpu:napier") == 1
    assert "was measured on cpu:napier;" in capsys.readouterr().err


def test_train_cost_shows_metrics(store, registry, capsys):
    assert train(store, registry) == 0
    shown = capsys.readouterr().out
    for text in ("86 held-out samples", "mean relative error", "Kendall's tau", "90% interval", "1024"):
        assert text in shown


def test_train_cost_draws_what_it_predicts_of_held_out_samples(store, registry, tmp_path, monkeypatch, capsys):
    drawn = {}
    monkeypatch.setattr("costmodel.kernel.command.draw", lambda figures, image: drawn.update({image: figures}))
    image = tmp_path / "accuracy.svg"
    assert train(store, registry, "--image", str(image), "--json") == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    marks, line = drawn[image]["held-out"].data
    assert len(marks.x) == metrics["num_samples"]
    errors = [abs(predicted / measured - 1) for predicted, measured in zip(marks.y, marks.x, strict=True)]
    assert sum(errors) / len(errors) == pytest.approx(metrics["relative_error"], rel=1e-4)
    assert min(marks.error_y.array) >= 0
    assert min(marks.error_y.arrayminus) >= 0
    assert min(line.x) > 0
    assert train(store, registry, "--image", "accuracy.jpg") == 2


def test_train_cost_tells_its_throughput(store, registry, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("costmodel.kernel.command.LOG_EVERY", 20)
    monkeypatch.setattr("costmodel.kernel.training.REPORT_EVERY", 20)
    assert train(store, registry, "--accelerator", "cpu", "--tensorboard", str(tmp_path / "logs")) == 0
    said = re.findall(r"update (\d+): loss -?[\d.]+, ([\d,]+) samples/s on cpu, seed 0", capsys.readouterr().err)
    assert [number for number, _ in said] == ["20", "40", "60"]
    log = EventAccumulator(str(tmp_path / "logs"))
    log.Reload()
    losses = log.Scalars("cost/loss")
    assert [event.step for event in losses] == [20, 40, 60]
    assert losses[-1].value < losses[0].value
    assert all(event.value > 0 for event in log.Scalars("cost/samples_per_s"))


def test_a_gpu_that_is_not_there_is_told_in_one_line(store, registry, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert train(store, registry, "--accelerator", "cuda") == 1
    assert capsys.readouterr().err == "error: --accelerator: one process needs a GPU, this machine has 0\n"


def test_models_lists_what_was_trained(run, store, registry, capfd, published):
    assert "No models" in run("models", "--registry", registry)[0]
    ids = []
    for seed in ("1", "2"):
        assert train(store, registry, "--seed", seed, "--json", "--force") == 0
        ids.append(json.loads(capfd.readouterr().out)["id"])
    result = published("models", run("models", "--registry", registry, "--json")[0])
    assert [item["id"] for item in result["models"]] == ids
    assert [item["production"] for item in result["models"]] == [False, True]
    shown = run("models", "--registry", registry)[0]
    assert all(id_ in shown for id_ in ids)
    assert "held-out error" in shown


@pytest.fixture(autouse=True)
def shipped(tmp_path, monkeypatch):
    """A folder of shipped models of our own, empty at first."""
    monkeypatch.setenv(SHIPPED_VARIABLE, str(tmp_path / "shipped"))
    return Registry(tmp_path / "shipped")


class TestModels:
    """The command, on models whose content does not matter to it."""

    @pytest.fixture
    def asked(self, run, registry, published):
        names = {"show": "model", "promote": "model-alias", "roll-back": "model-alias"}

        def asked(*arguments, code=0):
            as_json = ["--json"] if code == 0 else []
            out, err = run("models", *arguments, "--registry", registry, *as_json, code=code)
            name = names.get(arguments[0], "models") if arguments else "models"
            return published(name, out) if code == 0 else err

        return asked

    @pytest.fixture
    def ids(self, registry):
        """Two versions of the CPU's cost model, one of the A100's, one policy."""
        models = Registry(registry, author="someone")
        tested = {"num_tasks": 20, "over_greedy": -0.123}
        return {
            "old": models.publish("cost", "cpu", {}, {"device": "cpu", "metrics": {"relative_error": 0.05}}),
            "new": models.publish("cost", "cpu", {}, {"device": "cpu", "metrics": {"relative_error": 0.02}}),
            "a100": models.publish("cost", "a100", {}, {"device": "a100"}),
            "policy": models.publish("policy", "cpu", {}, {"device": "cpu", "training": {"test": tested}}),
        }

    @pytest.mark.usefixtures("ids")
    def test_scores_of_all_kinds_are_listed(self, registry, run):
        shown = run("models", "--registry", registry)[0]
        for text in (
            "held-out error 5.00%",
            "held-out error 2.00%",
            "step 12.3% below cost-greedy's",
        ):
            assert text in shown

    def test_listed_by_kind_and_device(self, ids, asked):
        assert {item["id"] for item in asked("--kind", "cost")["models"]} == {ids["old"], ids["new"], ids["a100"]}
        assert {item["id"] for item in asked("list", "--device", "cpu", "--kind", "policy")["models"]} == {
            ids["policy"]
        }
        assert asked("--device", "h100")["models"] == []

    @pytest.mark.usefixtures("ids")
    def test_an_empty_list_says_what_else_there_is(self, registry, run):
        out, _ = run("models", "--kind", "dense", "--registry", registry)
        assert out.startswith('No models of "dense" in ')
        assert "kinds there: " in out
        assert all(kind in out for kind in ("cost", "policy"))

    def test_show_by_id_and_alias(self, ids, asked, registry, run):
        for wanted in (ids["old"], ids["old"][:10]):
            result = asked("show", wanted)
            assert (result["id"], result["aliases"], result["used"]) == (ids["old"], [], False)
        result = asked("show", "production", "--kind", "cost", "--device", "cpu")
        assert (result["id"], result["aliases"], result["used"]) == (ids["new"], ["production"], True)
        assert [entry["id"] for entry in result["history"]["production"]] == [ids["old"], ids["new"]]
        shown = run("models", "show", ids["policy"], "--registry", registry)[0]
        for text in (ids["policy"], "training.test.over_greedy", "-0.123", "someone", "publish"):
            assert text in shown

    def test_promote_and_roll_back(self, ids, asked, registry):
        assert asked("promote", ids["old"], "--alias", "candidate")["alias"] == "candidate"
        assert asked("promote", "candidate")["id"] == ids["old"]
        assert Registry(registry).production_id("cost", "cpu") == ids["old"]
        rolled = asked("roll-back", "--kind", "cost", "--device", "cpu")
        assert rolled["id"] == ids["new"]
        assert [entry["action"] for entry in rolled["history"]] == ["publish", "publish", "promote", "roll-back"]
        assert Registry(registry).production_id("cost", "cpu") == ids["new"]
        assert Registry(registry).production_id("policy", "cpu") == ids["policy"]

    def test_what_cannot_be_meant(self, ids, asked):
        several = asked("roll-back", code=2)
        assert f"cost cpu {ids['new']}" in several
        assert 'version: "production" names several models' in several
        assert "--kind and --device" in several
        assert 'no model is "zzz"' in asked("promote", "zzz", code=2)
        assert 'no model is "candidate"' in asked("show", "candidate", code=2)
        assert "needs an id" in asked("show", code=2)
        assert "takes none" in asked("roll-back", ids["old"], code=2)
        assert "named no other version before" in asked("roll-back", "--device", "a100", code=1)

    def test_shipped_models_are_listed_and_hidden_by_own_ones(self, asked, shipped, registry):
        came = shipped.publish("cost", "cpu", {}, {"device": "cpu"})
        (item,) = asked()["models"]
        assert (item["id"], item["shipped"], item["used"]) == (came, True, True)
        assert asked("show", "production")["shipped"]
        # The alias of what is shipped is not ours to change.
        assert "no model is" in asked("roll-back", code=2)
        own = Registry(registry).publish("cost", "cpu", {}, {"device": "cpu", "own": True})
        assert [(item["id"], item["used"]) for item in asked()["models"]] == [(own, True), (came, False)]
        assert asked("show", "production")["id"] == own

    @pytest.mark.parametrize("wanted", ["shipped", "id", "roll-back"])
    def test_what_is_shipped_can_be_used_again(self, asked, shipped, registry, wanted):
        came = shipped.publish("cost", "cpu", {}, {"device": "cpu"})
        own = Registry(registry).publish("cost", "cpu", {}, {"device": "cpu", "own": True})
        moved = asked("roll-back") if wanted == "roll-back" else asked("promote", came if wanted == "id" else wanted)
        assert moved["id"] == came
        assert [(item["id"], item["used"]) for item in asked()["models"]] == [(own, False), (came, True)]
        shown = asked("show", "production")
        assert (shown["id"], shown["shipped"], shown["aliases"]) == (came, True, ["production"])
        assert [entry["id"] for entry in shown["history"]["production"]] == [own, came]
        if wanted == "roll-back":
            assert "named no other version before" in asked("roll-back", code=1)
        else:
            assert asked("roll-back")["id"] == own

    def test_what_is_shipped_can_be_promoted_where_nothing_else_is(self, asked, shipped, registry):
        came = shipped.publish("cost", "cpu", {}, {"device": "cpu"})
        assert asked("promote", "shipped")["id"] == came
        assert Registry(registry).production_id("cost", "cpu") == came
        own = Registry(registry).publish("cost", "cpu", {}, {"device": "cpu", "own": True})
        assert asked("roll-back", "--kind", "cost")["id"] == came != own

    def test_what_is_both_shipped_and_our_own_is_one_version(self, asked, shipped, registry):
        came = shipped.publish("cost", "cpu", {}, {"device": "cpu"})
        assert Registry(registry).publish("cost", "cpu", {}, {"device": "cpu"}) == came
        assert [item["id"] for item in asked()["models"]] == [came]
        assert asked("promote", "shipped")["id"] == asked("promote", came)["id"] == came


class TestShippedModel:
    """Plans right after the install are priced by the model that comes with the package."""

    @pytest.fixture
    def tables(self, samples, tmp_path):
        shards = [measured.shard for measured in samples.samples[0].shards[:4]]
        document = {
            "schema": "autoshard.tables/1",
            "batch_size": shards[0].num_bags,
            "tables": [
                {
                    "name": f"t{index}",
                    "num_embeddings": shard.num_embeddings,
                    "embedding_dim": shard.embedding_dim,
                    "dtype": "fp32",
                    "pooling": "sum",
                    "features": [{"name": f"f{index}", "pooling_factor": shard.pooling_factor}],
                    "access": {"kind": "zipf", "alpha": 0.9},
                }
                for index, shard in enumerate(shards)
            ],
        }
        file = tmp_path / "tables.json"
        file.write_text(json.dumps(document), encoding="utf-8")
        return file

    @pytest.fixture
    def planned_by(self, run, tables, registry):
        registry.mkdir(exist_ok=True)

        def planned_by(topology="cpu-4"):
            arguments = ["plan", tables, "--topology", topology, "--registry", registry, "--json"]
            plan = json.loads(run(*arguments, "--planner", "cost-greedy")[0])
            assert plan["provenance"]["models"]["kernel"] == plan["predicted"]["cost_model"]
            return plan["predicted"]["cost_model"]

        return planned_by

    def test_every_answer_names_model_and_version(self, trained, planned_by, shipped, registry):
        assert planned_by() == "analytic:cpu"
        came = shipped.publish("cost", "cpu", trained.model.tensors(), trained.model.card.to_json())
        assert planned_by() == f"learned:cpu@{came} (shipped)"
        assert planned_by("a100-8") == "analytic:a100"
        own = Registry(registry).publish("cost", "cpu", trained.model.tensors(), trained.model.card.to_json())
        assert planned_by() == f"learned:cpu@{own}"

    def test_a_shipped_version_that_is_promoted_again_prices_plans(self, trained, planned_by, shipped, registry):
        came = shipped.publish("cost", "cpu", trained.model.tensors(), {**trained.model.card.to_json(), "training": {}})
        models = Registry(registry)
        models.publish("cost", "cpu", trained.model.tensors(), trained.model.card.to_json())
        models.promote("cost", "cpu", came)
        assert planned_by() == f"learned:cpu@{came} (shipped)"

    def test_a_damaged_one_is_named(self, trained, tables, shipped, registry, capsys):
        came = shipped.publish("cost", "cpu", trained.model.tensors(), trained.model.card.to_json())
        (shipped.root / "cost" / "cpu" / came / "weights.safetensors").write_bytes(b"")
        registry.mkdir()
        arguments = ["plan", str(tables), "--topology", "cpu-4", "--registry", str(registry)]
        assert main(arguments) == fails(capsys, 1, "weights.safetensors", "damaged")


def fails(capsys, code, *said):
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1, printed.err
    for text in said:
        assert text in printed.err
    return code


def test_too_few_samples(samples, tmp_path, registry, capsys):
    write_samples(tmp_path / "few", samples.samples[:20])
    assert train(tmp_path / "few", registry) == fails(capsys, 1, "at least 50 samples, there are 20")
    assert not registry.exists()


def test_latencies_that_are_no_numbers(own_store, registry, capsys):
    def spoil(table):
        column = table["forward_ms"].to_pylist()
        column[7] = float("nan")
        index = table.schema.get_field_index("forward_ms")
        return table.set_column(index, table.schema.field(index), [column])

    damage(own_store, spoil)
    assert train(own_store, registry) == fails(
        capsys, 2, "part-", "forward_ms", "must be a number of at least 0, got nan"
    )
    assert not registry.exists()


def test_samples_of_another_schema(own_store, registry, capsys):
    damage(own_store, lambda table: table.replace_schema_metadata({b"autoshard.schema": b"autoshard.samples/9"}))
    assert train(own_store, registry) == fails(capsys, 2, "autoshard.samples/6", "autoshard.samples/9")


def test_a_damaged_model_is_named(store, registry, capsys):
    assert train(store, registry) == 0
    capsys.readouterr()
    (card,) = registry.rglob("card.json")
    card.write_text("{}", encoding="utf-8")
    assert main(["models", "--registry", str(registry)]) == fails(capsys, 1, "card.json", "damaged")


def test_the_committed_samples_are_intact(store):
    assert damaged_samples(read_samples(store).samples) == ()


class TestAlias:
    def test_a_candidate_is_not_what_plans_are_priced_with(self, store, registry, capsys):
        assert train(store, registry, "--json", "--alias", "candidate") == 0
        result = json.loads(capsys.readouterr().out)
        models = Registry(registry)
        assert (result["alias"], result["promoted"]) == ("candidate", False)
        assert models.production_id("cost", "cpu") is None
        assert models.load("cost", "cpu", "candidate").id == result["id"]

    def test_nothing_is_published_if_so_asked(self, store, registry, capsys):
        assert train(store, registry, "--no-publish", "--json") == 0
        result = json.loads(capsys.readouterr().out)
        assert (result["id"], result["registry"]) == (None, None)
        assert result["metrics"]["num_samples"] == 86
        assert not result["promoted"]
        assert not registry.exists()
