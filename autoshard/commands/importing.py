"""`autoshard import`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.commands.arguments import parse_settings, seed_option
from autoshard.commands.options import Needs, command_options
from autoshard.console import JsonOption, emit, progress
from autoshard.core.errors import InvalidOptionError
from autoshard.core.quoting import shown

if TYPE_CHECKING:
    from autoshard.core import TableSet
    from autoshard.formats import TableList

_log = logging.getLogger(__name__)


@command_options()
class ImportOptions:
    """Options of `autoshard import`."""

    source: Annotated[
        str,
        typer.Argument(
            help="A file, a folder, MODULE:FACTORY, FILE.py:MODEL, a command line of DLRM, or the name of bundled "
            "tables.",
            metavar="SRC",
        ),
    ]
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write the tables to.")]
    format: Annotated[
        str | None,
        typer.Option(
            help="`bundled`, `tables-json`, `table-list`, `torchrec`, `hugectr`, `dreamshard`, `nvidia-models`, "
            "`dlrm-command`, `dlrm-datasets`, `tbe-data-config`, `id-batches` or `row-counts`. Left out: recognised "
            "from the source, except torchrec, row-counts, and scripts not named .sh."
        ),
    ] = None
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the format, such as embedding_dim=32."),
    ] = None
    columns: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="COLUMN=FIELD",
            help="The field of a table list's column whose name does not say it, such as size=num_embeddings; "
            "COLUMN= ignores the column. May be repeated.",
        ),
    ] = None
    part: Annotated[
        str | None,
        typer.Option(metavar="K/N", help="Keep the K-th of N parts of the tables; no table is in two parts."),
    ] = None
    num_tables: Annotated[int | None, typer.Option(min=1, help="Draw this many of the tables.")] = None
    seed: Annotated[
        int,
        seed_option("Seed of the draw, with --num-tables."),
        Needs("--num-tables", lambda options: options.num_tables is not None),
    ] = 0
    row_orders: Annotated[
        bool,
        typer.Option(
            "--row-orders",
            help="Also write a file for each table that lists its rows by falling counts, so that planners may cut the "
            "table by access rank. Takes 16 bytes of memory for each row of a table.",
        ),
        Needs("--format row-counts", lambda options: options.format == "row-counts"),
    ] = False
    scale: Annotated[
        int, typer.Option(min=1, help="Divide rows and batch by this, so that a smaller machine can hold the task.")
    ] = 1

    def __post_init__(self) -> None:
        if self.row_orders and self.scale != 1:
            raise InvalidOptionError("cannot be given with --scale, whose tables have other rows", field="--row-orders")


def import_tables(options: ImportOptions, as_json: JsonOption = False) -> None:
    """Makes a tables.json from other formats or from bundled tables, or a smaller task from a larger one.

    Example:
        autoshard import metasyn --num-tables 80 --seed 1 --scale 64 -o tables.json
        autoshard import metasyn --part 1/4 -o quarter.json
        autoshard import fbgemm_t856_bs65536.pt.gz -o tables.json
        autoshard import my_tables.csv --set batch_size=8192 -o tables.json
        autoshard import my_tables.parquet --map size=num_embeddings --map owner= -o tables.json
        autoshard import my_model:make --format torchrec --set batch_size=8192 -o tables.json
        autoshard import hugectr_dlrm.json -o tables.json
        autoshard import config_v3.py:tiny -o tables.json
        autoshard import train_dlrm.sh -o tables.json
        autoshard import table_configs.json -o tables.json
        autoshard import reported_tbes/ --format tbe-data-config -o tables.json
        autoshard import clicks.parquet --set embedding_dim=32 --set batch_size=8192 -o tables.json
        autoshard import counts/ --format row-counts --set num_samples=1000000 --row-orders -o tables.json
    """
    from autoshard.commands.printed import IMPORTED
    from autoshard.evaluation.executable import tables_note
    from autoshard.formats import import_tables as read_source
    from autoshard.formats import write_tables
    from autoshard.formats.imports.count_tables import with_count_orders
    from autoshard.formats.imports.table_lists import log_list
    from autoshard.formats.row_orders import MovedOrders

    with progress("Importing", 1.0) as advance:
        settings = {key: _whole(key, value) for key, value in parse_settings(options.settings or []).items()}
        mapping = _mapping(options.columns or [])
        lists: list[TableList] = []
        found = read_source(
            options.source, options.format, advance=advance, columns=mapping, told=lists.append, **settings
        )
    for read in lists:
        log_list(read)
    dealt = found if options.part is None else found.part(*_part(options.part, len(found.tables)))
    chosen = dealt if options.num_tables is None else dealt.sample(options.num_tables, options.seed)
    made = chosen if options.scale == 1 else chosen.scaled(options.scale)
    orders = MovedOrders(made, Path(options.source).parent, options.output)
    made = with_count_orders(made, options.source, options.output) if options.row_orders else orders.named
    orders.copy()
    if note := tables_note(made):
        _log.warning("%s", note)
    write_tables(made, options.output)
    result = {
        "output": str(options.output),
        "num_tables": len(made.tables),
        "num_tables_in_source": len(found.tables),
        "part": options.part,
        "num_tables_in_part": len(dealt.tables),
        "batch_size": made.batch_size,
        "bytes": sum(table.storage_bytes for table in made.tables),
        "seed": options.seed if options.num_tables is not None else None,
        "scale": options.scale,
        "columns": dict(lists[0].columns) if lists else None,
        "notes": list(lists[0].notes) if lists else [],
    }
    emit(IMPORTED.to_json(result), "\n".join(_lines(found, made, result)), as_json=as_json)


def _mapping(given: list[str]) -> dict[str, str]:
    """Fields by column, of texts COLUMN=FIELD; a column may have `=` in its name."""
    mapping: dict[str, str] = {}
    for one in given:
        column, separator, name = one.rpartition("=")
        if not separator or not column:
            raise InvalidOptionError(f"must be COLUMN=FIELD, or COLUMN= to ignore it, got {shown(one)}", field="--map")
        if column in mapping:
            raise InvalidOptionError(f"{shown(column)} is given twice", field="--map")
        mapping[column] = name.strip()
    return mapping


def _whole(key: str, value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise InvalidOptionError(f"{shown(key)} must be a whole number, got {shown(value)}", field="--set") from None


def _part(text: str, num_tables: int) -> tuple[int, int]:
    """The K and N of K/N."""
    first, slash, last = text.partition("/")
    if slash and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last) <= num_tables:
        return int(first), int(last)
    raise InvalidOptionError(
        f"must be K/N with 1 <= K <= N <= {num_tables} (the tables), got {shown(text)}", field="--part"
    )


def _lines(found: TableSet, made: TableSet, result: dict[str, object]) -> list[str]:
    from autoshard.report.wording import write_bytes

    lines = [
        f"Wrote {result['output']}: {len(made.tables):,} tables, "
        f"{write_bytes(sum(table.storage_bytes for table in made.tables))} with optimizer state, "
        f"global batch {made.batch_size:,}."
    ]
    if result["part"] is not None:
        lines.append(f"Kept part {result['part']} of {len(found.tables):,} tables.")
    if result["seed"] is not None:
        lines.append(
            f"Drew {len(made.tables):,} of {result['num_tables_in_part']:,} tables with seed {result['seed']}."
        )
    if result["scale"] != 1:
        lines.append(
            f"Divided the rows of every table and the batch ({found.batch_size:,}) by {result['scale']}; pooling "
            "factors and lookups per row stay as they were."
        )
    return lines
