import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from autoshard.core.errors import InvalidOptionError
from autoshard.formats.stores.samples import write_samples
from studies.cost_models.calibration import (
    MIXTURE,
    CalibrationStudyOptions,
    Outcome,
    Store,
    errors_table,
    goal_notes,
    noise_of,
    seconds_of,
)


@pytest.fixture(scope="module")
def stores(store, samples, tmp_path_factory):
    """The samples, and the same as a machine measures them that takes twice as long."""
    folder = tmp_path_factory.mktemp("stores")
    shutil.copytree(store, folder / "quick")
    slow = [
        replace(one, sample_id="", device_name="B", forward_ms=2 * one.forward_ms, backward_ms=2 * one.backward_ms)
        for one in samples.samples
    ]
    write_samples(folder / "slow", slow)
    return folder


@pytest.fixture
def outcome():
    def make(**changes):
        usual = {"store": "slow", "arm": "calibrated", "seconds": 20.0, "repeat": 0, "num_samples": 90}
        errors = {"relative_error": 0.05, "factored_error": 0.05}
        return Outcome(**{**usual, **errors, "coverage": 0.9, "half_width": 0.1, **changes})

    return make


def test_samples_share_the_time_between_them(samples):
    kept = samples.samples[:100]
    seconds_S = seconds_of(samples.samples, kept, rounds=100)
    references_S = np.array([one.reference_forward_ms + one.reference_backward_ms for one in kept])
    runs_S = np.array([one.kernel_ms for one in kept]) + 3 / 24 * references_S
    rests_S = seconds_S - runs_S * np.array([one.num_rounds + 1 for one in kept]) / 1e3
    assert np.ptp(rests_S) == pytest.approx(0, abs=1e-9)
    assert (rests_S >= 0).all()


def test_fewer_rounds_take_less_time_and_add_noise(stores, samples):
    kept = [replace(one, num_rounds=9, num_attempts=2, forward_spread=0.3) for one in samples.samples[:100]]
    saved_S = seconds_of(samples.samples, kept, rounds=9) - seconds_of(samples.samples, kept, rounds=3)
    assert (saved_S > np.array([one.kernel_ms * 6 / 1e3 for one in kept])).all()
    assert noise_of(kept, 9)[:, 0] == pytest.approx(np.full(100, 0.3 * np.sqrt(1 / 9 - 1 / 18)))
    assert noise_of(kept, 3)[:, 0] == pytest.approx(np.full(100, 0.3 * np.sqrt(1 / 3 - 1 / 18)))
    store = Store.read(stores / "quick", 0, rounds=1)
    measured = store.measured(np.arange(20), np.random.default_rng(0))
    log_SO = np.log(measured.latency_ms_SO / store.pool.take(np.arange(20)).latency_ms_SO)
    assert (np.abs(log_SO) <= 5 * store.noise_SO[:20] + 1e-12).all()


def test_samples_are_drawn_by_shares_until_time_is_up(stores):
    quick = Store.read(stores / "quick", 0)
    shares = dict.fromkeys(np.unique(quick.source_S).tolist(), 1.0)
    drawn_S = quick.drawn(10.0, shares, np.random.default_rng(0))
    assert quick.seconds_S[drawn_S].sum() <= 10.0
    counts = [int((quick.source_S[drawn_S] == name).sum()) for name in shares]
    assert max(counts) - min(counts) <= 1
    assert len(set(drawn_S.tolist())) == len(drawn_S)


def test_of_other_kinds_each_comes_before_any_comes_again(stores):
    quick = Store.read(stores / "quick", 0)
    is_other_S = quick.source_S == "kinds"
    is_other_S |= np.arange(len(quick.pool)) % 3 == 0
    quick = replace(quick, source_S=np.where(is_other_S, "kinds", quick.source_S))
    drawn_S = quick.drawn(np.inf, {"kinds": 1.0}, np.random.default_rng(0))
    kinds = quick.kind_S[drawn_S].tolist()
    assert sorted(kinds) == sorted(quick.kind_S[is_other_S].tolist())
    laps = [kinds[:place].count(kind) for place, kind in enumerate(kinds)]
    assert laps == sorted(laps)
    assert laps[-1] > 0


def test_goals_are_reached_or_missed(outcome):
    everything = outcome(arm="everything", relative_error=0.04, factored_error=0.04)
    reached, missed = outcome(relative_error=0.06), outcome(seconds=60.0, relative_error=0.06, factored_error=0.044)
    assert goal_notes((everything, reached, missed)) == (
        "slow, 20 s: 1.50 times the error of everything, at most 1.6: reached",
        "slow, 20 s: 1.25 times the error of everything after one factor, at most 1.6: reached",
        "slow, 60 s: 1.50 times the error of everything, at most 1.3: missed",
        "slow, 60 s: 1.10 times the error of everything after one factor, at most 1.15: reached",
    )
    table = errors_table((everything, reached, outcome(repeat=1, relative_error=0.08), missed))
    assert table.lines[1][4:6] == ("7.00%", "1.75")


@pytest.mark.parametrize("options", [{"stores": "one"}, {"arms": "magic"}, {"seconds": "soon"}])
def test_options_are_checked(options):
    with pytest.raises(InvalidOptionError):
        CalibrationStudyOptions(**options)


@pytest.mark.smoke
def test_the_study_goes_on_from_its_parts(stores, run_study, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(MIXTURE, "random", 1.0)
    for name in list(MIXTURE):
        if name != "random":
            monkeypatch.delitem(MIXTURE, name)
    arguments = [
        *("calibrate", "--stores", f"{stores / 'quick'},{stores / 'slow'}", "--seconds", "5", "--repeats", "1"),
        *("--updates", "60", "--arms", "scaled", "--parts", tmp_path / "parts", "--json"),
    ]
    assert run_study(*arguments) == 0
    first = json.loads(capsys.readouterr().out)
    assert {(one["store"], one["arm"]) for one in first["outcomes"]} == {
        (store, arm) for store in ("quick", "slow") for arm in ("everything", "calibrated", "scaled")
    }
    assert run_study(*arguments) == 0
    assert json.loads(capsys.readouterr().out)["outcomes"] == first["outcomes"]
    (tmp_path / "numbers.json").write_text(json.dumps(first))
    assert run_study("calibrate", "--from", tmp_path / "numbers.json") == 0
    assert "Models of one machine on held-out sets of the other" in capsys.readouterr().out
