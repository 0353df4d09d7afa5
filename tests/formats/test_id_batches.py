"""Raw ids that pyarrow, pandas' layout and torch.save wrote, counted while they are streamed."""

import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.core import AccessProfile
from autoshard.core.batches import draw_bags
from autoshard.core.errors import FormatError, InputError
from autoshard.formats import import_tables, read_tables, write_tables
from autoshard.formats.imports.id_batches import read_id_batches
from tests.builders import profile_of


def written(path, columns, **options):
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path, **options)
    return path


class TestParquet:
    def test_lists_numbers_nulls_and_empty_lists(self, tmp_path):
        told = []
        file = written(
            tmp_path / "clicks.parquet",
            {
                "item": pa.array([[3, 3, 5], [], None, [3]], pa.list_(pa.int64())),
                "user": pa.array([0, None, 7, 7], pa.int32()),
                "large": pa.array([[1], [1], [2], [0]], pa.large_list(pa.uint64())),
                "fixed": pa.array([[1, 2], None, [1, 2], [0, 0]], pa.list_(pa.int16(), 2)),
                "never": pa.array([None, [], [], None], pa.list_(pa.int64())),
            },
        )
        tables = import_tables(file, embedding_dim=8, advance=told.append)
        assert sum(told) == pytest.approx(1)
        assert tables.batch_size == 4
        item, user, large, fixed, never = tables.tables
        assert [table.name for table in tables.tables] == ["item", "user", "large", "fixed", "never"]
        assert [table.features[0].name for table in tables.tables] == ["item", "user", "large", "fixed", "never"]
        assert {table.embedding_dim for table in tables.tables} == {8}
        assert [table.num_embeddings for table in tables.tables] == [6, 8, 3, 3, 1]
        assert [table.pooling_factor for table in tables.tables] == [1, 0.75, 1, 1.5, 0]
        assert item.features[0].pooling_variance == np.var([3, 0, 0, 1])
        assert [table.features[0].pooling_p99 for table in tables.tables] == [3, 1, 1, 2, 0]
        # Row 3 has three of four lookups; row 5, met once, is spread over the five other rows.
        assert item.access == AccessProfile(np.array([0.0, 1, 6]), np.array([0, 0.75, 1.0]))
        assert user.access == AccessProfile(np.array([0.0, 1, 8]), np.array([0, 2 / 3, 1.0]))
        assert large.access == AccessProfile(np.array([0.0, 1, 3]), np.array([0, 0.5, 1.0]))
        np.testing.assert_allclose(fixed.access.coverage(np.arange(4)), [0, 1 / 3, 2 / 3, 1])
        assert never.access == AccessProfile.uniform(1)

    def test_options(self, tmp_path):
        file = written(tmp_path / "a.parquet", {"a": [0, 1, 1]})
        tables = import_tables(file, batch_size=77, num_embeddings=100)
        assert tables.batch_size == 77
        assert tables.tables[0].num_embeddings == tables.tables[0].access.num_rows == 100
        assert tables.tables[0].embedding_dim == 64

    def test_a_folder_of_files_with_several_row_groups(self, tmp_path):
        rng = np.random.default_rng(0)
        bags = [draw_bags(AccessProfile.zipf(5000, 1.1), 6.5, 3000, rng) for _ in range(3)]
        for index, one in enumerate(bags):
            ends = np.concatenate([[0], np.cumsum(one.lengths_B)])
            lists = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(one.ids_L))
            columns = {"a": lists, "b": pa.array(one.lengths_B)}
            named = sorted(columns, reverse=index == 1)  # the order of columns does not matter
            written(tmp_path / f"{index}.parquet", {name: columns[name] for name in named}, row_group_size=700)
        (tmp_path / "_SUCCESS").touch()
        (tmp_path / "_metadata.parquet").touch()
        tables = import_tables(tmp_path)
        ids, lengths = (np.concatenate([getattr(one, name) for one in bags]) for name in ("ids_L", "lengths_B"))
        assert tables.batch_size == 9000
        assert tables["a"].num_embeddings == ids.max() + 1
        assert tables["a"].pooling_factor == pytest.approx(lengths.mean())
        assert tables["a"].features[0].pooling_variance == pytest.approx(lengths.var())
        assert tables["b"].num_embeddings == 8
        exact = profile_of(np.bincount(ids))
        repeated = int((np.unique(ids, return_counts=True)[1] > 1).sum())
        hot = np.arange(0, repeated, 50)
        np.testing.assert_allclose(tables["a"].access.coverage(hot), exact.coverage(hot), atol=1e-3)

    @pytest.mark.parametrize("num_batches", [1, 4])
    @pytest.mark.parametrize(
        "truth", [AccessProfile.zipf(10**6, 0.8), AccessProfile.zipf(50_000, 1.05), AccessProfile.uniform(10**6)]
    )
    def test_a_next_batch_hits_about_as_many_rows(self, tmp_path, truth, num_batches):
        ids = truth.sample_ranks(20_000 * num_batches, np.random.default_rng(0))
        file = written(tmp_path / "a.parquet", {"a": ids})
        access = import_tables(file, num_embeddings=truth.num_rows).tables[0].access
        for num_lookups in (2000, 20_000):
            expected = truth.expected_distinct(num_lookups)
            assert access.expected_distinct(num_lookups) == pytest.approx(expected, rel=0.08)

    def test_columns_that_pandas_adds_are_no_features(self, tmp_path):
        table = pa.table({"a": [1, 2], "__index_level_0__": [5, 6]})
        table = table.replace_schema_metadata({"pandas": '{"index_columns": ["__index_level_0__"], "columns": []}'})
        assert [one.name for one in import_tables(written(tmp_path / "a.parquet", table)).tables] == ["a"]
        for broken in ("no json", "[]", '{"index_columns": 5}', '{"index_columns": [{"kind": "range"}]}'):
            table = pa.table({"a": [1, 2]}).replace_schema_metadata({"pandas": broken})
            assert [one.name for one in import_tables(written(tmp_path / "b.parquet", table)).tables] == ["a"]

    def test_memory_grows_with_the_distinct_ids_and_not_with_the_file(self, tmp_path):
        rng = np.random.default_rng(0)
        num_samples, width, num_files = 40_000, 25, 4
        offsets = pa.array(np.arange(num_samples + 1, dtype=np.int32) * width)
        for index in range(num_files):
            ids = pa.array(rng.integers(0, 20_000, num_samples * width))
            written(tmp_path / f"{index}.parquet", {"a": pa.ListArray.from_arrays(offsets, ids)}, row_group_size=10_000)
        file_bytes = num_samples * width * num_files * 8
        pa_before = pa.total_allocated_bytes()
        tracemalloc.start()
        largest = []
        tables = read_id_batches(
            tmp_path, advance=lambda _: largest.append(pa.total_allocated_bytes() - pa_before), batch_size=1
        )
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert tables.tables[0].num_embeddings == 20_000
        assert tables.tables[0].pooling_factor == width
        assert peak < file_bytes / 4
        assert max(largest) < file_bytes / 4

    @settings(max_examples=30)
    @given(
        bags=st.lists(st.one_of(st.none(), st.lists(st.integers(0, 2**40 - 1), max_size=5)), min_size=1, max_size=40),
        row_group_size=st.integers(1, 10),
    )
    def test_any_lists_become_tables_that_can_be_written(self, tmp_path_factory, bags, row_group_size):
        folder = tmp_path_factory.mktemp("ids")
        column = pa.array(bags, pa.list_(pa.int64()))
        tables = import_tables(written(folder / "a.parquet", {"a": column}, row_group_size=row_group_size))
        lengths = [len(bag or ()) for bag in bags]
        (feature,) = tables.tables[0].features
        assert feature.pooling_factor == pytest.approx(np.mean(lengths))
        assert feature.pooling_variance == pytest.approx(np.var(lengths))
        assert feature.pooling_p99 == np.percentile(lengths, 99, method="higher")
        assert tables.tables[0].num_embeddings == 1 + max((max(bag) for bag in bags if bag), default=0)
        write_tables(tables, folder / "tables.json")
        assert read_tables(folder / "tables.json") == tables


class TestTensors:
    def batch(self, seed=0, num_samples=1000):
        rng = np.random.default_rng(seed)
        bags = [draw_bags(AccessProfile.zipf(rows, 1.05), 2.5, num_samples, rng) for rows in (5000, 20)]
        values = torch.from_numpy(np.concatenate([one.ids_L for one in bags]))
        return bags, values, torch.from_numpy(np.stack([one.lengths_B for one in bags]))

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_values_and_lengths_of_a_keyed_jagged_tensor(self, tmp_path, dtype):
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        bags, values, lengths = self.batch()
        kjt = KeyedJaggedTensor(keys=["a", "b"], values=values.to(dtype), lengths=lengths.flatten().to(dtype))
        torch.save((kjt.values(), kjt.lengths().view(len(kjt.keys()), -1)), tmp_path / "batch.pt")
        told = []
        tables = import_tables(tmp_path / "batch.pt", advance=told.append)
        assert sum(told) == pytest.approx(1)
        assert tables.batch_size == 1000
        assert [table.name for table in tables.tables] == ["f0", "f1"]
        for table, one in zip(tables.tables, bags, strict=True):
            assert table.num_embeddings == one.ids_L.max() + 1
            assert table.pooling_factor == pytest.approx(2.5)
            assert table.features[0].pooling_variance == pytest.approx(0.25)
            assert table.access.coverage(1) == np.bincount(one.ids_L).max() / len(one.ids_L)

    def test_the_same_ids_make_the_same_tables_in_every_form(self, tmp_path):
        bags, values, lengths = self.batch(num_samples=10_000)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
        torch.save((values, lengths), tmp_path / "two.pt")
        torch.save((values, offsets, lengths), tmp_path / "three.pt")
        columns = {
            f"f{index}": pa.ListArray.from_arrays(
                pa.array(np.concatenate([[0], np.cumsum(one.lengths_B)]), pa.int32()), pa.array(one.ids_L)
            )
            for index, one in enumerate(bags)
        }
        written(tmp_path / "ids.parquet", columns)
        read = [read_id_batches(tmp_path / name) for name in ("two.pt", "three.pt", "ids.parquet")]
        assert read[0] == read[1] == read[2]

    def test_a_folder_is_one_history(self, tmp_path):
        batches = [self.batch(seed, num_samples) for seed, num_samples in ((0, 1000), (1, 700))]
        for index, (_, values, lengths) in enumerate(batches):
            torch.save((values, lengths), tmp_path / f"{index}.pt")
        tables = import_tables(tmp_path)
        ids = np.concatenate([bags[0].ids_L for bags, _, _ in batches])
        assert tables.batch_size == 1000
        assert tables.tables[0].num_embeddings == ids.max() + 1
        assert tables.tables[0].access.coverage(1) == np.bincount(ids).max() / len(ids)


class TestRefusing:
    @pytest.mark.parametrize(
        ("columns", "field", "message"),
        [
            ({"a": [1], "b": [0.5]}, "b", "must hold whole numbers or lists of them, got double; leave out columns"),
            ({"b": [[0.5]]}, "b", "must hold whole numbers or lists of them, got list<"),
            ({"b": ["x"]}, "b", "got string"),
            ({"b": [True]}, "b", "got bool"),
            ({"b": [[[1]]]}, "b", "got list<"),
            ({"b": [[1], [2, -3], [-4]]}, "b", "ids must be in [0, 1099511627775]; row 1 has -3"),
            ({"b": [1, None, -1]}, "b", "ids must be in [0, 1099511627775]; row 2 has -1"),
            ({"b": [[1], None, [], [2, None]]}, "b", "ids must not be null; row 3 has a null within its list"),
            (
                {"b": pa.array([0, 2**63], pa.uint64())},
                "b",
                "ids must be in [0, 1099511627775]; hash larger ones into rows first; row 1 has 9223372036854775808",
            ),
        ],
    )
    def test_columns_and_rows_are_named(self, tmp_path, columns, field, message):
        file = written(tmp_path / "a.parquet", columns)
        with pytest.raises(FormatError) as caught:
            import_tables(tmp_path)
        assert str(caught.value).startswith(f"{file}: {field}: ")
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_rows_count_over_row_groups_and_ids_stay_below_the_option(self, tmp_path):
        ids = np.zeros(10_000, dtype=np.int64)
        ids[[9000, 9500]] = 100
        file = written(tmp_path / "a.parquet", {"a": ids}, row_group_size=999)
        with pytest.raises(FormatError) as caught:
            import_tables(file, num_embeddings=100)
        assert str(caught.value) == f"{file}: a: ids must be in [0, 99]; row 9000 has 100"
        assert import_tables(file, num_embeddings=101).tables[0].num_embeddings == 101

    def test_files_with_other_columns(self, tmp_path):
        first = written(tmp_path / "1.parquet", {"a": [1], "b": [1]})
        second = written(tmp_path / "2.parquet", {"a": [1]})
        with pytest.raises(FormatError) as caught:
            import_tables(tmp_path)
        expected = f"{second}: b: is in {first} and not here; files of a folder must have the same columns"
        assert str(caught.value) == expected
        written(second, {"a": [1], "b": [1], "c": [1]})
        with pytest.raises(FormatError, match=f"2.parquet: c: is not in {first}; "):
            import_tables(tmp_path)

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ((torch.arange(3), torch.tensor([[1, 1], [2, 0]])), "lengths that add up to the 3 ids, they add up to 4"),
            ((torch.arange(3), torch.tensor([[4, -1]])), r"f0: lengths must be in \[0, 3\].*; row 0 has 4"),
            ((torch.arange(3), torch.tensor([[3], [-1]])), r"f1: lengths must be in \[0, 3\].*; row 0 has -1"),
            ((torch.tensor([0, 5, -5]), torch.tensor([[0, 1, 2]])), r"f0: ids must be in .*; row 2 has -5"),
            ((torch.arange(3), torch.zeros(0, 2).long()), "lengths of 1 to 100000 features and at least one sample"),
            ((torch.zeros(3), torch.tensor([[3]])), "must hold whole numbers"),
            ((torch.arange(3), torch.tensor([3])), "must hold values .* got 1-dimensional, 1-dimensional"),
            ((torch.arange(3),), "must hold values .* got 1-dimensional"),
            ((torch.arange(3), torch.tensor([0, 1]), torch.tensor([[3]])), "offsets that follow from lengths"),
            ((torch.arange(3), torch.tensor([0]), torch.tensor([[3]])), "must have 2 offsets from 0, got 1"),
            ({"a": torch.arange(3)}, "one tuple of plain tensors and nothing else"),
        ],
    )
    def test_tensors_of_other_forms(self, tmp_path, value, message):
        torch.save(value, tmp_path / "a.pt")
        with pytest.raises(FormatError, match=message) as caught:
            import_tables(tmp_path / "a.pt", "id-batches")
        assert str(caught.value).startswith(f"{tmp_path / 'a.pt'}: ")

    def test_files_with_another_number_of_features(self, tmp_path):
        torch.save((torch.arange(2), torch.ones(2, 1).long()), tmp_path / "1.pt")
        torch.save((torch.arange(3), torch.ones(3, 1).long()), tmp_path / "2.pt")
        with pytest.raises(FormatError, match=r"2\.pt: must have as many features as .*1\.pt: 2, got 3"):
            import_tables(tmp_path)

    def test_other_files(self, tmp_path):
        (tmp_path / "a.parquet").write_bytes(b"hello")
        with pytest.raises(FormatError, match=r"a\.parquet: is neither a Parquet file nor one that torch\.save wrote"):
            import_tables(tmp_path / "a.parquet")
        with pytest.raises(FormatError, match=r"none\.parquet: cannot be read: no such file"):
            import_tables(tmp_path / "none.parquet")
        written(tmp_path / "a.parquet", {"a": [1]})
        torch.save((torch.arange(2), torch.ones(2, 1).long()), tmp_path / "b.pt")
        with pytest.raises(FormatError, match=r"files of one kind: a\.parquet is Parquet, b\.pt is not"):
            import_tables(tmp_path)

    def test_no_samples_and_no_columns(self, tmp_path):
        written(tmp_path / "a.parquet", {"a": pa.array([], pa.int64())})
        with pytest.raises(FormatError, match="must hold at least one sample"):
            import_tables(tmp_path / "a.parquet")
        written(tmp_path / "b.parquet", {})
        with pytest.raises(FormatError, match="must have 1 to 100000 columns of ids, got 0"):
            import_tables(tmp_path / "b.parquet")
        (tmp_path / "empty").mkdir()
        with pytest.raises(FormatError, match=r"empty: holds no \.parquet or \.pt files"):
            import_tables(tmp_path / "empty", "id-batches")

    def test_a_damaged_parquet_at_any_place_is_refused_in_one_line_or_read(self, tmp_path):
        file = tmp_path / "a.parquet"
        columns = {"a": [[1, 2], [3]], "bé": [1, 2]}
        content = written(file, columns, compression="none", store_schema=False).read_bytes()
        refused = []
        for place in range(4, len(content), 4):
            for damaged in (content[:place], content[:place] + b"\xff" + content[place + 1 :]):
                file.write_bytes(damaged)
                try:
                    import_tables(file)
                except InputError as error:
                    refused.append(str(error))
        assert len(refused) > len(content) / 4
        assert not any("\n" in line for line in refused)

    @pytest.mark.parametrize(
        ("table", "message"),
        [
            (pa.Table.from_arrays([pa.array([1])] * 2, names=["a", "a"]), "a: is there twice"),
            (pa.table({"a\nb": [-1]}), r"a\\nb: ids must be in"),
            (pa.table({"": [1]}), "name: must be a text of 1 to 512 characters"),
        ],
    )
    def test_names_of_columns(self, tmp_path, table, message):
        with pytest.raises(InputError, match=message):
            import_tables(written(tmp_path / "a.parquet", table))
        dotted = written(tmp_path / "b.parquet", {"a.b": [1], "a": [[2]], "a.list": [3]})
        assert [(one.name, one.num_embeddings) for one in import_tables(dotted).tables] == [
            *(("a.b", 2), ("a", 3), ("a.list", 4))
        ]


class TestLimits:
    @pytest.mark.parametrize("suffix", ["parquet", "pt"])
    def test_a_bag_has_a_million_ids_at_most(self, suffix, tmp_path):
        path = tmp_path / f"batch.{suffix}"
        lengths = np.array([3, 1_000_001, 2])
        ids = np.arange(lengths.sum()) % 100
        if suffix == "pt":
            torch.save((torch.from_numpy(ids), torch.from_numpy(lengths)[None]), path)
        else:
            bags = pa.ListArray.from_arrays(np.concatenate([[0], np.cumsum(lengths)]), ids)
            pq.write_table(pa.table({"f": bags}), path)
        with pytest.raises(FormatError, match=r"bags must have at most 1,000,000 ids; row 1 has 1,000,001"):
            import_tables(path)

    def test_a_single_long_bag_is_told_from_the_metadata(self, tmp_path):
        path = tmp_path / "batch.parquet"
        pq.write_table(pa.table({"f": pa.ListArray.from_arrays([0, 1_000_001], np.zeros(1_000_001, np.int64))}), path)
        with pytest.raises(FormatError, match="f: bags must have at most 1,000,000 ids; row group 0 has 1,000,001"):
            import_tables(path)

    def test_a_row_group_has_a_limit_that_is_checked_before_its_ids_are_read(self, tmp_path, monkeypatch):
        path = tmp_path / "batch.parquet"
        pq.write_table(pa.table({"f": pa.array([[1, 2], [3], [], [4]])}), path)
        monkeypatch.setattr("autoshard.formats.imports.id_batches.MAX_GROUP_IDS", 4)
        with pytest.raises(FormatError, match=r"f: must have at most 4 ids and .* row group, number 0 has 5"):
            import_tables(path)

    def test_distinct_ids_have_a_limit(self, tmp_path, monkeypatch):
        path = tmp_path / "batch.parquet"
        for names in ("a", "ab"):
            pq.write_table(pa.table(dict.fromkeys(names, range(2**16))), path)
            limit = len(names) * 2**16 - 1
            with monkeypatch.context() as patch:
                patch.setattr("autoshard.formats.imports.id_batches.MAX_DISTINCT_IDS", limit + 1)
                assert len(import_tables(path).tables) == len(names)
                patch.setattr("autoshard.formats.imports.id_batches.MAX_DISTINCT_IDS", limit)
                with pytest.raises(FormatError, match=f"at most {limit:,} distinct ids, all features together"):
                    import_tables(path)

    def test_columns_that_are_read_one_after_the_other_count_alike(self, tmp_path, monkeypatch):
        path = tmp_path / "batch.parquet"
        rng = np.random.default_rng(0)
        columns = {
            name: [rng.integers(0, 50, size).tolist() for size in rng.integers(0, 9, 200)] for name in ("a", "b.c", "d")
        }
        pq.write_table(pa.table({name: pa.array(bags) for name, bags in columns.items()}), path, row_group_size=64)
        together = import_tables(path)
        monkeypatch.setattr("autoshard.formats.imports.id_batches.MAX_GROUP_IDS", 700)
        assert import_tables(path) == together
