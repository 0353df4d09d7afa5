"""Batches of training data: which samples each process takes, and how a job goes on in them."""

import gzip

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import IterableDataset

from autoshard.core import AccessProfile
from autoshard.core.errors import FormatError, InputError
from autoshard.runtime.batch import BatchOfIds
from autoshard.runtime.training.data import Feed, GeneratedSamples, Share, file_samples
from autoshard.runtime.training.synthetic import Samples, draw_samples, global_samples
from tests import builders as make
from tests.ranks import on_ranks

TABLES = make.tables(make.table("a", 10_000), make.table("b", 50))
CPU = torch.device("cpu")
NUM_SAMPLES = 1_003


@pytest.fixture
def path(tmp_path):
    """Three files whose samples have their number as the first id."""
    rng = np.random.default_rng(0)
    first = 0
    for number, size in enumerate((400, 3, 600)):
        columns = {
            "label": rng.integers(0, 2, size),
            "int_0": rng.standard_normal(size),
            "a_f": np.arange(first, first + size),
            "b_f": [rng.integers(0, 50, rng.integers(0, 4)).tolist() for _ in range(size)],
        }
        pq.write_table(pa.table(columns), tmp_path / f"part_{number}.parquet", row_group_size=70)
        first += size
    return tmp_path


def feeds(path, num_processes, batch_size=64, *, ahead=0, **options):
    shares = (Share(batch_size=batch_size, process=rank, num_processes=num_processes) for rank in range(num_processes))
    return [Feed(file_samples(path, TABLES, 1, share, **options), CPU, ahead, in_thread=True) for share in shares]


def numbers(batches):
    """Numbers of the samples of a global batch; checks that its weights make the mean that over all samples."""
    sizes = [len(one.labels_B) for one in batches]
    assert [one.weight for one in batches] == pytest.approx([len(batches) * size / sum(sizes) for size in sizes])
    return [number for one in batches for number in one.ids.per_feature(one.ids.ids_L)[0].tolist()]


def taken(of, steps=None):
    """The global batches of all processes, up to so many; they end together."""
    found = []
    while steps is None or len(found) < steps:
        batches = [feed.take() for feed in of]
        if None in batches:
            assert batches == [None] * len(of)
            break
        found.append(numbers([samples for samples, _ in batches]))
    return found


def joined(batches):
    return [number for batch in batches for number in batch]


@pytest.mark.parametrize("shuffle", [0, 100, 5_000])
def test_each_epoch_has_each_sample_once_in_an_order_that_no_process_count_changes(path, shuffle):
    whole = taken(feeds(path, 1, epochs=2, buffer=shuffle))
    assert [len(batch) for batch in whole] == [*[64] * 15, 43] * 2
    first, second = joined(whole[:16]), joined(whole[16:])
    assert sorted(first) == sorted(second) == list(range(NUM_SAMPLES))
    assert (first == list(range(NUM_SAMPLES))) == (not shuffle)
    assert (first == second) == (not shuffle)
    assert taken(feeds(path, 3, epochs=2, buffer=shuffle, ahead=2)) == whole


@pytest.mark.parametrize(("steps", "before", "after"), [(5, 4, 3), (16, 2, 4), (19, 1, 2), (31, 3, 1)])
def test_a_job_that_goes_on_with_other_processes_sees_each_sample_once(path, steps, before, after):
    options = {"epochs": 2, "buffer": 150, "seed": 3}
    whole = taken(feeds(path, 1, **options))
    interrupted = feeds(path, before, ahead=1, **options)
    assert taken(interrupted, steps) == whole[:steps]
    states = [feed.state_dict() for feed in interrupted]
    assert all(state == states[0] for state in states)
    resumed = feeds(path, after, ahead=2, **options)
    for feed in resumed:
        feed.load_state_dict(states[0])
    assert taken(resumed) == whole[steps:]
    smaller = feeds(path, after, batch_size=10, **options)
    for feed in smaller:
        feed.load_state_dict(states[0])
    assert joined(taken(smaller)) == joined(whole[steps:])


@pytest.mark.parametrize("num_processes", [2, 3])
def test_balanced_batches_have_the_same_samples_and_even_lookups(path, num_processes):
    whole = taken(feeds(path, 1, buffer=150))
    plain, balanced = (feeds(path, num_processes, buffer=150, is_balanced=choice) for choice in (False, True))
    spreads = []
    for batch in whole:
        lookups = []
        for of in (plain, balanced):
            batches = [feed.take()[0] for feed in of]
            assert sorted(numbers(batches)) == sorted(batch)
            lookups.append([len(one.ids.ids_L) for one in batches])
        spreads.append([max(one) - min(one) for one in lookups])
    assert max(spread for _, spread in spreads) <= 3 < np.mean([spread for spread, _ in spreads])


def test_what_was_left_out_is_counted_once(path, tmp_path):
    pq.write_table(
        pa.table({"label": [0, 5, 1], "int_0": [0.0] * 3, "a_f": [0, 1, 2], "b_f": [[0]] * 3}),
        tmp_path / "part_3.parquet",
    )
    share = Share(batch_size=64, process=0, num_processes=1)
    samples = file_samples(path, TABLES, 1, share, epochs=2, buffer=10)
    batches = iter(samples)
    for _ in range(17):
        next(batches)
    state = samples.state_dict()
    again = file_samples(path, TABLES, 1, share, epochs=2, buffer=10)
    again.load_state_dict(state)
    assert sum(len(one.labels_B) for one in again) == 1005 - 64
    assert again.skipped == (2, f"{path}/part_3.parquet: row 1: label must be 0 or 1, got 5.0")
    assert again.share_read == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"seed": 1}, "seed: the checkpoint is of another: it was 0, this job has 1"),
        ({"buffer": 20}, "shuffle: the checkpoint is of another: it was 10, this job has 20"),
    ],
)
def test_a_position_in_other_data_is_refused(path, options, text):
    (feed,) = feeds(path, 1, epochs=2, buffer=10)
    taken([feed], 2)
    (other,) = feeds(path, 1, **{"epochs": 2, "buffer": 10, **options})
    with pytest.raises(InputError, match=f"^{text}$"):
        other.load_state_dict(feed.state_dict())
    (path / "part_1.parquet").unlink()
    (other,) = feeds(path, 1, epochs=2, buffer=10)
    with pytest.raises(InputError, match=r"^data: the checkpoint is of another"):
        other.load_state_dict(feed.state_dict())


def test_files_without_samples_are_refused(tmp_path):
    empty = {"label": pa.array([], pa.int64()), "int_0": pa.array([], pa.float32()), "a_f": pa.array([], pa.int64())}
    pq.write_table(pa.table({**empty, "b_f": empty["a_f"]}), tmp_path / "none.parquet")
    of = f"{tmp_path}/none.parquet"
    (feed,) = feeds(tmp_path, 1)
    with pytest.raises(InputError, match=f"^{of}: data: holds no samples$"):
        feed.take()
    pq.write_table(pa.table({"label": [2], "int_0": [0.0], "a_f": [0], "b_f": [0]}), of)
    (feed,) = feeds(tmp_path, 1)
    why = "row 0: label must be 0 or 1, got 2.0"
    with pytest.raises(InputError, match=f"^{of}: data: holds no samples: {of}: {why}$"):
        feed.take()


@pytest.mark.parametrize("in_thread", [True, False])
def test_what_is_wrong_with_a_file_is_told_as_it_was_found(tmp_path, in_thread):
    tables = make.tables(*(make.table(f"c{index}", 1000) for index in range(26)))
    line = "\t".join(["1"] * 14 + ["2a"] * 26) + "\n"
    (tmp_path / "day_0.gz").write_bytes(gzip.compress(line.encode() * 1000)[:-20])
    share = Share(batch_size=64, process=0, num_processes=1)
    feed = Feed(file_samples(tmp_path / "day_0.gz", tables, 13, share), CPU, in_thread=in_thread)
    with pytest.raises(FormatError, match=f"^{tmp_path}/day_0.gz: cannot be read: Compressed file ended before "):
        feed.take()


def test_files_may_differ_in_the_types_and_the_order_of_their_columns(tmp_path):
    count = np.arange(6)
    narrow = {"label": count % 2, "int_0": count / 2, "a_f": count, "b_f": [[1, None, 3]] * 6}
    pq.write_table(pa.table(narrow), tmp_path / "part_0.parquet")
    wide = {
        "b_f": pa.array([[4, 5]] * 6, pa.list_(pa.int32(), 2)),
        "a_f": pa.array(count + 6, pa.int32()),
        "int_0": pa.array(count, pa.int8()),
        "label": pa.array(count % 2 == 1),
    }
    schema = pa.schema([pa.field(name, of.type, nullable=False) for name, of in wide.items()])
    pq.write_table(pa.table(wide, schema=schema), tmp_path / "part_1.parquet")
    for shuffle in (0, 12):
        (feed,) = feeds(tmp_path, 1, batch_size=8, buffer=shuffle)
        batches = [feed.take()[0] for _ in range(2)]
        assert sorted(joined([numbers([one]) for one in batches])) == list(range(12))
        bags = [ids for one in batches for ids in torch.split(one.ids.per_feature(one.ids.ids_L)[1], 2)]
        assert sorted(ids.tolist() for ids in bags) == [[1, 3]] * 6 + [[4, 5]] * 6
        assert all(one.dense_BN.dtype == torch.float32 for one in batches)


def generated(rank, num_processes, batch_size=8, **options):
    share = Share(batch_size=batch_size, process=rank, num_processes=num_processes)
    return GeneratedSamples(TABLES, 1, share, seed=4, device=CPU, num_different=3, **options)


def steps_of(samples, count):
    return [one for _, one in zip(range(count), samples, strict=False)]


def same(one, other):
    return torch.equal(one.ids.ids_L, other.ids.ids_L) and torch.equal(one.labels_B, other.labels_B)


def test_hottest_rows_of_tables_are_in_different_blocks_of_them():
    tables = make.tables(*(make.table(f"t{n}", 1_600, access=AccessProfile.zipf(1_600, 1.3)) for n in range(32)))
    ids = draw_samples(tables, 1, 256, (0, 0, 0)).ids
    hottest = [int(of.bincount().argmax()) for of in ids.per_feature(ids.ids_L)]
    blocks = np.bincount([row // 100 for row in hottest], minlength=16)
    # Of 32 tables cut into 16 blocks, at random; all 32 would be in the first block if rows began at 0 in each.
    assert blocks.max() <= 7
    assert np.count_nonzero(blocks) >= 10


def test_generated_batches_are_repeated_and_keep_their_parts_on_fewer_processes():
    streams = [generated(rank, 4) for rank in range(4)]
    steps = [steps_of(stream, 5) for stream in streams]
    assert all(same(steps[rank][0], draw_samples(TABLES, 1, 2, (4, 0, rank))) for rank in range(4))
    assert all(same(of_rank[0], of_rank[3]) and not same(of_rank[0], of_rank[1]) for of_rank in steps)
    state = streams[0].state_dict()
    resumed = [generated(rank, 3) for rank in range(3)]
    for stream in resumed:
        stream.load_state_dict(state)
    batches = [steps_of(stream, 1)[0] for stream in resumed]
    assert [len(one.labels_B) for one in batches] == [2, 3, 3]
    assert [one.weight for one in batches] == pytest.approx([0.75, 1.125, 1.125])
    assert same(global_samples(batches), global_samples([steps_of(stream, 1)[0] for stream in streams]))


def test_hot_rows_change_every_so_many_steps():
    batches = steps_of(generated(0, 1, 512, drift_every=4), 9)
    hottest = [int(one.ids.per_feature(one.ids.ids_L)[0].mode().values) for one in batches]
    assert len(set(hottest[:4])) == len(set(hottest[4:8])) == 1
    assert len({hottest[0], hottest[4], hottest[8]}) == 3
    assert same(batches[0], steps_of(generated(0, 1, 512), 1)[0])


class Own(IterableDataset):
    """Batches that a user made; without a position, so that it is gone through again."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __iter__(self):
        for number, size in enumerate(self.sizes):
            ids = BatchOfIds(torch.ones(1, size, dtype=torch.int64), torch.full((size,), number))
            yield Samples(ids, torch.zeros(size, 1), torch.zeros(size))


def feed_own_batches():
    rank = torch.distributed.get_rank()
    feed = Feed(Own([4, 2] if rank == 0 else [4, 4, 3, 1]), CPU, 1, is_common=False)
    found = [(len(samples.labels_B), samples.weight) for samples, _ in (feed.take(), feed.take())]
    state = feed.state_dict()
    resumed = Feed(Own([4, 2] if rank == 0 else [4, 4, 3, 1]), CPU, is_common=False)
    resumed.load_state_dict(state)
    while (batch := resumed.take()) is not None:
        found.append((len(batch[0].labels_B), batch[0].weight))
    return found


def test_datasets_of_users_end_together_and_weigh_by_their_sizes():
    first, second = on_ranks(feed_own_batches, 2)
    assert first == [(4, 1.0), (2, 2 * 2 / 6), (0, 0.0), (0, 0.0)]
    assert second == [(4, 1.0), (4, 2 * 4 / 6), (3, 2.0), (1, 2.0)]
