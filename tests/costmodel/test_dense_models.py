"""The model of dense layers: known rooflines are found, other kinds stay analytic, registries return what they got."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import DType
from autoshard.core.dense import DenseKind, DenseShape
from autoshard.core.errors import ModelError
from autoshard.evaluation import DEVICE_ARITHMETIC, DEVICE_MEMORY, AnalyticDenseModel
from costmodel.registry.versions import SHIPPED_VARIABLE, Registry
from costmodel.step.dense_model import LearnedDense
from costmodel.step.dense_training import train_dense_model
from costmodel.step.plugin import load_step_models
from tests import builders as make

#: The truth of synthetic samples: milliseconds per billion operations, per layer and to start.
PER_GFLOP, PER_LAYER, START = 12.0, 0.03, 0.05


def true_ms(shape):
    layers = len(shape.widths) - 1 if shape.kind.is_mlp else 1
    return tuple(
        PER_GFLOP * flops / 1e9 + PER_LAYER * layers + START for flops in (shape.forward_flops, shape.backward_flops)
    )


def sample(shape, noise=1.0, **fields):
    forward_ms, backward_ms = true_ms(shape)
    times = {"forward_ms": forward_ms * noise, "backward_ms": backward_ms * noise}
    return make.dense_sample(shape, **{**times, **fields})


def drawn_shapes(count, seed):
    """Perceptrons and interactions of all kinds, of the sizes that a CPU measures."""
    rng = np.random.default_rng(seed)
    drawn = []
    for number in range(count):
        kind, batch_size = list(DenseKind)[number % 4], int(np.exp(rng.uniform(np.log(64), np.log(4096))))
        if kind.is_mlp:
            widths = tuple(int(width) for width in np.exp(rng.uniform(np.log(16), np.log(1024), rng.integers(2, 7))))
            last = (1,) if kind is DenseKind.TOP_MLP else ()
            drawn.append(DenseShape(kind=kind, batch_size=batch_size, widths=(*widths, *last)))
        else:
            dim = int(rng.choice((8, 16, 64)))
            drawn.append(DenseShape.interaction(batch_size, int(rng.integers(1, 80)), dim, kind=kind))
    return drawn


def drawn_samples(count, seed):
    rng = np.random.default_rng(seed)
    return [sample(shape, noise=float(np.exp(rng.normal(0, 0.02)))) for shape in drawn_shapes(count, seed)]


@pytest.fixture(scope="module")
def samples():
    return drawn_samples(240, seed=0)


@pytest.fixture(scope="module")
def model(samples):
    return train_dense_model(samples).model


shapes = st.one_of(
    st.builds(
        lambda batch, widths: DenseShape(kind=DenseKind.BOTTOM_MLP, batch_size=batch, widths=tuple(widths)),
        st.integers(1, 10**6),
        st.lists(st.integers(1, 10**4), min_size=2, max_size=21),
    ),
    st.builds(
        lambda batch, features, dim, kind: DenseShape.interaction(batch, features, dim, kind=kind),
        st.integers(1, 10**6),
        st.integers(1, 1000),
        st.integers(1, 1024),
        st.sampled_from([DenseKind.DOT, DenseKind.CONCAT]),
    ),
)


class TestLearned:
    def test_unseen_shapes_cost_what_they_cost(self, model):
        unseen = [
            DenseShape(kind=DenseKind.BOTTOM_MLP, batch_size=700, widths=(13, 300, 200, 40)),
            DenseShape(kind=DenseKind.TOP_MLP, batch_size=1500, widths=(500, 300, 300, 1)),
        ]
        costs = model.predict_parts(unseen)
        expected = np.array([true_ms(shape) for shape in unseen])
        np.testing.assert_allclose(costs.forward_ms_N, expected[:, 0], rtol=0.15)
        np.testing.assert_allclose(costs.backward_ms_N, expected[:, 1], rtol=0.15)

    def test_intervals_hold_samples_that_training_has_not_seen(self, model):
        fresh = drawn_samples(100, seed=17)
        costs = model.predict_parts([one.shape for one in fresh])
        measured = np.array([one.forward_ms + one.backward_ms for one in fresh])
        held = (costs.low_ms_N <= measured) & (measured <= costs.high_ms_N)
        assert held.mean() >= 0.8

    @given(shape=shapes)
    def test_prices_are_finite_and_above_nothing(self, model, shape):
        costs = model.predict_parts([shape])
        for times in (costs.forward_ms_N, costs.backward_ms_N):
            assert 0 < times[0] < float("inf")
        total = costs.forward_ms_N[0] + costs.backward_ms_N[0]
        assert costs.low_ms_N[0] <= total * (1 + 1e-9)
        assert total <= costs.high_ms_N[0] * (1 + 1e-9)

    def test_number_formats_that_were_not_measured_are_analytic(self, model):
        shape = DenseShape(kind=DenseKind.BOTTOM_MLP, batch_size=64, widths=(8, 8), dtype=DType.BF16)
        costs, analytic = model.predict_parts([shape]), AnalyticDenseModel.for_device("cpu").predict_parts([shape])
        np.testing.assert_array_equal(costs.forward_ms_N, analytic.forward_ms_N)
        np.testing.assert_array_equal(costs.high_ms_N, analytic.high_ms_N)

    def test_nothing_costs_nothing(self, model):
        assert model.predict_parts([]).forward_ms_N.shape == (0,)


class TestAnalytic:
    def test_devices_are_those_of_the_memory(self):
        assert set(DEVICE_ARITHMETIC) == set(DEVICE_MEMORY)

    def test_large_layers_take_their_arithmetic(self):
        # Neo Appendix B: perceptrons reach 70.5% of an A100's 19.5 TFLOP/s; launches are noise at this size.
        shape = DenseShape(kind=DenseKind.BOTTOM_MLP, batch_size=4096, widths=(4096,) * 21)
        costs = AnalyticDenseModel.for_device("a100").predict_parts([shape])
        assert costs.forward_ms_N[0] == pytest.approx(shape.forward_flops / (19.5e12 * 0.705) * 1e3, rel=0.01)
        assert costs.backward_ms_N[0] == pytest.approx(shape.backward_flops / (19.5e12 * 0.705) * 1e3, rel=0.01)

    def test_unknown_devices_say_so(self):
        assert "unknown device" in AnalyticDenseModel.for_device("abacus").name

    def test_products_in_tf32_are_eight_times_as_fast_where_the_device_has_it(self):
        # A100: 156 instead of 19.5 TFLOP/s; 20 microseconds for the layer either way.
        shape = DenseShape(kind=DenseKind.BOTTOM_MLP, batch_size=8192, widths=(4096, 4096))
        plain, tf32 = (AnalyticDenseModel.for_device("a100", tf32=tf32) for tf32 in (False, True))
        slow, fast = (float(model.predict_parts([shape]).forward_ms_N[0]) - 0.02 for model in (plain, tf32))
        assert slow / fast == pytest.approx(156 / 19.5)
        assert tf32.name == "analytic:a100 (TF32)"
        assert AnalyticDenseModel.for_device("cpu", tf32=True) == AnalyticDenseModel.for_device("cpu")


class TestRegistry:
    def test_the_plugin_names_what_was_shipped(self, model, tmp_path, monkeypatch):
        monkeypatch.setenv(SHIPPED_VARIABLE, str(tmp_path / "shipped"))
        own = tmp_path / "own"
        assert load_step_models(own, "cpu").dense is None
        came = model.publish(Registry(tmp_path / "shipped"))
        assert load_step_models(own, "cpu").dense.name == f"learned:cpu@{came} (shipped)"
        model.publish(Registry(own))
        assert load_step_models(own, "cpu").dense.name == f"learned:cpu@{came}"

    def test_round_trip(self, model, tmp_path):
        registry = Registry(tmp_path)
        version = model.publish(registry)
        loaded = LearnedDense.load(registry, "cpu")
        shape = DenseShape.interaction(512, 26, 16)
        np.testing.assert_array_equal(
            loaded.predict_parts([shape]).forward_ms_N, model.predict_parts([shape]).forward_ms_N
        )
        assert loaded.card == model.card
        assert loaded.name == f"learned:cpu@{version}"

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"schema": "autoshard.dense-model/9"}, "schema: must be autoshard"),
            ({"terms": ["gflops"]}, "terms: was trained on other features"),
            ({"bounds": {"dot.fp32": [2.0, 0.5]}}, r"bounds.dot.fp32\[0\]: must be a finite number in \[0, 1\], got 2"),
            ({"bounds": None}, "bounds: must be an object, got null"),
            ({"bounds": {"dot.int8": [0.5, 2.0]}}, "bounds.dot.int8: is not known"),
            ({"bounds": {"dot.bf16": [0.5, 2.0]}}, "needs a tensor"),
        ],
    )
    def test_refuses_foreign_cards(self, model, tmp_path, change, message):
        registry = Registry(tmp_path)
        registry.publish(LearnedDense.kind, "cpu", model.tensors(), model.card.to_json() | change)
        with pytest.raises(ModelError, match=message):
            LearnedDense.load(registry, "cpu")

    @pytest.mark.parametrize("value", [float("nan"), -1.0])
    def test_refuses_impossible_numbers(self, model, tmp_path, value):
        tensors = model.tensors()
        tensors["dot.fp32.forward.terms_F"] = tensors["dot.fp32.forward.terms_F"] * 0 + value
        Registry(tmp_path).publish(LearnedDense.kind, "cpu", tensors, model.card.to_json())
        with pytest.raises(ModelError, match="terms_F"):
            LearnedDense.load(Registry(tmp_path), "cpu")


class TestSamples:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"device": "h200"}, "one device"),
            ({"forward_ms": float("nan")}, "forward_ms: must be finite"),
            ({"reference_backward_ms": 0.0}, "reference_backward_ms: must be finite"),
        ],
    )
    def test_refuses_what_cannot_be_fitted(self, samples, change, message):
        with pytest.raises(ModelError, match=message):
            train_dense_model([*samples[:-1], replace(samples[-1], **change)])

    def test_refuses_too_few(self, samples):
        with pytest.raises(ModelError, match="at least 10 samples"):
            train_dense_model(samples[:5])
        with pytest.raises(ModelError, match="one device"):
            train_dense_model([])
