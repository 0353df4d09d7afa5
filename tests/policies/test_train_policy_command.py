"""The command `train policy`."""

import pytest

from autoshard.cli import main
from costmodel import Registry
from policies.planning.trained import TrainedPolicy
from policies.training import command, comparison, drawn_tasks, runs
from tests.policies.conftest import SMALL

FEW = ["--num-tasks", "2", "--search-seconds", "0.02", "--updates", "2", "--improvements", "0"]


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch):
    monkeypatch.setattr(drawn_tasks, "TaskKind", lambda **_: SMALL)
    monkeypatch.setattr(runs, "NUM_VALIDATION", 1)
    monkeypatch.setattr(comparison.TestTasks.__init__, "__defaults__", (8,))


@pytest.fixture
def train(tmp_path, capsys, published):
    def train(*arguments):
        assert main(["train", "policy", "--registry", str(tmp_path / "models"), *FEW, "--json", *arguments]) == 0
        printed = capsys.readouterr()
        return published("trained-policy", printed.out), printed.err

    return train


def test_it_publishes_a_policy_that_says_what_it_was_trained_on(train, tmp_path):
    result, said = train("--force")
    models = Registry(tmp_path / "models")
    assert result["id"] == models.production_id("policy", "any")
    policy = TrainedPolicy.load(models, "any")
    assert policy.card.training["num_updates"] == 2
    assert policy.card.ranges["ranks"] == (8.0, 8.0)
    assert policy.card.ranges["tables"] == (5.0, 5.0)
    assert result["training"]["test"].keys() == {"num_tasks", "over_greedy"}
    assert "labels: 100%" in said
    assert "imitation: 100%, loss" in said


def test_progress_is_told_once_for_each_percent(capsys):
    report = command.progress_lines()
    for done in (0.001, 0.004, 0.011, 0.012, 0.5):
        report(runs.Progress(stage="labels", done=done))
    report(runs.Progress(stage="imitation", done=0.5, loss=4.0))
    report(runs.Progress(stage="imitation", done=0.5, loss=3.5))
    said = capsys.readouterr().err.splitlines()
    assert said == [
        *("labels: 0%", "labels: 1%", "labels: 50%"),
        *("imitation: 50%, loss 4.0000", "imitation: 50%, loss 3.5000"),
    ]


@pytest.mark.slow
def test_it_goes_on_from_its_folder_and_begins_with_the_policy_in_use(train, tmp_path):
    first, _ = train("--force", "--checkpoint", str(tmp_path / "run"))
    again, said = train("--force", "--checkpoint", str(tmp_path / "run"))
    assert "labels" not in said
    assert first["training"]["num_labels"] == again["training"]["num_labels"]
    tuned, _ = train("--force", "--fine-tune", "--device", "a100")
    assert tuned["name"] == "a100"
    assert tuned["training"]["fine_tune"] is True


def test_a_worse_policy_is_kept_and_not_promoted(train, tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "_step_ms", lambda *_: 1e6)
    result, said = train()
    assert result["promoted"] is False
    assert "is not promoted: step " in said
    assert "above that of cost-greedy" in said
    assert Registry(tmp_path / "models").production_id("policy", "any") is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "abacus"), "--device: must be any or any of"),
        (("--search-seconds", "0"), "must be a number above 0"),
        (("--updates", "-1"), "'--updates': Input should be greater than or equal to 0"),
        (("--actors", "-1"), "'--actors': Input should be greater than or equal to 0"),
        (("--fine-tune",), "no policy model of any or of any device has been published"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.setenv("AUTOSHARD_SHIPPED_MODELS", str(tmp_path / "none"))
    assert main(["train", "policy", "--registry", str(tmp_path), *arguments]) != 0
    assert message in capsys.readouterr().err
