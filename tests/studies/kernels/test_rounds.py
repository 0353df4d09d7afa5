import json
from dataclasses import replace

import pytest

from bench.kernels.harness import Settings
from bench.measuring.devices import find_device
from bench.measuring.timing import RoundSettings
from studies.frame import read_document
from studies.kernels.rounds import ALL, BESIDE, EARLY, SCHEMA, Arm, Costs, arms_of, chosen_sets, measure_costs

rounds = RoundSettings(num_warmup=0, num_measured=6, num_dropped=1, flush_every_run=False)


@pytest.fixture
def settings():
    return Settings(rounds=rounds, max_group_sets=4, max_bytes=2**24, reference_bags=8, max_attempts=1)


def test_arms_differ_in_one_thing():
    arms = arms_of(find_device("cpu"))
    assert arms[EARLY].settings == arms[BESIDE].settings == Settings.for_collecting(find_device("cpu"))
    assert arms[ALL].settings == replace(arms[EARLY].settings, rounds=arms[ALL].settings.rounds)
    assert arms[ALL].settings.rounds == replace(arms[EARLY].settings.rounds, num_least=None)
    assert [arm.has_neighbour for arm in arms.values()] == [False, False, True]


def test_sets_are_those_of_the_collector_and_depend_on_the_seed():
    device = find_device("cpu")
    sets = chosen_sets(device, 12, scale=16384, seed=0)
    assert sets == chosen_sets(device, 12, scale=16384, seed=0) != chosen_sets(device, 12, scale=16384, seed=1)
    assert all(sets)


def test_fewer_rounds_are_counted_and_sets_keep_their_places(settings):
    device = find_device("cpu")
    sets = chosen_sets(device, 5, scale=16384, seed=0)
    early = replace(settings, rounds=replace(rounds, num_least=3, enough=10.0))
    arms = {"all": Arm(settings=settings), "few": Arm(settings=early), "same": Arm(settings=early, has_neighbour=True)}
    told = []
    costs = measure_costs(device, arms, sets, num_passes=2, advance=told.append)
    assert len(told) == 6
    assert [one.arm for one in costs.arms] == ["all", "few", "same"]
    assert [one.rounds for one in costs.arms] == [6, 3, 3]
    for one in costs.arms:
        assert (one.num_samples, one.attempts) == (10, 1)
        assert one.wall_s > 0 < one.processor_s
    assert costs.arms[0].latency_ratio == costs.arms[0].corrected_ratio == 1


@pytest.mark.smoke
def test_the_command_reports(tmp_path, settings, monkeypatch, capsys, run_study):
    monkeypatch.setattr("studies.kernels.rounds.arms_of", lambda _: {"one": Arm(settings=settings)})
    options = ("--sets", 3, "--passes", 2, "--scale", 16384)
    assert run_study("rounds", "--output-dir", tmp_path, *options) == 0
    assert "samples per processor second" in capsys.readouterr().out
    numbers = tmp_path / "rounds.json"
    found = read_document(numbers, Costs, SCHEMA)
    assert (found.num_sets, found.num_passes, found.arms[0].rounds) == (3, 2, 6)
    assert json.loads(numbers.read_text())["schema"] == SCHEMA
