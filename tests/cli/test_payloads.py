"""The option `--payload` of commands that plan."""

import json

import pytest

from autoshard.core import DType, Payload
from autoshard.core.errors import InvalidOptionError
from autoshard.formats import read_plan

TASK = ("criteo-kaggle", "--topology", "cpu-4")


@pytest.mark.parametrize(
    ("text", "forward", "backward"),
    [("fp32", DType.FP32, DType.FP32), ("int8", DType.INT8, DType.INT8), ("fp16/bf16", DType.FP16, DType.BF16)],
)
def test_a_payload_is_one_format_or_two(text, forward, backward):
    assert Payload.parse(text, "--payload") == Payload(forward=forward, backward=backward)
    assert str(Payload(forward=forward, backward=backward)) == text


@pytest.mark.parametrize("text", ["", "fp64", "fp16/", "/fp16", "fp16/bf16/fp32", "FP16"])
def test_other_texts_are_none(text):
    with pytest.raises(InvalidOptionError, match=r"^--payload: must be one of fp32, fp16, bf16, int8, or two of them"):
        Payload.parse(text, "--payload")


def test_plans_are_made_and_priced_for_a_payload(run, tmp_path):
    predicted = {}
    for payload in ("fp32", "bf16", "int8/fp32"):
        file = tmp_path / "plan.json"
        run("plan", *TASK, "--planner", "cost-greedy", "--payload", payload, "-o", file)
        plan = read_plan(file)
        assert str(plan.payload) == payload
        predicted[payload] = plan.predicted
    wide, half, mixed = ([rank.forward_exchange_ms for rank in one.ranks] for one in predicted.values())
    assert max(mixed) < max(half) < max(wide)
    wide, half, mixed = ([rank.backward_exchange_ms for rank in one.ranks] for one in predicted.values())
    assert max(half) < max(mixed) == max(wide)


def test_comparisons_and_simulations_take_a_payload(run, tmp_path):
    planners = ("--planners", "cost-greedy,oper", "--output-dir", tmp_path)
    run("compare", *TASK, *planners, "--payload", "bf16")
    assert {str(read_plan(tmp_path / f"{name}.json").payload) for name in ("cost-greedy", "oper")} == {"bf16"}
    steps_ms = []
    for payload in ("fp32", "fp16"):
        sizes = ("--ranks", "8", "--batches", "0", "--payload", payload, "--json")
        out, _ = run("simulate", "criteo-kaggle", "--topology", "dgx-a100", "--planner", "cost-greedy", *sizes)
        document = json.loads(out)
        assert document["settings"]["payload"] == payload
        steps_ms.append(document["points"][0]["step_ms"]["value"])
    assert steps_ms[1] < steps_ms[0]
