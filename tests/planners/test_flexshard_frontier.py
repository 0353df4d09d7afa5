"""The frontier over tables: never worse than any other cut, and never more communication for more memory."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.core import (
    Constraints,
    Exchange,
    Optimizer,
    Pooling,
    Tier,
)
from autoshard.planners.flexshard.equations import (
    Bandwidths,
    FlexMachine,
    TierStrategy,
    communication_s,
    input_distribution_s,
    memory_bytes,
)
from autoshard.planners.flexshard.frontier import Frontier, TierBounds
from autoshard.planners.flexshard.paper_rule import paper_choice
from autoshard.planners.flexshard.tier_costs import Pricing, real_multipliers, tiers_of
from tests import builders as make

BANDWIDTHS = Bandwidths(
    all_to_all_global=2e9,
    all_to_all_intra=2e10,
    all_reduce_global=6e9,
    all_reduce_cross=3e9,
    reduce_scatter_global=2e9,
)
MACHINE = FlexMachine(ranks_per_node=2, num_nodes=2, local_batch_size=64, bandwidths=BANDWIDTHS)
PRICING = Pricing(machine=MACHINE)


def table(name="t0", num_embeddings=40, pooling_factor=30.0, **fields):
    usual = {"alpha": 1.2, "pooling": Pooling.SEQUENCE}
    return make.table(name, num_embeddings, pooling_factor=pooling_factor, **{**usual, **fields})


def frontier(tables, num_tiers=3, pricing=PRICING, exchanges=tuple(Exchange)):
    return Frontier(tables, [tiers_of(one, pricing.machine, num_tiers) for one in tables], pricing, exchanges)


def cost(one, bounds, pricing=PRICING):
    """Memory and communication of a cut of a sequence table, straight from the scaling equations."""
    whole = pricing.rows_of(one)
    totals = np.zeros(2)
    ends = {TierStrategy.DATA_PARALLEL: (0, bounds.replicated), TierStrategy.FLEX: (bounds.replicated, bounds.flexed)}
    ends[TierStrategy.ROW_WISE] = (bounds.flexed, one.num_embeddings)
    for strategy, (start, stop) in ends.items():
        share = float(one.access.coverage(stop) - one.access.coverage(start))
        rows = replace(whole, num_rows=stop - start, lookups_per_sample=whole.lookups_per_sample * share)
        seconds = communication_s(strategy, rows, pricing.machine)
        seconds += input_distribution_s(strategy, rows, pricing.machine)
        totals += memory_bytes(strategy, rows, pricing.machine), seconds
    return totals


tables_of_sequences = st.lists(
    st.builds(
        lambda num_embeddings, length, alpha, dim, optimizer: {
            "num_embeddings": num_embeddings,
            "pooling_factor": length,
            "alpha": alpha,
            "embedding_dim": dim,
            "optimizer": optimizer,
        },
        st.integers(1, 10**7),
        st.floats(0, 2000),
        st.floats(0, 2),
        st.sampled_from([4, 64, 256]),
        st.sampled_from(Optimizer),
    ),
    min_size=1,
    max_size=3,
).map(lambda drawn: [table(f"t{index}", **values) for index, values in enumerate(drawn)])
any_tables = st.tuples(tables_of_sequences, st.lists(st.sampled_from(Pooling), min_size=3, max_size=3)).map(
    lambda drawn: [replace(one, pooling=pooling) for one, pooling in zip(*drawn, strict=False)]
)


class TestOneTable:
    @pytest.mark.parametrize("num_tiers", [2, 3])
    @pytest.mark.parametrize("alpha", [0.0, 0.6, 1.2])
    @pytest.mark.parametrize("extra", [-500.0, 0.0, 100.0, 777.0, 3000.0])
    def test_no_other_cut_communicates_less_within_the_budget(self, num_tiers, alpha, extra):
        one = table(num_embeddings=24, alpha=alpha)
        found = frontier([one], num_tiers)
        budget = found.row_wise.memory_bytes + extra
        every = [
            cost(one, TierBounds(replicated=replicated, flexed=flexed))
            for replicated in range(25)
            for flexed in range(replicated, 25 if num_tiers == 3 else replicated + 1)
        ]
        within = [seconds for memory, seconds in every if memory <= budget]
        chosen = found.at(budget)
        if chosen is None:
            assert not within
            return
        assert chosen.memory_bytes <= budget * (1 + 1e-9)
        assert chosen.communication_s <= min(within, default=np.inf) * (1 + 1e-9)

    def test_says_what_its_cut_costs(self):
        one = table(num_embeddings=100_000, pooling_factor=200.0)
        pricing = replace(PRICING, machine=replace(MACHINE, ranks_per_node=8, num_nodes=4))
        found = frontier([one], pricing=pricing)
        chosen = found.at(found.row_wise.memory_bytes)
        assert 0 < chosen.bounds[0].replicated < chosen.bounds[0].flexed < 100_000
        # Rounding to whole rows leaves a row of each tier.
        memory, seconds = cost(one, chosen.bounds[0], pricing)
        assert memory == pytest.approx(chosen.memory_bytes, rel=1e-3)
        assert seconds == pytest.approx(chosen.communication_s, rel=1e-3)

    def test_does_not_replicate_what_is_forbidden(self):
        for tier, is_kept in ((Tier.DATA_PARALLEL, "replicated"), (Tier.FLEX, "flexed")):
            one = table(num_embeddings=10_000, pooling_factor=200.0, constraints=Constraints(forbidden_tiers=(tier,)))
            bounds = frontier([one]).at(1e9).bounds[0]
            if is_kept == "replicated":
                assert (bounds.replicated, bounds.flexed > 0) == (0, True)
            else:
                assert bounds.replicated == bounds.flexed > 0

    def test_without_a_budget_for_anything_there_is_no_cut(self):
        found = frontier([table()])
        assert found.at(found.least_memory_bytes * 0.99) is None
        assert found.at(found.least_memory_bytes) is not None

    def test_multipliers_are_those_of_the_optimizer(self):
        # 16 fp32 of weights; gradients take as much, Adam's two moments twice as much, row-wise AdaGrad's 4 bytes.
        assert real_multipliers(table(optimizer=Optimizer.SGD)) == (2.0, 1.0)
        assert real_multipliers(table(optimizer=Optimizer.ADAM)) == (4.0, 3.0)
        assert real_multipliers(table()) == (2 + 4 / 64, 1 + 4 / 64)
        rows = replace(PRICING, memory_multiplier=6.0).rows_of(table())
        assert (rows.replica_multiplier, rows.sharded_multiplier) == (6.0, 1.0)


class TestManyTables:
    @settings(max_examples=60)
    @given(tables=any_tables, num_tiers=st.integers(1, 3), extra=st.lists(st.floats(-1e8, 1e10), min_size=2))
    def test_more_budget_never_communicates_more(self, tables, num_tiers, extra):
        found = frontier(tables, num_tiers)
        budgets = [found.row_wise.memory_bytes + more for more in sorted([0.0, *extra])]
        chosen = [(budget, choice) for budget in budgets if (choice := found.at(budget)) is not None]
        for budget, choice in chosen:
            assert choice.memory_bytes <= budget * (1 + 1e-9)
        seconds = [choice.communication_s for _, choice in chosen]
        assert all(after <= before * (1 + 1e-9) for before, after in pairwise(seconds))
        at_none = found.at(found.row_wise.memory_bytes)
        assert at_none.communication_s <= found.row_wise.communication_s * (1 + 1e-9)

    @settings(max_examples=60)
    @given(tables=any_tables, num_tiers=st.integers(2, 3), extra=st.floats(0, 1e10), multiplier=st.sampled_from([0, 6]))
    def test_is_never_worse_than_the_papers_rule(self, tables, num_tiers, extra, multiplier):
        pricing = replace(PRICING, memory_multiplier=float(multiplier))
        found = frontier(tables, num_tiers, pricing)
        budget = found.row_wise.memory_bytes + extra
        tiers = [tiers_of(one, MACHINE, num_tiers) for one in tables]
        by_rule = paper_choice(tables, tiers, pricing, found.row_wise, budget)
        assert by_rule.memory_bytes <= budget * (1 + 1e-9)
        if all(one.pooling is Pooling.SEQUENCE for one in tables):  # others have steps that cannot be split
            assert found.at(budget).communication_s <= by_rule.communication_s * (1 + 1e-6)

    def test_memory_goes_where_it_saves_most(self):
        # Alike in size; rows of the first are looked up ten times as often.
        tables = [table("often", 100_000, 500.0), table("seldom", 100_000, 50.0)]
        found = frontier(tables)
        often, seldom = found.at(found.row_wise.memory_bytes).bounds
        assert often.replicated > seldom.replicated
        assert often.flexed > seldom.flexed

    @pytest.mark.parametrize(("lookups", "exchange"), [(2.0, Exchange.ROWS), (50.0, Exchange.PARTIAL_SUMS)])
    def test_pooled_tables_send_what_is_less(self, lookups, exchange):
        # Four owners send a vector per bag each, or one row per lookup together.
        one = table(num_embeddings=1000, pooling_factor=lookups, pooling=Pooling.SUM)
        assert frontier([one], 1).row_wise.bounds[0].tail_exchange is exchange

    def test_steps_without_room_leave_it_to_other_tables(self):
        # The large table can only move whole, which takes too much; the small one gets the budget.
        large = table("large", 10**6, 50.0, pooling=Pooling.SUM)
        small = table("small", 10**4, 50.0)
        found = frontier([large, small], 2, exchanges=(Exchange.PARTIAL_SUMS,))
        chosen = found.at(found.row_wise.memory_bytes + 1e5)
        assert chosen.bounds[0].replicated == 0
        assert chosen.bounds[1].replicated > 0
