"""Import formats, by name or told from the source."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from autoshard.core import AccessProfile
from autoshard.core.errors import InputError, InvalidOptionError, UnknownNameError
from autoshard.formats import FORMATS, import_tables, load_tables, write_tables
from autoshard.formats.imports.importing import ImportFormat
from tests import builders as make

#: The least that a TBEDataConfig says.
CONFIG = (
    '{"T": 1, "E": 10, "D": 4, "mixed_dim": false, "weighted": false, "batch_params": {"B": 8}, '
    '"pooling_params": {"L": 2}, "indices_params": {"heavy_hitters": [], "zipf_q": 1, "zipf_s": 1}}'
)


def test_every_format_has_a_line_about_it():
    of_models = {"tables-json", "table-list", "torchrec", "tbe-data-config"} | {
        "hugectr",
        "dreamshard",
        "nvidia-models",
        "dlrm-command",
    }
    assert set(FORMATS) == {"bundled", *of_models, "dlrm-command", "dlrm-datasets", "id-batches", "row-counts"}
    assert all(item.name == name and item.description for name, item in FORMATS.items())


def test_the_format_is_told_from_the_source(tmp_path):
    write_tables(load_tables("param-b"), tmp_path / "tables.json")
    write_tables(load_tables("param-b"), tmp_path / "tables.odt")
    for source, format in [
        ("param-b", None),
        (tmp_path / "tables.json", None),
        (tmp_path / "tables.odt", "tables-json"),
    ]:
        told = []
        assert import_tables(source, format, advance=told.append) == load_tables("param-b")
        assert sum(told) == 1


def test_formats_are_told_by_what_files_and_folders_hold(tmp_path):
    def folder(name):
        (tmp_path / name).mkdir()
        return tmp_path / name

    ones = torch.ones(1, 3).long()
    (tmp_path / "config.json").write_text(CONFIG)
    (folder("configs") / "x.json").write_text(CONFIG)
    pq.write_table(pa.table({"a": [0, 1, 2]}), tmp_path / "ids.parquet")
    pq.write_table(pa.table({"a": [0, 1, 2]}), folder("parquet") / "part-0.parquet")
    torch.save((torch.arange(3), ones), tmp_path / "values.pt")
    torch.save((torch.arange(3), torch.arange(4), ones), tmp_path / "dlrm.pt")
    torch.save((torch.arange(3), torch.arange(4), ones), folder("batches") / "0.pt")
    expected = {
        "config.json": ["config.t0"],
        "configs": ["x.t0"],
        "ids.parquet": ["a"],
        "parquet": ["a"],
        "values.pt": ["f0"],
        "dlrm.pt": ["t0"],
        "batches": ["f0"],
    }
    for name, tables in expected.items():
        assert [table.name for table in import_tables(tmp_path / name).tables] == tables


def test_folders_that_do_not_tell_are_refused(tmp_path):
    with pytest.raises(UnknownNameError, match=r"is a folder with no \.json, \.parquet or \.pt files; name its format"):
        import_tables(tmp_path)
    (tmp_path / "a.json").write_text(CONFIG)
    pq.write_table(pa.table({"a": [0, 1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(UnknownNameError, match=r"is a folder with both \.json and \.parquet files; name its format"):
        import_tables(tmp_path)
    assert len(import_tables(tmp_path, "id-batches").tables) == 1
    assert len(import_tables(tmp_path, "tbe-data-config").tables) == 1


@pytest.mark.parametrize(
    ("factor", "num_embeddings", "line"),
    [
        (2e6, 10, "x: t0_f.pooling_factor: must be a number in [0, 1e+06], got 2000000.0"),
        (1.0, 2**40, "x: tables: must need at most 4,611,686,018,427,387,904 bytes in total"),
    ],
)
def test_tables_that_no_tables_json_can_hold_are_refused(factor, num_embeddings, line, monkeypatch):
    def read(*_, **__):
        tables = [
            make.table(
                f"t{number}",
                num_embeddings,
                65_536,
                pooling_factor=factor,
                access=AccessProfile.uniform(num_embeddings),
            )
            for number in range(16)
        ]
        return make.tables(*tables, batch_size=1)

    monkeypatch.setitem(FORMATS, "made", ImportFormat(name="made", description="Made", read=read))
    with pytest.raises(InputError) as caught:
        import_tables("x", "made")
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("source", "format", "options", "error", "line"),
    [
        ("tables.odt", None, {}, UnknownNameError, "tables.odt: is neither a bundled table set (metasyn, "),
        ("tables.odt", "csv", {}, UnknownNameError, 'format: no import format is named "csv"; there are bundled, '),
        ("param-b", None, {"seed": 1}, InvalidOptionError, "options.seed: format bundled takes these options: none"),
        (
            "x.pt",
            None,
            {"dim": 1},
            InvalidOptionError,
            "options.dim: format dlrm-datasets takes these options: embedding_dim, seed",
        ),
        (
            "x.pt",
            None,
            {"embedding_dim": 0},
            InvalidOptionError,
            "options.embedding_dim: must be a whole number in [1, 65536], got 0",
        ),
        (
            "x.pt",
            None,
            {"seed": True},
            InvalidOptionError,
            "options.seed: must be a whole number in [0, 4294967295], got true",
        ),
    ],
)
def test_what_cannot_be_imported_is_refused_in_one_line(source, format, options, error, line):
    with pytest.raises(error) as caught:
        import_tables(source, format, **options)
    assert isinstance(caught.value, InputError)
    assert str(caught.value).startswith(line)
