"""TBEDataConfig files that FBGEMM's own classes wrote, against what FBGEMM's own generators draw from them."""

import json
import math

import numpy as np
import pytest
import torch
from fbgemm_gpu.tbe.bench.tbe_data_config import TBEDataConfig
from fbgemm_gpu.tbe.bench.tbe_data_config_bench_helper import generate_embedding_dims, generate_requests
from fbgemm_gpu.tbe.bench.tbe_data_config_param_models import BatchParams, IndicesParams, PoolingParams
from fbgemm_gpu.tbe.monitoring.bench_params_reporter import TBEBenchmarkParamsReporter
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.core import AccessProfile
from autoshard.core.errors import FormatError, InputError, InvalidTableError
from autoshard.formats import import_tables, read_tables, write_tables
from autoshard.formats.imports.tbe_data_config import read_tbe_data_config, tbe_access


def indices(hitters=(0.2, 0.1), q=10.0, s=1.2):
    return IndicesParams(torch.tensor(hitters, dtype=torch.float32), q, s, torch.int64, torch.int64)


def config(**changes):
    values = {
        "T": 3,
        "E": 1000,
        "D": 32,
        "mixed_dim": False,
        "weighted": False,
        "batch_params": BatchParams(B=512),
        "indices_params": indices(),
        "pooling_params": PoolingParams(L=20),
    }
    return TBEDataConfig(**(values | changes))


def written(path, *, document=None, **changes):
    path.write_text(config(**changes).json() if document is None else json.dumps(document), encoding="utf-8")
    return path


def exact_probabilities(num_rows, hitters, q, s):
    """Row by row, as the generator's comments say."""
    tail = (np.arange(len(hitters), num_rows) + q) ** -s
    rest = 1 - sum(hitters)
    return np.concatenate([hitters, rest * tail / tail.sum()])


class TestFiles:
    def test_one_file(self, tmp_path):
        told = []
        tables = import_tables(written(tmp_path / "ads.json"), advance=told.append)
        assert sum(told) == pytest.approx(1)
        assert tables.batch_size == 512
        assert [table.name for table in tables.tables] == ["ads.t0", "ads.t1", "ads.t2"]
        for index, table in enumerate(tables.tables):
            (feature,) = table.features
            assert (table.num_embeddings, table.embedding_dim) == (1000, 32)
            assert (feature.name, feature.pooling_factor, feature.pooling_variance) == (f"ads.f{index}", 20, 0)
            assert feature.pooling_p99 == 20
            expected = np.sort(exact_probabilities(1000, [0.2, 0.1], 10.0, 1.2))[::-1]
            np.testing.assert_allclose(table.access.coverage(np.arange(5)), [0, *np.cumsum(expected)[:4]], rtol=1e-6)

    def test_lists_of_features(self, tmp_path):
        file = written(
            tmp_path / "a.json",
            D=20,
            mixed_dim=True,
            Es=[10, 1000, 100_000],
            Ds=[8, 16, 36],
            pooling_params=PoolingParams(L=3, sigma_L=4, Ls=[0.5, 1.0, 7.5]),
            indices_params_list=[indices((), 1.0, 0.5), indices((0.5,), 2.0, 1.0), indices()],
        )
        tables = read_tbe_data_config(file).tables
        assert [(table.num_embeddings, table.embedding_dim) for table in tables] == [(10, 8), (1000, 16), (100_000, 36)]
        assert [table.pooling_factor for table in tables] == [0.5, 1.0, 7.5]
        # sigma_L is of all bags of all features, 3 to 4 before it was rounded up; the means explain a part.
        assert tables[0].features[0].pooling_variance == pytest.approx(3.5**2 - np.var([0.5, 1.0, 7.5]))
        assert [table.access.coverage(1) for table in tables] == pytest.approx(
            [1 / np.sum(np.arange(1.0, 11) ** -0.5), 0.5, 0.2]
        )

    @pytest.mark.parametrize("weighted", [False, True])
    def test_tables_of_weighted_lookups_are_weighted(self, weighted, tmp_path):
        tables = import_tables(written(tmp_path / "a.json", weighted=weighted)).tables
        assert {table.weighted for table in tables} == {weighted}

    def test_a_folder_holds_the_tables_of_all_its_files(self, tmp_path):
        written(tmp_path / "b.json", T=1, E=7)
        written(tmp_path / "a.json", T=12)
        (tmp_path / ".hidden.json").write_text("no config")
        (tmp_path / "notes.txt").write_text("no config")
        tables = import_tables(tmp_path).tables
        assert [table.name for table in tables][:2] == ["a.t00", "a.t01"]
        assert [table.name for table in tables][-2:] == ["a.t11", "b.t0"]
        assert tables[-1].num_embeddings == 7

    def test_files_that_disagree_on_the_batch(self, tmp_path):
        for name, batch in (("a", 512), ("b", 512), ("c", 256)):
            written(tmp_path / f"{name}.json", batch_params=BatchParams(B=batch))
        with pytest.raises(FormatError) as caught:
            import_tables(tmp_path)
        assert str(caught.value).startswith(f"{tmp_path / 'c.json'}: batch_params.B: must be the same in all files")
        assert str(caught.value).endswith(f"got 256, and 512 in {tmp_path / 'a.json'}")
        tables = import_tables(tmp_path, batch_size=1024)
        assert tables.batch_size == 1024
        assert {table.pooling_factor for table in tables.tables} == {20}

    def test_null_and_the_sizes_that_the_reporter_writes_as_doubles(self, tmp_path):
        document = json.loads(config().json()) | {"E": 1001.0, "D": 8.0, "Es": None, "feature_table_map": None}
        document["indices_params"]["index_dtype"] = "None"
        table = import_tables(written(tmp_path / "a.json", document=document)).tables[0]
        assert (table.num_embeddings, table.embedding_dim) == (1001, 8)

    def test_mixed_dimensions_without_a_list_are_drawn_as_the_generator_draws_them(self, tmp_path):
        file = written(tmp_path / "a.json", T=200, D=40, mixed_dim=True)
        drawn = [table.embedding_dim for table in import_tables(file, seed=1).tables]
        reference = generate_embedding_dims(config(T=2000, D=40, mixed_dim=True))[1]
        assert {*drawn} == {*reference}
        assert np.mean(drawn) == pytest.approx(np.mean(reference), rel=0.1)
        assert drawn == [table.embedding_dim for table in import_tables(file, seed=1).tables]
        assert drawn != [table.embedding_dim for table in import_tables(file, seed=2).tables]

    @settings(max_examples=25)
    @given(st.data())
    def test_what_fbgemm_writes_becomes_tables_that_can_be_written(self, tmp_path_factory, data):
        num_features = data.draw(st.integers(1, 4))
        hitters = data.draw(st.lists(st.floats(0, 0.05), max_size=20))
        made = config(
            T=num_features,
            E=data.draw(st.integers(1, 10**9)),
            D=data.draw(st.integers(1, 512)),
            mixed_dim=data.draw(st.booleans()),
            batch_params=BatchParams(B=data.draw(st.integers(1, 10**6))),
            indices_params=indices(hitters, data.draw(st.floats(0.01, 1e5)), data.draw(st.floats(0.01, 2.5))),
            pooling_params=PoolingParams(L=data.draw(st.integers(1, 1000)), sigma_L=data.draw(st.integers(0, 100))),
        )
        folder = tmp_path_factory.mktemp("configs")
        (folder / "a.json").write_text(made.json(format=True))
        tables = import_tables(folder / "a.json")
        write_tables(tables, folder / "tables.json")
        assert read_tables(folder / "tables.json") == tables
        assert len(tables.tables) == num_features


class TestAccess:
    @given(
        num_rows=st.integers(1, 3000),
        hitters=st.lists(st.floats(0, 1), max_size=20),
        mass=st.floats(0, 1),
        q=st.floats(1e-3, 1e5),
        s=st.one_of(st.floats(0.0, 3.0), st.just(1 - 2**-50), st.just(1.0)),
    )
    def test_it_is_the_distribution_row_by_row(self, num_rows, hitters, mass, q, s):
        total = sum(hitters)
        hitters = [mass * value / total for value in hitters] if total > 0 else []
        if len(hitters) >= num_rows:
            return
        exact = exact_probabilities(num_rows, hitters, q, s)
        curve = np.concatenate([[0], np.cumsum(np.sort(exact)[::-1])])
        access = tbe_access(num_rows, tuple(hitters), q, s)
        at_knots = curve[access.ranks_K.astype(int)]
        if not hitters or min(hitters) >= exact[len(hitters) :].max():
            np.testing.assert_allclose(access.cumulative_K, at_knots, atol=2e-5)  # sums of powers are approximated
        else:  # rows within an interval are alike, so that a hitter among them may come late
            assert (access.cumulative_K <= at_knots + 2e-5).all()

    @pytest.mark.parametrize(
        ("num_rows", "hitters", "q", "s"),
        [
            (2000, (0.2, 0.1, 0.05), 10.0, 1.2),
            (2000, (), 0.1, 0.1),
            (50, (0.3, 0.3), 1.0, 1.0),
            (500, (0.001,), 1.0, 2.0),
        ],
    )
    def test_it_is_what_fbgemm_draws(self, num_rows, hitters, q, s):
        num_lookups = 200_000
        drawn = torch.ops.fbgemm.tbe_generate_indices_from_distribution(
            torch.tensor(hitters, dtype=torch.float64), q, s, num_rows, num_lookups
        ).numpy()
        assert 0 <= drawn.min() <= drawn.max() < num_rows
        by_probability = np.argsort(-exact_probabilities(num_rows, hitters, q, s), kind="stable")
        counts = np.bincount(drawn, minlength=num_rows)[by_probability]
        access = tbe_access(num_rows, hitters, q, s)
        found = np.concatenate([[0], np.cumsum(counts)])[access.ranks_K.astype(int)] / num_lookups
        # Five standard deviations of a share of the draws.
        np.testing.assert_allclose(found, access.cumulative_K, atol=5 * 0.5 / math.sqrt(num_lookups))

    def test_a_table_of_hitters_only_and_one_of_fewer_rows(self):
        np.testing.assert_allclose(tbe_access(2, (0.25, 0.5), 1, 1).cumulative_K, [0, 2 / 3, 1])
        np.testing.assert_allclose(tbe_access(2, (0.1, 0.3, 0.1), 1, 1).cumulative_K, [0, 0.75, 1])
        assert tbe_access(1, (), 0.1, 2.0) == AccessProfile.uniform(1)
        assert tbe_access(3, (0.0, 0.0, 0.0), 1, 1) == AccessProfile.uniform(3)

    def test_the_ends_of_what_is_accepted(self):
        for num_rows in (1, 2, 2**40):
            for q in (1e-6, 1e9):
                for s in (0.0, 20.0):
                    assert tbe_access(num_rows, (), q, s).num_rows == num_rows

    @pytest.mark.parametrize(
        ("hitters", "q", "s", "message"),
        [
            ((0.7, 0.7), 1, 1, "heavy_hitters: must be probabilities that add up to at most 1, got 1.4"),
            ((-0.1,), 1, 1, "heavy_hitters"),
            ((math.nan,), 1, 1, "heavy_hitters"),
            ((), 0, 1, "zipf: q must be in"),
            ((), 1, math.nan, "zipf: q must be in"),
        ],
    )
    def test_impossible_parameters(self, hitters, q, s, message):
        with pytest.raises(InvalidTableError) as caught:
            tbe_access(10, hitters, q, s)
        assert str(caught.value).startswith(message)


class TestLengthsAndBatches:
    @pytest.mark.parametrize("pooling", [PoolingParams(L=20, sigma_L=3), PoolingParams(4, 9, "uniform")])
    def test_lengths_are_those_that_the_generator_draws(self, tmp_path, pooling):
        feature = import_tables(written(tmp_path / "a.json", pooling_params=pooling)).tables[0].features[0]
        (request,) = generate_requests(config(T=1, batch_params=BatchParams(B=20_000), pooling_params=pooling))
        lengths = np.diff(request.offsets.numpy())
        assert feature.pooling_factor == pytest.approx(lengths.mean(), abs=0.6)  # normal draws are cut to whole numbers
        assert feature.pooling_variance == pytest.approx(lengths.var(), rel=0.05)
        assert feature.pooling_p99 == pytest.approx(np.percentile(lengths, 99), abs=1)

    def test_variable_batches_are_those_that_the_generator_draws(self, tmp_path):
        batch = BatchParams(B=512, sigma_B=20, vbe_distribution="normal", vbe_num_ranks=8)
        tables = import_tables(written(tmp_path / "a.json", T=2, batch_params=batch))
        (request,) = generate_requests(config(T=2, batch_params=batch, pooling_params=PoolingParams(L=1)))
        assert tables.batch_size == 4096
        assert len(request.indices) / 2 == pytest.approx(4096, rel=0.1)
        assert {table.pooling_factor for table in tables.tables} == {20}

    def test_features_with_a_batch_of_their_own_keep_their_lookups(self, tmp_path):
        batch = BatchParams(B=100, sigma_B=50, vbe_num_ranks=2, Bs=[50, 100, 150])
        tables = import_tables(written(tmp_path / "a.json", batch_params=batch))
        assert tables.batch_size == 100
        assert [table.pooling_factor * 100 for table in tables.tables] == [50 * 20, 100 * 20, 150 * 20]
        assert [table.features[0].pooling_p99 for table in tables.tables] == [None, 20, None]


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")  # of FBGEMM's reporter
class TestReporter:
    """What the operator writes while it trains, under `FBGEMM_TBE_REPORT_INPUT_PARAMS=1`."""

    @pytest.fixture
    def folder(self, tmp_path):
        rng = np.random.default_rng(0)
        reporter = TBEBenchmarkParamsReporter(1, bucket=str(tmp_path), path_prefix="reports")
        for operator, table_map in (("one", [0, 1, 2]), ("two", [0, 1, 0])):
            rows = torch.tensor([[2000, 50, 300][table] for table in table_map])
            dims = torch.tensor([[16, 8, 4][table] for table in table_map])
            for iteration in (2, 10):
                lengths = rng.integers(0, 9, size=(3, 256)) + np.array([[0], [10], [iteration]])
                ids = [
                    tbe_access(int(count), (), 2.0, 1.1).sample_ranks(int(sizes.sum()), rng)
                    for count, sizes in zip(rows, lengths, strict=True)
                ]
                reporter.report_stats(
                    rows,
                    dims,
                    iteration,
                    torch.from_numpy(np.concatenate(ids)),
                    torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])),
                    op_id=operator,
                    embedding_specs=[(2000, 16), (50, 8), (300, 4)][: max(table_map) + 1],
                    feature_table_map=table_map,
                )
        return tmp_path / "reports"

    def test_its_files_are_read_and_the_last_iteration_counts(self, folder):
        assert len(list(folder.iterdir())) == 4
        tables = import_tables(folder)
        assert tables.batch_size == 256
        prefixes = [f"tbe-{operator}-config-estimation-10" for operator in ("one", "two")]
        expected = [f"{prefixes[0]}.t{index}" for index in range(3)] + [f"{prefixes[1]}.t{index}" for index in range(2)]
        assert [table.name for table in tables.tables] == expected
        one = {table.name[-2:]: table for table in tables.tables[:3]}
        assert [one[name].num_embeddings for name in ("t0", "t1", "t2")] == [2000, 50, 300]
        assert [one[name].embedding_dim for name in ("t0", "t1", "t2")] == [16, 8, 4]
        assert [one[name].pooling_factor for name in ("t0", "t1", "t2")] == pytest.approx([4, 14, 14], abs=0.5)
        assert one["t1"].features[0].pooling_variance == pytest.approx(80 / 12, rel=0.4)  # of a rounded sigma_L
        shared = tables.tables[3]
        assert [feature.name for feature in shared.features] == [f"{prefixes[1]}.f0", f"{prefixes[1]}.f2"]
        assert shared.num_embeddings == 2000

    def test_a_next_batch_hits_about_as_many_rows(self, folder):
        table = import_tables(folder).tables[0]
        truth = tbe_access(2000, (), 2.0, 1.1)
        for num_lookups in (100, 1000):
            expected = truth.expected_distinct(num_lookups)
            assert table.access.expected_distinct(num_lookups) == pytest.approx(expected, rel=0.25)


def changed(document, path, value):
    """The document with another value at a path; None takes the field away."""
    inner = document
    *parents, last = path.split(".")
    for name in parents:
        inner = inner[name]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return document


class TestRefusing:
    @pytest.mark.parametrize(
        ("path", "value", "field", "message"),
        [
            ("T", None, "T", "is missing"),
            ("T", 0, "T", "must be a whole number in [1, "),
            ("E", math.nan, "E", "must be a whole number"),
            ("E", 10.5, "E", "must be a whole number in [1, 1099511627776], got 10.5"),
            ("D", 2**20, "D", "must be a whole number in [1, 65536]"),
            ("Es", [1, 2], "Es", "must hold 3 values, got 2"),
            ("Ds", [4, 0, 4], "Ds[1]", "must be a whole number in [1, 65536], got 0"),
            ("weighted", 1, "weighted", "must be true or false, got 1"),
            ("colour", 1, "colour", "is not known; accepted: T, E, D"),
            ("batch_params", None, "batch_params", "is missing"),
            ("batch_params.B", -1, "batch_params.B", "must be a whole number in [1, "),
            (
                "batch_params.Bs",
                [1, 1, "x"],
                "batch_params.Bs[2]",
                'must be a whole number in [1, 2147483648], got "x"',
            ),
            (
                "batch_params.vbe_distribution",
                "zipf",
                "batch_params.vbe_distribution",
                "must be one of normal, uniform",
            ),
            ("pooling_params.L", math.inf, "pooling_params.L", "must be a finite number"),
            ("pooling_params.Ls", [1, 2, -1], "pooling_params.Ls[2]", "must be a finite number in [0, 1e+06], got -1"),
            ("pooling_params.sigma_l", 1, "pooling_params.sigma_l", "is not known (did you mean sigma_L?)"),
            ("indices_params.zipf_q", math.nan, "indices_params.zipf_q", "must be a finite number in [1e-06, 1e+09]"),
            ("indices_params.zipf_s", None, "indices_params.zipf_s", "is missing"),
            ("indices_params.heavy_hitters", [2, 4], "indices_params.heavy_hitters[0]", "must be a finite number"),
            ("indices_params.heavy_hitters", [0.6, 0.6], "indices_params.heavy_hitters", "they add up to 1.2"),
            ("indices_params_list", [{}], "indices_params_list", "must hold 3 values, got 1"),
            ("indices_params_list", [{}, {}, {}], "indices_params_list[0].heavy_hitters", "is missing"),
            ("feature_table_map", [0, 2, 2], "feature_table_map", "must give every table a feature, table 1 has none"),
            ("feature_table_map", [0, 1, 3], "feature_table_map[2]", "must be a whole number in [0, 2], got 3"),
            ("embedding_specs", [[1000, 32]], "embedding_specs", "must hold 3 values, got 1"),
            (
                "embedding_specs",
                [[1000, 32], [9, 32], [1000, 32]],
                "embedding_specs",
                "table 1 has 9 rows of dimension 32, its feature 1 has 1000 of 32",
            ),
        ],
    )
    def test_fields_are_named(self, tmp_path, path, value, field, message):
        document = changed(json.loads(config().json()), path, value)
        file = written(tmp_path / "a.json", document=document)
        with pytest.raises(InputError) as caught:
            import_tables(file, "tbe-data-config")
        assert str(caught.value).startswith(f"{file}: {field}: ")
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_bounds_of_uniform_lengths(self, tmp_path):
        file = written(tmp_path / "a.json", pooling_params=PoolingParams(9, 4, "uniform"))
        with pytest.raises(
            FormatError, match=r"sigma_L: is the upper bound of uniform lengths .* at least L, 9; got 4"
        ):
            import_tables(file)

    @pytest.mark.parametrize(
        ("content", "message"), [("[1]", "must be an object"), ("{", "is not JSON"), ("{}", "T: is missing")]
    )
    def test_other_files(self, tmp_path, content, message):
        written(tmp_path / "a.json")
        (tmp_path / "b.json").write_text(content)
        with pytest.raises(FormatError) as caught:
            import_tables(tmp_path)
        assert str(caught.value).startswith(f"{tmp_path / 'b.json'}: {message}")

    def test_missing_files_and_empty_folders(self, tmp_path):
        with pytest.raises(FormatError, match="cannot be read: no such file"):
            import_tables(tmp_path / "none.json", "tbe-data-config")
        with pytest.raises(FormatError, match=r"holds no \.json files"):
            import_tables(tmp_path, "tbe-data-config")
