"""Losses under planners' plans, step by step."""

import pytest

from studies.runtime.loss_curves import LossCurveOptions, criteo_tables, trained, write_clicks


@pytest.mark.smoke
@pytest.mark.slow
def test_a_plan_that_cuts_rows_has_the_losses_of_one_process(tmp_path):
    options = LossCurveOptions(steps=6, batch_size=64, processes=2, time_limit=0.2)
    tables = criteo_tables(options.batch_size)
    write_clicks(tmp_path / "clicks.tsv", tables, 6 * 64, seed=1)
    [alone] = trained(tmp_path, tables, options, ["size-greedy"], 1)
    [planned] = trained(tmp_path, tables, options, ["flexshard"], 2)
    assert "row_wise" in planned.layout
    assert len(alone.losses) == 6
    assert planned.losses == pytest.approx(alone.losses, abs=1e-6)
    assert alone.losses[-1] != alone.losses[0]
