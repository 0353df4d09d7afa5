"""Import formats, by name or told from the source."""

import pytest

from autoshard.core.errors import InputError, InvalidOptionError, UnknownNameError
from autoshard.formats import FORMATS, import_tables, load_tables, write_tables


def test_every_format_has_a_line_about_it():
    assert set(FORMATS) == {"bundled", "tables-json", "dlrm-datasets"}
    assert all(item.name == name and item.description for name, item in FORMATS.items())


def test_the_format_is_told_from_the_source(tmp_path):
    write_tables(load_tables("param-b"), tmp_path / "tables.json")
    write_tables(load_tables("param-b"), tmp_path / "tables.txt")
    for source, format in [
        ("param-b", None),
        (tmp_path / "tables.json", None),
        (tmp_path / "tables.txt", "tables-json"),
    ]:
        told = []
        assert import_tables(source, format, advance=told.append) == load_tables("param-b")
        assert sum(told) == 1


@pytest.mark.parametrize(
    ("source", "format", "options", "error", "line"),
    [
        ("tables.txt", None, {}, UnknownNameError, "tables.txt: is neither a bundled table set (metasyn, "),
        ("tables.txt", "csv", {}, UnknownNameError, "format: no import format is named 'csv'; there are bundled, "),
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
