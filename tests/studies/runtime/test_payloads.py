"""The study of payloads."""

import json

import pytest

from autoshard.core import DType
from autoshard.validator import validate_plan
from studies.runtime.clicks import ClickModel
from studies.runtime.payloads import CONTROL, ClickResult, SeedRuns, loss_figure, loss_table, losses, payloads, plan_of


def result(entropy, sent):
    return ClickResult(
        normalised_entropy=entropy, best_entropy=0.7, sent_bytes={"ids": 5.0, "forward": sent, "backward": sent}
    )


@pytest.mark.smoke
def test_every_format_is_tried_forward_backward_and_both_ways():
    names = [str(payload) for payload in payloads()]
    assert len(set(names)) == 10
    assert {"fp32", "bf16/fp32", "fp32/bf16", "int8"} < set(names)
    for payload in payloads():
        plan = plan_of(ClickModel(), 64, 4, payload)
        validate_plan(plan)
        assert {payload.forward, payload.backward} <= set(DType)
        assert {str(one.tier) for one in plan.shards} == {"table_wise", "row_wise"}


@pytest.mark.smoke
def test_losses_are_paired_by_seed():
    found = [
        SeedRuns(results={"fp32": result(0.8, 4.0), "int8": result(0.88, 1.0), CONTROL: result(0.8, 4.0)}),
        SeedRuns(results={"fp32": result(0.5, 4.0), "int8": result(0.5, 1.0), CONTROL: result(0.5, 4.0)}),
    ]
    wide, narrow, control = losses(found)
    assert (wide.more, wide.sent, control.more) == (0.0, 1.0, 0.0)
    # Changes of 10% and 0%: mean 5%, standard error 5% / sqrt(2 - 1).
    assert (narrow.more, narrow.error, narrow.sent) == pytest.approx((0.05, 0.05, 0.25))
    text = loss_table(found, (wide, narrow, control)).to_markdown()
    assert "| int8 | +5.000% | 5.000% | 25% |" in text
    assert [len(trace.x or ()) for trace in loss_figure((wide, narrow, control)).data] == [0, 0, 1, 1]


def test_a_study_trains_and_continues(run_study, tmp_path, capfd):
    options = ("--seeds", 1, "--steps", 3, "--held-out", 2, "--batch-size", 64, "--nproc", 2, "--rows", 50)
    for _ in range(2):
        assert run_study("payloads", *options, "--parts", tmp_path / "parts", "-o", tmp_path, "--no-images") == 0
    document = json.loads((tmp_path / "payload-quality.json").read_text(encoding="utf-8"))
    assert document["summary"][0]["payload"] == "fp32"
    of_fp32, of_int8 = (document["seeds"][0][name] for name in ("fp32", "int8"))
    assert of_fp32["best_entropy"] == of_int8["best_entropy"]
    assert 0.25 < document["summary"][9]["sent"] < 0.5
    capfd.readouterr()
