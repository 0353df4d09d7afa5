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
from costmodel.card import CostModelCard
from costmodel.learned import COST_KIND, LearnedCostModel
from costmodel.plugin import load_learned_model
from costmodel.predictor import FULL_CODE_WIDTH
from costmodel.registry import Registry
from costmodel.weights import CODE_WIDTH


@pytest.fixture
def shards(make_shard):
    return [make_shard(table=f"t{index}", num_embeddings=10**index, pooling_factor=index) for index in range(1, 6)]


@pytest.fixture
def registry(tmp_path, trained):
    registry = Registry(tmp_path / "registry")
    registry.publish(COST_KIND, "cpu", trained.weights, trained.card.to_json())
    return registry


def test_codes_are_what_the_encoder_learned_and_a_count(random_model, shards):
    codes_NH = random_model.encode(shards)
    assert (codes_NH.dtype, codes_NH.shape) == (np.float32, (5, FULL_CODE_WIDTH))
    assert codes_NH[:, CODE_WIDTH:].tolist() == [[1.0]] * 5
    alone_NH = np.concatenate([random_model.encode([shard]) for shard in shards])
    assert alone_NH == pytest.approx(codes_NH, abs=1e-6)


def test_an_empty_set_costs_nothing_and_others_with_a_code_of_zeros_do(random_weights, card, shards):
    # An encoder of zeros: only the count tells a set of shards from an empty one.
    zeroed = {name: value * ("encoder" not in name) for name, value in random_weights.items()}
    zeroed |= {f"{head}.2.bias": np.ones(1, np.float32) for head in ("forward_head", "backward_head")}
    model = LearnedCostModel(zeroed, card)
    codes_NH = model.encode(shards)
    assert not codes_NH[:, :CODE_WIDTH].any()
    assert model.price(np.zeros((1, FULL_CODE_WIDTH), np.float32)).tolist() == [0.0]
    assert model.price(codes_NH[:1])[0] > 0


def test_parts_add_up_and_lie_in_their_interval(trained, samples):
    costs = set_costs(trained.model(), [sample.local_shards for sample in samples.samples[:50]])
    assert (costs.forward_ms_S > 0).all()
    assert (costs.backward_ms_S > costs.forward_ms_S).mean() > 0.9  # as was measured
    assert (costs.low_ms_S < costs.kernel_ms_S).all()
    assert (costs.kernel_ms_S < costs.high_ms_S).all()


def test_the_interval_is_that_of_the_card(random_model, shards, card):
    parts = random_model.price_parts(random_model.encode(shards))
    assert parts.kernel_ms_S.max() > 0
    assert parts.low_ms_S == pytest.approx(parts.kernel_ms_S * card.metrics.low_ratio)
    assert parts.high_ms_S == pytest.approx(parts.kernel_ms_S * card.metrics.high_ratio)


def test_an_interval_always_holds_its_prediction(random_weights, card, shards):
    """Held-out samples may all have been slower than predicted."""
    metrics = replace(card.metrics, low_ratio=1.01, high_ratio=1.1)
    parts = (model := LearnedCostModel(random_weights, replace(card, metrics=metrics))).price_parts(
        model.encode(shards)
    )
    assert (parts.low_ms_S <= parts.kernel_ms_S).all()


def test_many_sets_are_priced_as_few(random_model, shards):
    codes_NH = random_model.encode(shards)
    many_SH = np.tile(codes_NH, (20_000, 1))
    assert random_model.price(many_SH) == pytest.approx(np.tile(random_model.price(codes_NH), 20_000), rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_bags": 65}, "num_bags: .*covers 64, table 't' has 65"),
        ({"dtype": DType.FP16}, "dtype: .*covers fp32"),
        ({"pooling": Pooling.MEAN}, "pooling: .*covers sum"),
        ({"optimizer": Optimizer.SGD}, "optimizer: .*covers rowwise_adagrad"),
        ({"update": Update.ALL_REDUCED}, "update: .*covers fused"),
        ({"level": MemoryLevel.DDR}, "level: .*covers hbm"),
        ({"output": Exchange.ROWS}, "output: .*covers partial_sums"),
        ({"embedding_dim": 7}, "embedding_dim: .*covers 8 to 64, table 't' has 7"),
        ({"embedding_dim": 65}, "embedding_dim: .*covers 8 to 64, table 't' has 65"),
        ({"num_embeddings": 2_000_001}, "num_embeddings: .*covers 0 to 2e.06"),
        ({"pooling_factor": 100.5}, "pooling_factor: .*covers 0 to 100"),
    ],
)
def test_kinds_that_were_not_seen_are_refused(random_model, make_shard, changes, said):
    with pytest.raises(ModelError, match=said):
        random_model.encode([make_shard(), replace(make_shard(), **changes)])


def test_what_is_a_little_larger_is_priced(random_model, make_shard):
    edges = make_shard(num_embeddings=2_000_000, embedding_dim=64, pooling_factor=100.0)
    assert len(random_model.encode([edges, make_shard(num_embeddings=1, embedding_dim=8, pooling_factor=0.0)])) == 2


def test_weights_are_checked(random_weights, card):
    name = "backward_head.0.weight"
    for damaged in (
        {key: value for key, value in random_weights.items() if key != name},
        {**random_weights, name: random_weights[name].T},
        {**random_weights, name: np.full_like(random_weights[name], np.nan)},
    ):
        with pytest.raises(ModelError, match=f"here: {name}"):
            LearnedCostModel(damaged, card, source="here")


# -- cards -----------------------------------------------------------------------------------------------------------


def test_cards_survive_json(card, trained):
    for original in (card, trained.card):
        assert CostModelCard.from_json(json.loads(json.dumps(original.to_json())), "here") == original


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "autoshard.cost-model/9"}, "schema: must be autoshard.cost-model/1, got 'autoshard.cost-model/9'"),
        ({"features": ["embedding_dim"]}, "features: was trained on other features"),
        ({"scaling": {"mean": [0.0], "std": [1.0]}}, "scaling: needs 21 numbers"),
        ({"scale_ms": "many"}, "wrong kind"),
        ({"metrics": {"num_samples": 1}}, "mae_ms: is missing"),
        ({"coverage": {}}, "num_tables: is missing"),
        ({"coverage": 3}, "wrong kind"),
        ({"scaling": {"mean": [0.0] * 21, "std": [0.0] * 21}}, "scaling: must be finite"),
        ({"scale_ms": -1.0}, "scale_ms: must be finite and above 0"),
    ],
)
def test_cards_are_checked(card, change, said):
    with pytest.raises(ModelError, match=said):
        CostModelCard.from_json({**card.to_json(), **change}, "here")


@pytest.mark.parametrize("field", ["schema", "features", "device", "scale_ms", "metrics", "training", "encoder_hidden"])
def test_cards_need_all_fields(card, field):
    data = card.to_json()
    del data[field]
    with pytest.raises(ModelError, match=field):
        CostModelCard.from_json(data, "here")


# -- from the registry -----------------------------------------------------------------------------------------------


def test_a_loaded_model_prices_alike(registry, trained, samples):
    loaded = LearnedCostModel.load(registry, "cpu")
    assert loaded.name == "learned:cpu"
    sets = [sample.local_shards for sample in samples.samples[:20]]
    assert set_costs(loaded, sets).kernel_ms_S.tolist() == set_costs(trained.model(), sets).kernel_ms_S.tolist()


def test_the_plugin_has_what_covers_the_task(registry):
    model = load_learned_model(registry.root, "cpu", 1024)
    assert model is not None
    assert model.name == "learned:cpu"
    assert load_learned_model(registry.root, "cpu", 512) is None
    assert load_learned_model(registry.root, "a100", 1024) is None
    assert load_learned_model(registry.root / "nothing", "cpu", 1024) is None


def test_the_plugin_takes_the_default_registry(registry, monkeypatch):
    monkeypatch.setenv("AUTOSHARD_REGISTRY", str(registry.root))
    assert load_learned_model(None, "cpu", 1024) is not None


def test_the_plugin_does_not_hide_damage(registry):
    (weights,) = registry.root.rglob("weights.safetensors")
    weights.write_bytes(b"damaged")
    with pytest.raises(ModelError, match=r"weights\.safetensors"):
        load_learned_model(registry.root, "cpu", 1024)


def test_prices_need_no_torch(registry):
    program = (
        "import sys; from pathlib import Path; from costmodel.plugin import load_learned_model; "
        "assert load_learned_model(Path(sys.argv[1]), 'cpu', 1024) is not None; assert 'torch' not in sys.modules"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", program, str(registry.root)], env=environment, check=True, timeout=120)
