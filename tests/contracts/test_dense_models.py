"""What every model of dense layers promises: see `autoshard.core.costs.DenseCostModel`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core.costs import DenseCostModel
from autoshard.core.dense import DENSE_DTYPES, DenseKind, DenseShape
from autoshard.evaluation import AnalyticDenseModel
from autoshard.evaluation.dense_time import touched_bytes
from autoshard.evaluation.upper_end import UpperEndDense
from autoshard.formats.stores.dense_samples import DenseSample
from costmodel.step.dense_training import train_dense_model
from tests import builders as make

TIMES = ("forward_ms_N", "backward_ms_N", "low_ms_N", "high_ms_N")


def learned() -> DenseCostModel:
    """Trained on noisy times of 160 small parts in fp32; all else is priced analytically."""
    rng = np.random.default_rng(0)
    return train_dense_model([_sample(_small_shape(number, rng), rng) for number in range(160)]).model


def _small_shape(number: int, rng: np.random.Generator) -> DenseShape:
    kind, batch_size = list(DenseKind)[number % len(DenseKind)], int(2 ** rng.uniform(5, 12))
    if not kind.is_mlp:
        return DenseShape.interaction(batch_size, int(rng.integers(1, 40)), int(2 ** rng.integers(3, 7)), kind=kind)
    widths = (2 ** rng.uniform(3, 9, rng.integers(2, 6))).astype(int).tolist()
    return DenseShape(kind=kind, batch_size=batch_size, widths=(*widths, *([1] if kind is DenseKind.TOP_MLP else [])))


def _sample(shape: DenseShape, rng: np.random.Generator) -> DenseSample:
    forward_ms, backward_ms = (
        (flops / 1e8 + touched_bytes(shape) / 1e6 + 0.1) * float(np.exp(rng.normal(0, 0.1)))
        for flops in (shape.forward_flops, shape.backward_flops)
    )
    return make.dense_sample(shape, forward_ms=forward_ms, backward_ms=backward_ms)


#: All models under test; one more is one more line.
MODELS: dict[str, Callable[[], DenseCostModel]] = {
    "analytic cpu": lambda: AnalyticDenseModel.for_device("cpu"),
    "analytic a100": lambda: AnalyticDenseModel.for_device("a100"),
    "analytic a100 (TF32)": lambda: AnalyticDenseModel.for_device("a100", tf32=True),
    "analytic abacus": lambda: AnalyticDenseModel.for_device("abacus"),
    "analytic cpu (upper end)": lambda: UpperEndDense(AnalyticDenseModel.for_device("cpu")),
    "learned": learned,
}


@pytest.fixture(scope="module", params=MODELS)
def model(request) -> DenseCostModel:
    return MODELS[request.param]()


batches = st.integers(1, 10**6)
dtypes = st.sampled_from(DENSE_DTYPES)
widths = st.lists(st.integers(1, 10**4), min_size=2, max_size=21).map(tuple)
perceptrons = st.builds(DenseShape, kind=st.just(DenseKind.BOTTOM_MLP), batch_size=batches, widths=widths, dtype=dtypes)
tops = st.builds(
    lambda batch, inner, dtype: DenseShape(kind=DenseKind.TOP_MLP, batch_size=batch, widths=(*inner, 1), dtype=dtype),
    batches,
    widths,
    dtypes,
)
interaction_kinds = st.sampled_from([DenseKind.DOT, DenseKind.CONCAT])
interactions = st.builds(
    lambda batch, features, dim, kind, dtype: DenseShape.interaction(batch, features, dim, kind=kind, dtype=dtype),
    *(batches, st.integers(1, 1000), st.integers(1, 1024), interaction_kinds, dtypes),
)
shapes = st.one_of(perceptrons, tops, interactions)


def total_ms(model: DenseCostModel, shape: DenseShape) -> float:
    costs = model.predict_parts([shape])
    return float(costs.forward_ms_N[0] + costs.backward_ms_N[0])


def test_it_says_its_name(model):
    assert isinstance(model.name, str)
    assert model.name


@given(drawn=st.lists(shapes, min_size=1, max_size=6))
def test_prices_are_finite_and_above_zero_with_the_price_inside_its_interval(model, drawn):
    costs = model.predict_parts(drawn)
    for name in TIMES:
        values_N = getattr(costs, name)
        assert values_N.shape == (len(drawn),)
        assert np.isfinite(values_N).all()
    assert (costs.forward_ms_N > 0).all()
    assert (costs.backward_ms_N > 0).all()
    assert (costs.low_ms_N >= 0).all()
    total_N = costs.forward_ms_N + costs.backward_ms_N
    assert (costs.low_ms_N <= total_N * (1 + 1e-9)).all()
    assert (total_N <= costs.high_ms_N * (1 + 1e-9)).all()


@given(data=st.data(), drawn=st.lists(shapes, min_size=1, max_size=6))
def test_every_part_is_priced_by_itself_in_any_order(model, data, drawn):
    order = data.draw(st.permutations(range(len(drawn))))
    together, shuffled = model.predict_parts(drawn), model.predict_parts([drawn[index] for index in order])
    alone = [model.predict_parts([shape]) for shape in drawn]
    for name in TIMES:
        np.testing.assert_allclose(getattr(together, name), [getattr(one, name)[0] for one in alone])
        np.testing.assert_allclose(getattr(shuffled, name), getattr(together, name)[list(order)])


def test_no_parts_at_all(model):
    costs = model.predict_parts([])
    assert [getattr(costs, name).shape for name in TIMES] == [(0,)] * len(TIMES)


#: Where arithmetic and bytes count, and not the start: there models may be a little off in any direction.
large_perceptrons = st.builds(
    DenseShape,
    kind=st.just(DenseKind.BOTTOM_MLP),
    batch_size=st.integers(1024, 10**4),
    widths=st.lists(st.integers(64, 2000), min_size=2, max_size=8).map(tuple),
    dtype=dtypes,
)
large_interactions = st.builds(
    lambda batch, features, dim, kind: DenseShape.interaction(batch, features, dim, kind=kind),
    *(
        st.integers(1024, 10**4),
        st.integers(16, 100),
        st.sampled_from([16, 64]),
        st.sampled_from([DenseKind.DOT, DenseKind.CONCAT]),
    ),
)


@given(shape=large_perceptrons | large_interactions)
def test_much_larger_batches_cost_more(model, shape):
    assert total_ms(model, replace(shape, batch_size=64 * shape.batch_size)) > total_ms(model, shape)


@given(shape=large_perceptrons)
def test_much_wider_and_deeper_perceptrons_cost_more(model, shape):
    usual = total_ms(model, shape)
    assert total_ms(model, replace(shape, widths=tuple(8 * width for width in shape.widths))) > usual
    assert total_ms(model, replace(shape, widths=shape.widths * 8)) > usual


@given(shape=large_interactions)
def test_interactions_of_many_more_features_cost_more(model, shape):
    wider = replace(shape, widths=(shape.widths[0], 16 * shape.widths[1]))
    assert total_ms(model, wider) > total_ms(model, shape)
