"""Lists of tables as people have them: a row per table, columns by whatever names, in any common syntax."""

from __future__ import annotations

import base64
import binascii
import csv
import io
import json
import logging
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, replace
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, Final, get_args

from autoshard.core import DType, EmbeddingTable, Feature, Optimizer, Pooling, TableSet
from autoshard.core.accepted import MAX_TABLES, none_of
from autoshard.core.declared import Written, declared, declared_field
from autoshard.core.errors import FormatError, InputError
from autoshard.core.quoting import shortened, shown
from autoshard.formats.documents.access_json import ALPHA
from autoshard.formats.documents.json_document import YAML_SUFFIXES, parse_json
from autoshard.formats.documents.kinds import kind_of
from autoshard.formats.documents.tables_json import BATCH_SIZE, DEFAULT_BATCH_SIZE, TABLE, tables_from_json
from autoshard.formats.files import open_file, read_bytes
from autoshard.formats.imports.list_numbers import read_number, read_whole
from autoshard.formats.torchrec.config_fields import LEFT_CONFIG, REFUSED_CONFIG

_log = logging.getLogger(__name__)

#: Endings of files that hold lists, whatever their text says; .json and .yaml may hold other things.
LIST_SUFFIXES = (".csv", ".tsv", ".tab", ".txt", ".psv", ".jsonl", ".ndjson")

#: Types of fields that a cell holds.
_SCALARS: Final = (str, int, float)
#: Other names of the fields' columns, as `_plain` writes them. A name is here only if it means one thing.
_NAMES: Final[Mapping[str, str]] = {
    "name": "table tablename tables tbl tableid embeddingname embname embeddingtable embeddingtablename",
    "num_embeddings": "numembedding nembeddings embeddings row rows rowcount numrow numrows nrow nrows norows noofrows "
    "numofrows numberofrows tablerows embeddingrows hashsize cardinality card vocab vocabsize vocabularysize "
    "maxvocabularysize vocabularycount bucket buckets numbucket numbuckets nbuckets hashbuckets numhashbuckets "
    "hashbucketsize numids nids idcount uniqueids numuniqueids unique uniquevalues numunique nunique uniquecount "
    "distinct distinctids distinctvalues categories numcategories ncategories numentries entries inputdim slotsize "
    "height e",
    "embedding_dim": "dim dims d embdim embeddim embdims embeddingdims dimension embeddingdimension embdimension "
    "embeddingsize embsize embedsize embeddingwidth embwidth embeddingvecsize embvecsize vectorsize vecsize vecdim "
    "vectordim width outputdim latentdim numcolumns cols numcols",
    "pooling_factor": "poolingfactors avgpooling averagepooling meanpooling avgpoolingfactor averagepoolingfactor "
    "meanpoolingfactor poolingsize avgpoolingsize avgpoolsize poolsize l bagsize avgbagsize meanbagsize "
    "averagebagsize lookupspersample avglookupspersample numlookupspersample idspersample avgidspersample "
    "numidspersample avgids meanids avglookups meanlookups averagelookups indicesperlookup numindicesperlookup "
    "indicespersample multihot multihotsize multihotsizes hotness avghotness meanhotness avglength meanlength "
    "averagelength avglen meanlen avgseqlen avgseqlength meanseqlen avgnnz nnzpersample valuespersample "
    "avgnumids avgnumlookups",
    "pooling_variance": "varpooling poolingvar variancepooling poolingfactorvariance",
    "pooling_p99": "p99pooling poolingfactorp99 pooling99",
    "pooling": "pool poolingmode poolingtype poolingop combiner aggregation aggregator agg reduction reduce",
    "dtype": "datatype precision weightsprecision weightprecision weighttype weightstype weightdtype weightsdtype "
    "embeddingdtype paramdtype numberformat",
    "optimizer": "optim opt optimiser optimizertype",
    "weighted": "isweighted",
    "features": "feature featurename featurenames featureids slot slots slotname",
    "zipf_alpha": "alpha zipf zipfexponent zipfs zipfparameter",
    "batch_size": "batch globalbatchsize globalbatch b",
}
#: Names that people give to more than one thing.
_UNCLEAR: Final = {
    "size": "rows or bytes",
    "tablesize": "rows or bytes",
    "shape": "rows and columns in one",
    "id": "a name or a number",
    "count": "rows or lookups",
    "num": "rows or lookups",
    "n": "rows or lookups",
    "length": "rows or ids per sample",
    "len": "rows or ids per sample",
    "lookups": "lookups per sample or in all",
    "numlookups": "lookups per sample or in all",
    "nnz": "ids per sample or in all",
    "type": "a number format or a kind of feature",
    "mode": "pooling or another mode",
    **dict.fromkeys(
        ("numtables", "numtable", "ntables", "tablecount"),
        "a number of tables or a name; a list has a row for each table",
    ),
    **dict.fromkeys(
        ("numfeatures", "numfeature", "nfeatures", "featurecount", "numslots", "numslot", "nslots", "slotcount"),
        "a number of features or a name; a list names features, with ; between them",
    ),
    **dict.fromkeys(("numbatch", "numbatches", "nbatches"), "batches or samples of one"),
    **dict.fromkeys(("numpooling", "numpoolings"), "poolings or ids per sample"),
}
#: Fields that count something, so that `num` or # may stand before what they count.
_COUNTING: Final = ("num_embeddings", "embedding_dim", "pooling_factor")
#: Columns of names that hold numbers of things, if all their values are whole numbers.
_PLURALS: Final = ("tables", "features", "slots")
_NEEDED: Final = ("num_embeddings", "embedding_dim")
#: Declared fields that a column holds as they are: of tables, and of their features but for the name.
_OF_TABLES: Final = {
    one.name: one for one in declared(EmbeddingTable) if isinstance(one.type, type) and issubclass(one.type, _SCALARS)
}
_OF_FEATURES: Final = {one.name: one for one in declared(Feature) if one.name != "name"}
_DECLARED: Final = {**_OF_TABLES, **_OF_FEATURES, "batch_size": declared_field(TableSet, "batch_size")}
#: Fields that columns may be read as.
FIELDS: Final = tuple(dict.fromkeys((*_NAMES, *_DECLARED)))
_KINDS: Final = {name: kind_of(one.type, one.marks) for name, one in _DECLARED.items()}
_WHOLE: Final = {name: _KINDS[name] for name, one in _DECLARED.items() if one.type is int}
_NUMBERS: Final = {name: _KINDS[name] for name, one in _DECLARED.items() if float in (one.type, *get_args(one.type))}
_NUMBERS["zipf_alpha"] = ALPHA
_FLAGS: Final = frozenset(name for name, one in _DECLARED.items() if one.type is bool)
#: Words for flags; data frames write flags as 1.0 and 0.0 where some rows have none.
_TRUE, _FALSE = ("true", "yes", "1", "1.0"), ("false", "no", "0", "0.0")
#: What fields are where a list has no value, as messages show it.
_DEFAULTS: Final = {
    "pooling_factor": "1",
    **{
        name: str(_OF_TABLES[name].default)
        for name in FIELDS
        if name in _OF_TABLES
        and _OF_TABLES[name].default is not MISSING
        and _OF_TABLES[name].meaning.written is not Written.UNLESS_DEFAULT
    },
}
#: Words that people use, without spaces and marks, and the members that they mean, beside the members' own.
_OTHER_WORDS: Final[Mapping[str, Mapping[str, str]]] = {
    "pooling": {
        **dict.fromkeys(("average", "avg"), Pooling.MEAN),
        **dict.fromkeys(("none", "nopooling", "unpooled", "seq"), Pooling.SEQUENCE),
    },
    "dtype": {
        **dict.fromkeys(("float32", "float", "f32", "single"), DType.FP32),
        **dict.fromkeys(("float16", "half", "f16"), DType.FP16),
        **dict.fromkeys(("bfloat16", "bfloat"), DType.BF16),
        "i8": DType.INT8,
    },
    "optimizer": {
        "exactsgd": Optimizer.SGD,
        "exactadagrad": Optimizer.ADAGRAD,
        "exactrowwiseadagrad": Optimizer.ROWWISE_ADAGRAD,
    },
}
_WORDS: Final[Mapping[str, Mapping[str, str]]] = {
    name: {**{word.replace("_", ""): word for word in one.type}, **_OTHER_WORDS.get(name, {})}
    for name, one in _OF_TABLES.items()
    if issubclass(one.type, StrEnum)
}
_BY_NAME: Final = {plain: name for name in FIELDS for plain in (name.replace("_", ""), *_NAMES.get(name, "").split())}
#: What brackets of a header may hold: by what its numbers are multiplied; 1 says what is counted.
_UNITS: Final = {
    **dict.fromkeys(("", "#", "num", "count", "rows", "ids", "elements", "columns", "floats", "values", "avg"), 1),
    **dict.fromkeys(("mean", "average", "per sample", "ids per sample", "lookups per sample", "global", "samples"), 1),
    **dict.fromkeys(("k", "thousand", "thousands", "in thousands", "x1000", "1e3", "10^3"), 10**3),
    **dict.fromkeys(("m", "mn", "million", "millions", "in millions", "mio", "1e6", "10^6"), 10**6),
    **dict.fromkeys(("b", "bn", "billion", "billions", "in billions", "1e9", "10^9"), 10**9),
}
#: Columns by which a list is known as one of TorchRec's configs.
_TORCHREC: Final = ("feature_names", "data_type")
#: How a text begins that is YAML: with a list, or with a field whose value is no row of cells.
_YAML_START: Final = re.compile(r"- *\S+:|-$|---$|[^,;:\t|]+:(\s+[\[{]|(\s[^,;\t|]*)?$)")
_PARQUET_START: Final = b"PAR1"
_ZIP_START: Final = b"PK\x03\x04"
_LINE: Final = re.compile(r"[^\r\n]*(?:\r\n?|\n)|[^\r\n]+")
_SEPARATORS: Final = ",\t;|"
#: Rows of Parquet that are read at once.
_CHUNK_ROWS: Final = 256
#: Faults that are told one by one.
_MOST_FAULTS: Final = 50
#: Rows that a note names.
_MOST_NAMED: Final = 5
#: Keys of an object around a list of rows, and of one that holds a file.
_AROUND: Final = ("tables", "rows")
_FILES: Final = ("text", "base64")
LIST_KEYS: Final = frozenset((*_AROUND, *_FILES))


@dataclass(frozen=True, slots=True, kw_only=True)
class TableList:
    """What was read of a list, and how.

    Attributes:
        tables: The tables.
        columns: The field that each column was read as, by the column's name; empty for those that were ignored.
        notes: What the list leaves open and what was taken for it, a line each.
        is_default_batch: Whether nobody said the batch size.
    """

    tables: TableSet
    columns: Mapping[str, str]
    notes: tuple[str, ...]
    is_default_batch: bool

    @property
    def mapping(self) -> str:
        """How columns were read, in one line."""
        read = [f"{shown(column)} is {name or 'ignored'}" for column, name in self.columns.items()]
        return f"columns: {', '.join(read)}"


Told = Callable[[TableList], None]


def log_list(found: TableList) -> None:
    """Logs how columns were read, and warns of what the list leaves open."""
    _log.info("%s", found.mapping)
    for note in found.notes:
        _log.warning("%s", note)


def read_table_list(
    path: str | Path, *, batch_size: int | None = None, columns: Mapping[str, str] | None = None, told: Told = log_list
) -> TableSet:
    """Tables of a file: CSV or the like with a header, JSON, JSON lines, YAML or Parquet.

    Args:
        path: The file.
        batch_size: Global batch; None for what the list says, and `DEFAULT_BATCH_SIZE` where it says none.
        columns: Fields (`FIELDS`) by column, for columns whose names do not say it; an empty text ignores a column.
        told: Is told how the list was read.

    Raises:
        FormatError: If it is no list of tables. `faults` are all that is wrong with it, by line and table.
    """
    with open_file(path) as file:
        is_parquet = file.read(len(_PARQUET_START)) == _PARQUET_START
    chosen = _Chosen(batch_size=batch_size, columns=columns or {})
    grid: _Grid | TableSet
    if is_parquet:
        with open_file(path) as file:
            grid = _parquet_grid(file, chosen)
    else:
        grid = _text_grid(_decoded(read_bytes(path)), is_yaml=Path(path).suffix in YAML_SUFFIXES)
    return _tables(grid, chosen, told)


def tables_from_list(
    given: object, *, batch_size: int | None = None, columns: Mapping[str, str] | None = None, told: Told = log_list
) -> TableSet:
    """Tables of a list that no file holds.

    Args:
        given: A data frame (of pandas or polars, or an Arrow table), a list of mappings, the text of a file, or a
            mapping: with `tables` or `rows` (a list of mappings), `text` (of a file) or `base64` (of a file's bytes),
            and beside it `batch_size` and `columns` where they are not given here; or of tables by name. A text may be
            a `tables.json`, too, of whose columns nothing is told.
        batch_size: As of `read_table_list`.
        columns: Likewise.
        told: Likewise.

    Raises:
        FormatError: Likewise.
    """
    chosen = _Chosen(batch_size=batch_size, columns=columns or {})
    if isinstance(given, Mapping):
        given, chosen = _unwrapped(given, chosen)
    if isinstance(given, bytes):
        is_parquet = given.startswith(_PARQUET_START)
        grid = _parquet_grid(io.BytesIO(given), chosen) if is_parquet else _text_grid(_decoded(given))
    elif isinstance(given, str):
        grid = _text_grid(given)
    else:
        grid = _grid_of(given)
    return _tables(grid, chosen, told)


def is_table_list(document: object) -> bool:
    """Whether a parsed document is a list of tables, and none of the documents that say their schema."""
    if isinstance(document, list):
        return all(isinstance(row, dict) for row in document) and bool(document)
    if not isinstance(document, dict) or "schema" in document:
        return False
    rows = next((document[key] for key in _AROUND if key in document), None)
    if isinstance(rows, list):
        return all(isinstance(row, dict) and "access" not in row for row in rows)
    return bool(document) and all(
        isinstance(row, dict) and _has_needed(map(str, row)) for row in document.values()
    )  # by name


def is_parquet_list(path: str | Path) -> bool:
    """Whether the columns of a Parquet file are those of a list of tables."""
    import pyarrow as pa
    import pyarrow.parquet

    try:
        with open_file(path) as file, pyarrow.parquet.ParquetFile(file, pre_buffer=False) as parquet:
            return _has_needed(parquet.schema_arrow.names)
    except (pa.ArrowException, OSError, UnicodeDecodeError, FormatError):
        return False


def _has_needed(columns: Iterable[str]) -> bool:
    return {_field_of(column)[0] for column in columns} >= set(_NEEDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """What the caller says beside the list."""

    batch_size: int | None
    columns: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    """Rows with a value for each column, None where there is none; `places` say where each row stands."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    places: Sequence[str]
    faults: Sequence[FormatError] = ()
    notes: Sequence[str] = ()
    batch_size: object = None


# Syntaxes.


def _unwrapped(given: Mapping[Any, Any], chosen: _Chosen) -> tuple[object, _Chosen]:
    """The list within an object, and what the object says beside it."""
    keys = [key for key in (*_AROUND, *_FILES) if key in given]
    if not keys:
        return given, chosen
    for name in given:
        if name not in (*keys[:1], "batch_size", "columns"):
            accepted = f"{', '.join(_AROUND)}, text or base64, and batch_size and columns"
            raise FormatError(f"is not known; a table list takes {accepted}", field=shortened(str(name)))
    columns, batch_size = given.get("columns") or {}, given.get("batch_size")
    if not isinstance(columns, Mapping) or not all(isinstance(name, str) for name in columns.values()):
        raise FormatError("must be an object of fields by column", field="columns")
    if batch_size is not None and chosen.batch_size is None:
        chosen = replace(chosen, batch_size=BATCH_SIZE.read(batch_size, "batch_size"))
    content = given[keys[0]]
    if keys[0] in _AROUND:
        return content, replace(chosen, columns={**columns, **chosen.columns})
    if not isinstance(content, str):
        raise FormatError(f"must be a text, got {shown(content)}", field=keys[0])
    if keys[0] == "base64":
        try:
            content = base64.b64decode(content, validate=True)
        except (binascii.Error, ValueError):
            raise FormatError("must be the bytes of a file in base64", field="base64") from None
    return content, replace(chosen, columns={**columns, **chosen.columns})


def _decoded(data: bytes) -> str:
    """The text of a file; spreadsheets write UTF-16, too."""
    if data.startswith(_ZIP_START):
        raise FormatError("is an archive or a workbook; save the sheet as CSV")
    try:
        return data.decode("utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig")
    except UnicodeDecodeError:
        raise FormatError("is not UTF-8 text") from None


def _text_grid(text: str, *, is_yaml: bool = False) -> _Grid | TableSet:
    """Rows of a text, whose syntax is told from how it begins, or the tables of a `tables.json`."""
    text = text.removeprefix("\ufeff")
    start = next((line for line in map(str.strip, _lines(text)) if line and not line.startswith("#")), "")
    if not is_yaml and start.startswith(("[", "{")):
        return _lines_grid(text) if _is_lines(text, start) else _document_grid(parse_json(text))
    if is_yaml or _YAML_START.match(start):
        from autoshard.formats.yaml_text import parse_yaml

        return _document_grid(parse_yaml(text))
    return _delimited_grid(text)


def _lines(text: str) -> Iterator[str]:
    """Lines of a text one by one, with their ends. A copy of it (`io.StringIO`) would take four bytes a character."""
    return (line[0] for line in _LINE.finditer(text))


def _is_lines(text: str, start: str) -> bool:
    """Whether each line is a JSON object."""
    if not start.startswith("{") or sum(1 for line in _lines(text) if line.strip()) < 2:
        return False
    try:
        json.loads(start)
    except (ValueError, RecursionError):
        return False
    return True


def _lines_grid(text: str) -> _Grid:
    rows, places, faults = [], [], []
    for number, line in enumerate(_lines(text), 1):
        if line.strip():
            try:
                rows.append(parse_json(line))
                places.append(f"line {number}")
            except FormatError as error:
                faults.append(FormatError(re.sub(r" at line 1, ", " at ", error.message), field=f"line {number}"))
    return replace(_mappings_grid(rows, places), faults=faults)


def _document_grid(document: object) -> _Grid | TableSet:
    """Rows of a parsed document: a list of them, an object that holds one, tables by name; or a `tables.json`."""
    if isinstance(document, dict):
        if "schema" in document:
            return tables_from_json(document)
        key = next((key for key in _AROUND if key in document), None)
        if key is not None:
            for name in document:
                if name not in (key, "batch_size"):
                    raise FormatError(f"is not known beside {key}; accepted: batch_size", field=shortened(name))
            return replace(_grid_of(document[key]), batch_size=document.get("batch_size"))
    return _grid_of(document)


def _grid_of(given: object) -> _Grid:
    """Rows of a data frame, a list of mappings, or tables by name."""
    if hasattr(given, "columns") and hasattr(given, "index") and hasattr(given, "to_dict"):
        return _frame_grid(given)
    if hasattr(given, "column_names") and hasattr(given, "num_rows"):
        return _arrow_grid(given)
    if hasattr(given, "to_dicts"):  # polars
        given = given.to_dicts()
    if isinstance(given, Mapping) and given and all(isinstance(row, Mapping) for row in given.values()):
        for name, row in given.items():
            if any(_field_of(str(key))[0] == "name" for key in row):
                raise FormatError("must have no name of its own among tables by name", field=shortened(str(name)))
        given = [{"name": name, **row} for name, row in given.items()]
    if isinstance(given, Mapping):
        given = [given]
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise FormatError(f"must be a list of tables, got {shown(given)}")
    return _mappings_grid(given, [f"row {number}" for number in range(1, len(given) + 1)])


def _frame_grid(frame: Any) -> _Grid:
    """Rows of a pandas data frame; an index that is more than row numbers is a column."""
    if frame.index.nlevels > 1 or frame.index.name is not None or frame.index.dtype.kind not in "iu":
        frame = frame.reset_index()
    columns = list(frame.columns)
    for column in columns:
        if not isinstance(column, str):
            raise FormatError("must be a text: the columns need names", field=f"column {shown(column)}")
    return _rows_grid(columns, [list(row) for row in frame.itertuples(index=False, name=None)])


def _arrow_grid(table: Any) -> _Grid:
    """Rows of an Arrow table, or of a batch of one; by columns, since a mapping would lose one of two of a name."""
    _check_count(table.num_rows)
    columns = [column.to_pylist() for column in table.columns]
    return _rows_grid(list(table.column_names), [list(row) for row in zip(*columns, strict=True)])


def _rows_grid(columns: Sequence[str], rows: Sequence[list[object]]) -> _Grid:
    _check_count(len(rows))
    return _Grid(columns=columns, rows=rows, places=[f"row {number}" for number in range(1, len(rows) + 1)])


def _mappings_grid(rows: Sequence[object], places: Sequence[str]) -> _Grid:
    _check_count(len(rows))
    columns: dict[str, None] = {}
    for row, place in zip(rows, places, strict=True):
        if not isinstance(row, Mapping):
            raise FormatError(f"must be an object with the table's fields, got {shown(row)}", field=place)
        columns.update(dict.fromkeys(map(str, row)))
    return _Grid(
        columns=tuple(columns), rows=[[row.get(name) for name in columns] for row in rows if isinstance(row, Mapping)],
        places=places,
    )  # fmt: skip


def _check_count(num_rows: int) -> None:
    if num_rows > MAX_TABLES:
        raise FormatError(f"must have at most {MAX_TABLES:,} rows")


def _delimited_grid(text: str) -> _Grid:
    """Rows of values with separators between them, after a header."""
    lines = _lines(text)
    separator, num_before, header = _header(text)
    for _ in range(num_before):
        next(lines)
    reader = csv.reader(lines, delimiter=separator, strict=True, skipinitialspace=True)
    rows: list[list[str | None]] = []
    places, faults, num_comments = [], [], 0
    width = len(header)
    try:
        next(reader)
        while True:
            first = num_before + reader.line_num + 1
            line = next(reader, None)
            if line is None:
                break
            if not any(cell.strip() for cell in line):
                continue
            if line[0].lstrip().startswith("#"):
                num_comments += 1
                continue
            place = f"line {first}"
            _check_count(len(rows) + 1)
            extra = [cell for cell in line[width:] if cell.strip()]
            if len(line) < width or extra:
                faults.append(FormatError(f"must have {width} values, got {len(line)}", field=place))
                continue
            rows.append([cell.strip() or None for cell in line[:width]])
            places.append(place)
    except csv.Error as error:
        message = f"is not CSV: {shortened(str(error))} in line {num_before + reader.line_num}"
        raise FormatError(message) from None
    notes = (f"lines that begin with #, left out: {num_comments}",) if num_comments else ()
    return _Grid(columns=header, rows=rows, places=places, faults=faults, notes=notes)


def _header(text: str) -> tuple[str, int, list[str]]:
    """The separator, the number of lines before the header, and the columns."""
    for num_before, line in enumerate(_lines(text)):
        found = [(separator, _cells(line, separator)) for separator in _SEPARATORS]
        separator, cells = max(
            found, key=lambda one: (sum(_field_of(cell)[0] is not None for cell in one[1]), len(one[1]))
        )
        is_comment = line.lstrip().startswith("#") and not _has_needed(cells)
        if any(cells) and not is_comment:
            if any(re.fullmatch(r"[-+]?[\d.,]+", cell) for cell in cells) and not _has_needed(cells):
                needed = " and ".join(_NEEDED)
                raise FormatError(f"must name the columns, {needed} among them", field=f"line {num_before + 1}")
            while len(cells) > 1 and not cells[-1] and not _has_values(text, separator, len(cells) - 1):
                del cells[-1]
            return separator, num_before, cells
    raise FormatError("must be a list of tables with a header, but it is empty")


def _has_values(text: str, separator: str, column: int) -> bool:
    """Whether any row has a value in a column without a header."""
    rows = csv.reader(_lines(text), delimiter=separator)
    return any(len(row) > column and row[column].strip() for row in rows)


def _cells(line: str, separator: str) -> list[str]:
    try:
        (cells,) = csv.reader([line], delimiter=separator, skipinitialspace=True)
    except (csv.Error, ValueError):
        return []
    cells = [cell.strip() for cell in cells]
    if cells and cells[0].startswith("#") and _field_of(cells[0])[0] is None:
        cells[0] = cells[0].lstrip("# ")  # numpy writes headers as comments
    return cells


def _parquet_grid(file: Any, chosen: _Chosen) -> _Grid:
    import pyarrow as pa
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file, pre_buffer=False) as parquet:
            _check_count(parquet.metadata.num_rows)
            columns = [name for name in parquet.schema_arrow.names if not name.startswith("__index")]
            # Columns that are no fields are faults; their values may be large.
            read = [
                name
                for name in columns
                if _field_of(name)[0] or _mapped(name, chosen.columns) or name in (*LEFT_CONFIG, *REFUSED_CONFIG)
            ]
            rows = [
                [row.get(name) for name in columns]
                for batch in parquet.iter_batches(_CHUNK_ROWS, columns=read, use_threads=False)
                for row in batch.to_pylist()
            ]
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise FormatError(f"is a damaged Parquet file: {shortened(str(error))}") from None
    return _rows_grid(columns, rows)


# Columns.


def _plain(name: str) -> str:
    """A name without case, spaces and marks; # stands for a number of something."""
    folded = unicodedata.normalize("NFKC", name).casefold().replace("#", " num ")
    return re.sub(r"[^\w]|_", "", folded)


def _field_of(column: str) -> tuple[str | None, int]:
    """The field that a column's name means, if any, and by what its numbers are multiplied."""
    bare, scale = column, 1
    unit = re.search(r"\s*[(\[]([^()\[\]]*)[)\]]\s*$", column)
    if unit is not None:
        known = _UNITS.get(unit[1].strip().casefold())
        if known is None:
            return None, 1
        bare, scale = column[: unit.start()], known
    plain = _plain(bare)
    name, counted = _BY_NAME.get(plain), _BY_NAME.get(plain.removeprefix("num"))
    if name in ("name", "features") and unit is not None and unit[1].strip():
        return None, 1  # names have no unit
    return name or (counted if counted in _COUNTING else None), scale


def _mapped(column: str, columns: Mapping[str, str]) -> str | None:
    """What the caller says of a column; None if nothing."""
    return columns.get(column, next((name for key, name in columns.items() if _same(key, column)), None))


def _same(one: str, other: str) -> bool:
    return one.strip().casefold() == other.strip().casefold()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """A column that is read: its place among the columns, its name, and by what its numbers are multiplied."""

    index: int
    label: str
    scale: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """Columns by field, with what the list's columns were read as.

    Attributes:
        by_field: Columns by field.
        read_as: Fields by column; empty for those that are ignored.
        is_torchrec: Whether the list is one of TorchRec's configs, whose features may look up several tables.
        left: Columns of such configs that have values which tables do not hold.
    """

    by_field: Mapping[str, _Column]
    read_as: Mapping[str, str]
    is_torchrec: bool
    left: Sequence[str]


def _columns_of(grid: _Grid, chosen: _Chosen, faults: list[FormatError]) -> _Columns:
    by_field: dict[str, _Column] = {}
    read_as: dict[str, str] = {}
    left: list[str] = []
    is_torchrec = set(_TORCHREC) <= set(grid.columns)
    for key, chosen_field in chosen.columns.items():
        if chosen_field and chosen_field not in FIELDS:
            raise FormatError(f"{shown(chosen_field)} is no field; these are: {', '.join(FIELDS)}", field=_label(key))
        if not any(_same(key, column) for column in grid.columns):
            there = ", ".join(map(shown, grid.columns))
            raise FormatError(f"is not there to be mapped; there are {there}", field=_label(key))
    for index, label in enumerate(grid.columns):
        mapped = _mapped(label, chosen.columns)
        known, scale = _field_of(label)
        values = [row[index] for row in grid.rows]
        if mapped is not None:
            name = mapped
        elif is_torchrec and label in (*LEFT_CONFIG, *REFUSED_CONFIG):
            name = ""
            if not all(map(_is_unset, values)):
                left.append(label)
        elif _is_numbering(label, values):
            name = ""
        elif known is not None and not _is_count(label, values):
            name = known
        else:
            faults.append(_unknown(label, is_first=not faults))
            continue
        if name == "pooling" and mapped is None and _has_numbers(values):
            name = "pooling_factor"
        if name and name in by_field:
            faults.append(
                FormatError(
                    f"is {name}, and so is {shown(by_field[name].label)}; ignore one with --map COLUMN= "
                    "(in Python and over REST: columns)",
                    field=_label(label),
                )
            )
            continue
        if name:
            by_field[name] = _Column(index=index, label=label, scale=scale)
        read_as[label or f"column {index + 1}"] = name
    for name in _NEEDED:
        if name not in by_field:
            faults.append(FormatError(f"must be a column; there are {', '.join(map(shown, grid.columns))}", field=name))
    faults += [
        FormatError(f"is set: plans do not hold {meaning}", field=_label(label))
        for label, meaning in REFUSED_CONFIG.items()
        if label in left
    ]
    return _Columns(by_field=by_field, read_as=read_as, is_torchrec=is_torchrec, left=left)


def _label(column: str) -> str:
    return f"column {shown(column)}"


def _unknown(label: str, *, is_first: bool) -> FormatError:
    """The fault of a column that says no field; the first one says what to do."""
    bare = _plain(re.sub(r"[(\[].*", "", label))
    unclear = _UNCLEAR.get(bare) or _UNCLEAR.get(_plain(label)) or _UNCLEAR.get(f"num{bare}")
    reason = f"may mean {unclear}" if unclear else "is no field that is known"
    remedy = (
        "; say which with --map COLUMN=FIELD, or ignore it with --map COLUMN= (in Python and over REST: columns); "
        f"fields are {', '.join(FIELDS)}"
    )
    return FormatError(reason + remedy * is_first, field=_label(label))


def _is_numbering(label: str, values: Sequence[object]) -> bool:
    """Whether a column only numbers the rows, as pandas and spreadsheets write it: without a name."""
    if label and not re.fullmatch(r"Unnamed: \d+|index|#|level_0", label):
        return False
    numbers = [str(value) for value in values]
    return bool(numbers) and any(numbers == [str(start + index) for index in range(len(numbers))] for start in (0, 1))


def _is_count(label: str, values: Sequence[object]) -> bool:
    """Whether a column in the plural holds whole numbers, which may be numbers of things or their names."""
    given = [str(value).strip() for value in values if not _is_missing(value)]
    return _plain(label) in _PLURALS and bool(given) and all(map(str.isdecimal, given))


def _has_numbers(values: Sequence[object]) -> bool:
    """Whether all values are numbers, or texts that begin as numbers do."""
    given = [value for value in values if not _is_missing(value)]
    return bool(given) and all(
        re.match(r"[-+]?[\d.]", value) if isinstance(value, str) else not isinstance(value, bool | list | Enum)
        for value in given
    )


# Values.


def _is_missing(value: object) -> bool:
    """Whether there is no value: None, an empty text, or what data frames hold for that."""
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or type(value).__name__ in ("NAType", "NaTType")


def _is_unset(value: object) -> bool:
    """Whether there is no value, or it is false, as TorchRec's configs have it where nothing is set."""
    return _is_missing(value) or str(value).strip().casefold() in ("false", "none")


def _value(name: str, value: object, scale: int) -> Any:
    """A value of a column as the field's.

    Raises:
        FormatError: If it is none.
    """
    value = value.item() if hasattr(value, "item") and hasattr(value, "dtype") else value  # numpy's numbers
    if name in _WHOLE:
        return _WHOLE[name].read(read_whole(value, scale, may_have_suffix=name == "num_embeddings"), "")
    if name in _NUMBERS:
        return _NUMBERS[name].read(read_number(value, scale), "")
    if name in _FLAGS:
        return _flag(value)
    if name in _WORDS:
        return _word(name, value)
    if name == "features":
        return _names(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise FormatError(f"must be a text, got {shown(value)}")
    return value.strip()


def _flag(value: object) -> bool:
    word = str(value).strip().casefold()
    if word not in (*_TRUE, *_FALSE):
        raise FormatError(f"must be true or false (or yes or no, 1 or 0), got {shown(value)}")
    return word in _TRUE


def _word(name: str, value: object) -> str:
    known = _WORDS[name]
    value = value.name if isinstance(value, Enum) and not isinstance(value, str) else value  # of TorchRec
    text = str(value) if type(value).__module__ == "torch" or isinstance(value, str) else ""
    plain = _plain(text.rpartition(".")[2])
    if plain not in known:
        raise FormatError(none_of(known.values(), value))
    return known[plain]


def _names(value: object) -> list[str]:
    """Names of features: a list, or a text with `;`, `|` or commas between them."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if isinstance(value, str):
        bare = value.strip()
        value = [part.strip(" '\"") for part in re.split("[;|,]", bare[1:-1] if bare.startswith("[") else bare)]
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value) or not value:
        raise FormatError(f"must be names with ; between them, got {shown(value)}")
    return list(value)


# Rows.


@dataclass(slots=True)
class _Reader:
    """Reads rows, and collects what is wrong with them and what they leave open."""

    columns: Mapping[str, _Column]
    faults: list[FormatError]
    are_features_shared: bool
    defaults: Mapping[str, str]
    empty: dict[str, list[str]] = field(default_factory=dict)
    batch_sizes: dict[int, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    features: dict[str, str] = field(default_factory=dict)

    def table(self, number: int, place: str, row: Sequence[object]) -> EmbeddingTable | None:
        """The table of a row; None if there are faults in it."""
        values, num_before = {}, len(self.faults)
        named = self._name_of(row)
        where = f"{place}, table {shortened(named)}" if named else place
        for name, column in self.columns.items():
            given = row[column.index]
            if _is_missing(given):
                if name in _NEEDED:
                    self._fault(where, column.label, "must have a value")
                self.empty.setdefault(name, []).append(place)
                continue
            try:
                values[name] = _value(name, given, column.scale)
            except FormatError as error:
                self._fault(where, column.label, error.message)
        if "batch_size" in values:
            self.batch_sizes.setdefault(values["batch_size"], place)
        if len(self.faults) > num_before or any(name not in values for name in _NEEDED):
            return None
        return self._checked(_document(number, values, self.defaults), where, place)

    def _name_of(self, row: Sequence[object]) -> str:
        """What a message calls the table: its name, else its feature."""
        for name in ("name", "features"):
            column = self.columns.get(name)
            if column is not None and not _is_missing(row[column.index]):
                return str(row[column.index])
        return ""

    def _checked(self, document: dict[str, Any], where: str, place: str) -> EmbeddingTable | None:
        try:
            table = TABLE.read(document, "")
        except InputError as error:
            path = (error.field or "").rpartition(".")[2]
            path = "features" if path == "name" and (error.field or "").startswith("features") else path
            name = {"alpha": "zipf_alpha"}.get(path, path)
            name = name if name in self.columns else "name" if "name" in self.columns else name
            self._fault(where, self.columns[name].label if name in self.columns else name, error.message)
            return None
        names = [("table", table.name, self.names)]
        if not self.are_features_shared:
            names += [("feature", feature.name, self.features) for feature in table.features]
        for kind, name, seen in names:
            if name in seen:
                other = f"{seen[name]} has it, too" if seen[name] != place else "it is there twice"
                self.faults.append(
                    FormatError(f"must have {kind} names of its own, got {shown(name)}: {other}", field=where)
                )
                return None
            seen[name] = place
        return table

    def _fault(self, where: str, column: str, message: str) -> None:
        self.faults.append(FormatError(message, field=f"{where}, {_label(column)}"))

    def notes(self) -> Iterator[str]:
        """What the rows leave open."""
        absent = [f"{name} is {default}" for name, default in self.defaults.items() if name not in self.columns]
        absent += [] if "zipf_alpha" in self.columns else ["all rows of a table are looked up alike"]
        if absent:
            yield f"the list has no columns for these: {', '.join(absent)}"
        for name, places in self.empty.items():
            default = self.defaults.get(name) or {"zipf_alpha": "rows are looked up alike"}.get(name)
            if default is not None:
                more = f" and {len(places) - _MOST_NAMED} more" if len(places) > _MOST_NAMED else ""
                yield f"{name} is empty in {', '.join(places[:_MOST_NAMED])}{more}: {default} is taken"


def _tables(grid: _Grid | TableSet, chosen: _Chosen, told: Told) -> TableSet:
    """The tables of a list, or those of a `tables.json`, with the caller's batch."""
    if isinstance(grid, TableSet):
        if chosen.columns:
            raise FormatError("must be left out: a text with a schema has no columns to map", field="columns")
        return grid if chosen.batch_size is None else replace(grid, batch_size=chosen.batch_size)
    found = _read(grid, chosen)
    told(found)
    return found.tables


def _read(grid: _Grid, chosen: _Chosen) -> TableList:
    faults: list[FormatError] = []
    columns = _columns_of(grid, chosen, faults)
    faults += grid.faults
    has_all_fields = columns.is_torchrec and any(label in grid.columns for label in LEFT_CONFIG)
    # Of TorchRec's configs, those of sequences alone have no pooling.
    defaults = _DEFAULTS | ({"pooling": str(Pooling.SEQUENCE)} if has_all_fields else {})
    reader = _Reader(columns.by_field, faults, columns.is_torchrec, defaults)
    tables = [reader.table(index, grid.places[index], row) for index, row in enumerate(grid.rows)]
    batch_size, notes = _batch_size(grid, chosen, reader, faults)
    if not grid.rows and not faults:
        faults.append(FormatError("must hold at least one table", field="tables"))
    if faults:
        raise _all_of(faults)
    read, of_features = _told_apart([table for table in tables if table is not None])
    left_out = [f"{label} is left out: it says how weights begin or kernels run" for label in columns.left]
    return TableList(
        tables=TableSet(batch_size=batch_size, tables=read),
        columns=columns.read_as,
        notes=(*notes, *reader.notes(), *of_features, *left_out, *grid.notes),
        is_default_batch=bool(notes),
    )


def _told_apart(tables: Sequence[EmbeddingTable]) -> tuple[tuple[EmbeddingTable, ...], tuple[str, ...]]:
    """Tables whose features have names of their own, as those of TorchRec's models get them; a note of new names."""
    num_tables = Counter(one.name for table in tables for one in table.features)
    shared = [name for name, number in num_tables.items() if number > 1]
    if not shared:
        return tuple(tables), ()
    renamed = [
        tuple(
            replace(one, name=f"{one.name}@{table.name}") if num_tables[one.name] > 1 else one for one in table.features
        )
        for table in tables
    ]
    more = f" and {len(shared) - _MOST_NAMED} more" if len(shared) > _MOST_NAMED else ""
    note = f"features that several tables look up are named FEATURE@TABLE: {', '.join(shared[:_MOST_NAMED])}{more}"
    return tuple(replace(table, features=features) for table, features in zip(tables, renamed, strict=True)), (note,)


def _all_of(faults: Sequence[FormatError]) -> FormatError:
    """One error that holds all faults, or the first ones and how many more there are."""
    if len(faults) == 1:
        return faults[0]
    told = list(faults[:_MOST_FAULTS])
    if len(faults) > _MOST_FAULTS:
        told.append(FormatError(f"{len(faults) - _MOST_FAULTS:,} more faults"))
    return FormatError(f"{len(faults):,} faults: {'; '.join(map(str, told))}", faults=told)


def _batch_size(
    grid: _Grid, chosen: _Chosen, reader: _Reader, faults: list[FormatError]
) -> tuple[int, tuple[str, ...]]:
    """The global batch, and a note where nobody says it."""
    if chosen.batch_size is not None:
        return chosen.batch_size, ()
    if len(reader.batch_sizes) > 1:
        said = ", ".join(f"{size:,} in {place}" for size, place in list(reader.batch_sizes.items())[:_MOST_NAMED])
        faults.append(FormatError(f"must be the same in all rows, the samples of all ranks; got {said}",
                                  field=_label(reader.columns["batch_size"].label)))  # fmt: skip
    said_one = next(iter(reader.batch_sizes), grid.batch_size)
    if said_one is None:
        return DEFAULT_BATCH_SIZE, (
            f"the list says no batch size: {DEFAULT_BATCH_SIZE:,} samples over all ranks are taken; a column "
            "batch_size sets it, or the option batch_size (autoshard import LIST --set batch_size=N)",
        )
    try:
        return BATCH_SIZE.read(said_one, "batch_size"), ()
    except FormatError as error:
        faults.append(error)
        return DEFAULT_BATCH_SIZE, ()


def _document(number: int, values: Mapping[str, Any], defaults: Mapping[str, str]) -> dict[str, Any]:
    """A row as an object of tables.json."""
    features = values.get("features")
    name = values.get("name") or (features[0] if features and len(features) == 1 else f"table_{number}")
    looked_up = {"pooling_factor": 1.0, **{key: values[key] for key in _OF_FEATURES if key in values}}
    alpha = values.get("zipf_alpha")
    return {
        **{key: default for key, default in defaults.items() if key in _OF_TABLES},
        **{key: values[key] for key in _OF_TABLES if key in values},
        "name": name,
        "features": [{"name": feature, **looked_up} for feature in features or [name]],
        "access": {"kind": "uniform"} if alpha is None else {"kind": "zipf", "alpha": alpha},
    }
