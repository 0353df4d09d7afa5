"""The compiled search beside the same sums in numpy."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest

from autoshard.cli import main
from autoshard.core import Constraints, MemoryBytes, Tier
from autoshard.core.errors import AutoshardError
from autoshard.core.step import EMBEDDING_PARTS
from autoshard.planners.hybrid import successive_halving
from autoshard.planners.hybrid.balanced import placed_options
from autoshard.planners.hybrid.compiled import library as compiled
from autoshard.planners.hybrid.compiled import linear as compiled_linear
from autoshard.planners.hybrid.compiled.library import Mode
from autoshard.planners.hybrid.compiled.linear import LinearEffort, LinearSearch
from autoshard.planners.hybrid.descent import SearchContext, Start
from autoshard.planners.hybrid.option_offers import space_of
from autoshard.planners.hybrid.starts import balanced_starts
from autoshard.planners.hybrid.step_search import StepSearch, search_steps
from autoshard.planners.hybrid.successive_halving import improve
from autoshard.planners.space.cost_gradient import CostGradient, FlatOptions
from autoshard.planners.space.layout import Limits
from autoshard.planners.space.options import ShardingType
from autoshard.validator import validate_plan
from scripts.compiled_header import FOLDER, headers
from tests import builders as make

EFFORTS = [
    LinearEffort(mode=Mode.DESCEND),
    LinearEffort(mode=Mode.LAUNCH_BY_LAUNCH),
    LinearEffort(),
    LinearEffort(rounds=40, near=8),
]


#: More ranks than are all looked at for each shard.
MANY = make.topology(9, 81)


@pytest.fixture(scope="module", params=["one node", "two nodes", "nine nodes"])
def start(request):
    tables, topology = make.draw_task(24, 8, seed=5)
    topology = {"one node": topology, "two nodes": make.two_nodes(), "nine nodes": MANY}[request.param]
    space = space_of(make.request(tables, topology))
    return balanced_starts(space, Limits.of(space))[0].layout


class Numpy:
    """What shards add to ranks, summed over a whole layout by numpy."""

    def __init__(self, linear):
        self.linear, self.kinds = linear, linear.space.kinds

    def held(self, layout):
        for item in range(len(layout.chosen)):
            for shard, site in layout.held(item):
                yield shard, slice(None) if shard.is_everywhere else shard.ranks(site)

    def loads(self, layout):
        """Milliseconds of each part on each rank, up to what is the same for all layouts; shape (P, R)."""
        loads_PR, counts_KR = np.zeros((len(EMBEDDING_PARTS), layout.num_ranks)), self.counts(layout)
        rates = self.linear.rates
        for shard, ranks in self.held(layout):
            added_VP = rates.shared_VP if shard.is_everywhere else rates.served_VP
            loads_PR[:, ranks] += added_VP[shard.kind][:, None]
        return loads_PR + self.linear.launches.added_KP.T @ (counts_KR > 0)

    def counts(self, layout):
        """Uses of each launch on each rank, shape (K, R)."""
        counts_KR = np.zeros((self.linear.launches.count_VK.shape[1], layout.num_ranks), dtype=np.int64)
        for shard, ranks in self.held(layout):
            counts_KR[:, ranks] += self.linear.launches.count_VK[shard.kind][:, None]
        return counts_KR

    def sync_ms(self, layout):
        """What gradient synchronisation adds to the step."""
        synced = [shard.kind for shard, _ in self.held(layout) if shard.is_everywhere]
        sync_ms = [ms for ms in self.linear.rates.sync_V[synced].tolist() if ms > 0]
        return sum(sync_ms) + (self.linear.space.prices.sync_latency_ms() if sync_ms else 0.0)


def searched(linear, layout, effort, **options):
    """The layout that is found, and what the search left in its arrays."""
    kept, state_of = {}, linear._state
    options = {"may_O": np.ones(len(linear.flat.item_O), np.bool_), "seed": 7, "deadline_s": math.inf} | options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "_state", lambda *of: kept.setdefault("state", state_of(*of)))
        return linear.improved(layout, effort, **options), kept["state"]


@pytest.mark.parametrize("effort", EFFORTS)
def test_sums_are_those_of_the_layout_that_is_found(start, effort):
    linear = LinearSearch(start.space, start.limits, FlatOptions.of(start.space), start)
    oracle = Numpy(linear)
    found, state = searched(linear, start, effort)
    num_ranks = start.num_ranks
    changed_PR = oracle.loads(found) - oracle.loads(start)
    np.testing.assert_allclose(state["load_pr"][:, :num_ranks], start.parts_ms() + changed_PR, rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(state["count_kr"][:, :num_ranks], oracle.counts(found))
    assert found.chosen != start.chosen
    assert found.fits()


@pytest.mark.parametrize("effort", EFFORTS)
def test_the_step_by_the_slowest_ranks_never_grows(start, effort):
    linear = LinearSearch(start.space, start.limits, FlatOptions.of(start.space), start)
    oracle = Numpy(linear)
    found, state = searched(linear, start, effort)
    step_ms = [
        state["weight_p"] @ (start.parts_ms() + oracle.loads(one) - oracle.loads(start)).max(axis=1)
        + oracle.sync_ms(one)
        for one in (start, found)
    ]
    assert step_ms[1] <= step_ms[0] * (1 + 1e-12)


def test_rates_and_launches_are_exact_where_the_models_are_linear():
    # The roofline adds up what shards take and launches.
    space = space_of(make.request(*make.draw_task(24, 8, seed=5)))
    start = balanced_starts(space, Limits.of(space))[0].layout
    linear = LinearSearch(space, start.limits, FlatOptions.of(space), start)
    found, state = searched(linear, start, LinearEffort(rounds=40))
    kernels = [EMBEDDING_PARTS.index("forward_kernel"), EMBEDDING_PARTS.index("backward_kernel")]
    np.testing.assert_allclose(state["load_pr"][kernels, :8], found.parts_ms()[kernels], rtol=1e-6)


def test_options_that_may_not_be_taken_are_not(start):
    linear = LinearSearch(start.space, start.limits, FlatOptions.of(start.space), start)
    context = SearchContext(start.space, start.limits, start, seed=0)
    may_O = context.open_options((Tier.TABLE_WISE,))
    whole = placed_options(
        start.space,
        FlatOptions.of(start.space),
        CostGradient.of(start.space),
        start.limits,
        np.zeros(len(start.space.items), dtype=np.int64),
    )
    found, _ = searched(linear, whole, LinearEffort(rounds=40), may_O=may_O)
    tiers = {shard.tier for item in range(len(found.chosen)) for shard, _ in found.held(item)}
    assert tiers == {Tier.TABLE_WISE}


@pytest.mark.parametrize("little", [None, 2_000_000])
def test_of_many_ranks_the_one_that_grows_least_is_found(little):
    tables, ranks = make.draw_task(400, MANY.world_size, seed=2)
    pinned = replace(tables.tables[7], constraints=Constraints(pinned_ranks=(3, 40, 80)))
    tables = replace(tables, tables=(*tables.tables[:7], pinned, *tables.tables[8:]))
    scarce = [] if little is None else [(rank, MemoryBytes(hbm=little)) for rank in range(0, MANY.world_size, 2)]
    topology = replace(MANY, memory_bytes=ranks.memory_bytes, overrides=tuple(scarce))
    space = space_of(make.request(tables, topology), names={ShardingType.TABLE_WISE})
    flat, rates, limits = FlatOptions.of(space), CostGradient.of(space), Limits.of(space)
    options_I = np.zeros(len(space.items), dtype=np.int64)
    layout = placed_options(space, flat, rates, limits, options_I)
    num_ranks = topology.world_size
    order = sorted(
        range(len(space.items)),
        key=lambda item: (item != 7, -rates.served_VP[space.items[item].options[0].shards[0].kind].sum()),
    )
    kinds = [space.items[item].options[0].shards[0].kind for item in order]
    mean_P = rates.served_VP[kinds].sum(axis=0) / num_ranks
    used = mean_P > 0
    load_PR, free_R = np.zeros((used.sum(), num_ranks)), limits.capacity_RM[:, 0].copy()
    for item, kind in zip(order, kinds, strict=True):
        ((_, (rank,)),) = [layout.choice(item)]
        share_PR = load_PR / mean_P[used, None]
        grown_PR = (share_PR + (rates.served_VP[kind] / np.maximum(mean_P, 1e-300))[used, None]) ** 8 - share_PR**8
        score_R = mean_P[used] @ grown_PR
        needed = space.kinds.bytes_VM[kind, 0]
        open_R = (free_R >= needed) & space.items[item].options[0].shards[0].allowed_S
        assert open_R[rank]
        assert score_R[rank] <= score_R[open_R].min() * (1 + 1e-9) + 1e-300
        load_PR[:, rank] += rates.served_VP[kind][used]
        free_R[rank] -= needed


def test_constraints_are_kept():
    space = space_of(make.request(*make.mixed_task()))
    start = balanced_starts(space, Limits.of(space))[0].layout
    linear = LinearSearch(space, start.limits, FlatOptions.of(space), start)
    for seed in range(3):
        found, _ = searched(linear, start, LinearEffort(rounds=40), seed=seed)
        plan = found.plan()
        validate_plan(plan)
        assert {placed.shard.table.name for placed in plan.shards} == {table.name for table in plan.tables.tables}


@pytest.mark.parametrize("with_activations", [True, False])
def test_memory_is_kept_to(with_activations):
    space = space_of(make.request(*make.draw_task(24, 4, seed=3, spare=0.5)))
    start = balanced_starts(space, Limits.of(space, with_activations=with_activations))[0].layout
    linear = LinearSearch(space, start.limits, FlatOptions.of(space), start)
    for seed in range(5):
        found, state = searched(linear, start, LinearEffort(rounds=40), seed=seed)
        assert found.fits()
        if not with_activations:
            np.testing.assert_allclose(state["free_mr"][:, :4].T, found.free_bytes())


def test_a_deadline_that_has_passed_changes_nothing(start):
    linear = LinearSearch(start.space, start.limits, FlatOptions.of(start.space), start)
    for effort in EFFORTS:
        found, _ = searched(linear, start, effort, deadline_s=time.perf_counter() - 1)
        assert found.chosen == start.chosen


def test_the_same_seed_finds_the_same(start):
    starts = [Start(layout=start)]
    found = [improve(starts, seed=seed, deadline_s=math.inf, max_steps=6).layout.chosen for seed in (1, 1, 2)]
    assert found[0] == found[1]


@pytest.mark.parametrize("effort", EFFORTS)
def test_wider_vectors_find_the_same(start, effort, monkeypatch):
    if compiled.library() is compiled.loaded("_search"):
        pytest.skip("this machine has no wider vectors, or its compiler does not know them")
    linear = LinearSearch(start.space, start.limits, FlatOptions.of(start.space), start)
    wide, won_O = searched(linear, start, effort)[0], linear.won_O.copy()
    monkeypatch.setattr(compiled_linear, "library", lambda: compiled.loaded("_search"))
    linear.won_O[:] = 0
    plain, _ = searched(linear, start, effort)
    assert plain.chosen == wide.chosen
    assert (linear.won_O == won_O).all()


def test_options_that_were_best_are_counted(start):
    flat = FlatOptions.of(start.space)
    linear = LinearSearch(start.space, start.limits, flat, start)
    may_O = np.arange(len(flat.item_O)) % 2 == 0
    searched(linear, start, LinearEffort(mode=Mode.DESCEND), may_O=may_O)
    assert (linear.won_O[~may_O] == 0).all()
    assert (np.add.reduceat(linear.won_O, flat.first_I) > 0).sum() > len(flat.first_I) / 2


def test_without_a_compiler_there_is_one_clear_line(monkeypatch, capsys):
    request = make.request(*make.draw_task(12, 4, seed=5))
    monkeypatch.setattr(compiled, "loaded", lambda _name: None)
    compiled.library.cache_clear()
    try:
        with pytest.raises(AutoshardError, match="without a C compiler: install one"):
            search_steps(request, StepSearch(steps=20, with_policy=False))
        assert main(["doctor"]) == 0
        assert "without a C compiler" in " ".join(capsys.readouterr().out.split())
    finally:
        compiled.library.cache_clear()


def test_idle_bursts_are_followed_by_detours_that_never_cost_anything(start, monkeypatch):
    """A detour begins elsewhere and with fewer options; the best layout stays until one is better."""
    drawn = []

    def some_types(context):
        drawn.append(context.num_steps)
        return original(context)

    original = SearchContext.some_types
    monkeypatch.setattr(SearchContext, "some_types", some_types)
    monkeypatch.setattr(successive_halving, "_PATIENCE", 8)
    short, long = (improve([Start(layout=start)], seed=0, deadline_s=math.inf, max_steps=steps) for steps in (60, 120))
    assert drawn
    assert long.step_ms <= short.step_ms < start.step_ms()
    assert long.layout.fits()
    context = SearchContext(start.space, start.limits, start, seed=0)
    options_O = context.options_of(original(context))
    assert np.logical_or.reduceat(options_O, FlatOptions.of(start.space).first_I).all()
    assert not options_O.all()


def test_the_header_says_what_is_declared():
    for name, text in headers().items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text
