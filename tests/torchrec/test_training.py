"""Models of TorchRec trained by TorchRec with our plan, and on our engine: equal to the unsharded model."""

import pytest

from tests.ranks import on_ranks


@pytest.fixture(scope="module")
def results():
    from tests.torchrec.worker import train_all

    return on_ranks(train_all, 2)[0]


@pytest.mark.parametrize("how", ["by_torchrec", "by_same_plan", "by_other_plan"])
def test_losses_are_those_of_the_unsharded_model(results, how):
    assert results[how] == pytest.approx(results["unsharded"], abs=1e-5)


def test_weights_are_those_of_the_unsharded_model(results):
    assert results["difference"] < 1e-5


def test_plans_of_the_planner_round_trip(results):
    assert results["round_trip"]


def test_the_recorder_counts_every_other_pass(results):
    # Three passes before the tables were put on our engine, the first and the last counted.
    assert results["by_same_plan_counted"] == results["by_other_plan_counted"] == 2


def test_batches_that_are_not_executed_are_refused_by_name(results):
    weighted, without = results["refused"]
    # A module without weights leaves those of its batches aside.
    assert weighted == ""
    assert without.startswith('keys: has no feature "b", ')


def test_towers_that_share_tables_train_as_the_unsharded_model(results):
    assert max(results["towers"]["differences"].values()) < 1e-5, results["towers"]["differences"]
    assert all(results["towers"]["replaced"])


def test_a_sharded_model_is_restored_under_another_plan(results):
    assert results["towers"]["restored"] == [True] * 5


def test_models_that_cannot_be_replaced_whole_are_refused_and_left_as_they_were(results):
    told = results["towers"]["refusals"]
    assert told["stubborn"] == "kept.tables: cannot be replaced in the model: this tower keeps its tables"
    assert told["list"].startswith("plain[0]: is EmbeddingBagCollection in an attribute that is no submodule")
    assert told["processed"] == "1: its feature processors are not executed, which weights give gradients to"
    assert told["adaptive"].startswith("towers.0.inner.tables: stands at towers.1.inner.tables, again, too")
