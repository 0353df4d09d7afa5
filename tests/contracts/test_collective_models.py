"""What every model of collectives promises: see `autoshard.core.costs.CommModel`.

Shape suffixes: R ranks; [i, j] is what rank i sends to rank j.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import Topology
from autoshard.core.costs import CommModel
from autoshard.evaluation import AlphaBetaComm, UpperEndComm
from autoshard.evaluation.communication import link_bytes
from autoshard.formats.stores.collective_samples import CollectiveSample, GroupLevel, Operator
from costmodel.step.collective_curve import num_latencies
from costmodel.step.collective_model import COLLECTIVES
from costmodel.step.collective_training import train_collective_model
from tests import builders as make


def learned(*levels: GroupLevel) -> CommModel:
    """Trained on noisy times of 4 to 16 ranks; links of other levels are the topology's."""
    rng = np.random.default_rng(0)
    return train_collective_model(
        [
            _sample(operator, level, num_bytes, nproc, float(np.exp(rng.normal(0, 0.1))))
            for operator in Operator
            for level in levels
            for num_bytes in (4**power for power in range(5, 14))
            for nproc in (4, 8, 16)
        ]
    ).model


def _sample(operator: Operator, level: GroupLevel, num_bytes: int, nproc: int, noise: float) -> CollectiveSample:
    usual = make.collective_sample(make.collective(operator, level, num_bytes), nproc=nproc, node_size=nproc // 2)
    latency_ms, per_byte = (0.05, 1e-6) if level is GroupLevel.NODE else (0.4, 8e-6)
    latency_ms *= num_latencies(operator.value, usual.group_size)
    return replace(usual, latency_ms=(latency_ms + per_byte * usual.mean_sent_bytes) * noise)


#: All models under test; one more is one more line.
MODELS: dict[str, Callable[[], CommModel]] = {
    "alpha-beta": AlphaBetaComm,
    "alpha-beta (upper end)": lambda: UpperEndComm(AlphaBetaComm()),
    "learned": lambda: learned(GroupLevel.NODE, GroupLevel.ACROSS_NODES),
    "learned inside nodes": lambda: learned(GroupLevel.NODE),
}
#: Sizes of levels. None of the learned models has seen more than 16 ranks, or 3 or 6.
WORLDS = [(2,), (3,), (6,), (4, 8), (3, 12), (2, 4, 16), (8, 64), (8, 256)]
worlds = st.sampled_from(WORLDS)
sizes = st.floats(1, 1e11)
topology = partial(
    make.topology,
    bytes_per_s=(1e10, 1e9, 1e8),
    latency_s=(1e-5, 1e-4, 1e-3),
    reduce_bytes_per_s=(2e10, 2e9, 2e8),
    reduce_latency_s=(2e-5, 2e-4, 2e-3),
)


def relabelled(sizes: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """An order of ranks in which those of a group stay together, at every level."""
    order = np.arange(sizes[-1])
    for below, size in zip((1, *sizes), sizes, strict=False):
        groups = order.reshape(-1, size // below, below)
        order = np.concatenate([group[rng.permutation(size // below)].ravel() for group in groups])
    return order


def drawn_bytes(world_size: int, rng: np.random.Generator) -> np.ndarray:
    """Bytes of any scale; some pairs exchange none."""
    scale = 10.0 ** rng.uniform(0, 9)
    return rng.uniform(0, scale, (world_size, world_size)) * (rng.random((world_size, world_size)) < 0.7)


def all_to_all_ms(model: CommModel, sent_RR: np.ndarray, world: Topology) -> np.ndarray:
    return model.links_ms(link_bytes(sent_RR, world), world)


REDUCTIONS = [name for name in COLLECTIVES if name != "all_to_all"]


@pytest.fixture(scope="module", params=MODELS)
def model(request) -> CommModel:
    return MODELS[request.param]()


def test_it_says_its_name(model):
    assert isinstance(model.name, str)
    assert model.name


@given(sizes=worlds)
def test_nothing_is_free_and_so_is_what_stays(model, sizes):
    world = topology(*sizes)
    ranks = world.world_size
    for kept_R in (np.zeros(ranks), np.full(ranks, 1e9)):
        assert all_to_all_ms(model, np.diag(kept_R), world).tolist() == [0.0] * ranks
    for name in REDUCTIONS:
        assert model.collective_ms(name, 0.0, world) == 0.0


def test_a_world_of_one_exchanges_nothing(model):
    assert all_to_all_ms(model, np.array([[1e9]]), topology(1)).tolist() == [0.0]
    for name in REDUCTIONS:
        assert model.collective_ms(name, 1e9, topology(1)) == 0.0


@given(sizes=worlds, seed=st.integers(0, 10**6))
def test_an_all_to_all_of_any_world_is_finite_and_costs_time(model, sizes, seed):
    world = topology(*sizes)
    sent_RR = drawn_bytes(world.world_size, np.random.default_rng(seed))
    moved_RR = sent_RR - np.diag(np.diag(sent_RR))
    takes_part_R = (moved_RR.sum(axis=0) + moved_RR.sum(axis=1)) > 0
    times_R = all_to_all_ms(model, sent_RR, world)
    assert times_R.shape == (world.world_size,)
    assert np.isfinite(times_R).all()
    assert ((times_R > 0) == takes_part_R).all()


@given(sizes=worlds, seed=st.integers(0, 10**6))
def test_more_bytes_never_save_a_rank_time(model, sizes, seed):
    rng, world = np.random.default_rng(seed), topology(*sizes)
    sent_RR = drawn_bytes(world.world_size, rng)
    more_RR = sent_RR + drawn_bytes(world.world_size, rng)
    fewer_R, more_R = (all_to_all_ms(model, bytes_RR, world) for bytes_RR in (sent_RR, more_RR))
    assert (fewer_R <= more_R * (1 + 1e-9)).all()


@given(sizes=worlds, name=st.sampled_from(REDUCTIONS), num_bytes=st.tuples(sizes, sizes))
def test_reductions_are_finite_and_rise_with_the_bytes(model, sizes, name, num_bytes):
    fewer, more = (model.collective_ms(name, size, topology(*sizes)) for size in sorted(num_bytes))
    assert 0 < fewer <= more * (1 + 1e-9)
    assert np.isfinite(more)


@given(sizes=worlds, seed=st.integers(0, 10**6))
def test_relabelling_alike_ranks_and_nodes_relabels_their_times(model, sizes, seed):
    rng, world = np.random.default_rng(seed), topology(*sizes)
    sent_RR, order_R = drawn_bytes(world.world_size, rng), relabelled(sizes, rng)
    times_R = all_to_all_ms(model, sent_RR, world)
    np.testing.assert_allclose(all_to_all_ms(model, sent_RR[np.ix_(order_R, order_R)], world), times_R[order_R])


@given(sizes=worlds, seed=st.integers(0, 10**6))
def test_sums_by_level_say_the_same_one_by_one_or_together(model, sizes, seed):
    rng, world = np.random.default_rng(seed), topology(*sizes)
    several = [link_bytes(drawn_bytes(world.world_size, rng), world) for _ in range(3)]
    leaving_LBR, arriving_LBR = (
        np.stack([getattr(links, name) for links in several], axis=1) for name in ("leaving_LR", "arriving_LR")
    )
    together_BR = model.links_ms(type(several[0])(leaving_LR=leaving_LBR, arriving_LR=arriving_LBR), world)
    np.testing.assert_allclose(together_BR, [model.links_ms(links, world) for links in several])
    rng = np.random.default_rng(seed)
    np.testing.assert_allclose(together_BR[0], all_to_all_ms(model, drawn_bytes(world.world_size, rng), world))


@given(sizes=worlds, name=st.sampled_from(COLLECTIVES), values=st.lists(st.floats(0, 1e9), min_size=1, max_size=9))
def test_intervals_hold_the_value(model, sizes, name, values):
    value_ms = np.array(values)
    low, high = model.bounds_ms(name, value_ms, topology(*sizes))
    assert low.shape == high.shape == value_ms.shape
    assert (low >= 0).all()
    assert (low <= value_ms * (1 + 1e-12)).all()
    assert (value_ms <= high * (1 + 1e-12)).all()
    assert np.isfinite(high).all()
