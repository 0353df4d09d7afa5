"""What every cost model promises: see `autoshard.core.costs.CostModel`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import AccessProfile, CostModel, LocalShard, set_costs
from autoshard.core.costs import kernel_floor
from autoshard.evaluation.analytic import AnalyticCostModel
from costmodel.kernel.learned import LearnedCostModel
from tests import builders as make


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A cost model under test, and what it covers."""

    model: CostModel
    num_bags: tuple[int, ...]
    """Batch sizes, rising."""
    embedding_dims: tuple[int, int]
    max_rows: int
    max_pooling_factor: float

    def shards(self, sketches: list[Sketch]) -> list[LocalShard]:
        """Shards that it covers."""
        return [self._shard(f"t{index}", sketch) for index, sketch in enumerate(sketches)]

    def _shard(self, name: str, sketch: Sketch) -> LocalShard:
        rows_share, dim_share, pooling_share, alpha = sketch
        rows = max(1, round(self.max_rows**rows_share))
        low, high = self.embedding_dims
        return make.held(
            name,
            rows,
            low + round((high - low) * dim_share),
            alpha=alpha,
            num_bags=self.num_bags[-1],
            pooling_factor=self.max_pooling_factor * pooling_share**4,
        )


#: Rows, columns and lookups as shares of what a model covers, and how skewed the lookups are.
Sketch = tuple[float, float, float, float]
shares = st.floats(0, 1)
sketches = st.tuples(shares, shares, shares, st.floats(0, 1.5))


def learned(model: LearnedCostModel) -> Subject:
    ranges = model.card.coverage.ranges
    return Subject(
        model=model,
        num_bags=(int(ranges["num_bags"][1]),),
        embedding_dims=(8, 64),
        max_rows=int(ranges["num_embeddings"][1]) * 2,
        max_pooling_factor=ranges["pooling_factor"][1] * 2,
    )


def analytic(device: str) -> Subject:
    return Subject(
        model=AnalyticCostModel.for_device(device),
        num_bags=(1, 8, 64, 1024, 65536),
        embedding_dims=(1, 1024),
        max_rows=10**9,
        max_pooling_factor=500.0,
    )


@pytest.fixture(
    scope="session", params=["analytic:cpu", pytest.param("analytic:a100", marks=pytest.mark.slow), "learned:cpu"]
)
def subject(request) -> Subject:
    kind, device = request.param.split(":")
    return learned(request.getfixturevalue("trained").model) if kind == "learned" else analytic(device)


def test_it_is_a_cost_model_and_says_its_name(subject, request):
    assert isinstance(subject.model, CostModel)
    assert subject.model.name == request.node.callspec.params["subject"]


@given(drawn=st.lists(sketches, min_size=1, max_size=12))
def test_prices_are_finite_and_not_negative_with_the_price_inside_its_interval(subject, drawn):
    shards = subject.shards(drawn)
    parts = set_costs(subject.model, [shards, *[[shard] for shard in shards]])
    for values in (parts.forward_ms_S, parts.backward_ms_S, parts.low_ms_S, parts.high_ms_S):
        assert np.isfinite(values).all()
        assert (values >= 0).all()
    assert (parts.low_ms_S <= parts.kernel_ms_S).all()
    assert (parts.kernel_ms_S <= parts.high_ms_S).all()


@given(drawn=st.lists(sketches, min_size=1, max_size=12))
def test_price_is_the_sum_of_its_parts(subject, drawn):
    codes_SH = subject.model.encode(subject.shards(drawn))
    assert subject.model.predict_ms(codes_SH) == pytest.approx(
        subject.model.predict_parts(codes_SH).kernel_ms_S, rel=1e-6
    )


@given(drawn=st.lists(sketches, min_size=1, max_size=12))
def test_no_set_takes_less_than_the_floor_of_its_shards(subject, drawn):
    codes_NH = subject.model.encode(subject.shards(drawn))
    floor = kernel_floor(subject.model, codes_NH)
    assert floor.is_proven
    num_kernels = len(set(floor.kernel_N.tolist()))
    parts = subject.model.predict_parts(codes_NH.sum(axis=0, keepdims=True))
    for (ms,), added_ms_N, base_ms in (
        (parts.forward_ms_S, floor.forward_ms_N, floor.forward_base_ms),
        (parts.backward_ms_S, floor.backward_ms_N, floor.backward_base_ms),
    ):
        least_ms = added_ms_N.sum() + num_kernels * base_ms
        assert least_ms <= ms * (1 + 1e-5)
        if floor.is_exact:
            assert ms == pytest.approx(least_ms, rel=1e-5)


def test_an_empty_set_costs_nothing(subject):
    parts = set_costs(subject.model, [[], []])
    for values in (parts.forward_ms_S, parts.backward_ms_S, parts.low_ms_S, parts.high_ms_S):
        assert values.tolist() == [0.0, 0.0]


def test_no_sets_at_all(subject):
    codes_NH = subject.model.encode([])
    assert codes_NH.shape[0] == 0
    assert subject.model.predict_ms(codes_NH).shape == (0,)


@given(data=st.data(), drawn=st.lists(sketches, min_size=2, max_size=12))
def test_the_order_of_shards_does_not_matter(subject, data, drawn):
    shards = subject.shards(drawn)
    shuffled = data.draw(st.permutations(shards))
    first, second = set_costs(subject.model, [shards, shuffled]).kernel_ms_S
    assert first == pytest.approx(second, rel=1e-3, abs=1e-4)


@given(drawn=st.lists(sketches, min_size=1, max_size=8))
def test_codes_can_be_added_and_taken_away(subject, drawn):
    """Planners move shards between ranks by their codes; a rank that lost all its shards costs nothing again."""
    codes_NH = subject.model.encode(subject.shards(drawn))
    rank_H = np.zeros(codes_NH.shape[1], dtype=np.float32)
    for code_H in codes_NH:
        rank_H += code_H
    for code_H in codes_NH[1:]:
        rank_H -= code_H
    left = subject.model.predict_ms(np.stack([rank_H, rank_H - codes_NH[0]]))
    scale_ms = subject.model.predict_ms(codes_NH).sum()
    assert left[0] == pytest.approx(subject.model.predict_ms(codes_NH[:1])[0], rel=1e-2, abs=1e-3 * scale_ms + 1e-6)
    assert left[1] <= 1e-3 * scale_ms + 1e-6


@given(drawn=st.lists(sketches, min_size=1, max_size=6))
def test_shards_are_encoded_one_by_one_or_together_alike(subject, drawn):
    shards = subject.shards(drawn)
    together_NH = subject.model.encode(shards)
    alone_NH = np.concatenate([subject.model.encode([shard]) for shard in shards])
    assert together_NH.dtype == np.float32
    assert together_NH == pytest.approx(alone_NH, rel=1e-4, abs=1e-5)


@given(drawn=st.lists(sketches, min_size=1, max_size=6))
def test_larger_batches_do_not_cost_less(subject, drawn):
    if len(subject.num_bags) == 1:
        pytest.skip("covers one batch size only")
    sets = [[replace(shard, num_bags=num_bags) for shard in subject.shards(drawn)] for num_bags in subject.num_bags]
    kernel_ms_S = set_costs(subject.model, sets).kernel_ms_S
    assert (np.diff(kernel_ms_S) >= -1e-6 * kernel_ms_S[1:]).all()


def test_batches_of_other_sizes_have_a_price(subject):
    shard = make.held("t", 100, 16, num_bags=777, pooling_factor=1.0, access=AccessProfile.uniform(100))
    assert subject.model.predict_ms(subject.model.encode([shard]))[0] > 0
