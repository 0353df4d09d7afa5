import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

import costmodel
from autoshard.formats.stores.samples import SampleTable, write_samples
from costmodel.registry.versions import SHIPPED_VARIABLE
from studies.cost_models.hours import stretches_of

_FACTOR = 1.2


@pytest.fixture(scope="module")
def table(samples):
    """Samples of two stretches: those of the second take longer, and were measured an hour after the first."""
    start = min(one.collected_at for one in samples.samples)
    first = [
        replace(one, sample_id="", collected_at=start + timedelta(seconds=index))
        for index, one in enumerate(samples.samples)
    ]
    slower = ("forward_ms", "backward_ms", "reference_forward_ms", "reference_backward_ms")
    later = [
        replace(
            one,
            collected_at=one.collected_at + timedelta(hours=1),
            **{name: getattr(one, name) * _FACTOR for name in slower},
        )
        for one in first
    ]
    return SampleTable(samples=(*first[:200], *later[200:]))


def test_the_speed_between_stretches_stays(table):
    first, second = stretches_of(table)
    assert (second.middle_at - first.middle_at).total_seconds() == pytest.approx(3800, abs=400)
    whole = SampleTable(samples=tuple(replace(one, is_noisy=False) for one in table.samples))
    assert len(first.dataset) + len(second.dataset) <= len(whole)
    drawn_S, rest_S = first.drawn(5.0, np.random.default_rng(0))
    assert first.seconds_S[drawn_S].sum() <= 5.0
    assert sorted([*drawn_S, *rest_S]) == list(range(len(first.dataset)))


@pytest.mark.smoke
def test_models_are_tried_in_later_hours(table, run_study, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(SHIPPED_VARIABLE, str(Path(costmodel.__file__).parent / "shipped"))
    write_samples(tmp_path / "store", table.samples)
    arguments = [
        *("hours", "--store", tmp_path / "store", "--base", "shipped", "--seconds", 10, "--refresh-seconds", 5),
        *("--updates", 5, "--parts", tmp_path / "parts", "--json"),
    ]
    assert run_study(*arguments) == 0
    found = json.loads(capsys.readouterr().out)
    later = {one["is_refreshed"]: one for one in found["trials"] if one["calibrated_at"] != one["tried_at"]}
    assert later[False]["factor"] > 1.1
    assert later[True]["factor"] == pytest.approx(1, abs=0.06)
    assert later[False]["hour_coverage"] <= later[False]["coverage"]
    (tmp_path / "numbers.json").write_text(json.dumps(found))
    assert run_study("hours", "--from", tmp_path / "numbers.json") == 0
    assert "an hour later, refreshed" in capsys.readouterr().out


def test_a_store_of_one_stretch_tells_nothing(samples, run_study, tmp_path, capsys):
    write_samples(tmp_path / "store", samples.samples[:30])
    assert run_study("hours", "--store", tmp_path / "store", "--base", "shipped") == 1
    assert "has 0 stretches of 60 steady samples or more, two are needed" in capsys.readouterr().err
