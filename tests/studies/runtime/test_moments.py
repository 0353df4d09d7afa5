"""Replica groups and moment scaling: what trainings are summed up to, and real trainings on two processes."""

import json

import pytest

from studies.runtime.clicks import ClickModel
from studies.runtime.moments.study import Growth, MomentResults, Pairs, best_rate
from studies.runtime.moments.trainings import (
    NoiseJob,
    NoiseResult,
    Run,
    Setting,
    TrainedRun,
    compared_runs,
    moments_of_noise,
    tuning_runs,
)

SMALL = ClickModel(num_tables=2, num_rows=60, embedding_dim=8, num_dense=4)
#: Normalised entropies at the end, by seed, groups and moment scale.
ENTROPIES = {(0, 1, 1): 0.8, (0, 2, 1): 0.82, (0, 2, 2): 0.804, (1, 1, 1): 0.9, (1, 2, 1): 0.909, (1, 2, 2): 0.882}


def trained(run, last):
    return TrainedRun(run=run, entropies=(0.95, last), is_identical=True)


@pytest.fixture
def results():
    runs = compared_runs((0, 1), (1, 2), 0.1)
    return MomentResults(
        groups=(1, 2),
        verifications=(),
        noise=(
            NoiseResult(num_groups=1, num_states=(1, 1), moment=4.0),
            NoiseResult(num_groups=2, num_states=(2, 1), moment=9.0),
        ),
        tuning=tuple(trained(run, abs(run.learning_rate - 0.1)) for run in tuning_runs((0.01, 0.08, 0.3))),
        runs=tuple(trained(run, ENTROPIES[run.seed, run.num_groups, run.moment_scale]) for run in runs),
    )


@pytest.mark.smoke
def test_gaps_are_relative_to_one_group_of_the_same_seed(results):
    plain, scaled = results.all_gaps()
    assert (plain.moment_scale, scaled.moment_scale) == (1, 2)
    assert plain.percent == (pytest.approx((0.0, 2.5)), pytest.approx((0.0, 1.0)))
    assert (scaled.last.mean, scaled.last.deviation) == (pytest.approx(-0.75), pytest.approx(1.25))


@pytest.mark.smoke
def test_pairs_count_gaps_on_both_sides_of_0(results):
    # Of the second seed, c = 2 is 2% better than one group, further away than c = 1.
    assert results.pairs() == (Pairs(num_groups=2, num_seeds=2, num_smaller=2, num_nearer=1),)
    assert results.growth()[1] == Growth(num_groups=2, ratio=2.25, num_states=(2, 1))
    assert best_rate(results.tuning) == 0.08


@pytest.mark.smoke
def test_scales_between_1_and_the_number_of_groups_are_optional():
    def scales(**options):
        return [run.moment_scale for run in compared_runs((0,), (8,), 0.1, **options)]

    assert (scales(), scales(all_scales=True)) == ([1, 8], [1, 2, 4, 8])
    assert len({run.name for run in (*compared_runs((0, 1), (1, 2, 4), 0.1), Run(seed=0, **tuned()))}) == 11


def tuned():
    return {"num_groups": 1, "moment_scale": 1, "learning_rate": 0.2}


@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.timeout(180)
def test_moments_grow_with_the_groups_on_noise_and_a_sync_makes_groups_alike():
    setting = Setting(model=SMALL, num_processes=2, batch_size=64, num_steps=60)
    one, two = moments_of_noise(NoiseJob(setting=setting, groups=(1, 2)))
    assert (one.num_states, two.num_states) == ((1, 1), (2, 1))
    # Proposition 1; 120 rows of 8 columns over 60 steps leave some noise.
    assert two.moment / one.moment == pytest.approx(2.0, rel=0.05)


@pytest.mark.timeout(600)
def test_a_small_study(tmp_path, run_study, capsys):
    options = {
        "--nproc": 2,
        "--max-groups": 2,
        "--seeds": 1,
        "--steps": 10,
        "--batch-size": 32,
        "--num-tables": 2,
        "--num-rows": 60,
        "--held-out": 2,
        "--parts": tmp_path / "parts",
    }
    words = [word for pair in options.items() for word in pair]
    assert run_study("moments", *words, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["run"]["num_groups"] for one in found["runs"]] == [1, 2, 2]
    assert all(one["is_identical"] and len(one["entropies"]) == 5 for one in found["runs"])
    assert max(one["weight_error"] for one in found["verifications"]) < 1e-6
    # What is done is not trained again.
    assert run_study("moments", *words, "--json") == 0
    assert json.loads(capsys.readouterr().out)["runs"] == found["runs"]
    assert run_study("moments", *words, "--steps", 20) == 2
    assert "parts whose num_steps is 10, not 20" in capsys.readouterr().err
