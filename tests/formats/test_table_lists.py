"""Lists of tables as people have them: names of columns, numbers as they are written, syntaxes, and faults."""

import base64
import json
import logging
from enum import Enum

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from autoshard.core import DType, Optimizer, Pooling
from autoshard.core.errors import FormatError, InputError
from autoshard.formats import import_tables, load_tables, tables_from_list, write_tables
from autoshard.formats.imports.list_numbers import read_number, read_whole
from tests import builders as make

CSV = """name,num_embeddings,embedding_dim,pooling,dtype,optimizer,features,pooling_factor,zipf_alpha
user,1000,64,mean,fp16,sgd,user; friend,2.5,1.1
item,50,8,,,,,,
"""


def test_a_csv_says_what_tables_have(tmp_path):
    path = tmp_path / "tables.csv"
    path.write_text(CSV)
    user, item = import_tables(path, batch_size=256).tables
    assert (user.pooling, user.dtype, user.optimizer) == (Pooling.MEAN, DType.FP16, Optimizer.SGD)
    assert [(one.name, one.pooling_factor) for one in user.features] == [("user", 2.5), ("friend", 2.5)]
    assert user.access.coverage(10) > item.access.coverage(1) > 0
    assert (item.pooling, item.dtype, item.optimizer) == (Pooling.SUM, DType.FP32, Optimizer.ROWWISE_ADAGRAD)
    assert [(one.name, one.pooling_factor) for one in item.features] == [("item", 1.0)]


# Header and first row, and the name, rows, dimension, ids per sample, pooling and dtype that they say.
LISTS = {
    "Table Name,#Rows,Dim,Avg Pooling\nuser,1000,64,2.5": ("user", 1000, 64, 2.5, "sum", "fp32"),
    'Table,Rows,Dim\nuser,"1,234,567",64.0': ("user", 1_234_567, 64, 1, "sum", "fp32"),
    "name\trows\tdim\tpooling\nuser\t120M\t64\t3": ("user", 120_000_000, 64, 3, "sum", "fp32"),
    "name;rows;dim;pooling\nuser;2.5e7;64;mean": ("user", 25_000_000, 64, 1, "mean", "fp32"),
    "name|hash_size|emb_dim|bag_size\nuser|1_000|64|4": ("user", 1000, 64, 4, "sum", "fp32"),
    "feature,cardinality,embedding_size\nC1,1460,16": ("C1", 1460, 16, 1, "sum", "fp32"),
    "num_rows,width,lookups per sample\n2^20,128,1": ("table_0", 2**20, 128, 1, "sum", "fp32"),
    "Table ID,Vocab Size,D,L\n7,10^6,8,0.5": ("7", 10**6, 8, 0.5, "sum", "fp32"),
    "name,E,D,L,dtype\nuser,1000,64,20,FP16": ("user", 1000, 64, 20, "sum", "fp16"),
    "embedding_name,vocabulary_size,embedding_vec_size,combiner\nuser,900,16,mean": (
        *("user", 900, 16, 1, "mean", "fp32"),
    ),
    "tbl,buckets,vector dim,hotness,precision\nuser,10K,64,1,half": ("user", 10_000, 64, 1, "sum", "fp16"),
    "name,Rows (M),Dim\nuser,1.5,64": ("user", 1_500_000, 64, 1, "sum", "fp32"),
    "name,rows [thousands],dim (floats)\nuser,12,64": ("user", 12_000, 64, 1, "sum", "fp32"),
    ",rows,dim\n0,1000,64": ("table_0", 1000, 64, 1, "sum", "fp32"),
    "Unnamed: 0,name,nunique,dim\n0,user,1000,64": ("user", 1000, 64, 1, "sum", "fp32"),
    "# name,rows,dim\nuser,1000,64": ("user", 1000, 64, 1, "sum", "fp32"),
    "#Rows,Dim,Table\n1000,64,user": ("user", 1000, 64, 1, "sum", "fp32"),
    "\ufeff\n# made by hand\n\nname, rows, dim ,,\nuser, 1000, 64,,\n,,,,\n": ("user", 1000, 64, 1, "sum", "fp32"),
    "name;rows;dim;pooling\nuser;1.234.567;64;2,5": ("user", 1_234_567, 64, 2.5, "sum", "fp32"),
    "Name,Number of rows,Embedding dimension,Mean pooling,Data type\nuser,1 000,64,2,torch.bfloat16": (
        *("user", 1000, 64, 2, "sum", "bf16"),
    ),
    "slot,slot_size,emb size,multi-hot size\nC1,39043,128,3": ("C1", 39043, 128, 3, "sum", "fp32"),
    "name,num unique,dims,pooling mode,avg length\nuser,1.2k,64,PoolingType.NONE,20": (
        *("user", 1200, 64, 20, "sequence", "fp32"),
    ),
    '[{"name": "user", "rows": 1000, "dim": 64, "pooling": 3}]': ("user", 1000, 64, 3, "sum", "fp32"),
    '{"tables": [{"table": "user", "rows": "1M", "dim": 64.0}]}': ("user", 10**6, 64, 1, "sum", "fp32"),
    '{"user": {"hash_size": 1000, "dim": 64}}': ("user", 1000, 64, 1, "sum", "fp32"),
    '{"name": "user", "rows": 1000, "dim": 64}\n{"name": "ad", "rows": 5, "dim": 4}\n': (
        *("user", 1000, 64, 1, "sum", "fp32"),
    ),
    "- name: user\n  rows: 1e3\n  dim: 64\n  pooling: avg\n": ("user", 1000, 64, 1, "mean", "fp32"),
    "tables:\n- {name: user, rows: 1000, dim: 64}\n": ("user", 1000, 64, 1, "sum", "fp32"),
    '[{"name": "user", "num_embeddings": 4096, "embedding_dim": 8, "feature_names": ["f1"], "data_type": "FP32", '
    '"pooling": "SUM"}]': ("user", 4096, 8, 1, "sum", "fp32"),
}


LISTS |= dict.fromkeys(
    (
        "batch_size: 8192\ntables:\n- name: user\n  rows: 1000\n  dim: 64\n",
        "# of a model\nuser:\n  rows: 1000\n  dim: 64\n",
        "user: {rows: 1000, dim: 64}",
        '"user": { rows: 1000, dim: 64 }\nad: {rows: 5, dim: 4}',
    ),
    ("user", 1000, 64, 1, "sum", "fp32"),
)


@pytest.mark.parametrize("text", LISTS)
def test_lists_as_people_have_them_are_read(text):
    table = tables_from_list(text, batch_size=256).tables[0]
    read = (table.name, table.num_embeddings, table.embedding_dim, table.pooling_factor, table.pooling, table.dtype)
    assert read == LISTS[text]


def test_a_list_says_the_same_in_every_syntax(tmp_path):
    rows = [
        {"name": "user", "rows": 1000, "dim": 64, "alpha": 1.1, "features": "user;friend"},
        {"name": "ad", "rows": 50, "dim": 8, "alpha": None, "features": None},
    ]
    frame = pd.DataFrame(rows)
    texts = {
        "a.csv": frame.to_csv(index=False),
        "b.csv": frame.to_csv(),
        "a.tsv": frame.to_csv(index=False, sep="\t"),
        "a.json": json.dumps(rows),
        "b.json": json.dumps({"tables": rows}),
        "c.json": json.dumps({row["name"]: {key: row[key] for key in row if key != "name"} for row in rows}),
        "a.jsonl": "\n".join(map(json.dumps, rows)),
        "a.yaml": "\n".join(f"- {json.dumps(row)}" for row in rows),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "utf16.txt").write_text(texts["a.tsv"], encoding="utf-16")
    frame.to_parquet(tmp_path / "a.parquet")
    found = tables_from_list(rows)
    assert [table.name for table in found.tables] == ["user", "ad"]
    assert [feature.name for feature in found.tables[0].features] == ["user", "friend"]
    for name in (*texts, "utf16.txt", "a.parquet"):
        assert import_tables(tmp_path / name) == load_tables(tmp_path / name) == found, name
    parquet = base64.b64encode((tmp_path / "a.parquet").read_bytes()).decode()
    for given in (
        *(frame, frame.set_index("name"), frame.convert_dtypes(), {"rows": rows}),
        *(pa.table(frame), pa.RecordBatch.from_pandas(frame)),
        *({"text": texts["a.tsv"]}, {"base64": parquet}),
    ):
        assert tables_from_list(given) == found


def test_a_column_that_an_arrow_table_has_twice_is_named(tmp_path):
    table = pa.table([["user"], [10], [20], [8]], names=["name", "rows", "rows", "dim"])
    pq.write_table(table, tmp_path / "a.parquet")
    for given in (table, table.to_batches()[0]):
        with pytest.raises(FormatError, match='is num_embeddings, and so is "rows"'):
            tables_from_list(given)
    with pytest.raises(FormatError, match='is num_embeddings, and so is "rows"'):
        import_tables(tmp_path / "a.parquet")


def test_a_name_of_yaml_may_have_any_characters():
    assert tables_from_list("user-id:\n  rows: 1000\n  dim: 16\n").tables[0].name == "user-id"


def test_the_text_of_a_tables_json_is_read(tmp_path):
    tables = make.tables(make.table("a"), batch_size=64)
    told = []
    for name in ("tables.json", "tables.yaml"):
        write_tables(tables, tmp_path / name)
        text = (tmp_path / name).read_text()
        assert tables_from_list({"text": text}, told=told.append) == tables
        assert tables_from_list(text, batch_size=8).batch_size == 8
        with pytest.raises(FormatError, match="columns: must be left out: a text with a schema has no columns to map"):
            tables_from_list(text, columns={"a": "name"})
    assert told == []


@pytest.mark.parametrize("column", ["weighted", "Is Weighted"])
def test_a_column_says_which_tables_are_weighted(column, tmp_path):
    def weighted(given):
        return [table.weighted for table in tables_from_list(given).tables]

    for flags in ("true,False,,yes", "1,0,,YES", "TRUE,no,,1"):
        rows = "".join(f"9,4,{flag}\n" for flag in flags.split(","))
        assert weighted(f"rows,dim,{column}\n{rows}") == [True, False, False, True], flags
    for flags in ([True, False, None, True], [1, 0, None, 1], ["true", "0", "", "yes"]):
        listed = [{"rows": 9, "dim": 4, column: flag} for flag in flags]
        assert weighted(listed) == weighted(pd.DataFrame(listed)) == [True, False, False, True], flags
    pd.DataFrame([{"rows": 9, "dim": 4, column: True}]).to_parquet(tmp_path / "a.parquet")
    assert load_tables(tmp_path / "a.parquet").tables[0].weighted
    assert weighted(f"- rows: 9\n  dim: 4\n  {column}: true\n") == [True]


#: A config of TorchRec with all its fields, as `dataclasses.asdict` gives it, and Python then writes it to JSON.
CONFIG = {
    "name": "t1",
    "num_embeddings": 4096,
    "embedding_dim": 8,
    "feature_names": ["f1"],
    "data_type": "DataType.FP16",
    "pooling": "PoolingType.MEAN",
    **dict.fromkeys(("weight_init_max", "weight_init_min", "num_embeddings_post_pruning", "init_fn", "input_dim")),
    **dict.fromkeys(("total_num_buckets", "virtual_table_eviction_policy")),
    **dict.fromkeys(("need_pos", "use_virtual_table", "enable_embedding_update"), False),
}


def test_configs_of_torchrec_are_read_with_all_their_fields(tmp_path):
    told = []
    (table,) = tables_from_list(json.dumps([CONFIG]), told=told.append).tables
    assert (table.name, table.num_embeddings, table.embedding_dim) == ("t1", 4096, 8)
    assert ([one.name for one in table.features], table.dtype, table.pooling) == (["f1"], DType.FP16, Pooling.MEAN)
    assert [note for note in told[0].notes if "left out" in note] == []
    as_csv = pd.DataFrame([CONFIG]).assign(feature_names="f1").to_csv(index=False)
    assert tables_from_list(as_csv).tables == (table,)
    told.clear()
    pd.DataFrame([CONFIG | {"need_pos": True}]).to_parquet(tmp_path / "a.parquet")
    assert import_tables(tmp_path / "a.parquet", told=told.append).tables == (table,)
    assert "need_pos is left out: it says how weights begin or kernels run" in told[0].notes


def test_configs_without_pooling_are_of_sequences():
    told = []
    sequence = {field: value for field, value in CONFIG.items() if field != "pooling"} | {"name": "t2"}
    (table,) = tables_from_list([sequence], told=told.append).tables
    assert table.pooling is Pooling.SEQUENCE
    assert "the list has no columns for these: pooling_factor is 1, pooling is sequence, " in told[0].notes[1]
    both = tables_from_list([CONFIG | {"feature_names": ["f2"]}, sequence])
    assert [one.pooling for one in both.tables] == [Pooling.MEAN, Pooling.SEQUENCE]


def test_members_of_torchrecs_enumerations_are_read():
    words = Enum("words", ["FP16", "MEAN"])
    (table,) = tables_from_list([CONFIG | {"data_type": words.FP16, "pooling": words.MEAN}]).tables
    assert (table.dtype, table.pooling) == (DType.FP16, Pooling.MEAN)


def test_what_configs_of_torchrec_hold_and_tables_do_not_is_refused():
    with pytest.raises(FormatError) as raised:
        tables_from_list([CONFIG, CONFIG | {"name": "t2", "input_dim": 10**6, "use_virtual_table": True}])
    assert sorted(map(str, raised.value.faults)) == [
        'column "input_dim": is set: plans do not hold ids that are hashed to rows; leave it out',
        'column "use_virtual_table": is set: plans do not hold a virtual table; give num_embeddings the rows that are '
        "in use",
    ]
    (table,) = tables_from_list("input_dim,output_dim,data_type\n9,4,fp32\n").tables
    assert table.num_embeddings == 9


def test_features_that_several_tables_of_torchrec_look_up_are_named_after_these():
    told = []
    configs = [CONFIG | {"name": "a", "feature_names": ["f", "g"]}, CONFIG | {"name": "b", "feature_names": ["f"]}]
    found = tables_from_list(configs, told=told.append)
    assert [[one.name for one in table.features] for table in found.tables] == [["f@a", "g"], ["f@b"]]
    assert told[0].notes[-1] == "features that several tables look up are named FEATURE@TABLE: f"


def test_what_a_list_leaves_open_is_told():
    told = []
    given = {"text": "name,rows,dim,pooling,owner\na,10,4,2,x\n#b,1,1,1,x\nc,10,4,,y\n", "columns": {"owner": ""}}
    found = tables_from_list(given, told=told.append)
    assert found.batch_size == 65_536
    (read,) = told
    assert read.columns == {
        "name": "name",
        "rows": "num_embeddings",
        "dim": "embedding_dim",
        "pooling": "pooling_factor",
        "owner": "",
    }
    assert read.mapping.endswith('"pooling" is pooling_factor, "owner" is ignored')
    assert [note.split(":")[0] for note in read.notes] == [
        *("the list says no batch size", "the list has no columns for these"),
        *("pooling_factor is empty in line 4", "lines that begin with #, left out"),
    ]
    told.clear()
    assert tables_from_list("rows,dim,batch\n10,4,512\n9,4,512", told=told.append).batch_size == 512
    assert tables_from_list({"batch_size": 64, "rows": [{"rows": 1, "dim": 4}]}, told=told.append).batch_size == 64
    assert not any("batch" in note for read in told for note in read.notes)


def test_python_hears_of_a_default_batch(caplog):
    with caplog.at_level(logging.INFO):
        tables_from_list([{"rows": 10, "dim": 4}])
    assert caplog.messages[0] == 'columns: "rows" is num_embeddings, "dim" is embedding_dim'
    assert "65,536 samples over all ranks are taken" in caplog.messages[1]


def test_a_mapping_says_what_a_column_is():
    text = "size,width,weird,hash_size\n10,4,3,x\n"
    columns = {"size": "num_embeddings", "Weird": "pooling_factor", "hash_size": ""}
    (table,) = tables_from_list(text, columns=columns).tables
    assert (table.num_embeddings, table.embedding_dim, table.pooling_factor) == (10, 4, 3)
    with pytest.raises(FormatError, match='column "b": is not there to be mapped; there are "size"'):
        tables_from_list(text, columns={"b": "name"})
    with pytest.raises(FormatError, match='column "size": "rows" is no field; these are: name, num_embeddings'):
        tables_from_list(text, columns={"size": "rows"})


@pytest.mark.parametrize(
    ("text", "columns", "features"),
    [
        ("table,rows,dim\n0,9,4\n1,9,4\n2,9,4\n", {}, {"0": ["0"], "1": ["1"], "2": ["2"]}),
        ("slot,rows,dim\n101,9,4\n7,9,4\n", {}, {"101": ["101"], "7": ["7"]}),
        ("rows,dim,features\n9,4,3\n9,4,1;2\n", {}, {"3": ["3"], "table_1": ["1", "2"]}),
        ('[{"rows": 9, "dim": 4, "features": ["3"]}]', {}, {"3": ["3"]}),
        ("rows,dim,features\n9,4,3\n", {"features": "features"}, {"3": ["3"]}),
        ("num_tables,rows,dim\n8,9,4\n", {"num_tables": "name"}, {"8": ["8"]}),
    ],
)
def test_names_may_be_numbers_where_they_cannot_be_counts(text, columns, features):
    found = tables_from_list(text, batch_size=64, columns=columns)
    assert {table.name: [one.name for one in table.features] for table in found.tables} == features


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("rows,dim,colour\n1,2,x\n", ['column "colour": is no field that is known; say which with --map']),
        ("rows,dim,size\n1,4,4\n", ['column "size": may mean rows or bytes; say which with --map']),
        ("rows,dim,Size (GB)\n1,4,4\n", ['column "Size (GB)": may mean rows or bytes']),
        ("rows,dim,rows in millions\n1,4,4\n", ['column "rows in millions": is no field']),
        (
            "num_tables,num_rows,dim\n8,1000,16\n2,10,8\n",
            ['column "num_tables": may mean a number of tables or a name'],
        ),
        ("tables,rows,dim\n8,1000,16\n", ['column "tables": may mean a number of tables or a name; a list has a row']),
        ("#tables,rows,dim\n8,1000,16\n", ['column "tables": may mean a number of tables or a name']),
        ("Tables (#),rows,dim\na,1000,16\n", ['column "Tables (#)": may mean a number of tables or a name']),
        ("rows,dim,num_features\n1,4,3\n", ['column "num_features": may mean a number of features or a name']),
        ("rows,dim,num_slots\n1,4,3\n", ['column "num_slots": may mean a number of features or a name']),
        ("rows,dim,features\n1,4,3\n1,4,\n", ['column "features": may mean a number of features or a name; a list']),
        ('[{"rows": 1, "dim": 4, "slots": 3}]', ['column "slots": may mean a number of features or a name']),
        ("rows,dim,num_batch\n1,4,9\n", ['column "num_batch": may mean batches or samples of one']),
        ("rows,dim,num_pooling\n1,4,9\n", ['column "num_pooling": may mean poolings or ids per sample']),
        ("rows,dim,num_dtype\n1,4,9\n", ['column "num_dtype": is no field that is known']),
        ("embedding_dim\n4\n", ["num_embeddings: must be a column"]),
        ("rows,hash_size,dim\n1,2,3\n", ['column "hash_size": is num_embeddings, and so is "rows"']),
        ("rows,rows,dim\n1,2,3\n", ['column "rows": is num_embeddings, and so is "rows"']),
        ("pooling,avg pooling,rows,dim\n1,2,3,4\n", ['column "avg pooling": is pooling_factor, and so is "pooling"']),
        ("rows,dim\n1\n", ["line 2: must have 2 values, got 1"]),
        ("rows,dim\n1,4,5\n", ["line 2: must have 2 values, got 3"]),
        ("1000,64\n50,8\n", ["line 1: must name the columns, num_embeddings and embedding_dim among them"]),
        ("user,1000,64\nad,50,8\n", ["line 1: must name the columns"]),
        ('rows,dim\n1,"4\n', ["is not CSV: "]),
        ("rows,dim\n", ["tables: must hold at least one table"]),
        ("", ["must be a list of tables with a header, but it is empty"]),
        (
            "name,rows,dim,pooling\na,64.5,-4,x\nb,,0,50%\n\nc,many,nan,mean\n",
            [
                'line 2, table a, column "rows": must be a whole number, got "64.5"',
                'line 2, table a, column "dim": must be a whole number in [1, 65536], got -4',
                'line 2, table a, column "pooling": must be one of sum, mean, sequence, got "x"',
                'line 3, table b, column "rows": must have a value',
                'line 3, table b, column "dim": must be a whole number in [1, 65536], got 0',
                'line 3, table b, column "pooling": must be one of sum, mean, sequence, got "50%"',
                'line 5, table c, column "rows": must be a whole number, got "many"',
                'line 5, table c, column "dim": must be a whole number, got "nan"',
            ],
        ),
        ("name,rows,dim\na,40.000,4\n", ['line 2, table a, column "rows": may mean 40000 or 40;']),
        ("name,rows,dim\na,100MB,4\n", ['line 2, table a, column "rows": must be a whole number, got "100MB"']),
        ("name,rows,dim\na,10,1K\n", ['line 2, table a, column "dim": must be a whole number, got "1K"; write']),
        ('name,rows,dim,L\na,10,4,"1,234"\n', ['line 2, table a, column "L": may mean 1234 or 1.234;']),
        ("name,rows (M),dim\na,10M,4\n", ['line 2, table a, column "rows (M)": must be a whole number, got "10M"']),
        ("name,rows,dim\na,1e99999999,4\n", ['line 2, table a, column "rows": must be a whole number of at most']),
        ("name,rows,dim\na,1,4\na,2,4\n", ['line 3, table a: must have table names of its own, got "a": line 2']),
        ("name,feature,rows,dim\na,f,1,4\nb,f,2,4\n", ['line 3, table b: must have feature names of its own, got "f"']),
        ("rows,dim,weighted\n1,4,maybe\n1,4,2\n", ['line 2, column "weighted": must be true or false (or yes or no']),
        ("rows,dim,pooling\n1,4,sqrtn\n", ['line 2, column "pooling": must be one of sum, mean, sequence, got']),
        ("rows,dim,dtype\n1,4,fp64\n", ['line 2, column "dtype": must be one of fp32, fp16, bf16, int8, got "fp64"']),
        ("rows,dim,batch\n1,4,8\n1,4,9\n", ['column "batch": must be the same in all rows']),
        ("rows,dim,batch\n1,4,64K\n", ['line 2, column "batch": must be a whole number, got "64K"; write']),
        ('[{"rows": true, "dim": [4]}]', ['row 1, column "rows": must be a whole number, got true', "row 1, column"]),
        ('{"rows": 1, "dim": 4}\n{"rows": 1,\n{"rows": 0, "dim": 4}', ["line 2: is not JSON: ", "line 3, column"]),
        ('[{"rows": 1, "dim": 4}, 3]', ["row 2: must be an object with the table's fields, got 3"]),
        ("PK\x03\x04", ["is an archive or a workbook; save the sheet as CSV"]),
    ],
)
def test_all_faults_are_named_at_once(tmp_path, text, faults):
    path = tmp_path / "list.csv"
    path.write_text(text)
    with pytest.raises(InputError) as raised:
        load_tables(path)
    error = raised.value
    found = [str(fault) for fault in (error.faults or [error])]
    assert [one for one, wanted in zip(found, faults, strict=False) if not one.startswith(f"{path}: {wanted}")] == []
    assert len(found) >= len(faults)


def test_many_faults_are_counted():
    with pytest.raises(FormatError) as raised:
        tables_from_list("rows,dim\n" + "0,4\n" * 70)
    assert len(raised.value.faults) == 51
    assert str(raised.value.faults[-1]) == "20 more faults"
    assert str(raised.value).startswith('70 faults: line 2, column "rows": must be')


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        *((" 1000 ", 1000), ("1,000", 1000), ("12,345,678.0", 12_345_678), ("1.5M", 1_500_000), ("1,5 M", 1_500_000)),
        *(("3 million", 3_000_000), ("1B", 10**9), ("2bn", 2 * 10**9), ("4Ki", 4096), ("1E6", 10**6), ("+5", 5)),
        *(("1'000'000", 10**6), ("1\u202f000", 1000), ("2**10", 1024), ("1.000.000,0", 10**6), (7.0, 7), ("0064", 64)),
    ],
)
def test_whole_numbers_are_read(text, rows):
    assert read_whole(text, may_have_suffix=True) == rows


@pytest.mark.parametrize(
    "text", ["", "1.5", "12%", "1,23,456", "1.000", "1,234K", "0x10", "٣", "1-2", "inf", "~5", "5 GB", "1.2.3", "--1"]
)
def test_other_texts_are_no_whole_numbers(text):
    with pytest.raises(FormatError):
        read_whole(text, may_have_suffix=True)


def test_fractions_are_read():
    assert [read_number(one) for one in ("2.5", "2,5", "0,125", ".5", "1.234", "1e-3", "1,234.5", 3)] == [
        *(2.5, 2.5, 0.125, 0.5, 1.234, 0.001, 1234.5, 3.0),
    ]


def test_parquet_of_ids_is_no_list(tmp_path):
    pq.write_table(pa.table({"user": [[1, 2], [3]], "item": [[0], [1]]}), tmp_path / "ids.parquet")
    assert [table.name for table in import_tables(tmp_path / "ids.parquet").tables] == ["user", "item"]
    with pytest.raises(FormatError, match=r'ids.parquet: 4 faults: column "user": is no field'):
        load_tables(tmp_path / "ids.parquet")
