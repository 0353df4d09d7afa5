"""Lists of tables as CSV and Parquet."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from autoshard.core import DType, Optimizer, Pooling
from autoshard.core.errors import FormatError, InvalidTableError
from autoshard.formats import import_tables

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


def test_parquet_says_the_same(tmp_path):
    table = pa.table({"num_embeddings": [1000, 50], "embedding_dim": [64, 8], "zipf_alpha": [1.1, None]})
    pq.write_table(table, tmp_path / "tables.parquet")
    found = import_tables(tmp_path / "tables.parquet", "table-list", batch_size=256)
    (tmp_path / "tables.csv").write_text("num_embeddings,embedding_dim,zipf_alpha\n1000,64,1.1\n50,8,\n")
    assert found == import_tables(tmp_path / "tables.csv", batch_size=256)
    assert [one.name for one in found.tables] == ["table_0", "table_1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_embeddings,dim\n1,2\n", "dim: is no column of table lists; these are: name, dtype"),
        ("embedding_dim\n4\n", "num_embeddings: must be a column"),
        ("num_embeddings,num_embeddings,embedding_dim\n1,2,3\n", "num_embeddings: is there twice"),
        ("num_embeddings,embedding_dim\n1\n", "must have 2 values in line 2, got 1"),
        ("num_embeddings,embedding_dim\n1,\n", "tables[0].embedding_dim: must have a value"),
        ("num_embeddings,embedding_dim\n1,4\nmany,4\n", "tables[1].num_embeddings: must be a whole number"),
        ('num_embeddings,embedding_dim\n1,"4\n', "is not CSV: "),
        ("num_embeddings,embedding_dim\n", "tables: must "),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, message):
    path = tmp_path / "tables.csv"
    path.write_text(text)
    with pytest.raises((FormatError, InvalidTableError)) as raised:
        import_tables(path)
    assert str(raised.value).startswith(f"{path}: {message}")
