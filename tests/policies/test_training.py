"""Training: from labels, from own placements, by V-trace; resumable."""

import logging

import numpy as np
import pytest
import torch

from autoshard.core.errors import ExecutionError, FormatError, InvalidOptionError
from autoshard.planning import make_costs
from policies.network import PolicyNetwork, first_weights
from policies.planning.playing import play
from policies.training import runs
from policies.training.drawn_tasks import TaskKind, TaskSplit, machines_of, task_seeds, warnings_once
from policies.training.labels import Label, searched
from policies.training.learner import Learner, imitation_loss, vtrace_loss
from policies.training.run_options import LearningOptions, PolicyRunOptions, TaskOptions
from policies.training.runs import Actors, PolicyTraining, make_label
from tests.policies.conftest import SMALL


@pytest.fixture(autouse=True)
def few_tasks(monkeypatch):
    monkeypatch.setattr(runs, "NUM_VALIDATION", 2)


def options(num_tasks=3, updates=6, **learning):
    return PolicyRunOptions(
        tasks=TaskOptions(num_tasks=num_tasks, search_seconds=0.02),
        learning=LearningOptions(**{"updates": updates, "improvements": 0, **learning}),
    )


def trained(folder, of=None, **settings):
    said = []
    training = PolicyTraining(of or options(), SMALL, folder, report=said.append, **settings)
    return training.run(), training, said


@pytest.fixture(scope="module")
def labels(task):
    return [Label.of(task, searched(task, 0.05, seed)) for seed in range(2)]


class TestLearning:
    def test_imitation_makes_what_is_cheap_likely(self, task, labels):
        learner = Learner(first_weights(0), 3e-3)
        before = learner.loss(labels)
        for _ in range(60):
            learner.imitate(labels)
        assert learner.loss(labels) < 0.6 * before
        untrained = play(PolicyNetwork(first_weights(0)), task).rewards_E[0]
        assert play(PolicyNetwork(learner.weights()), task).rewards_E[0] > untrained

    def test_several_tasks_have_the_mean_loss_of_their_items(self, labels):
        network = Learner(first_weights(0), 1e-3).network
        with torch.no_grad():
            together, alone = (
                float(imitation_loss(network, [labels[0]] * number, torch.device("cpu"))) for number in (2, 1)
            )
        assert together == pytest.approx(alone, rel=1e-4)

    @pytest.mark.slow
    def test_vtrace_makes_better_placements_likelier(self, task):
        learner = Learner(first_weights(0), 3e-3)
        rng = np.random.default_rng(0)
        rewards = []
        for _ in range(40):
            played = play(PolicyNetwork(learner.weights()), task, 8, rng=rng)
            rewards.append(played.rewards_E.mean())
            learner.reinforce(played)
        assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.02

    def test_without_lag_the_policys_loss_begins_at_probabilities_of_its_own(self, task):
        learner = Learner(first_weights(0), 1e-3)
        played = play(PolicyNetwork(learner.weights()), task, 4, rng=np.random.default_rng(0))
        loss = vtrace_loss(learner.network, played, torch.device("cpu"))
        assert torch.isfinite(loss)
        loss.backward()
        assert all(one.grad is not None for name, one in learner.parameters.items() if name.startswith("value"))


class TestRun:
    def test_it_labels_learns_and_says_how_far_it_is(self, tmp_path):
        weights, training, said = trained(tmp_path)
        assert {one.stage for one in said} == {"labels", "imitation"}
        assert said[-1].done == 1.0
        assert (weights["item.weight"] != first_weights(0)["item.weight"]).any()
        record = training.record()
        assert (record["num_labels"], record["num_updates"]) == (5, 6)

    def test_what_is_there_is_not_made_again(self, tmp_path):
        first, _, _ = trained(tmp_path)
        files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        again, training, said = trained(tmp_path)
        assert not [one for one in said if one.stage == "labels"]
        assert training.record()["num_updates"] == 6
        for name, value in first.items():
            np.testing.assert_array_equal(value, again[name])
        more, training, _ = trained(tmp_path, options(updates=9))
        assert training.record()["num_updates"] == 9
        assert (more["item.weight"] != first["item.weight"]).any()
        labels = [path for path in files if path.parent.name == "labels"]
        assert labels
        assert all(path.stat().st_mtime_ns == files[path] for path in labels)

    def test_own_placements_never_make_labels_worse(self, tmp_path):
        trained(tmp_path, options(improvements=1, updates=5))
        seeds = task_seeds(TaskSplit.TRAIN, 3)
        before = [Label.read(tmp_path / "labels" / f"{seed}.safetensors").step_ms[0] for seed in seeds]
        after = [Label.read(tmp_path / "labels" / f"{seed}-0.safetensors").step_ms[0] for seed in seeds]
        assert all(ours <= theirs for ours, theirs in zip(after, before, strict=True))

    def test_vtrace_keeps_the_best_weights(self, tmp_path):
        _, _, said = trained(tmp_path, options(vtrace_updates=2, updates=2))
        assert said[-1].stage == "vtrace"
        assert said[-1].loss < 0

    def test_weights_that_only_get_worse_are_not_the_best(self, tmp_path, monkeypatch):
        begin = first_weights(3)
        monkeypatch.setattr(runs, "_TUNING_RATE", 1e3)
        best, training, said = trained(tmp_path, options(updates=2), begin=begin)
        assert [one.done for one in said if one.stage == "imitation"] == [0.0, 1.0]
        assert said[-1].loss > said[-2].loss
        assert all((best[name] == begin[name]).all() for name in begin)
        assert any((training.latest[name] != begin[name]).any() for name in begin)

    def test_it_ends_with_its_time(self, tmp_path):
        with pytest.raises(ExecutionError, match="in the time given"):
            PolicyTraining(
                PolicyRunOptions(tasks=options().tasks, learning=options().learning, seconds=1e-6), SMALL, tmp_path
            ).run()

    def test_weights_of_something_else_are_refused(self, tmp_path):
        from safetensors.numpy import save_file

        save_file({"a": np.zeros(1)}, tmp_path / "weights.safetensors")
        with pytest.raises(FormatError, match="must hold a training's weights"):
            PolicyTraining(options(), SMALL, tmp_path)

    @pytest.mark.slow
    def test_processes_make_the_labels_that_this_one_makes(self, tmp_path):
        trained(tmp_path / "one", options(num_tasks=2))
        trained(tmp_path / "two", options(num_tasks=2, actors=2))
        names = {path.name for path in (tmp_path / "one" / "labels").iterdir()}
        assert names == {path.name for path in (tmp_path / "two" / "labels").iterdir()}

    @pytest.mark.slow
    def test_an_actor_that_dies_is_told(self):
        with pytest.raises(ExecutionError, match="an actor died"), Actors(1) as run_all:
            list(run_all([_die]))


def _die():
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


class TestTasks:
    def test_the_same_seed_draws_the_same_task(self):
        seed = task_seeds(TaskSplit.TEST, 1)[0]
        one, other = (TaskKind().request(seed) for _ in range(2))
        assert (one.tables, one.topology) == (other.tables, other.topology)

    def test_tasks_differ_in_machine_links_memory_tables_and_batch(self):
        drawn = [TaskKind().request(seed) for seed in task_seeds(TaskSplit.TRAIN, 12)]
        assert len({one.topology.world_size for one in drawn}) > 2
        assert len({one.topology.levels[-1].all_to_all for one in drawn}) == 12
        assert len({one.tables.batch_size for one in drawn}) > 2
        assert len({len(one.tables.tables) for one in drawn}) > 2

    def test_seeds_of_splits_never_meet(self):
        found = [set(task_seeds(split, 100, seed)) for split in TaskSplit for seed in (0, 1)]
        assert not found[4] & (found[0] | found[2] | found[5])

    def test_machines_are_those_of_the_device(self):
        assert "a100-32" in machines_of("a100")
        assert set(machines_of("cpu:amd-epyc")) == set(machines_of("cpu"))
        assert machines_of("any") == TaskKind().machines
        with pytest.raises(InvalidOptionError, match="--device: must be any or any of a100, cpu, h100, got abacus"):
            machines_of("abacus")


class TestWarningsOnce:
    def test_each_kind_is_said_once_with_the_number_of_others(self, caplog):
        log = logging.getLogger(make_costs.__module__)
        with warnings_once():
            for number in range(3):
                log.warning("prices of task %d", number)
            log.warning("another kind")
            log.info("no warning")
            assert [one.levelname for one in caplog.records if one.levelno >= logging.WARNING] == []
        assert [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING] == [
            "prices of task 0 (and 2 like it)",
            "another kind",
        ]
        log.warning("later")
        assert caplog.records[-1].getMessage() == "later"


def test_trainings_without_a_task_to_learn_from_are_an_error(tmp_path, monkeypatch):
    def of_validation_alone(kind, seed, seconds, path):
        if seed in task_seeds(TaskSplit.VALIDATION, 2):
            make_label(kind, seed, seconds, path)
        else:
            path.write_bytes(b"")

    monkeypatch.setattr(runs, "make_label", of_validation_alone)
    with pytest.raises(ExecutionError, match="for none of the tasks to learn from was a layout found in the time"):
        trained(tmp_path)
