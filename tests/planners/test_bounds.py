"""Lower bounds: never above the best of all plans of small tasks, and equal to it where nothing is lost.

Shape suffixes: N items, R ranks.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autoshard.core import (
    Constraints,
    DType,
    KernelCosts,
    LowerBound,
    MemoryBytes,
    MemoryLevel,
    MemoryPlacement,
    Payload,
    Pooling,
    ReplicaGroups,
)
from autoshard.core.costs import KernelFloor
from autoshard.core.step import EMBEDDING_PARTS, ENGINE_WORK, Overlap, StepPart
from autoshard.evaluation import AlphaBetaComm, AnalyticCostModel, evaluate, stages
from autoshard.planners.bounds.kernel_relaxation import KernelRelaxation
from autoshard.planners.bounds.step_relaxation import StepRelaxation
from autoshard.planners.exact.cp_sat import CpSatPlanner
from autoshard.planners.heuristics.greedy import CostGreedyPlanner
from autoshard.planners.hybrid.option_offers import space_of
from autoshard.planners.neo import NeoPlanner
from autoshard.planners.neuroshard.planner import NeuroShardPlanner
from autoshard.planners.plan_bounds import MAX_KERNEL, STEP, plan_bounds
from autoshard.planners.space.layout import Layout, Limits
from autoshard.planners.space.options import ShardingType
from autoshard.planners.space.placement import PlacementProblem
from tests import builders as make

COSTS = make.costs()

TABLE_WISE = {ShardingType.TABLE_WISE}
SPACES = [
    tuple(ShardingType),
    (ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL, ShardingType.ROW_WISE),
    (ShardingType.TABLE_WISE, ShardingType.TABLE_ROW_WISE, ShardingType.FLEX),
]
#: Layouts that one example may price.
MOST_LAYOUTS = 1500
ANALYTIC = [make.costs(device) for device in ("cpu", "a100")]


@st.composite
def topologies(draw):
    sizes = draw(st.sampled_from([(1,), (2,), (3,), (2, 4)]))
    levels = make.levels(
        *sizes,
        bytes_per_s=tuple(10.0 ** draw(st.floats(7, 11)) for _ in sizes),
        reduce_bytes_per_s=2e9,
        latency_s=tuple(draw(st.sampled_from([0.0, 1e-5, 1e-3])) for _ in sizes),
        shared_links=(False, draw(st.booleans())),
    )
    return make.topology(*sizes, hbm=draw(st.sampled_from([10**5, 10**9])), levels=levels)


@st.composite
def table_sets(draw, most=3, poolings=tuple(Pooling)):
    tables = []
    for index in range(draw(st.integers(1, most))):
        rows = draw(st.sampled_from([1, 300, 2000]))
        tables.append(
            make.table(
                f"t{index}",
                rows,
                draw(st.sampled_from([4, 16])),
                pooling_factor=draw(st.sampled_from([0.0, 1.0, 30.0])),
                alpha=draw(st.sampled_from([0.0, 1.05])),
                pooling=draw(st.sampled_from(poolings)),
                dtype=draw(st.sampled_from([DType.FP32, DType.FP16])),
            )
        )
    return make.tables(*tables, batch_size=draw(st.sampled_from([64, 4096])))


def layouts_of(space, limits):
    """All layouts within the memory, or none if they are too many."""
    choices = []
    for item in space.items:
        of_item = []
        for number, option in enumerate(item.options):
            sites = product(*(np.flatnonzero(shard.allowed_S).tolist() for shard in option.shards))
            of_item += [(number, at) for at in sites if not option.of_tables[0].in_one_node or len(set(at)) == 1]
        choices.append(of_item)
    if np.prod([len(of_item) for of_item in choices]) > MOST_LAYOUTS:
        return []
    found = (Layout(space, limits, chosen) for chosen in product(*choices))
    return [layout for layout in found if layout.fits()]


def space_and_limits(tables, topology, costs, names=tuple(ShardingType), payload=None):
    request = make.request(tables, topology, costs=costs, payload=payload or Payload())
    space = space_of(request, names)
    return space, Limits.of(space)


class TestSteps:
    @settings(max_examples=6, deadline=None)
    @given(
        tables=table_sets(),
        topology=topologies(),
        costs=st.sampled_from(ANALYTIC),
        names=st.sampled_from(
            [tuple(ShardingType), ("table_wise", "data_parallel", "row_wise"), ("table_wise", "flex")]
        ),
        forward=st.sampled_from([DType.FP32, DType.INT8]),
    )
    def test_no_plan_is_below(self, tables, topology, costs, names, forward):
        space, limits = space_and_limits(tables, topology, costs, names, Payload(forward=forward))
        layouts = layouts_of(space, limits)
        assume(layouts)
        relaxation = StepRelaxation(space, limits.capacity_RM)
        assert relaxation.is_proven
        bounds = relaxation.bounds()
        for layout in layouts:
            assert bounds.step_ms <= layout.step_ms()
            for part, least_ms, ms_R in zip(EMBEDDING_PARTS, bounds.parts_ms, layout.parts_ms(), strict=True):
                assert least_ms <= ms_R.max() * (1 + 1e-9), part

    @pytest.mark.parametrize(
        ("term", "is_proven"),
        [
            (lambda links: 0.05 + 0 * links, True),
            (lambda links: 1e-4 * links, True),
            (lambda links: 1e-2 * np.sqrt(links), False),
            (lambda links: 1e-7 * links**2, False),
        ],
    )
    def test_a_term_of_the_step_is_proven_only_where_no_plan_is_below(self, monkeypatch, term, is_proven):
        plain = stages.all_to_alls_ms

        def dearer(links, comm, topology):
            return plain(links, comm, topology) + term(links.leaving_LR.sum(axis=0))

        monkeypatch.setattr(stages, "all_to_alls_ms", dearer)
        for batch_size in (8, 65_536):
            tables = make.tables(3, batch_size=batch_size)
            space, limits = space_and_limits(tables, make.topology(3, latency_s=1e-5), COSTS, SPACES[1])
            relaxation = StepRelaxation(space, limits.capacity_RM)
            assert relaxation.is_proven is is_proven
            best_ms = min(layout.step_ms() for layout in layouts_of(space, limits))
            assert relaxation.bounds().step_ms <= best_ms or not is_proven

    def test_collectives_that_do_not_say_that_they_are_affine_prove_nothing(self):
        class Measured(AlphaBetaComm):
            is_affine = False

        costs = replace(COSTS, comm=Measured())
        space, limits = space_and_limits(make.tables(3), make.topology(2), costs, SPACES[1])
        assert not StepRelaxation(space, limits.capacity_RM).is_proven

    def test_equal_tables_that_divide_the_ranks_are_bounded_exactly(self):
        tables = make.tables(4, batch_size=512)
        space, limits = space_and_limits(tables, make.topology(2, latency_s=1e-4), COSTS, TABLE_WISE)
        best = min(layouts_of(space, limits), key=Layout.step_ms)
        bounds = StepRelaxation(space, limits.capacity_RM).bounds()
        assert bounds.step_ms == pytest.approx(best.step_ms(), rel=1e-5)
        assert bounds.parts_ms == pytest.approx(best.parts_ms().max(axis=1).tolist(), rel=1e-5)

    def test_one_rank_is_bounded_exactly(self):
        tables, topology = make.draw_task(12, 1, seed=1)
        space, limits = space_and_limits(tables, topology, COSTS)
        (layout,) = layouts_of(space, limits)
        assert StepRelaxation(space, limits.capacity_RM).bounds().step_ms == pytest.approx(layout.step_ms(), rel=1e-5)

    def test_the_costliest_table_bounds_where_it_cannot_be_cut(self):
        tables, topology = make.draw_task(6, 4, seed=2)
        tables = replace(tables, tables=(*tables.tables, make.table("heavy", 10**4, 64, 5000.0)))
        space, limits = space_and_limits(tables, topology, COSTS, TABLE_WISE)
        plan = CostGreedyPlanner().plan(make.request(tables, topology, costs=COSTS))
        bounds = StepRelaxation(space, limits.capacity_RM).bounds()
        slowest_ms = evaluate(plan, COSTS).parts["backward_kernel"].value
        assert bounds.parts_ms[EMBEDDING_PARTS.index("backward_kernel")] == pytest.approx(slowest_ms, rel=1e-5)

    def test_memory_bounds_what_is_copied(self):
        # Without exchange there is no cheaper way than copies on all ranks. Half of them fit.
        tables = make.tables(8, batch_size=4096)
        names = {ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL}
        held = tables.tables[0].storage_bytes
        exchange_ms = []
        for room in (100, 4, 2):
            space, limits = space_and_limits(tables, make.topology(4, hbm=room * held), COSTS, names)
            bounds = StepRelaxation(space, limits.capacity_RM).bounds()
            exchange_ms.append(bounds.parts_ms[EMBEDDING_PARTS.index("forward_exchange")])
        # What ranks read of their own copies they still pack and unpack: 8 vectors of 16 fp32 for 1,024 samples.
        work = ENGINE_WORK["cpu"][StepPart.FORWARD_EXCHANGE]
        assert exchange_ms[0] == pytest.approx(work["steps"] + work["megabytes"] * 2 * 8 * 1024 * 64 / 1e6, rel=1e-5)
        assert exchange_ms[0] < exchange_ms[1] < exchange_ms[2]


class TestKernels:
    @settings(max_examples=40, deadline=None)
    @given(tables=table_sets(most=6), num_ranks=st.integers(1, 3), costs=st.sampled_from(ANALYTIC), data=st.data())
    def test_no_placement_is_below(self, tables, num_ranks, costs, data):
        pinned = [
            replace(
                table, constraints=Constraints(pinned_ranks=data.draw(st.sampled_from([(), (0,), (num_ranks - 1,)])))
            )
            for table in tables.tables
        ]
        tables = replace(tables, tables=tuple(pinned))
        room = data.draw(st.sampled_from([1, 2])) * sum(table.storage_bytes for table in pinned)
        problem = PlacementProblem.table_wise(tables, make.topology(num_ranks, hbm=room), costs.kernel)
        placements = (np.array(ranks) for ranks in product(range(num_ranks), repeat=problem.num_items))
        best_ms = min(problem.rank_ms(ranks_N).max() for ranks_N in placements if problem.is_feasible(ranks_N))
        relaxation = KernelRelaxation(problem)
        assert relaxation.is_proven
        assert relaxation.max_ms() <= best_ms

    def test_cp_sat_is_never_below_and_close(self):
        pytest.importorskip("ortools")
        for seed in range(3):
            task = make.draw_task(16, 3, seed=seed)
            plan = CpSatPlanner().plan(make.request(*task, options={"effort": 0.2}, time_limit_s=120.0))
            problem = make.problem(*task)
            found_ms = problem.rank_ms(problem.ranks_of(plan)).max()
            bound_ms = KernelRelaxation(problem).max_ms()
            assert bound_ms <= found_ms <= 1.02 * bound_ms

    def test_pinned_tables_are_bounded_by_their_ranks(self):
        # Two ranks of four may hold these, so that the mean of these counts, not that of all.
        constraints = Constraints(pinned_ranks=(0, 1))
        problem = make.problem(make.tables(4, constraints=constraints), make.topology(4))
        assert KernelRelaxation(problem).max_ms() == pytest.approx(
            problem.rank_ms(np.array([0, 0, 1, 1])).max(), rel=1e-5
        )

    def test_more_tables_than_ranks_share(self):
        problem = make.problem(make.tables(5), make.topology(4))
        slowest_ms = problem.rank_ms(np.array([0, 0, 1, 2, 3])).max()
        assert KernelRelaxation(problem).max_ms() == pytest.approx(slowest_ms, rel=1e-5)


class Fused:
    """Sets cost less than their shards, and the floor is half of that; nothing is exact."""

    name = "learned:fused"

    def __init__(self, has_floor=True):
        self.inner = AnalyticCostModel.for_device("cpu")
        if has_floor:
            self.floor = self._floor

    def encode(self, shards):
        return self.inner.encode(shards)

    def predict_ms(self, codes):
        return self.predict_parts(codes).kernel_ms_S

    def predict_parts(self, codes):
        costs = self.inner.predict_parts(codes)
        forward, backward = costs.forward_ms_S**0.95, costs.backward_ms_S**0.95
        return KernelCosts(forward_ms_S=forward, backward_ms_S=backward, low_ms_S=forward, high_ms_S=forward + backward)

    def _floor(self, codes):
        floor = self.inner.floor(codes)
        return KernelFloor(
            forward_ms_N=floor.forward_ms_N / 2,
            backward_ms_N=floor.backward_ms_N / 2,
            kernel_N=np.zeros(len(codes), dtype=np.int64),
            forward_base_ms=0.0,
            backward_base_ms=0.0,
        )


def unordered(num_tables, num_ranks, seed):
    """A task whose rows are not cut by how often they are looked up: nobody knows their order."""
    tables, topology = make.draw_task(num_tables, num_ranks, seed=seed)
    return replace(tables, tables=tuple(replace(one, row_order=None) for one in tables.tables)), topology


class TestPlans:
    def test_every_part_and_the_step_have_a_bound(self):
        task = unordered(20, 4, seed=1)
        for planner in (CostGreedyPlanner(), NeoPlanner(), NeuroShardPlanner()):
            plan = planner.plan(make.request(*task))
            predicted = evaluate(plan, COSTS)
            bounds = plan_bounds(plan, COSTS)
            assert set(bounds) - {MAX_KERNEL} == {STEP, *map(str, EMBEDDING_PARTS)}
            assert bounds[STEP].estimated_ms is None
            assert 0 < bounds[STEP].proven_ms <= predicted.step_ms.value
            for part in EMBEDDING_PARTS:
                assert bounds[part].proven_ms <= predicted.parts[part].value
        assert plan_bounds(CostGreedyPlanner().plan(make.request(*task)), COSTS)[MAX_KERNEL].proven_ms > 0

    def test_fewer_sharding_types_have_a_higher_bound(self):
        # Fewer tables than ranks, so that the largest whole one decides.
        plan = CostGreedyPlanner().plan(make.request(*unordered(3, 4, seed=5)))
        every, whole = (plan_bounds(plan, COSTS, names)[STEP].proven_ms for names in (tuple(ShardingType), TABLE_WISE))
        assert every < whole

    def test_where_rows_may_be_cut_anywhere_bounds_are_estimates(self):
        plan = CostGreedyPlanner().plan(make.request(*make.draw_task(20, 4, seed=1)))
        cut, whole = (plan_bounds(plan, COSTS, names)[STEP] for names in (tuple(ShardingType), TABLE_WISE))
        assert cut.proven_ms is None
        assert 0 < cut.estimated_ms <= whole.proven_ms

    def test_a_step_of_another_overlap_has_none(self):
        plan = CostGreedyPlanner().plan(make.request(*unordered(20, 4, seed=1)))
        usual, plain, neo = (
            plan_bounds(plan.with_predicted(evaluate(plan, COSTS, overlap=overlap)), COSTS)
            for overlap in (None, Overlap.NONE, Overlap.NEO)
        )
        assert plain == usual
        assert neo == {name: bound for name, bound in usual.items() if name != STEP}

    def test_kernels_of_tables_behind_caches_are_above_their_bound(self):
        tables, _ = unordered(4, 2, seed=1)
        largest = max(one.storage_bytes for one in tables.tables)
        small = MemoryBytes(hbm=largest // 4, ddr=8 * largest)
        topology = make.topology(2, hbm=largest, ddr=8 * largest, overrides=((1, small),))
        behind = MemoryPlacement(level=MemoryLevel.DDR, cache_bytes=largest // 16)
        shards = [replace(one, memory=behind) for one in make.table_wise(tables.tables, [0, 1, 0, 1])]
        plan = make.plan(*shards, topology=topology, batch_size=tables.batch_size)
        assert 0 < plan_bounds(plan, COSTS)[MAX_KERNEL].proven_ms <= evaluate(plan, COSTS).max_kernel_ms

    def test_prices_that_do_not_add_up_have_an_estimate_beside(self):
        tables, topology = unordered(20, 4, seed=1)
        fused = replace(COSTS, kernel=Fused())
        plan = CostGreedyPlanner().plan(make.request(tables, topology, costs=fused))
        predicted, bounds = evaluate(plan, fused), plan_bounds(plan, fused)
        for name, value_ms in ((STEP, predicted.step_ms.value), (MAX_KERNEL, predicted.max_kernel_ms)):
            bound = bounds[name]
            assert bound.proven_ms < bound.estimated_ms <= value_ms
            above, kind = bound.above(value_ms)
            assert kind == "estimated"
            assert above == pytest.approx(value_ms / bound.estimated_ms - 1)

    def test_prices_without_a_floor_prove_nothing(self):
        tables, topology = make.draw_task(20, 4, seed=1)
        fused = replace(COSTS, kernel=Fused(has_floor=False))
        plan = CostGreedyPlanner().plan(make.request(tables, topology, costs=fused))
        for bound in plan_bounds(plan, fused).values():
            assert bound.proven_ms is None
            assert bound.estimated_ms is not None

    def test_replica_groups_have_none(self):
        tables, topology = make.draw_task(8, 2, seed=1)
        plan = CostGreedyPlanner().plan(make.request(tables, topology))
        wide = replace(topology, world_size=4, levels=(replace(topology.levels[0], size=4),))
        groups = ReplicaGroups(num_groups=2)
        assert plan_bounds(replace(plan, topology=wide, replica_groups=groups), COSTS) == {}


def test_the_sharper_bound_counts():
    assert LowerBound(proven_ms=2.0).above(3.0) == (0.5, "proven")
    assert LowerBound(proven_ms=2.0, estimated_ms=2.5).above(3.0) == (pytest.approx(0.2), "estimated")
    assert LowerBound(proven_ms=0.0).above(3.0) == (0.0, "proven")
