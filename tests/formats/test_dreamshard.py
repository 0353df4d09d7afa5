"""Tables as the tools of DreamShard and NeuroShard write them, and JSON that no format is told from."""

import json

import pytest

from autoshard.core import AccessProfile, DType, Optimizer
from autoshard.core.errors import InputError
from autoshard.formats import import_tables

BINS = [0.5, 0.25, 0.25, *[0.0] * 14]


def table(index, row, dim, pooling_factor, bins=BINS):
    named = {f"bin_{n}": share for n, share in enumerate(bins)}
    return {"index": index, "row": row, "dim": dim, "pooling_factor": pooling_factor, **named}


def imported(folder, document, **options):
    path = folder / "table_configs.json"
    path.write_text(json.dumps(document))
    return import_tables(path, **options)


@pytest.mark.parametrize("wrapped", [True, False])
def test_tables_have_rows_dimension_lookups_and_reuse(wrapped, tmp_path):
    listed = [table(0, 1_000_000, 16, 12), table(1, 50_000, 32, 3.5)]
    found = imported(tmp_path, {"tables": listed} if wrapped else listed)
    assert [(one.num_embeddings, one.embedding_dim, one.pooling_factor) for one in found.tables] == [
        (1_000_000, 16, 12.0),
        (50_000, 32, 3.5),
    ]
    assert found.batch_size == 65536
    assert found.tables[0].access == AccessProfile.from_reuse_bins(1_000_000, BINS, of="rows", num_lookups=65536 * 12)
    assert {(one.name, one.dtype, one.optimizer) for one in found.tables} == {
        ("table_0", DType.FP32, Optimizer.SGD),
        ("table_1", DType.FP32, Optimizer.SGD),
    }


def test_bins_are_those_of_the_batch(tmp_path):
    found = imported(tmp_path, {"tables": [table(7, 1_000_000, 16, 12)]}, batch_size=512)
    assert (found.batch_size, found.tables[0].name) == (512, "table_7")
    assert found.tables[0].access == AccessProfile.from_reuse_bins(1_000_000, BINS, of="rows", num_lookups=512 * 12)


def test_what_is_taken_for_granted_is_told(tmp_path, caplog):
    imported(tmp_path, [table(0, 100, 16, 1)], batch_size=65536)
    assert caplog.messages == ["dtype, optimizer: taken for fp32 and sgd, as in NeuroShard's benchmarks"]
    imported(tmp_path, [table(0, 100, 16, 1)])
    assert "batch_size: taken for 65536, also for the bins, as the file does not say it" in caplog.messages


def test_tables_without_reuse_are_looked_up_alike(tmp_path):
    empty = [table(0, 100, 16, 0, [0.0] * 17), table(1, 100, 16, 2, []), table(2, 100, 16, 2, [0.0] * 17)]
    for one in imported(tmp_path, empty).tables:
        assert one.access == AccessProfile.uniform(100)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"tables": [table(0, 100, 16, 1, BINS[:3])]}, "tables[0].bin_3: is missing, although there is a bin_0"),
        ({"tables": [table(0, 0, 16, 1)]}, "tables[0].row: must be a whole number in [1, "),
        ({"tables": [table(0, 100, 16.5, 1)]}, "tables[0].dim: must be a whole number in [1, "),
        ({"tables": [table(0, 100, 16, -1)]}, "tables[0].pooling_factor: must be a finite number in [0, "),
        ([table(0, 100, 16, 1), table(1, 100, 16, 1) | {"bin_17": 0}], "[1].bin_17: is not known"),
        ({"tables": [table(0, 100, 16, 1)], "dtype": "fp16"}, "dtype: is not known; accepted: tables"),
        ([table(0, 100, 16, 1), {"row": 5}], "[1].dim: is missing"),
        ([table(0, 100, 16, 1), table(0, 100, 16, 1)], '"table_0" is used twice'),
        (
            {"embeddings": []},
            "must be of a format that can be told from it: tables-json has a schema, table-list is a list of",
        ),
    ],
)
def test_what_is_wrong_is_named_in_the_files_words(document, message, tmp_path):
    with pytest.raises(InputError) as raised:
        imported(tmp_path, document)
    assert message in str(raised.value)
