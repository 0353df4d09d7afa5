"""Sampled batches: what is drawn has the moments that it should, and steps vary as whole prices of batches do."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from autoshard.core import (
    AccessProfile,
    Link,
    ReplicaGroups,
    Tier,
    local_shard,
)
from autoshard.core.choices import Lengths
from autoshard.core.costs import set_costs
from autoshard.core.errors import InvalidOptionError
from autoshard.formats import load_topology
from autoshard.whatif.spread import batch_variance, distinct_variance, draw_lookups, sample_steps
from tests import builders
from tests.builders import costs, everyone, placed, plan, table_wise

COSTS = costs("a100")
BATCH = 512
table = partial(builders.table, num_embeddings=100_000, embedding_dim=64, pooling_factor=20.0, alpha=1.05)


def plan_of(*tables, ranks=2, groups=1, batch=BATCH):
    return plan(
        *table_wise(tables, [index % (ranks // groups) for index in range(len(tables))]),
        batch_size=batch,
        topology=load_topology(f"dgx-a100-{ranks}"),
        replica_groups=ReplicaGroups(num_groups=groups),
    )


class TestDraws:
    @pytest.mark.parametrize("variance", [0.0, 300.0, 1000.0, 90_000.0])
    def test_lookups_have_the_mean_and_the_variance(self, variance):
        drawn = draw_lookups(1000.0, variance, 200_000, np.random.default_rng(1))
        assert drawn.min() >= 0
        assert drawn.mean() == pytest.approx(1000, rel=0.005)
        assert drawn.var() == pytest.approx(variance, rel=0.02)

    def test_of_a_variance_at_the_mean_they_are_poisson(self):
        drawn = draw_lookups(3.0, 3.0, 400_000, np.random.default_rng(2))
        assert np.mean(drawn == 0) == pytest.approx(np.exp(-3), rel=0.02)

    def test_a_batch_adds_up_the_variances_of_its_samples(self):
        assert batch_variance(table("a", pooling_variance=400.0), 512, Lengths.DECLARED) == 512 * 400
        # Nothing declared: 20 ids each time, or 2 and 3 with one half each.
        assert batch_variance(table("a"), 512, Lengths.DECLARED) == 0
        assert batch_variance(table("a", pooling_factor=2.5), 512, Lengths.DECLARED) == 512 * 0.25
        assert batch_variance(table("a", pooling_factor=2.5), 512, Lengths.POISSON) == 512 * 2.5

    @pytest.mark.parametrize(("rows", "lookups"), [(1000, 300), (1000, 3000), (20_000, 2_000)])
    def test_distinct_rows_vary_as_those_of_drawn_ids(self, rows, lookups):
        access, rng = AccessProfile.zipf(rows, 0.8), np.random.default_rng(3)
        drawn = [len(np.unique(access.sample_ranks(lookups, rng))) for _ in range(1000)]
        assert np.mean(drawn) == pytest.approx(access.expected_distinct(lookups), rel=0.01)
        assert np.var(drawn) == pytest.approx(distinct_variance(access, lookups), rel=0.15)


def whole_prices(plan, num_batches, seed):
    """Kernel times of the slowest rank with each batch's lookups priced anew; distinct rows follow lookups."""
    rng, times = np.random.default_rng(seed), []
    for _ in range(num_batches):
        held = [[] for _ in range(plan.group_size)]
        for shard in plan.shards:
            one = shard.shard.table
            mean, variance = BATCH * one.pooling_factor, batch_variance(one, BATCH, Lengths.DECLARED)
            factor = draw_lookups(mean, variance, 1, rng)[0] / mean
            local = local_shard(shard, group_batch_size=BATCH)
            held[shard.replicas[0][0]].append(replace(local, pooling_factor=local.pooling_factor * factor))
        times.append(set_costs(COSTS.kernel, held).kernel_ms_S.max())
    return np.array(times)


class TestSteps:
    # Few rows and many lookups: all rows are hit, so that distinct rows do not vary by themselves.
    TABLES = (
        table("a", num_embeddings=500, pooling_factor=50.0, pooling_variance=50.0**2, alpha=0.2),
        table("b", num_embeddings=500, pooling_factor=40.0, pooling_variance=80.0**2, alpha=0.2),
    )

    def test_kernels_vary_as_whole_prices_of_batches_do(self):
        plan = plan_of(*self.TABLES)
        priced = whole_prices(plan, 1000, seed=4)
        spread = sample_steps(plan, COSTS, num_batches=1500, seed=5)
        assert spread.expected_max_kernel_ms == pytest.approx(priced.mean(), rel=0.003)
        assert spread.expected_max_kernel_ms > spread.max_expected_kernel_ms

    def test_on_one_rank_steps_vary_as_kernels_do(self):
        plan = plan_of(*self.TABLES, ranks=1)
        priced = whole_prices(plan, 1500, seed=4)
        spread = sample_steps(plan, COSTS, num_batches=3000, seed=5)
        for low, high, share in ((spread.p50_ms, spread.p90_ms, 0.9), (spread.p50_ms, spread.p99_ms, 0.99)):
            assert high - low == pytest.approx(np.quantile(priced, share) - np.quantile(priced, 0.5), rel=0.2)

    def test_ids_vary_on_the_wire_too(self):
        # At 1 MB/s and without latency the input distribution decides, and its bytes follow the lookups.
        plan = plan_of(table("a", pooling_factor=10.0), self.TABLES[1])
        slow = Link(bytes_per_s=1e6)
        level = replace(plan.topology.levels[0], all_to_all=slow)
        plan = replace(plan, topology=replace(plan.topology, levels=(level,)))
        spread = sample_steps(plan, COSTS, num_batches=1000, seed=5)
        # The other rank's half of the second table's ids comes over the wire.
        ids_ms = BATCH / 2 * 40 * 4 / 1e6 * 1e3
        drawn = draw_lookups(BATCH * 40.0, BATCH * 80.0**2, 1000, np.random.default_rng(1)) / (BATCH * 40.0)
        assert spread.p99_ms - spread.p50_ms == pytest.approx(
            ids_ms * (np.quantile(drawn, 0.99) - np.quantile(drawn, 0.5)), rel=0.25
        )

    def test_quantiles_rise_and_the_seed_decides(self):
        plan = plan_of(*self.TABLES)
        spread = sample_steps(plan, COSTS, num_batches=100, seed=1)
        assert spread.p50_ms < spread.p90_ms < spread.p99_ms
        assert spread == sample_steps(plan, COSTS, num_batches=100, seed=1)
        assert spread != sample_steps(plan, COSTS, num_batches=100, seed=2)

    def test_declared_variance_widens_the_spread(self):
        def width(variance):
            spread = sample_steps(plan_of(table("a", pooling_variance=variance)), COSTS, num_batches=300, seed=1)
            return spread.p99_ms - spread.p50_ms

        assert width(0.0) < width(20.0) < width(4000.0)

    def test_more_ranks_and_groups_wait_for_a_slower_one(self):
        tables = [table(f"t{index}", pooling_variance=4000.0) for index in range(8)]
        waits = []
        for ranks, groups in ((1, 1), (8, 1), (64, 8)):
            plan = plan_of(*tables[: ranks // groups], ranks=ranks, groups=groups, batch=BATCH * groups)
            spread = sample_steps(plan, COSTS, num_batches=300, seed=1)
            waits.append(spread.expected_max_kernel_ms / spread.max_expected_kernel_ms)
        assert waits[0] == pytest.approx(1, abs=0.01)
        assert waits[0] < waits[1] < waits[2]

    def test_shares_of_split_rows_vary_even_where_lengths_do_not(self):
        split = placed(table("a"), Tier.ROW_WISE, everyone(8))
        spread = sample_steps(replace(plan_of(table("a"), ranks=8), shards=(split,)), COSTS, num_batches=100, seed=1)
        assert spread.p99_ms > spread.p50_ms

    def test_needs_two_batches(self):
        with pytest.raises(InvalidOptionError, match="num_batches: must be at least 2, got 1"):
            sample_steps(plan_of(table("a")), COSTS, num_batches=1)
