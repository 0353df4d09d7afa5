"""Trained versions become production ones unless they are worse than what they replace."""

import json
from dataclasses import replace

import numpy as np
import pytest

from autoshard.cli import main
from autoshard.core.errors import ModelError
from autoshard.core.machine import MeasuredMachine
from costmodel.kernel.comparison import kernel_version, unseen_by
from costmodel.kernel.learned import LearnedCostModel
from costmodel.registry.objects import BASELINES
from costmodel.registry.promotion import (
    LEAST_TOLERANCE,
    HeldOutComparison,
    TrainedVersion,
    publish_version,
    report_published,
)
from costmodel.registry.publish_options import PublishOptions
from costmodel.registry.versions import SHIPPED_VARIABLE, Registry

TENSORS = {"a": np.zeros(3)}


@pytest.fixture
def registry(tmp_path):
    return Registry(tmp_path / "registry")


@pytest.fixture(autouse=True)
def shipped(tmp_path, monkeypatch):
    monkeypatch.setenv(SHIPPED_VARIABLE, str(tmp_path / "shipped"))
    return Registry(tmp_path / "shipped")


def against(name, difference):
    return HeldOutComparison.paired(np.full(20, difference), against=name, measure="error", of="samples")


def version(number, *, compare=None, baselines=()):
    """A version that is as much worse than another as its number is higher."""

    def by_number(stored):
        return against(stored.label, number - stored.card["number"])

    return TrainedVersion(
        kind="cost",
        name="cpu",
        tensors=TENSORS,
        card={"number": number},
        compare=compare or by_number,
        baselines=baselines,
    )


def publish(registry, trained, **options):
    return publish_version(registry, trained, PublishOptions(**options))


class TestComparison:
    def test_the_tolerance_is_the_standard_error_of_the_pairs(self):
        difference_P = np.array([0.0, 0.02, 0.04, 0.02])
        found = HeldOutComparison.paired(difference_P, against="x", measure="error", of="samples")
        # Deviations -2, 0, 2 and 0%: a variance of 8/3 %^2, over four pairs.
        assert found.tolerance == pytest.approx(0.01 * (8 / 3 / 4) ** 0.5)
        assert found.difference == pytest.approx(0.02)
        assert found.is_worse
        assert not HeldOutComparison.paired(difference_P - 0.015, against="x", measure="error", of="samples").is_worse

    @pytest.mark.parametrize(("difference", "is_worse"), [(0.0009, False), (0.0011, True), (-1, False), (np.nan, True)])
    def test_differences_that_never_vary_may_be_small(self, difference, is_worse):
        found = against("x", difference)
        assert found.tolerance == LEAST_TOLERANCE or np.isnan(found.tolerance)
        assert found.is_worse == is_worse

    def test_it_says_what_was_compared(self):
        assert str(against("cost-greedy", 0.056)) == (
            "error 5.60% above that of cost-greedy on 20 samples (tolerance 0.10%)"
        )


class TestPublishing:
    def test_the_first_version_has_only_baselines_to_pass(self, registry):
        refused = publish(registry, version(1, baselines=(against("cost-greedy", 0.01),)))
        assert refused.alias is None
        assert [one.against for one in refused.worse] == ["cost-greedy"]
        assert registry.production_id("cost", "cpu") is None
        assert registry.load("cost", "cpu", refused.id).card["number"] == 1
        assert registry.worse_than("cost", "cpu", refused.id, BASELINES) == str(refused.worse[0])
        taken = publish(registry, version(2, baselines=(against("cost-greedy", 0.0),)))
        assert registry.production_id("cost", "cpu") == taken.id

    def test_a_worse_version_is_kept_and_not_promoted(self, registry):
        first = publish(registry, version(1))
        worse = publish(registry, version(2))
        assert (worse.alias, [one.against for one in worse.comparisons]) == (None, [first.id])
        assert registry.worse_than("cost", "cpu", worse.id, first.id) == str(worse.comparisons[0])
        assert registry.production_id("cost", "cpu") == first.id
        assert registry.promote("cost", "cpu", worse.id) == worse.id
        better = publish(registry, version(0))
        assert registry.worse_than("cost", "cpu", better.id, worse.id) is None
        assert registry.production_id("cost", "cpu") == better.id
        assert [entry.action for entry in registry.history("cost", "cpu")] == ["publish", "promote", "publish"]

    def test_an_equal_version_is_promoted(self, registry):
        publish(registry, version(1))
        equal = replace(version(1), card={"number": 1, "seed": 2})
        assert publish(registry, equal).id == registry.production_id("cost", "cpu")

    def test_the_production_version_itself_needs_no_comparison(self, registry):
        first = publish(registry, version(1))
        again = publish(registry, version(1, baselines=(against("cost-greedy", 0.5),)))
        assert (again.id, again.alias, again.comparisons) == (first.id, "production", ())

    def test_force_compares_nothing(self, registry):
        publish(registry, version(1))
        forced = publish(registry, version(2), force=True)
        assert (forced.alias, forced.comparisons) == ("production", ())
        assert registry.production_id("cost", "cpu") == forced.id

    def test_a_candidate_is_compared_and_stays_one_if_it_is_worse(self, registry, capsys):
        first = publish(registry, version(1))
        candidate = publish(registry, version(2, baselines=(against("cost-greedy", 0.0),)), alias="candidate")
        assert [one.against for one in candidate.comparisons] == ["cost-greedy", first.id]
        assert [one["worse"] for one in candidate.to_json()["comparisons"]] == [False, True]
        assert registry.worse_than("cost", "cpu", candidate.id, first.id) == str(candidate.worse[0])
        assert registry.worse_than("cost", "cpu", candidate.id, BASELINES) is None
        report_published(candidate, "cost", "cpu")
        said = f"{candidate.id} is the candidate, and worse: error 100.00% above that of {first.id}"
        assert said in capsys.readouterr().err
        assert (candidate.alias, candidate.to_json()["promoted"]) == ("candidate", False)
        assert registry.load("cost", "cpu", "candidate").id == candidate.id
        assert registry.production_id("cost", "cpu") == first.id

    def test_nothing_is_published_if_so_asked(self, registry):
        assert publish(registry, version(1), publish=False).to_json() == {
            "id": None,
            "alias": None,
            "promoted": False,
            "registry": None,
            "comparisons": [],
            "notes": [],
        }
        assert not registry.root.exists()

    def test_the_shipped_version_is_replaced_where_the_registry_has_none(self, registry, shipped):
        came = shipped.publish("cost", "cpu", TENSORS, {"number": 1})
        worse = publish(registry, version(2))
        assert [one.against for one in worse.worse] == [f"{came} (shipped)"]
        assert registry.production_id("cost", "cpu") is None
        registry.promote("cost", "cpu", worse.id)
        assert publish(registry, version(1.5)).alias == "production"
        registry.promote("cost", "cpu", came)
        assert publish(registry, version(1.4)).worse[0].against == f"{came} (shipped)"

    @pytest.mark.parametrize("damaged", ["weights.safetensors", "production/00000001"])
    def test_a_damaged_production_version_is_replaced(self, registry, damaged):
        first = publish(registry, version(1))
        folder = registry.root / "cost" / "cpu"
        (folder / damaged if "/" in damaged else folder / first.id / damaged).write_text("x")
        new = publish(registry, version(2))
        assert registry.production_id("cost", "cpu") == new.id
        (note,) = new.notes
        assert "not compared with the production version" in note
        assert damaged in note

    def test_one_that_cannot_be_compared_is_replaced(self, registry):
        publish(registry, version(1))

        def compare(stored):
            raise ModelError(f"{stored.card['number']} has seen no such kernels")

        new = publish(registry, version(2, compare=compare))
        assert new.alias == "production"
        assert new.notes == ("not compared with the production version: 1 has seen no such kernels",)
        refused = publish(registry, version(3, compare=compare, baselines=(against("cost-greedy", 0.5),)))
        assert refused.alias is None

    def test_a_version_that_is_promoted_meanwhile_is_compared_as_well(self, registry):
        first = publish(registry, version(1))
        other = publish(registry, version(0), alias="candidate")

        def compare(stored):
            if stored.id == first.id:
                registry.promote("cost", "cpu", other.id)
            return against(stored.id, 0.5 - stored.card["number"])

        late = publish(registry, version(0.5, compare=compare))
        assert [one.against for one in late.worse] == [other.id]
        assert registry.production_id("cost", "cpu") == other.id
        assert len(registry.history("cost", "cpu")) == 2


class TestKernelModels:
    """On the committed samples, with models of a few hundred updates."""

    def spoilt(self, trained, factor):
        """The model with prices that are all off by a factor."""
        return self.with_card(trained, scale_ms=trained.model.card.scale_ms * factor)

    def with_card(self, trained, **changes):
        """The model with another card."""
        card = replace(trained.model.card, **changes)
        return replace(trained, model=LearnedCostModel(trained.model.tensors(), card))

    def test_a_worse_one_is_refused_and_an_equal_one_is_not(self, trained, registry):
        first = publish(registry, kernel_version(trained))
        worse = publish(registry, kernel_version(self.spoilt(trained, 1.5)))
        (comparison,) = worse.worse
        assert comparison.num_pairs == len(trained.held_out)
        assert comparison.difference > 0.2
        assert registry.production_id("cost", "cpu") == first.id
        noted = self.with_card(trained, training={**trained.model.card.training, "note": "equal"})
        equal = publish(registry, kernel_version(noted))
        assert equal.comparisons[0].difference == 0
        assert registry.production_id("cost", "cpu") == equal.id != first.id

    def test_only_samples_that_neither_was_trained_on_count(self, trained, dataset):
        training = {**trained.model.card.training, "seed": 1}
        other = LearnedCostModel(trained.model.tensors(), replace(trained.model.card, training=training))
        common = set(trained.held_out.set_S[unseen_by(other, trained.held_out)].tolist())
        assert common == {
            number for number in dataset.split(0.2, 1)[1].set_S.tolist() if number in set(trained.held_out.set_S)
        }
        silent = LearnedCostModel(trained.model.tensors(), replace(trained.model.card, training={}))
        assert len(unseen_by(silent, trained.held_out)) == len(trained.held_out)
        elsewhere = replace(trained.model.card, measured_on=MeasuredMachine(device_name="Abacus"))
        assert len(unseen_by(LearnedCostModel(trained.model.tensors(), elsewhere), dataset)) == len(dataset)

    def test_a_calibrated_one_has_seen_what_was_measured_before_its_newest_sample(self, trained, dataset, registry):
        at_S = np.sort(dataset.collected_at_S)
        training = {"calibrated_from": "0" * 16, "samples_until": str(at_S[-41])}
        other = self.with_card(trained, training=training).model
        assert unseen_by(other, dataset).tolist() == np.flatnonzero(dataset.collected_at_S > at_S[-41]).tolist()
        twice = replace(dataset, set_S=np.zeros(len(dataset), dtype=np.int64))
        with pytest.raises(ModelError, match="only 0 samples were kept"):
            unseen_by(other, twice)
        # One that does not say until when has seen all.
        registry.publish("cost", "cpu", other.tensors(), {**other.card.to_json(), "training": {"calibrated_from": "0"}})
        published = publish(registry, kernel_version(self.spoilt(trained, 1.5)))
        assert published.alias == "production"
        assert "only 0 samples were kept from its training too, 10 are needed" in published.notes[0]

    def test_too_few_samples_in_common_compare_nothing(self, trained, registry):
        publish(registry, kernel_version(trained))
        few = replace(self.spoilt(trained, 1.5), held_out=trained.held_out.take(np.arange(9)))
        (note,) = publish(registry, kernel_version(few)).notes
        assert "only 9 samples were kept from its training too, 10 are needed" in note

    def test_one_of_other_kernels_is_replaced(self, trained, registry):
        other = replace(trained.model.card.coverage, kinds=("fused/hbm/fp16/sgd/sum",))
        publish(registry, kernel_version(self.with_card(trained, coverage=other)))
        new = publish(registry, kernel_version(self.spoilt(trained, 1.5)))
        assert registry.production_id("cost", "cpu") == new.id
        assert "has seen fused/hbm/fp16/sgd/sum" in new.notes[0]


def test_train_cost_says_in_one_line_why_a_model_is_not_promoted(store, trained, registry, capsys):
    first = registry.publish("cost", "cpu", trained.model.tensors(), trained.model.card.to_json())
    arguments = ["train", "cost", "--store", str(store), "--registry", str(registry.root), "--updates", "1", "--json"]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert (result["alias"], result["promoted"], registry.production_id("cost", "cpu")) == (None, False, first)
    assert [one["worse"] for one in result["comparisons"]] == [True]
    assert printed.err.count("\n") == 1
    for text in (
        f"cost cpu: {result['id']} is not promoted: mean relative error",
        f"points above that of version {first} on {len(trained.held_out)} held-out samples",
        f"To promote it anyway: autoshard models promote {result['id']} --registry {registry.root}",
    ):
        assert text in printed.err
    assert main(["models", "promote", result["id"], "--registry", str(registry.root)]) == 0
    assert registry.production_id("cost", "cpu") == result["id"]
    registry.promote("cost", "cpu", first)
    capsys.readouterr()
    assert main([*arguments[:-1], "--force"]) == 0
    assert capsys.readouterr().err == ""
    assert registry.production_id("cost", "cpu") == result["id"]
