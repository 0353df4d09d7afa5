import json

import pytest

from studies.__main__ import main


@pytest.mark.slow
@pytest.mark.parametrize("moments", [("--epochs", "3"), ("--changing",)], ids=["any", "changing"])
def test_killed_jobs_end_with_the_state_of_undisturbed_ones(tmp_path, moments):
    assert main(["job-kills", "--kills", "2", *moments, "-o", str(tmp_path)]) == 0
    (part,) = json.loads((tmp_path / "job-kills.json").read_bytes())["parts"]
    kills = [part[f"num_{moment}"] for moment in ("training", "starting", "searching", "changing")]
    assert 1 <= sum(kills) == len(part["steps_again"]) <= 2
    assert part["faults"] == []
    if moments == ("--changing",):
        assert sum(kills[2:]) >= 1
        assert part["num_adopted"] == len(part["steps_again"])
        assert part["num_steps"] > 100
    else:
        assert (part["weight_difference"], part["loss_difference"], part["num_adopted"]) == (0, 0, 0)
