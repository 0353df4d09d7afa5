import json

import pytest

from studies.__main__ import main


@pytest.mark.slow
def test_killed_jobs_end_with_the_state_of_undisturbed_ones(tmp_path):
    assert main(["job-kills", "--kills", "2", "--epochs", "3", "-o", str(tmp_path)]) == 0
    (part,) = json.loads((tmp_path / "job-kills.json").read_bytes())["parts"]
    assert 1 <= part["num_training"] + part["num_starting"] <= 2
    assert part["faults"] == []
