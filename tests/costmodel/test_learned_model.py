import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autoshard.core import DType, Exchange, MemoryLevel, Optimizer, Pooling, Update, set_costs
from autoshard.core.errors import ModelError
from costmodel.kernel.card import CostModelCard, TrainedCoverage
from costmodel.kernel.features import NUM_FEATURES
from costmodel.kernel.learned import LearnedCostModel
from costmodel.kernel.predictor import COUNT, FULL_CODE_WIDTH, NUM_OUTSIDE
from costmodel.kernel.weights import CODE_WIDTH, MAX_LOG_FUSION, OVERHEAD, TRAIT_WIDTH
from costmodel.plugin import load_learned_model
from costmodel.registry.versions import Registry, StoredModel
from tests import builders as make


@pytest.fixture
def shards():
    return [make.held(table=f"t{index}", num_embeddings=10**index, pooling_factor=index) for index in range(1, 6)]


@pytest.fixture
def registry(tmp_path, trained):
    registry = Registry(tmp_path / "registry")
    registry.publish(LearnedCostModel.kind, "cpu", trained.model.tensors(), trained.model.card.to_json())
    return registry


def test_codes_are_what_the_encoder_learned_and_counts(random_model, shards):
    codes_NH = random_model.encode(shards)
    assert (codes_NH.dtype, codes_NH.shape) == (np.float32, (5, FULL_CODE_WIDTH))
    assert codes_NH[:, COUNT].tolist() == [1.0] * 5
    assert codes_NH[:, NUM_OUTSIDE].tolist() == [0.0] * 5
    assert (codes_NH[:, TRAIT_WIDTH:CODE_WIDTH] > 0).all()  # what each takes by itself
    alone_NH = np.concatenate([random_model.encode([shard]) for shard in shards])
    assert alone_NH == pytest.approx(codes_NH, abs=1e-6)


def test_an_empty_set_costs_nothing_and_one_of_idle_shards_what_starting_a_kernel_costs(random_model):
    codes_NH = random_model.encode([make.held(num_embeddings=10, pooling_factor=0.0)])
    assert random_model.predict_ms(np.zeros((1, FULL_CODE_WIDTH), np.float32)).tolist() == [0.0]
    assert random_model.predict_ms(codes_NH)[0] > 0


def test_fusing_changes_a_sum_within_bounds(random_model, random_weights, shards):
    codes_NH = random_model.encode(shards)
    own_ms = 2.0 * codes_NH[:, TRAIT_WIDTH:CODE_WIDTH].sum()  # the card's scale_ms
    overhead_ms = 2.0 * np.exp(random_weights[OVERHEAD].astype(float)).sum()
    priced_ms = random_model.predict_ms(codes_NH.sum(axis=0, keepdims=True))[0]
    assert own_ms * np.exp(-MAX_LOG_FUSION) <= priced_ms <= (own_ms + overhead_ms) * np.exp(MAX_LOG_FUSION)


def test_parts_add_up_and_lie_in_their_interval(trained, samples):
    costs = set_costs(trained.model, [sample.local_shards for sample in samples.samples[:50]])
    assert (costs.forward_ms_S > 0).all()
    assert (costs.backward_ms_S > costs.forward_ms_S).mean() > 0.9  # as was measured
    assert (costs.low_ms_S < costs.kernel_ms_S).all()
    assert (costs.kernel_ms_S < costs.high_ms_S).all()


def test_the_interval_is_that_of_the_card_times_the_spread(random_model, shards, card):
    codes_NH = random_model.encode(shards)
    parts = random_model.predict_parts(codes_NH)
    spread_S = random_model.predictor.spread(codes_NH)
    assert len(set(spread_S.tolist())) == 5  # some are less certain than others
    assert parts.low_ms_S == pytest.approx(parts.kernel_ms_S * np.exp(card.interval.low * spread_S))
    assert parts.high_ms_S == pytest.approx(parts.kernel_ms_S * np.exp(card.interval.high * spread_S))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_bags": 2048}, "num_bags 2,048, trained on 64 to 1,024"),
        ({"num_bags": 63}, "num_bags 63, trained on 64 to 1,024"),
        ({"embedding_dim": 33}, "embedding_dim 33, trained on 16 to 32"),
        ({"embedding_dim": 15}, "embedding_dim 15, trained on 16 to 32"),
        ({"num_embeddings": 1_000_001}, "num_embeddings 1,000,001, trained on 10 to 1,000,000"),
        ({"pooling_factor": 50.5}, "pooling_factor 50.5, trained on 1 to 50"),
        ({"num_bags": 2048, "embedding_dim": 320}, "embedding_dim 320, trained on 16 to 32"),
    ],
)
def test_what_was_never_measured_is_priced_with_a_wider_interval_and_a_note(random_model, changes, said):
    inside, outside = make.held(), replace(make.held(), **changes)
    assert random_model.notes([inside]) == ()
    (note,) = random_model.notes([inside, outside, outside])
    assert (note.table, note.fault) == ("t", said)
    codes_NH = random_model.encode([inside, outside])
    assert codes_NH[:, NUM_OUTSIDE].tolist() == [0, 1]
    tame_NH = codes_NH.copy()
    tame_NH[:, NUM_OUTSIDE] = 0
    wide, tame = random_model.predict_parts(codes_NH), random_model.predict_parts(tame_NH)
    assert wide.kernel_ms_S.tolist() == tame.kernel_ms_S.tolist()
    assert wide.high_ms_S[0] == tame.high_ms_S[0]
    assert wide.high_ms_S[1] > tame.high_ms_S[1]
    assert wide.low_ms_S[1] < tame.low_ms_S[1]


def test_little_of_what_costs_little_is_no_cause_for_a_note(random_model):
    assert random_model.notes([make.held(num_embeddings=1, pooling_factor=0.001)]) == ()


def test_many_sets_are_priced_as_few(random_model, shards):
    codes_NH = random_model.encode(shards)
    many_SH = np.tile(codes_NH, (20_000, 1))
    assert random_model.predict_ms(many_SH) == pytest.approx(
        np.tile(random_model.predict_ms(codes_NH), 20_000), rel=1e-4
    )


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({"dtype": DType.FP16}, "fused/hbm/fp16/rowwise_adagrad/sum"),
        ({"pooling": Pooling.MEAN}, "fused/hbm/fp32/rowwise_adagrad/mean"),
        ({"optimizer": Optimizer.SGD}, "fused/hbm/fp32/sgd/sum"),
        ({"update": Update.ALL_REDUCED}, "all_reduced/hbm/fp32/none/sum"),
        ({"level": MemoryLevel.DDR}, "fused/ddr/fp32/rowwise_adagrad/sum"),
        ({"optimizer": Optimizer.LAMB}, "fused/hbm/fp32/lamb/sum"),
        ({"output": Exchange.ROWS}, "fused/hbm/fp32/rowwise_adagrad/rows"),
    ],
)
def test_kinds_that_were_not_seen_are_refused(random_model, changes, needs):
    with pytest.raises(ModelError, match=f'has seen fused/hbm/fp32/rowwise_adagrad/sum; table "t" needs {needs}'):
        random_model.encode([make.held(), replace(make.held(), **changes)])


def test_a_long_list_of_kinds_is_cut():
    kinds = tuple(f"fused/hbm/fp32/optimizer{number}/sum" for number in range(500))
    coverage = TrainedCoverage(kinds=kinds, num_tables=(1, 2), ranges={})
    with pytest.raises(ModelError, match="has seen fused/hbm/fp32/optimizer0/sum") as caught:
        coverage.check(make.held())
    assert len(str(caught.value)) < 1500


def test_weights_are_checked(random_weights, card):
    name = "fusion.0.weight"
    for damaged in (
        {key: value for key, value in random_weights.items() if key != name},
        {**random_weights, name: random_weights[name].T},
        {**random_weights, name: np.full_like(random_weights[name], np.nan)},
        {**random_weights, name: np.full_like(random_weights[name], 3e38)},
        {**random_weights, name: random_weights[name].astype(np.int32)},
        {**random_weights, name: random_weights[name].astype(np.float64)},
    ):
        with pytest.raises(ModelError, match=f"here: {name}"):
            LearnedCostModel.from_stored(StoredModel(id="", tensors=damaged, card=card.to_json(), source="here"))


# -- cards -----------------------------------------------------------------------------------------------------------

COVERED = {
    "kinds": ["fused/hbm/fp32/rowwise_adagrad/sum"],
    "num_tables": [1, 2],
    "ranges": {name: [1, 2] for name in ("num_bags", "embedding_dim", "num_embeddings", "pooling_factor")},
}


def test_cards_survive_json(card, trained):
    for original in (card, trained.model.card):
        assert CostModelCard.from_json(json.loads(json.dumps(original.to_json())), "here") == original


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "autoshard.cost-model/9"}, 'schema: must be autoshard.cost-model/2, got "autoshard.cost-model/9"'),
        ({"features": ["embedding_dim"]}, "features: was trained on other features"),
        ({"scaling": {"mean": [0.0], "std": [1.0]}}, r"scaling.mean: must hold \d+ values, got 1"),
        ({"scale_ms": "many"}, r"scale_ms: must be a finite number in \[1e-09, 1e\+09\], got \"many\""),
        ({"scale_ms": 1e308}, "scale_ms: must be a finite number"),
        ({"features": None}, "features: was trained on other features"),
        ({"encoder_hidden": []}, "encoder_hidden: must hold 1 to 8 values, got 0"),
        ({"encoder_hidden": [64] * 9}, "encoder_hidden: must hold 1 to 8 values, got 9"),
        ({"encoder_hidden": [1 << 20]}, r"encoder_hidden\[0\]: must be a whole number in \[1, 4096\]"),
        ({"encoder_hidden": [64.5, 64]}, r"encoder_hidden\[0\]: must be a whole number"),
        ({"device": 7}, "device: must be a text"),
        ({"training": []}, "training: must be an object"),
        ({"unheard_of": 1}, "unheard_of: is not known"),
        ({"metrics": {"num_samples": 1}}, "mae_ms: is missing"),
        ({"coverage": {}}, "coverage.kinds: is missing"),
        ({"interval": {"low": -1}}, "high: is missing"),
        (
            {"interval": {"low": 1, "high": 2, "coverage": None, "half_width": None}},
            r"interval.low: must be a finite number in \[-1e\+06, 0\], got 1",
        ),
        ({"coverage": 3}, "coverage: must be an object, got 3"),
        ({"coverage": {**COVERED, "num_tables": [2, 1]}}, "coverage.num_tables: must rise, got 2 to 1"),
        (
            {"coverage": {**COVERED, "ranges": {**COVERED["ranges"], "num_bags": [9, 8]}}},
            "coverage.ranges.num_bags: must rise, got 9 to 8",
        ),
        (
            {"scaling": {"mean": [0.0] * NUM_FEATURES, "std": [0.0] * NUM_FEATURES}},
            r"scaling.std\[0\]: must be a finite number",
        ),
        ({"scale_ms": -1.0}, "scale_ms: must be a finite number"),
    ],
)
def test_cards_are_checked(card, change, said):
    with pytest.raises(ModelError, match=said):
        CostModelCard.from_json({**card.to_json(), **change}, "here")


@pytest.mark.parametrize(
    "field", ["schema", "features", "device", "scale_ms", "metrics", "interval", "training", "encoder_hidden"]
)
def test_cards_need_all_fields(card, field):
    data = card.to_json()
    del data[field]
    with pytest.raises(ModelError, match=field):
        CostModelCard.from_json(data, "here")


# -- from the registry -----------------------------------------------------------------------------------------------


def test_a_loaded_model_prices_alike(registry, trained, samples):
    loaded = LearnedCostModel.load(registry, "cpu")
    assert loaded.name == f"learned:cpu@{registry.production_id(LearnedCostModel.kind, 'cpu')}"
    sets = [sample.local_shards for sample in samples.samples[:20]]
    assert set_costs(loaded, sets).kernel_ms_S.tolist() == set_costs(trained.model, sets).kernel_ms_S.tolist()


def test_the_plugin_has_the_model_of_the_device(registry):
    model = load_learned_model(registry.root, "cpu")
    assert model is not None
    assert model.name.startswith("learned:cpu")
    assert load_learned_model(registry.root, "a100") is None
    assert load_learned_model(registry.root / "nothing", "cpu") is None


def test_the_plugin_takes_the_default_registry(registry, monkeypatch):
    monkeypatch.setenv("AUTOSHARD_REGISTRY", str(registry.root))
    assert load_learned_model(None, "cpu") is not None


def test_the_plugin_does_not_hide_damage(registry):
    (weights,) = registry.root.rglob("weights.safetensors")
    weights.write_bytes(b"damaged")
    with pytest.raises(ModelError, match=r"weights\.safetensors"):
        load_learned_model(registry.root, "cpu")


def test_prices_need_no_torch(registry):
    program = (
        "import sys; from pathlib import Path; from costmodel.plugin import load_learned_model; "
        "assert load_learned_model(Path(sys.argv[1]), 'cpu') is not None; assert 'torch' not in sys.modules"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", program, str(registry.root)], env=environment, check=True, timeout=120)
