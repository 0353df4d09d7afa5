"""The study of wrong models: draws of samples, regrets by hand, what it refuses, and a short run."""

import json
from pathlib import Path

import numpy as np
import pytest

from autoshard.formats.stores.samples import read_samples
from costmodel.kernel.dataset import CostDataset
from studies.__main__ import main
from studies.planners.fooled import FooledTask, Quality, regrets, regrets_table, whole_sets

SAMPLES = Path(__file__).parents[2] / "data" / "samples"


def test_sets_are_drawn_with_all_their_measurements():
    once = CostDataset.from_samples(read_samples(SAMPLES, "cpu"))
    twice = once.take(np.repeat(np.arange(50), 2))
    drawn = twice.take(whole_sets(twice, 20, np.random.default_rng(0)))
    assert len(drawn) == 20
    assert set(np.unique(drawn.set_S, return_counts=True)[1].tolist()) == {2}
    other = twice.take(whole_sets(twice, 20, np.random.default_rng(1)))
    assert set(other.set_S.tolist()) != set(drawn.set_S.tolist())


def test_regrets_are_over_the_best_plan_of_any_model():
    tasks = [
        FooledTask(
            quality=Quality(store="here", num_samples=num_samples, noise=0.0),
            seed=seed,
            slowest_ms={"cost-greedy": 2.0, "auto": auto_ms},
            step_ms={"cost-greedy": 4.0, "auto": 2.0 * auto_ms},
            true_ms={"auto": 1.25},
        )
        for seed, num_samples, auto_ms in ((1000, 100, 2.5), (1001, 100, 1.5), (1000, 300, 1.0), (1001, 300, 1.25))
    ]
    rows = {(row.num_samples, row.planner): row for row in regrets(tasks)}
    # The best known plans take 1 ms (made with 300 samples) and 1.25 ms (with the true model).
    assert rows[100, "auto"].regret == pytest.approx((1.5 + 0.2) / 2)
    assert rows[100, "cost-greedy"].regret == pytest.approx((1.0 + 0.6) / 2)
    assert rows[100, "auto"].over_greedy == pytest.approx(0.0)
    assert rows[100, "auto"].over_greedy_error == pytest.approx(0.25 / np.sqrt(2))
    assert rows[300, "auto"].slowest_ms == pytest.approx(1.125)
    assert rows[300, "auto"].step_over_greedy == pytest.approx((0.5 + 0.625) / 2 - 1)
    assert regrets_table(regrets(tasks)).lines[1][:5] == ("100", "0%", "auto", "2", "2.000")


@pytest.mark.slow
def test_a_short_run_is_kept_and_continued(tmp_path, capsys):
    options = ["--stores", str(SAMPLES), "--samples", "60", "--noise", "0", "--steps", "3", "--num-tables", "12"]
    options += ["--num-tasks", "1", "--updates", "60", "--parts", str(tmp_path / "parts"), "--json"]
    assert main(["fooled", *options]) == 0
    first = json.loads(capsys.readouterr().out)
    planners = [row["planner"] for row in first["regrets"]]
    assert planners[:3] == ["lookup-greedy", "karmarkar-karp", "cost-greedy"]
    assert {"auto, means, 3 steps", "auto, draws, 3 steps", "auto+whole, draws, 3 steps"} <= set(planners)
    assert all(row["regret"] >= 0 for row in first["regrets"])
    assert main(["fooled", *options]) == 0
    assert json.loads(capsys.readouterr().out) == first
