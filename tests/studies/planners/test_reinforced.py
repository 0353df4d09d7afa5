"""AutoShard's and DreamShard's algorithms on this project's prices."""

import numpy as np
import pytest
import torch

from autoshard.core.errors import InvalidOptionError
from costmodel import Registry
from policies.network import first_weights
from policies.planning.trained import TrainedPolicy
from studies.__main__ import main
from studies.planners import policy_runs
from studies.planners.limit_runs import LimitTask
from studies.planners.reinforced import autoshard, dreamshard, study
from studies.planners.reinforced.games import Game, Scaling, held_before, play

TASK = LimitTask(num_tables=6, num_ranks=3, base="cpu-8", goals={})
ALGORITHMS = {"AutoShard": autoshard.AutoShard, "DreamShard": dreamshard.DreamShard}


@pytest.fixture
def game():
    return Game.of(TASK.request(7, None))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_scores_of_an_update_are_those_that_were_played(game, algorithm):
    torch.manual_seed(0)
    net, scaling = ALGORITHMS[algorithm](), Scaling.of([game])
    played = play(net, game, scaling, 4)
    held_ENMR = held_before(played.chosen_EN, 3)
    filled_ENR = torch.einsum("enmr,m->enr", held_ENMR, played.share_N)
    net.start(played.features_NF)
    for number in range(6):
        # Tables after this one are not on a rank yet, whatever they choose later.
        assert not held_ENMR[:, number, number:].any()
        before = net.logits(number, held_ENMR[:, number, :number], filled_ENR[:, number])
        np.testing.assert_allclose(held_ENMR[:, number].sum(dim=(1, 2)), number)
        assert before.shape == (4, 3)
    losses = net._policy_loss(played) if algorithm == "DreamShard" else net._loss(played, torch.rand(4))
    assert torch.isfinite(losses)


@pytest.mark.smoke
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_keeps_to_the_memory_and_prices_tables_where_they_are(game, algorithm):
    full = Game(problem=game.problem, costs=game.costs, features_NF=game.features_NF, share_N=torch.full((6,), 0.4))
    played = play(ALGORITHMS[algorithm](), full, Scaling.of([game]), 5)
    assert all(np.bincount(chosen_N, minlength=3).tolist() == [2, 2, 2] for chosen_N in played.chosen_EN.numpy())
    ranks_N = torch.empty(6, dtype=torch.int64)
    ranks_N[played.order_N] = played.chosen_EN[0]
    assert played.measured(0).step_ms == game.measured(ranks_N).step_ms
    assert game.measured(torch.zeros(6, dtype=torch.int64)).kernel_ms[1:].tolist() == [0, 0]


def test_dreamshard_learns_to_spread_tables(game, monkeypatch):
    monkeypatch.setattr(dreamshard, "_COST_BATCHES", 40)
    torch.manual_seed(0)
    net, scaling = dreamshard.DreamShard(), Scaling.of([game])
    net.learn([game], scaling, 1, np.random.default_rng(0))
    (chosen_N,) = play(net, game, scaling, 1, greedy=True).chosen_EN.numpy()
    assert len(set(chosen_N)) == 3


def test_a_study_trains_plans_and_reads_its_parts_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dreamshard, "_ITERATIONS", 1)
    monkeypatch.setattr(dreamshard, "_COST_BATCHES", 2)
    monkeypatch.setattr(dreamshard, "_RL_BATCHES", 1)
    monkeypatch.setattr(autoshard, "_PLACEMENTS", 100)
    for module in (study, policy_runs):
        monkeypatch.setattr(module, "TASKS", {"80-cpu": TASK})
    options = ["--tasks", "80-cpu", "--seeds", "1", "--efforts", "1", "--num-trained", "2", "--best-s", "0.1"]
    TrainedPolicy(weights=first_weights(0), training={}).publish(Registry(tmp_path / "models"))
    options += ["--registry", str(tmp_path / "models"), "--parts", str(tmp_path / "parts")]
    assert main(["reinforced", *options]) == 0
    printed = capsys.readouterr().out
    for name in ("AutoShard, 1 x", "DreamShard, 1 x, 64 samples", "policy", "auto, 0.05 s"):
        assert name in printed
    monkeypatch.setattr(study, "trained", lambda *_: pytest.fail("made again"))
    assert main(["reinforced", *options]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("wrong", [{"efforts": "1,half"}, {"efforts": ""}, {"first_seed": 510}])
def test_says_which_option_is_wrong(wrong):
    with pytest.raises(InvalidOptionError):
        study.ReinforcedOptions(**wrong)
