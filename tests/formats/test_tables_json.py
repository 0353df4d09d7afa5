"""tables.json: what is read back is what was written, and faults are named by file and field."""

import copy
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import (
    AccessProfile,
    Constraints,
    DenseLayers,
    DType,
    Feature,
    Optimizer,
    Pooling,
    Tier,
)
from autoshard.core.errors import FormatError, InputError, InvalidTableError
from autoshard.formats import format_json, read_tables, tables_from_json, tables_to_json, write_tables
from autoshard.formats.documents.access_json import access_to_json
from tests import builders as make

SCHEMA = "autoshard.tables/1"
factors = st.floats(0, 1e6)


@st.composite
def tables(draw, name):
    num_rows = draw(st.integers(1, 2**30))
    access = draw(
        st.sampled_from(
            [
                AccessProfile.uniform(num_rows),
                AccessProfile.uniform(num_rows, 1e-3),
                AccessProfile.zipf(num_rows, 1.05, 2.7),
                AccessProfile.from_reuse_bins(num_rows, [1.0] * 17, of="rows", num_lookups=1e5),
            ]
        )
    )
    features = tuple(
        Feature(
            name=f"{name}é{index}",
            pooling_factor=draw(factors),
            pooling_variance=draw(factors),
            pooling_p99=draw(st.none() | factors),
        )
        for index in range(draw(st.integers(1, 3)))
    )
    return make.table(
        name,
        num_rows,
        draw(st.integers(1, 2**16)),
        features=features,
        access=access,
        dtype=draw(st.sampled_from(DType)),
        pooling=draw(st.sampled_from(Pooling)),
        optimizer=draw(st.sampled_from(Optimizer)),
        constraints=draw(
            st.sampled_from(
                [
                    Constraints(),
                    Constraints(pinned_ranks=(0, 3)),
                    Constraints(colocate_with=("t0",), forbidden_tiers=(Tier.FLEX, Tier.ROW_WISE)),
                ]
            )
        ),
    )


@st.composite
def table_sets(draw):
    return make.tables(
        *(draw(tables(f"t{index}")) for index in range(draw(st.integers(1, 3)))),
        batch_size=draw(st.integers(1, 2**31)),
        dense=draw(st.none() | st.just(DenseLayers(num_dense_features=13, bottom_mlp=(8, 4), top_mlp=(1,)))),
    )


def document(**changes):
    table = {
        "name": "t0",
        "num_embeddings": 10,
        "embedding_dim": 4,
        "dtype": "fp32",
        "pooling": "sum",
        "features": [{"name": "f0", "pooling_factor": 2.0}],
        "access": {"kind": "uniform"},
    }
    return {"schema": SCHEMA, "batch_size": 64, "tables": [{**table, **changes}]}


@given(table_set=table_sets())
def test_what_is_written_is_read_back_equal(table_set, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "tables.json"
    write_tables(table_set, path)
    assert read_tables(path) == table_set


def test_whole_documents_are_read_field_by_field(documents):
    read = tables_from_json(documents[SCHEMA])
    clicks, views, history, users = read.tables
    assert read.batch_size == 4096
    assert (clicks.dtype, clicks.pooling, clicks.optimizer) == (DType.FP16, Pooling.MEAN, Optimizer.ADAM)
    assert clicks.features[0] == Feature(name="f0", pooling_factor=3.5, pooling_variance=1.25, pooling_p99=9.0)
    assert clicks.access == AccessProfile.zipf(1000, 1.05, 2.0)
    assert clicks.constraints == Constraints(
        pinned_ranks=(0, 1), colocate_with=("views",), forbidden_tiers=(Tier.ROW_WISE,)
    )
    assert views.optimizer is Optimizer.ROWWISE_ADAGRAD
    assert views.access == AccessProfile.uniform(8, 0.5)
    bins = [0.5, 0.25, *[0.01] * 15]
    assert history.access == AccessProfile.from_reuse_bins(100_000, bins, of="rows", num_lookups=65536 * 40)
    assert users.access.coverage(1.0) == 0.5
    assert read.dense is not None
    assert read.dense.bottom_mlp == (64, 16)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"num_embeddings": -5}, "num_embeddings: must be a whole number in [1, 1099511627776], got -5"),
        ({"num_embeddings": True}, "num_embeddings: must be a whole number in [1, 1099511627776], got true"),
        ({"embedding_dim": 16.0}, "embedding_dim: must be a whole number in [1, 65536], got 16.0"),
        ({"embedding_dim": 10**50}, "embedding_dim: must be a whole number in [1, 65536], got a number of 167 bits"),
        ({"dtype": "FP32"}, 'dtype: must be one of fp32, fp16, bf16, int8, got "FP32"'),
        ({"dtype": "int4"}, 'dtype: must be one of fp32, fp16, bf16, int8, got "int4"; the nearest is int8'),
        (
            {"optimizer": "lambs"},
            "optimizer: must be one of sgd, rowwise_adagrad, adagrad, adam, partial_rowwise_adam, lamb, "
            'partial_rowwise_lamb, none, got "lambs"',
        ),
        (
            {"optimizer": "lars_sgd"},
            "optimizer: must be one of sgd, rowwise_adagrad, adagrad, adam, partial_rowwise_adam, lamb, "
            'partial_rowwise_lamb, none, got "lars_sgd"; the nearest is ',
        ),
        ({"pooling": None}, "pooling: must be one of sum, mean, sequence, got null"),
        ({"name": ""}, 'name: must be a text of 1 to 512 characters, got ""'),
        ({"name": "a" * 10_000}, 'name: must be a text of 1 to 512 characters, got "' + "a" * 58 + "…"),
        ({"name": "\udfff"}, 'name: must be made of whole characters, got "\\udfff"'),
        ({"features": []}, "features: must hold 1 to 1000000 values, got 0"),
        ({"features": {}}, "features: must be a list, got an object"),
        (
            {"features": [{"name": "f", "pooling_factor": float("inf")}]},
            "features[0].pooling_factor: must be a finite number in [0, 1e+06], got Infinity",
        ),
        (
            {"features": [{"name": "f", "pooling_factor": False}]},
            "features[0].pooling_factor: must be a finite number in [0, 1e+06], got false",
        ),
        ({"features": [{"name": "f"}]}, "features[0].pooling_factor: is missing"),
        (
            {"embeding_dim": 4},
            "embeding_dim: is not known (did you mean embedding_dim?); accepted: name, num_embeddings, embedding_dim, "
            "dtype, pooling, features, access, optimizer, weighted, constraints",
        ),
        ({"bad\nname": 1}, "bad\\nname: is not known"),
        ({"constraints": {"pinned_ranks": [0, 0.5]}}, "constraints.pinned_ranks[1]: must be a whole number"),
        ({"access": []}, "access: must be an object, got an empty list"),
        ({"access": {}}, "access.kind: is missing"),
        (
            {"access": {"kind": "zip"}},
            'access.kind: must be one of uniform, zipf, reuse_bins, curve, counts, got "zip"',
        ),
        ({"access": {"kind": "zipf"}}, "access.alpha: is missing"),
        ({"access": {"kind": "zipf", "alpha": -1}}, "access.alpha: must be a finite number in [0, 64], got -1"),
        ({"access": {"kind": "uniform", "alpha": 1}}, "access.alpha: is not known; accepted: kind, accessed_fraction"),
        (
            {"access": {"kind": "uniform", "accessed_fraction": 0}},
            "access.accessed_fraction: must be in (0, 1], got 0.0",
        ),
        (
            {"access": {"kind": "uniform", "hot_rows": "h.parquet"}},
            "access.hot_rows: is no part of it: name the file in the table's row_order",
        ),
        (
            {"access": {"kind": "reuse_bins", "of": "rows", "batch_size": 1, "bins": [1] * 16}},
            "access.bins: must hold 17 values, got 16",
        ),
        (
            {"access": {"kind": "reuse_bins", "of": "rows", "batch_size": 1, "bins": [0] * 17}},
            "access.bins: must be finite, at least 0, with a positive sum",
        ),
        (
            {"access": {"kind": "curve", "knots": [[0, 0], [9, 1]]}},
            "access.knots: must end at access rank 10, the table's rows, got 9",
        ),
        (
            {"access": {"kind": "curve", "knots": [[0, 0], [5, 0.2], [10, 1]]}},
            "access.knots: must be concave: rows are ordered by falling access frequency",
        ),
        ({"access": {"kind": "curve", "knots": [[0, 0], [10, True]]}}, "access.knots[1][1]: must be a finite number"),
        ({"access": {"kind": "curve", "knots": [[0, 0], 10]}}, "access.knots[1]: must be a list, got 10"),
        (
            {"access": {"kind": "curve", "knots": [[0, 0], [10, 1, 1]]}},
            "access.knots[1]: must hold 2 values, got 3",
        ),
        (
            {"access": {"kind": "curve", "knots": [[0, 0], [10, 10**400]]}},
            "access.knots: holds a number that is too large",
        ),
    ],
)
def test_a_fault_is_one_line_with_file_field_and_what_is_accepted(changes, line, tmp_path):
    path = tmp_path / "tables.json"
    path.write_text(json.dumps(document(**changes)))
    with pytest.raises(InputError) as caught:
        read_tables(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: tables[0].{line}")
    assert "\n" not in text


@pytest.mark.parametrize(
    ("change", "error", "line"),
    [
        (lambda it: it.update(schema="autoshard.plan/1"), FormatError, 'schema: must be "autoshard.tables/1"'),
        (lambda it: it.pop("batch_size"), FormatError, "batch_size: is missing"),
        (lambda it: it.update(tables=[]), FormatError, "tables: must hold 1 to 100000 values, got 0"),
        (lambda it: it["tables"].append(it["tables"][0]), InvalidTableError, 'tables.name: "t0" is used twice'),
        (
            lambda it: it["tables"].append({**it["tables"][0], "name": "t1"}),
            InvalidTableError,
            'tables.features: "f0" is used twice',
        ),
        (
            lambda it: it.update(
                tables=[{**it["tables"][0], "num_embeddings": 2**40, "embedding_dim": 2**16, "optimizer": "adam"}] * 8
            ),
            InvalidTableError,
            "tables: must need at most",
        ),
    ],
)
def test_faults_of_the_whole_set(change, error, line):
    changed = copy.deepcopy(document())
    change(changed)
    with pytest.raises(error) as caught:
        tables_from_json(changed)
    assert str(caught.value).startswith(line)


def test_reuse_bins_of_a_table_without_lookups_say_nothing():
    bins = {"kind": "reuse_bins", "of": "rows", "batch_size": 64, "bins": [1] * 17}
    with pytest.raises(FormatError, match="its pooling factors are 0"):
        tables_from_json(document(features=[{"name": "f0", "pooling_factor": 0}], access=bins))


class TestCounts:
    def write(self, folder, counts, column="count"):
        pyarrow.parquet.write_table(pyarrow.table({column: counts}), folder / "counts.parquet")
        path = folder / "tables.json"
        path.write_text(format_json(document(access={"kind": "counts", "file": "counts.parquet"})))
        return path

    def test_counts_lie_beside_the_file(self, tmp_path):
        counts = [9, 0, 3, 3, 1, 0, 0, 2, 2, 100]
        assert read_tables(self.write(tmp_path, counts)).tables[0].access == make.profile_of(counts)

    @pytest.mark.parametrize(
        ("counts", "column", "line"),
        [
            ([1, 2], "count", "access.file: must hold one count per row: the table has 10, the file 2"),
            ([1] * 10, "number", "access.file: counts.parquet must have one column of numbers named count"),
            (["a"] * 10, "count", "access.file: counts.parquet must have one column of numbers named count"),
            ([0] * 10, "count", "access.counts: must have a positive sum"),
            ([1.0] * 9 + [-1.0], "count", "access.counts: must be finite and at least 0"),
            ([1.0] * 9 + [np.nan], "count", "access.counts: must be finite and at least 0"),
            ([1] * 9 + [None], "count", "access.counts: must be finite and at least 0"),
        ],
    )
    def test_counts_that_are_wrong_are_refused(self, counts, column, line, tmp_path):
        path = self.write(tmp_path, counts, column)
        with pytest.raises(InputError) as caught:
            read_tables(path)
        assert str(caught.value).startswith(f"{path}: tables[0].{line}")

    @pytest.mark.parametrize("name", ["../counts.parquet", "/etc/passwd", "a\\b", ".."])
    def test_counts_lie_nowhere_else(self, name, tmp_path):
        path = self.write(tmp_path, [1] * 10)
        path.write_text(format_json(document(access={"kind": "counts", "file": name})))
        with pytest.raises(FormatError, match="file"):
            read_tables(path)

    def test_a_file_that_is_not_there_or_no_parquet(self, tmp_path):
        path = self.write(tmp_path, [1] * 10)
        (tmp_path / "counts.parquet").write_text("no")
        with pytest.raises(FormatError, match="no readable Parquet file") as caught:
            read_tables(path)
        assert "\n" not in str(caught.value)
        (tmp_path / "counts.parquet").unlink()
        with pytest.raises(FormatError, match="there is no file"):
            read_tables(path)

    def test_a_request_has_no_files(self):
        with pytest.raises(FormatError, match="can only be read from a file"):
            tables_from_json(document(access={"kind": "counts", "file": "counts.parquet"}))


def test_uniform_access_is_written_as_such():
    written = tables_to_json(tables_from_json(document()))
    assert written["tables"][0]["access"] == {"kind": "uniform"}


@pytest.mark.parametrize("interaction", ["dot", "concat"])
def test_both_ways_in_which_features_meet_are_read_back(interaction):
    dense = {"num_dense_features": 13, "bottom_mlp": [16], "top_mlp": [1], "interaction": interaction}
    assert tables_to_json(tables_from_json(document() | {"dense": dense}))["dense"] == dense


def test_thousands_of_tables_with_one_wrong_number_name_it():
    many = document()
    many["tables"] = [
        {**many["tables"][0], "name": f"t{index}", "features": [{"name": f"f{index}", "pooling_factor": 1}]}
        for index in range(5000)
    ]
    assert len(tables_from_json(many).tables) == 5000
    many["tables"][4321]["embedding_dim"] = 0
    with pytest.raises(FormatError) as caught:
        tables_from_json(many)
    assert caught.value.field == "tables[4321].embedding_dim"


def test_tables_with_the_same_curve_share_it_and_each_other_one_is_checked(tmp_path):
    curve = AccessProfile.from_reuse_bins(10**6, [1.0] * 17, of="rows", num_lookups=1e5)
    of = [make.table(f"t{index}", 10**6, access=curve) for index in range(3)]
    write_tables(make.tables(*of, make.table("other", 10**6)), tmp_path / "tables.json")
    read = read_tables(tmp_path / "tables.json")
    assert [table.access for table in read.tables[:3]] == [curve] * 3
    assert len({id(table.access) for table in read.tables}) == 2
    document = json.loads((tmp_path / "tables.json").read_text())
    assert document["tables"][0]["access"] == document["tables"][2]["access"] == access_to_json(curve)
    document["tables"][2]["num_embeddings"] += 1
    with pytest.raises(InputError, match=r"^tables\[2\].access.knots: must end at access rank 1000001"):
        tables_from_json(document)
