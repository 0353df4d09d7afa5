import json
from pathlib import Path

import pytest

import costmodel
from autoshard.core.errors import InvalidOptionError
from costmodel.registry.versions import SHIPPED_VARIABLE
from studies.service.arrivals import Call, _Answer, send_at_rate, summary_of
from studies.service.load import LoadOptions
from studies.service.processes import running_service


@pytest.mark.smoke
def test_percentiles_are_of_accepted_requests():
    answers = [_Answer(200, number / 1e3, is_hasty=False) for number in range(1, 101)]
    refused = [_Answer(503, 9.0, is_hasty=False), _Answer(429, 9.0, is_hasty=True), _Answer(0, 60.0, is_hasty=False)]
    found = summary_of([*answers, *refused], 10.0, 10.3)
    assert (found.num_sent, found.num_accepted, found.num_refused, found.num_failed) == (103, 100, 2, 1)
    assert found.num_hasty == 1
    assert (found.p50_ms, found.max_ms) == (pytest.approx(50.5), pytest.approx(100))
    assert summary_of(refused, 10.0, 1.0).p99_ms is None


def test_requests_come_at_their_rate_from_several_clients(tmp_path):
    seen = []
    with running_service(tmp_path, None) as service:
        calls = [Call(method="GET", path="/livez"), Call(method="GET", path="/v1/plans/none")]
        found = send_at_rate(
            service.url, calls, rate=50, seconds=2, num_clients=3, observe=lambda: seen.append(service.resident_bytes)
        )
    assert found.num_sent == 100
    assert found.statuses == {"200": 50, "422": 50} or found.statuses == {"200": 50, "400": 50}
    assert found.seconds == pytest.approx(2.0, rel=0.5)
    assert min(seen) > 2**20


def test_the_study_measures_and_goes_on(run_study, tmp_path, capsys):
    arguments = ["service-load", "--seconds", 3, "--plans", 200, "--parts", tmp_path / "parts", "--json"]
    assert run_study(*arguments) == 0
    first = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in first["scenarios"]] == ["plans", "reads", "unloaded", "overload"]
    assert all(one["answers"]["num_hasty"] == 0 for one in first["scenarios"])
    assert all(set(one["answers"]["statuses"]) <= {"200", "429", "503"} for one in first["scenarios"])
    assert first["scenarios"][1]["answers"]["statuses"] == {"200": 600}
    assert first["lists"]["num_plans"] == 200
    assert run_study(*arguments) == 0
    assert json.loads(capsys.readouterr().out)["scenarios"] == first["scenarios"]


@pytest.mark.smoke
def test_runs_are_checked():
    with pytest.raises(InvalidOptionError):
        LoadOptions(runs="plans,storm")


def test_models_are_swapped_under_load(run_study, capsys, monkeypatch):
    monkeypatch.setenv(SHIPPED_VARIABLE, str(Path(costmodel.__file__).parent / "shipped"))
    assert run_study("service-swaps", "--swaps", 10, "--gap-s", 0.3, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_swapped"], found["num_refused"]) == (8, 2)
    assert found["num_wrong"] == found["num_stale"] == 0
    assert found["answers"]["statuses"].keys() == {"200"}
