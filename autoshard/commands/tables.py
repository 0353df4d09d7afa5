"""`autoshard list`, `import` and `export`: what there is to plan with, and other projects' files."""

from __future__ import annotations

import logging
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoshard.commands.arguments import parse_settings, seed_option, written_file
from autoshard.commands.options import Needs, command_options
from autoshard.console import JsonOption, emit, log, progress
from autoshard.core.errors import InvalidOptionError
from autoshard.core.quoting import shown
from autoshard.table import Column, Table, texts

if TYPE_CHECKING:
    from autoshard.core import ShardingPlan, TableSet
    from autoshard.formats import TableList
    from autoshard.formats.torchrec import ExportedDifference, Places
    from autoshard.planners.registry import OptionHelp


class NameKind(StrEnum):
    """Kinds of names that can be listed."""

    TABLES = "tables"
    TOPOLOGIES = "topologies"
    PLANNERS = "planners"


def list_names(
    what: Annotated[NameKind, typer.Argument(help="What to list.", metavar="WHAT")],
    as_json: JsonOption = False,
) -> None:
    """Lists bundled tables, bundled topologies, or planners with their options.

    Example:
        autoshard list tables
        autoshard list planners --json
    """
    if what is NameKind.PLANNERS:
        _list_planners(as_json)
    else:
        _list_bundled(what, as_json)


def _list_bundled(what: NameKind, as_json: bool) -> None:
    from autoshard.formats import bundled_table_sets, bundled_topologies

    known = bundled_table_sets() if what is NameKind.TABLES else bundled_topologies()
    table = Table(columns=texts("name", "description"), rows=tuple(known.items()))
    emit({str(what): table.records()}, table, as_json=as_json, kind="catalogue")


def _list_planners(as_json: bool) -> None:
    from autoshard.planners.registry import describe_planners

    described = describe_planners()
    table = Table.of(
        described,
        [
            ("planner", lambda planner: planner.name),
            (Column("what it does"), lambda planner: planner.summary),
            (Column("options (--set KEY=VALUE)"), lambda planner: "\n".join(map(_option, planner.options))),
        ],
    )
    listed = [
        {
            "name": planner.name,
            "summary": planner.summary,
            "options": [asdict(option) for option in planner.options],
        }
        for planner in described
    ]
    emit({"planners": listed}, table, as_json=as_json, kind="catalogue")


def _option(option: OptionHelp) -> str:
    """An option with its default: lists of names can be wrapped, and are read with spaces, too."""
    return f"{option.name}={str(option.default).replace(',', ', ')}  {option.help}"


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
    output: Annotated[Path, written_file("--output", "-o", help="File to write the tables to.")]
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
        _ = self.numbers_of_part

    @property
    def numbers_of_part(self) -> tuple[int, int] | None:
        """The K and N of `--part`; None for all tables."""
        if self.part is None:
            return None
        first, slash, last = self.part.partition("/")
        if slash and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last):
            return int(first), int(last)
        raise InvalidOptionError(f"must be K/N with 1 <= K <= N, got {shown(self.part)}", field="--part")


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
    from autoshard.evaluation.executable import tables_note
    from autoshard.formats import import_tables as read_source
    from autoshard.formats import write_tables
    from autoshard.formats.imports.count_tables import with_count_orders
    from autoshard.formats.imports.table_lists import log_list
    from autoshard.formats.row_orders import MovedOrders

    with progress("Importing", 1.0) as advance:
        settings = {key: _whole(key, value) for key, value in parse_settings(options.settings).items()}
        mapping = _mapping(options.columns or [])
        lists: list[TableList] = []
        found = read_source(
            options.source, options.format, advance=advance, columns=mapping, told=lists.append, **settings
        )
    for read in lists:
        log_list(read)
    part, num_found = options.numbers_of_part, len(found.tables)
    if part is not None and part[1] > num_found:
        raise InvalidOptionError(f"must have at most {num_found} parts, the tables, got {options.part}", field="--part")
    dealt = found if part is None else found.part(*part)
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
        "num_tables_in_source": num_found,
        "part": options.part,
        "num_tables_in_part": len(dealt.tables),
        "batch_size": made.batch_size,
        "bytes": made.storage_bytes,
        "seed": options.seed if options.num_tables is not None else None,
        "scale": options.scale,
        "columns": dict(lists[0].columns) if lists else None,
        "notes": list(lists[0].notes) if lists else [],
    }
    emit(result, "\n".join(_imported_lines(found, made, result)), as_json=as_json, kind="imported")


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


def _imported_lines(found: TableSet, made: TableSet, result: dict[str, object]) -> list[str]:
    from autoshard.core.quoting import write_bytes

    lines = [
        f"Wrote {result['output']}: {len(made.tables):,} tables, "
        f"{write_bytes(made.storage_bytes)} with optimizer state, "
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


class ExportFormat(StrEnum):
    """Formats that plans are exported to."""

    TORCHREC = "torchrec"
    """TorchRec's `ShardingPlan`, as `torch.save` writes it."""
    CONSTRAINTS = "torchrec-constraints"
    """Fields of `ParameterConstraints` by table, as JSON."""


@command_options()
class ExportOptions:
    """Options of `autoshard export`."""

    plan: Annotated[Path, typer.Argument(help="Plan to export.", metavar="PLAN")]
    output: Annotated[Path, written_file("--output", "-o", help="File to write.")]
    format: Annotated[
        ExportFormat,
        typer.Option(
            help="`torchrec`: its ShardingPlan, as torch.save writes it; `torchrec-constraints`: fields of its "
            "ParameterConstraints by table, as JSON."
        ),
    ] = ExportFormat.TORCHREC
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY",
            help="The model that the tables were imported from, which says where they are in it. Left out: pooled "
            "tables are in `embedding_bag_collection`, sequence tables in `embedding_collection`.",
        ),
    ] = None


def export(options: ExportOptions, as_json: JsonOption = False) -> None:
    """Turns a plan into TorchRec's, for DistributedModelParallel, or into constraints of TorchRec's planner.

    What TorchRec does otherwise is named; a plan that it cannot say is refused, with a line for every reason.

    Example:
        autoshard export plan.json -o plan.pt
        autoshard export plan.json --model my_model:make -o plan.pt
        autoshard export plan.json --format torchrec-constraints -o constraints.json
    """
    from autoshard.formats import read_plan
    from autoshard.formats.documents.fields import from_source
    from autoshard.formats.torchrec import changes, refusals
    from autoshard.formats.torchrec.child import read_factory

    plan = read_plan(options.plan)
    places = None if options.model is None else read_factory(options.model).places
    refused = refusals(plan, places)
    for error in refused[1:]:
        log(f"{options.plan}: {error}")
    if refused:
        raise refused[0].in_source(str(options.plan))
    if options.format is ExportFormat.CONSTRAINTS:
        from_source(str(options.plan), lambda: _write_constraints(plan, places, options.output))
    else:
        _write_plan(plan, places, options.output)
    found = changes(plan)
    result = {
        "output": str(options.output),
        "format": str(options.format),
        "num_tables": len(plan.tables.tables),
        "changes": [
            {"field": one.field, "table": one.table, "planned": _plain(one.planned), "executed": _plain(one.executed)}
            for one in found
        ],
    }
    emit(result, "\n".join(_exported_lines(result, found)), as_json=as_json, kind="exported")


def _write_plan(plan: ShardingPlan, places: Places | None, output: Path) -> None:
    from autoshard.formats.torchrec import to_torchrec
    from autoshard.formats.torchrec.stored_plans import write_stored_plan

    write_stored_plan(to_torchrec(plan, places), output)


def _write_constraints(plan: ShardingPlan, places: Places | None, output: Path) -> None:
    from autoshard.formats import atomic_write, format_json
    from autoshard.formats.torchrec import parameter_constraints

    document = {
        name: {
            "sharding_types": one.sharding_types,
            "compute_kernels": one.compute_kernels,
            "min_partition": one.min_partition,
            "pooling_factors": one.pooling_factors,
            "cache_params": _cache_fields(one.cache_params),
            "feature_names": one.feature_names,
            "output_dtype": one.output_dtype.name if one.output_dtype else None,
        }
        for name, one in parameter_constraints(plan, places).items()
    }
    atomic_write(output, format_json(document))


def _cache_fields(params: Any) -> dict[str, object] | None:
    """Fields of TorchRec's `CacheParams`, members of enumerations by their names; None without a cache."""
    if params is None:
        return None
    return {
        "algorithm": params.algorithm.name,
        "load_factor": params.load_factor,
        "precision": params.precision.name if params.precision else None,
    }


def _plain(value: object) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, bool | int | str) or value is None else str(value)


def _exported_lines(result: dict[str, Any], found: tuple[ExportedDifference, ...]) -> list[str]:
    lines = [f"Wrote {result['output']}: {result['num_tables']:,} tables."]
    kinds: dict[str, list[ExportedDifference]] = {}
    for one in found:
        kinds.setdefault(one.field.partition(".")[2], []).append(one)
    for kind, same in kinds.items():
        first = same[0]
        example = f"{_plain(first.planned)} is {_plain(first.executed)} in {first.table}" if kind != "replicas" else ""
        lines.append(
            f"TorchRec has another {kind} for {len(same):,} shards" + (f", such as: {example}." if example else ".")
        )
    return lines
