"""Counted accesses: exact where all fits, unbiased and bounded where it does not, and written as tables are."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from autoshard.core import AccessProfile, Pooling
from autoshard.core.batches import coprime_step, scatter_ranks
from autoshard.core.errors import InputError, InvalidOptionError
from autoshard.formats import read_plan, read_tables, write_plan
from autoshard.formats.row_orders import read_counted_rows, read_row_orders, write_row_order
from autoshard.runtime.access_counts import AccessCounter, AccessCounts
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.training.synthetic import draw_samples
from tests import builders as make

LEAST_BYTES = 32 << 20


def drawn(access, num_lookups, key=0):
    """Ids of one batch: hot rows are strewn over the table."""
    ranks = access.sample_ranks(num_lookups, np.random.default_rng(key))
    return torch.from_numpy(scatter_ranks(ranks, access.num_rows))


def counted(tables, batches, **settings):
    """Counts of batches: of each the ids of all features in turn, how many each has, and its samples."""
    counter = AccessCounter(tables, half_life=1e12, **settings)
    for ids, counts, num_samples in batches:
        counter.observe(ids, counts, num_samples)
    counter.close()
    return counter.counted()


class TestCounting:
    def test_small_batches_are_counted_exactly(self):
        tables = make.tables(make.table("a", 50), make.table("b", 70))
        batches = [(torch.tensor([3, 3, 49, 0, 69, 3]), (3, 3), 2), (torch.tensor([1, 69, 3]), (0, 3), 1)]
        found = counted(tables, batches)
        assert dict(zip(found.keys_N.tolist(), found.lookups_N.tolist(), strict=True)) == {
            3: 2, 49: 1, 50: 1, 51: 1, 53: 2, 119: 2
        }  # fmt: skip
        assert (found.lookups_F.tolist(), found.num_samples, found.num_hits) == ([3, 6], 3, 9)

    def test_a_sample_stands_for_its_batch(self):
        access = AccessProfile.zipf(1000, 1.1)
        tables = make.tables(make.table("a", 1000, alpha=1.1))
        batches = [(drawn(access, 9_999, key), (9_999,), 100) for key in range(50)]
        found = counted(tables, batches, sampled_ids=1_000)
        exact = np.bincount(torch.cat([ids for ids, *_ in batches]).numpy(), minlength=1000)
        assert found.num_hits == pytest.approx(50_000, rel=0.02)
        assert found.lookups_F.tolist() == [50 * 9_999]
        hottest = exact.argsort()[-5:]
        assert found.lookups_N[np.searchsorted(found.keys_N, hottest)] == pytest.approx(exact[hottest], rel=0.05)

    def test_the_same_seed_gives_the_same_counts_and_another_process_others(self):
        tables = make.tables(make.table("a", 1000))
        batches = [(drawn(AccessProfile.zipf(1000, 1.0), 5_000, key), (5_000,), 100) for key in range(3)]
        first, again, other = (counted(tables, batches, seed=(7, process)) for process in (0, 0, 1))
        assert np.array_equal(first.lookups_N, again.lookups_N)
        assert not np.array_equal(first.keys_N, other.keys_N) or not np.array_equal(first.lookups_N, other.lookups_N)

    def test_lookups_count_half_after_the_half_life(self):
        tables = make.tables(make.table("a", 10))
        counter = AccessCounter(tables, half_life=4)
        counter.observe(torch.tensor([1, 1]), (2,), 1)
        counter.counted()
        for _ in range(4):
            counter.observe(torch.tensor([2]), (1,), 1)
        found = counter.counted()
        assert (found.keys_N.tolist(), found.lookups_N.tolist()) == ([1, 2], [1, 4])
        assert (found.num_samples, found.num_hits, found.lookups_F.tolist()) == (4.5, 5, [5])

    def test_processes_are_counted_together(self):
        tables = make.tables(make.table("a", 100))
        parts = [counted(tables, [(torch.tensor(ids), (len(ids),), 1)]) for ids in ([1, 5, 5], [5, 99], [])]
        found = AccessCounts.merged(parts)
        assert (found.keys_N.tolist(), found.lookups_N.tolist()) == ([1, 5, 99], [1, 3, 1])
        assert (found.num_samples, found.num_hits) == (3, 5)

    @pytest.mark.parametrize(
        ("settings", "text"),
        [
            ({"sampled_ids": 0}, "sampled_ids: must be a whole number of at least 1, got 0"),
            ({"max_bytes": 1 << 20}, "max_bytes: must be at least"),
            ({"half_life": 0.0}, "half_life: must be a number above 0"),
        ],
    )
    def test_what_it_cannot_do_is_refused(self, settings, text):
        with pytest.raises(InvalidOptionError, match=text):
            AccessCounter(make.tables(make.table("a", 10)), **settings)


class TestThreshold:
    def test_frequent_rows_stay_as_they_are_and_others_stand_for_each_other(self):
        lookups_N = np.concatenate([np.ones(10_000), np.full(100, 1e6)])
        found = [self._held(lookups_N).within(1_000, np.random.default_rng(key)) for key in range(200)]
        sums = [one.lookups_N.sum() - 1e8 for one in found]
        assert np.mean([len(one.keys_N) for one in found]) == pytest.approx(1_000, rel=0.01)
        assert np.mean(sums) == pytest.approx(10_000, rel=0.01)
        for one in found:
            assert one.lookups_N[-100:].tolist() == [1e6] * 100
            assert set(one.lookups_N[:-100].tolist()) == {one.threshold}
        assert found[0].threshold == pytest.approx(10_000 / 900)

    def test_rows_that_have_room_all_stay(self):
        held = self._held(np.arange(1.0, 5.0))
        assert held.within(4, np.random.default_rng(0)).lookups_N.tolist() == [1, 2, 3, 4]

    def test_memory_is_bounded_and_sums_stay_right(self):
        """2 billion rows, looked up nearly evenly: a million batches would have as many rows."""
        num_rows = 2_000_000_000
        tables = make.tables(make.table("a", num_rows, alpha=0.0))
        batches = ((drawn(AccessProfile.zipf(num_rows, 0.5), 100_000, key), (100_000,), 100) for key in range(8))
        found = counted(tables, batches, sampled_ids=100_000, max_bytes=LEAST_BYTES)
        assert len(found.keys_N) <= LEAST_BYTES / 46 - 2**18
        assert found.threshold > 1
        assert found.lookups_N.sum() == pytest.approx(800_000, rel=0.01)

    def test_what_is_sent_is_bounded_and_what_is_counted_stays(self):
        tables = make.tables(make.table("a", 100_000, alpha=1.0))
        with contextlib.closing(AccessCounter(tables, sampled_ids=100_000)) as counter:
            counter.observe(drawn(AccessProfile.zipf(100_000, 1.0), 100_000, 0), (100_000,), 100)
            sent, whole = counter.counted_within(1_000), counter.counted()
        assert len(whole.keys_N) > 10_000
        assert len(sent.keys_N) == pytest.approx(1_000, rel=0.1)
        assert sent.lookups_N.sum() == pytest.approx(100_000, rel=0.05)
        assert sent.lookups_N.max() == whole.lookups_N.max()

    @staticmethod
    def _held(lookups_N):
        return AccessCounts(
            keys_N=np.arange(len(lookups_N)),
            lookups_N=lookups_N,
            lookups_F=np.array([lookups_N.sum()]),
            num_samples=1.0,
            num_hits=1.0,
            threshold=0.0,
        )


class TestTables:
    ACCESS = AccessProfile.zipf(1_000_000, 1.2)

    @pytest.fixture(scope="class")
    @classmethod
    def found(cls):
        tables = make.tables(make.table("a", 1_000_000, alpha=0.0), make.table("b", 10))
        batches = [(drawn(cls.ACCESS, 50_000, key), (50_000, 0), 1_000) for key in range(30)]
        return tables, counted(tables, batches, sampled_ids=50_000)

    def test_the_curve_is_that_of_the_lookups(self, found):
        tables, counts = found
        now, _ = counts.tables(tables)
        ranks = 2.0 ** np.arange(20)
        assert now.tables[0].access.coverage(ranks) == pytest.approx(self.ACCESS.coverage(ranks), abs=0.01)
        assert now.tables[0].pooling_factor == pytest.approx(50)

    def test_a_table_that_is_hardly_looked_up_stays_as_it_is(self, found):
        tables, counts = found
        now, orders = counts.tables(tables)
        assert now.tables[1] == tables.tables[1]
        assert list(orders) == ["a"]

    def test_the_hottest_rows_are_known(self, found):
        tables, counts = found
        order = counts.tables(tables)[1]["a"].ids_N
        ranks = order * pow(coprime_step(1_000_000), -1, 1_000_000) % 1_000_000
        assert ranks[:4].tolist() == [0, 1, 2, 3]
        assert np.sort(ranks[:1_000]).mean() == pytest.approx(499.5, rel=0.05)

    def test_rows_that_are_looked_up_alike_make_an_even_curve(self):
        tables = make.tables(make.table("a", 1_000_000))
        counts = counted(tables, [(torch.arange(0, 1_000_000, 50), (20_000,), 100)], sampled_ids=20_000)
        now, rows = counts.tables(tables)
        assert (now.tables[0].access, rows["a"].num_known) == (AccessProfile.uniform(1_000_000), 0)
        assert rows["a"].least_share == 16 / 20_000

    def test_a_table_of_which_no_row_can_be_known_keeps_its_access(self):
        access = AccessProfile.zipf(1_000_000, 0.7)  # its first row gets 12 of 2,500 lookups
        spread = {"pooling_factor": 10.0, "pooling_variance": 16.0, "pooling_p99": 20.0}
        tables = make.tables(replace(make.table("a", 1_000_000, **spread), access=access))
        counts = counted(tables, [(drawn(access, 2_500), (2_500,), 100)], sampled_ids=2_500)
        now, rows = counts.tables(tables)
        assert (now.tables[0].access, rows) == (access, {})
        # Lengths are spread around the mean that was counted as they were around the one before.
        (feature,) = now.tables[0].features
        assert (feature.pooling_factor, feature.pooling_variance, feature.pooling_p99) == (25, 100, 50)

    @pytest.mark.parametrize("is_there", [True, False])
    def test_a_table_that_keeps_its_row_order_has_a_copy_of_the_file(self, tmp_path, is_there):
        (tmp_path / "of_plan").mkdir()
        file = tmp_path / "of_plan" / "plan.rows-1.parquet"
        order = write_row_order(file, np.array([4, 2]))
        tables = make.tables(make.table("a", 1_000), replace(make.table("b", 10), row_order=order))
        counts = counted(tables, [(torch.arange(1_000), (1_000, 0), 100)])
        if not is_there:
            file.write_bytes(b"another")
        written = counts.write(tmp_path / "now.json", tables, file.parent)
        copy = replace(order, file="now.rows-1.parquet")
        assert written.tables[1].row_order == (copy if is_there else None)
        assert ("b" in read_counted_rows(read_tables(tmp_path / "now.json"), tmp_path / "now.json")) == is_there
        assert counts.write(tmp_path / "now.json", tables).tables[1].row_order is None

    def test_what_is_written_is_read_by_plans(self, found, tmp_path):
        tables, counts = found
        written = counts.write(tmp_path / "now.json", tables)
        read = read_tables(tmp_path / "now.json")
        assert read == written
        assert read.tables[0].row_order.file == "now.rows-0.parquet"
        plan = make.table_wise_plan(read.tables, [0, 1])
        write_plan(replace(plan, row_orders={"a": read.tables[0].row_order}), tmp_path / "plan.json")
        orders = read_row_orders(read_plan(tmp_path / "plan.json"), tmp_path / "plan.json")
        rows = counts.tables(tables)[1]["a"]
        assert np.array_equal(orders["a"], rows.ids_N)
        counted_rows = read_counted_rows(read, tmp_path / "now.json")["a"]
        assert np.array_equal(counted_rows.shares_N, rows.shares_N)
        assert (counted_rows.num_known, counted_rows.least_share) == (rows.num_known, rows.least_share)

    def test_nothing_counted_is_not_written(self, tmp_path):
        with pytest.raises(InputError, match="access: no lookup was counted"):
            AccessCounts.nothing(1).write(tmp_path / "now.json", make.tables(make.table("a", 10)))
        assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("one_process")
class TestOfEmbeddings:
    @pytest.fixture
    def plan(self):
        tables = [make.table("t", 40, 8), make.table("s", 40, 8, pooling=Pooling.SEQUENCE)]
        return make.table_wise_plan(tables, [0, 0], world_size=1, batch_size=6)

    @pytest.mark.parametrize("is_prefetched", [False, True])
    def test_batches_that_are_looked_up_are_counted_once(self, plan, is_prefetched):
        counter = AccessCounter(plan.tables, half_life=1e12)
        embeddings = ShardedEmbeddings(plan, FusedSettings(learning_rate=0.1), counter=counter)
        batches = [draw_samples(plan.tables, 1, size, (size,)).ids for size in (6, 4, 0)]
        for batch in batches:
            embeddings(embeddings.prefetch(batch) if is_prefetched else batch)
        with pytest.raises(InputError):
            embeddings(InputError("is none"))
        found = counter.counted()
        by_table = [torch.cat([batch.per_feature(batch.ids_L)[number] for batch in batches]) for number in range(2)]
        keys = torch.cat([by_table[0], by_table[1] + 40])
        exact = torch.bincount(keys, minlength=80).numpy()
        assert found.keys_N.tolist() == np.flatnonzero(exact).tolist()
        assert found.lookups_N.tolist() == exact[exact > 0].tolist()
        assert found.num_samples == 10
        embeddings.close()
        counter.close()
