"""FlexShard's scaling equations and break points, against its tables."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import AccessProfile, DType, Optimizer, Payload
from autoshard.core.errors import InvalidTableError, InvalidTopologyError
from autoshard.evaluation import AlphaBetaComm
from autoshard.planners.flexshard.equations import (
    Bandwidths,
    FlexMachine,
    RowSet,
    TierStrategy,
    communication_s,
    dynamic_communication_s,
    dynamic_memory_bytes,
    memory_bytes,
    neutral_communication,
    pareto_frontier,
    static_communication_s,
    static_memory_bytes,
)
from studies.papers.flexshard.results import ids_distributed, memory_neutral_probability
from tests import builders as make

RW, CW, DP, FLEX = TierStrategy.ROW_WISE, TierStrategy.COLUMN_WISE, TierStrategy.DATA_PARALLEL, TierStrategy.FLEX
#: The paper's cluster (Sec. 5): 4 nodes of 8, batch of 4,096 per rank; bandwidths as in its Fig. 3, in bytes per s.
BANDWIDTHS = Bandwidths(
    all_to_all_global=2e9,
    all_to_all_intra=2e10,
    all_reduce_global=6e9,
    all_reduce_cross=1e9,
)
PAPER = FlexMachine(ranks_per_node=8, num_nodes=4, local_batch_size=4096, bandwidths=BANDWIDTHS)
#: 32 ranks of which each has 2^20 rows; 100 lookups per sample of 256 fp32.
ROWS = RowSet(num_rows=2**25, lookups_per_sample=100, embedding_dim=256)
ROW_BYTES = 1024


class TestEquations:
    @pytest.mark.parametrize(
        ("strategy", "static_rows", "dynamic_rows"),
        [(RW, 2**20, 2), (CW, 2**20, 2), (DP, 6 * 2**25, 1), (FLEX, 6 * 2**22, 2)],
    )
    def test_memory_is_that_of_table_2(self, strategy, static_rows, dynamic_rows):
        assert static_memory_bytes(strategy, ROWS, PAPER) == static_rows * ROW_BYTES
        assert dynamic_memory_bytes(strategy, ROWS, PAPER) == dynamic_rows * 4096 * 100 * ROW_BYTES

    @pytest.mark.parametrize(
        ("strategy", "ids", "dynamic_s", "static_s"),
        [
            (RW, 4096 * 100, 4096 * 100 * ROW_BYTES / 2e9, 0),
            (CW, 32 * 4096 * 100, 4096 * 100 * ROW_BYTES / 2e9, 0),
            (DP, 0, 0, 2**25 * ROW_BYTES / 6e9),
            (FLEX, 4096 * 100, 4096 * 100 * ROW_BYTES / 2e10, 2**22 * ROW_BYTES / 1e9),
        ],
    )
    def test_communication_is_that_of_table_3(self, strategy, ids, dynamic_s, static_s):
        assert ids_distributed(strategy, ROWS, PAPER) == ids
        assert dynamic_communication_s(strategy, ROWS, PAPER) == pytest.approx(dynamic_s)
        assert static_communication_s(strategy, ROWS, PAPER) == pytest.approx(static_s)
        assert communication_s(strategy, ROWS, PAPER) == pytest.approx(2 * dynamic_s + static_s)

    def test_gradients_are_summed_in_fp32_whatever_is_sent(self):
        plain, narrow = (RowSet.of(make.table(), Payload(forward=of, backward=of)) for of in (DType.FP32, DType.INT8))
        for strategy in (FLEX, DP):
            static_s = static_communication_s(strategy, plain, PAPER)
            assert static_communication_s(strategy, narrow, PAPER) == static_s > 0
        assert dynamic_communication_s(RW, narrow, PAPER) < dynamic_communication_s(RW, plain, PAPER)

    @given(
        strategy=st.sampled_from(TierStrategy),
        num_rows=st.lists(st.floats(0, 1e9), min_size=2, max_size=2),
        lookups=st.lists(st.floats(0, 1e4), min_size=2, max_size=2),
    )
    def test_a_table_costs_the_sum_of_its_rows(self, strategy, num_rows, lookups):
        parts = [
            replace(ROWS, num_rows=rows, lookups_per_sample=times)
            for rows, times in zip(num_rows, lookups, strict=True)
        ]
        whole = replace(ROWS, num_rows=sum(num_rows), lookups_per_sample=sum(lookups))
        for cost in (memory_bytes, communication_s):
            assert cost(strategy, whole, PAPER) == pytest.approx(sum(cost(strategy, part, PAPER) for part in parts))

    def test_bandwidths_are_read_off_the_model_of_collectives(self):
        machine = make.topology(8, 32, bytes_per_s=(2e11, 7e9), reduce_bytes_per_s=(2e11, 6e10))
        found = Bandwidths.of(machine, AlphaBetaComm())
        # Of 32 equal parts 24 leave the node, of 8 within it 7 leave the rank.
        assert found.all_to_all_global == pytest.approx(7e9 * 32 / 24)
        assert found.all_to_all_intra == pytest.approx(2e11 * 8 / 7)
        assert found.all_reduce_global == pytest.approx(6e10)
        assert found.all_reduce_cross == pytest.approx(6e10 / 8)

    def test_multipliers_are_those_of_the_optimizer(self):
        # 16 fp32 of weights; gradients take as much, Adam's two moments twice as much, row-wise AdaGrad's 4 bytes.
        def held(optimizer, multiplier=0.0):
            rows = RowSet.of(make.table("t", 40, 16, optimizer=optimizer), Payload(), multiplier)
            return rows.replica_multiplier, rows.sharded_multiplier

        assert held(Optimizer.SGD) == (2.0, 1.0)
        assert held(Optimizer.ADAM) == (4.0, 3.0)
        assert held(Optimizer.ROWWISE_ADAGRAD) == (2 + 4 / 64, 1 + 4 / 64)
        assert held(Optimizer.ROWWISE_ADAGRAD, 6.0) == (6.0, 1.0)

    def test_impossible_values_are_refused(self):
        with pytest.raises(InvalidTopologyError, match="all_to_all_intra: must be above 0, got 0"):
            replace(BANDWIDTHS, all_to_all_intra=0)
        with pytest.raises(InvalidTopologyError, match="num_nodes: must be at least 1, got 0"):
            replace(PAPER, num_nodes=0)


class TestBreakPoints:
    def test_memory_is_neutral_where_the_errata_say(self):
        assert memory_neutral_probability(32, 4096, 6) == pytest.approx((6 - 1 / 32) / 4096)
        with pytest.raises(InvalidTopologyError, match="world_size: must be at least 2, got 1"):
            memory_neutral_probability(1, 4096, 6)

    @given(multiplier=st.floats(0.5, 10), sharded=st.floats(0.5, 2), batch=st.floats(1, 1e5), dim=st.integers(1, 512))
    def test_the_closed_form_is_what_the_equations_say(self, multiplier, sharded, batch, dim):
        rows = replace(ROWS, replica_multiplier=multiplier, sharded_multiplier=sharded, embedding_dim=dim)
        machine = replace(PAPER, local_batch_size=batch)
        neutral = memory_neutral_probability(32, batch, multiplier, sharded)
        row = replace(rows, num_rows=1, lookups_per_sample=neutral)
        assert memory_bytes(DP, row, machine) == pytest.approx(memory_bytes(RW, row, machine))

    def test_communication_is_neutral_where_both_take_as_long(self):
        # Fig. 3: all-reduces are three times as fast as all-to-alls, of which there are two for each lookup.
        assert neutral_communication(DP, ROWS, PAPER) == pytest.approx(1 / (2 * 4096 * 3))
        flex = neutral_communication(FLEX, ROWS, PAPER)
        assert flex == pytest.approx(1 / 8 / 1e9 / (2 * 4096 * (1 / 2e9 - 1 / 2e10)))
        row = replace(ROWS, num_rows=1, lookups_per_sample=flex)
        assert communication_s(FLEX, row, PAPER) == pytest.approx(communication_s(RW, row, PAPER))

    def test_flex_pays_never_where_nodes_are_no_faster(self):
        machine = replace(PAPER, bandwidths=replace(BANDWIDTHS, all_to_all_intra=2e9))
        assert neutral_communication(FLEX, ROWS, machine) == math.inf


class TestParetoFrontier:
    """Fig. 5, on a Zipf curve: saves memory first, then time, then neither."""

    ACCESS = AccessProfile.zipf(2**25, 1.05)

    def frontier(self, machine=PAPER, rows=ROWS):
        return pareto_frontier(self.ACCESS, rows, machine)

    def test_points_come_in_order(self):
        found = self.frontier()
        points = (
            found.most_memory_saved,
            found.memory_neutral,
            found.most_communication_saved,
            found.whole_table,
        )
        assert 0 < points[0].num_rows < points[1].num_rows < points[2].num_rows < points[3].num_rows == 2**25
        assert points[0].memory_bytes == min(point.memory_bytes for point in found.curve) < 0
        assert points[1].memory_bytes == pytest.approx(0, abs=1e-3)
        assert points[2].communication_s == min(point.communication_s for point in found.curve) < 0
        assert points[3].coverage == 1

    def test_points_are_at_the_neutral_probabilities(self):
        found, knots = self.frontier(), self.ACCESS.ranks_K
        for point, neutral in (
            (found.most_memory_saved, memory_neutral_probability(32, 4096, 6)),
            (found.most_communication_saved, neutral_communication(DP, ROWS, PAPER)),
        ):
            before = knots[np.searchsorted(knots, point.num_rows) - 1]
            assert float(self.ACCESS.probability_at(before)) * 100 >= neutral
            assert float(self.ACCESS.probability_at(point.num_rows)) * 100 <= neutral

    def test_all_rows_cost_the_difference_of_whole_tables(self):
        last = self.frontier().whole_table
        assert last.memory_bytes == pytest.approx(memory_bytes(DP, ROWS, PAPER) - memory_bytes(RW, ROWS, PAPER))
        assert last.communication_s == pytest.approx(
            communication_s(DP, ROWS, PAPER) - communication_s(RW, ROWS, PAPER)
        )

    def test_where_memory_is_never_saved_nothing_is_neutral_but_nothing(self):
        found = self.frontier(machine=replace(PAPER, local_batch_size=1e-3))
        assert found.most_memory_saved.num_rows == found.memory_neutral.num_rows == 0

    def test_where_all_rows_save_memory_all_are_neutral(self):
        found = self.frontier(rows=replace(ROWS, replica_multiplier=0.01))
        assert found.memory_neutral == found.whole_table

    def test_refuses_the_curve_of_another_table(self):
        with pytest.raises(InvalidTableError, match="access: describes 33554432 rows, the table has 5"):
            self.frontier(rows=replace(ROWS, num_rows=5))
