import json
import re

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from autoshard.cli import main
from costmodel import Registry
from costmodel.registry.publish_options import PublishOptions
from policies.algorithms.training_options import Budget
from policies.choices import Algorithm
from policies.planning.planner import PolicyPlanner
from policies.planning.trained import TrainedPolicy
from policies.training.run_options import PolicyRunOptions, TaskOptions
from policies.training.runs import run_training
from tests import builders as make

SMALL = ["--num-tables", "8", "--num-ranks", "2", "--num-tasks", "4", "--updates", "2"]


@pytest.fixture(scope="module")
def registry(tmp_path_factory, make_cost):
    """With a cost model for MetaSyn divided by 64."""
    root = tmp_path_factory.mktemp("models")
    cost = make_cost(num_bags=1024)
    Registry(root).publish("cost", "cpu", cost.tensors(), cost.card.to_json())
    return root


def run(*arguments):
    return main(["train", "policy", *map(str, arguments)])


def test_it_trains_and_publishes_a_policy_that_says_what_it_was_trained_on(registry, capsys, published):
    assert run("--registry", registry, *SMALL, "--json", "--force") == 0
    output = capsys.readouterr()
    result = published("trained-policy", output.out)
    policy = TrainedPolicy.load(Registry(registry), "cpu")
    assert result["id"] == Registry(registry).production_id("policy", "cpu")
    assert result["cost_model"] == policy.card.cost_model.id == Registry(registry).production_id("cost", "cpu")
    assert result["training"]["num_updates"] == 2
    assert result["training"]["test"].keys() == {"policy", "cost-greedy", "lookup-greedy"}
    assert "update 2: balance" in output.err


def test_its_policy_plans(registry, make_cost, capsys):
    from dataclasses import replace

    assert run("--registry", registry, *SMALL, "--force") == 0
    assert "on 20 unseen tasks" in capsys.readouterr().out
    request = make.request(
        replace(make.pool([1, 2, 3, 4, 5]), batch_size=1024),
        make.topology(3),
        costs=make.costs(kernel=make_cost(1024)),
        registry=registry,
    )
    assert len(PolicyPlanner().plan(request).shards) == 5


class TestPromotion:
    """Two updates make a policy that is far worse than `cost-greedy`."""

    @pytest.fixture
    def models(self, tmp_path, make_cost):
        models, cost = Registry(tmp_path / "models"), make_cost(num_bags=1024)
        models.publish("cost", "cpu", cost.tensors(), cost.card.to_json())
        return models

    @pytest.fixture
    def train(self, models, capsys, published):
        def train(*arguments):
            assert run("--registry", models.root, *SMALL, "--json", *arguments) == 0
            printed = capsys.readouterr()
            return published("trained-policy", printed.out), [
                line for line in printed.err.splitlines() if "update" not in line
            ]

        return train

    def test_a_worse_policy_is_kept_and_not_promoted(self, models, train):
        result, (said,) = train()
        assert (result["alias"], result["promoted"]) == (None, False)
        assert models.production_id("policy", "cpu") is None
        assert f"policy cpu: {result['id']} is not promoted: slowest rank " in said
        assert "above that of cost-greedy on 20 held-out tasks" in said
        assert f"autoshard models promote {result['id']} --registry {models.root}" in said
        (comparison,) = result["comparisons"]
        scores = result["training"]["test"]
        assert comparison["difference"] > comparison["tolerance"] >= 0.001
        ratio = scores["policy"]["max_ms"] / scores["cost-greedy"]["max_ms"]
        assert comparison["difference"] == pytest.approx(ratio - 1, abs=0.05)  # a mean of ratios, not a ratio of means
        assert main(["models", "promote", result["id"], "--registry", str(models.root)]) == 0
        assert models.production_id("policy", "cpu") == result["id"]

    def test_force_promotes_it(self, models, train):
        result, said = train("--force")
        assert (result["promoted"], result["comparisons"], said) == (True, [], [])
        assert models.production_id("policy", "cpu") == result["id"]

    def test_a_candidate_is_compared_with_nothing(self, models, train):
        result, said = train("--alias", "candidate")
        assert (result["alias"], result["promoted"], said) == ("candidate", False, [])
        assert models.production_id("policy", "cpu") is None
        assert models.load("policy", "cpu", "candidate").id == result["id"]

    def test_nothing_is_published_if_so_asked(self, models, train):
        result, said = train("--no-publish")
        assert (result["id"], result["registry"], said) == (None, None, [])
        assert not (models.root / "policy").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--algorithm", "ppo"], {"algorithm": "ppo"}),
        (["--objective", "max_kernel", "--memory-fill", "0.8"], {"objective": "max_kernel", "memory_fill": 0.8}),
    ],
)
def test_a_policy_says_how_it_was_trained(registry, capsys, arguments, told):
    assert run("--registry", registry, *SMALL, *arguments, "--json") == 0
    training = json.loads(capsys.readouterr().out)["training"]
    assert {name: training[name] for name in told} == told
    assert training["times"].keys() == {"collect_s", "measure_s", "learn_s", "evaluate_s"}
    assert training["times"]["collect_s"] > 0
    assert training["times"]["measure_s"] == 0
    rounding_s = 0.005
    assert sum(training["times"].values()) <= training["elapsed_s"] + rounding_s
    assert not training["stopped_early"]


@pytest.mark.slow
def test_actors_and_logs_can_be_asked_for(registry, tmp_path, capsys):
    assert run("--registry", registry, *SMALL, "--actors", "1", "--tensorboard", tmp_path, "--json") == 0
    training = json.loads(capsys.readouterr().out)["training"]
    assert training["actors"] == {"num_actors": 1, "mean_lag": 0.5, "max_lag": 1, "num_replaced": 0}
    log = EventAccumulator(str(tmp_path))
    log.Reload()
    assert [event.value for event in log.Scalars("actors/lag")] == [0, 1]


def test_step_times_are_told_where_they_are_the_objective(registry, capsys):
    assert run("--registry", registry, *SMALL, "--objective", "step", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    for score in result["training"]["test"].values():
        assert score["step_ms"] > score["max_ms"] > 0


@pytest.mark.slow
def test_rewards_can_be_measured(registry, capsys):
    arguments = ["--num-tables", "2", "--num-ranks", "2", "--num-tasks", "1", "--updates", "1", "--reward", "measured"]
    for algorithm in Algorithm:
        assert run("--registry", registry, *arguments, "--algorithm", algorithm, "--json") == 0
        training = json.loads(capsys.readouterr().out)["training"]
        assert training["reward"] == "measured"
        assert training["num_measured"] > 0
        assert training["times"]["measure_s"] > 0


@pytest.mark.slow
def test_a_cost_model_can_be_learned_from_measured_placements_alone(registry, capsys):
    arguments = ["--num-tables", "6", "--num-ranks", "2", "--num-tasks", "2", "--updates", "2", "--no-publish"]
    arguments += ["--joint", "--reward", "measured", "--cost-loss", "squared"]
    assert run("--registry", registry, *arguments, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["cost_model"] is None
    assert result["training"]["joint"]
    assert result["training"]["num_measured"] > 0


def test_it_goes_on_from_a_checkpoint(registry, tmp_path, capsys):
    arguments = ["--registry", registry, *SMALL, "--checkpoint", tmp_path / "run", "--json"]
    assert run(*arguments) == 0
    first = json.loads(capsys.readouterr().out)
    assert run(*arguments) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["training"]["num_updates"] == first["training"]["num_updates"]
    assert run(*arguments, "--seed", "1") == 2
    assert "its seed is 0, not 1" in capsys.readouterr().err


def test_a_cost_model_that_is_published_meanwhile_waits_for_the_next_training(tmp_path, make_cost):
    models, before, after = Registry(tmp_path), make_cost(num_bags=1024), make_cost(num_bags=2048)
    first = models.publish("cost", "cpu", before.tensors(), before.card.to_json())
    options = PolicyRunOptions(budget=Budget(num_updates=1), tasks=TaskOptions(num_tasks=4, num_tables=8, num_ranks=2))
    run = run_training(
        options,
        PublishOptions(registry=tmp_path, force=True),
        on_evaluated=lambda _: models.publish("cost", "cpu", after.tensors(), after.card.to_json()),
    )
    assert models.production_id("cost", "cpu") != first
    assert run.policy.card.cost_model.id == TrainedPolicy.load(models, "cpu").card.cost_model.id == first


def test_a_gpu_that_is_not_there_is_told_in_one_line(registry, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert run("--registry", registry, *SMALL, "--accelerator", "cuda") == 1
    assert capsys.readouterr().err == "error: --accelerator: one process needs a GPU, this machine has 0\n"


def test_logs_name_device_seed_and_throughput(registry, capsys):
    assert run("--registry", registry, *SMALL, "--accelerator", "cpu", "--seed", "4") == 0
    assert re.search(r"update 2: balance .*; [\d,]+ env steps/s; on cpu, seed 4", capsys.readouterr().err)


def test_items_that_the_cost_model_has_not_seen_are_refused_in_one_line(registry, capsys):
    assert run("--registry", registry, "--items", "row_groups") == 1
    error = capsys.readouterr().err.strip()
    assert "kernel_kind: the learned cost model has seen fused/hbm/fp32" in error
    assert "\n" not in error
