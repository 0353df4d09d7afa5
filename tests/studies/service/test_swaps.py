import json
from pathlib import Path

import costmodel
from costmodel.registry.versions import SHIPPED_VARIABLE


def test_models_are_swapped_under_load(run_study, capsys, monkeypatch):
    monkeypatch.setenv(SHIPPED_VARIABLE, str(Path(costmodel.__file__).parent / "shipped"))
    assert run_study("service-swaps", "--swaps", 10, "--gap-s", 0.3, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_swapped"], found["num_refused"]) == (8, 2)
    assert found["num_wrong"] == found["num_stale"] == 0
    assert found["answers"]["num_answered"] == found["answers"]["num_requests"] > 0
