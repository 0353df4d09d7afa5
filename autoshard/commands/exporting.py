"""`autoshard export`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoshard.commands.options import Needs, command_options
from autoshard.console import JsonOption, emit, log

if TYPE_CHECKING:
    from autoshard.core import ShardingPlan
    from autoshard.formats.torchrec import ExportedDifference, Places


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
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")]
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
        Needs("--format torchrec", lambda options: options.format is ExportFormat.TORCHREC),
    ] = None


def export(options: ExportOptions, as_json: JsonOption = False) -> None:
    """Turns a plan into TorchRec's, for DistributedModelParallel, or into constraints of TorchRec's planner.

    What TorchRec does otherwise is named; a plan that it cannot say is refused, with a line for every reason.

    Example:
        autoshard export plan.json -o plan.pt
        autoshard export plan.json --model my_model:make -o plan.pt
        autoshard export plan.json --format torchrec-constraints -o constraints.json
    """
    from autoshard.commands.printed import EXPORTED
    from autoshard.formats import read_plan
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
        _write_constraints(plan, options.output)
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
    emit(EXPORTED.to_json(result), "\n".join(_lines(result, found)), as_json=as_json)


def _write_plan(plan: ShardingPlan, places: Places | None, output: Path) -> None:
    from autoshard.formats.torchrec import to_torchrec
    from autoshard.formats.torchrec.stored_plans import write_stored_plan

    write_stored_plan(to_torchrec(plan, places), output)


def _write_constraints(plan: ShardingPlan, output: Path) -> None:
    from autoshard.formats import atomic_write, format_json
    from autoshard.formats.torchrec import parameter_constraints

    document = {
        name: {
            "sharding_types": one.sharding_types,
            "compute_kernels": one.compute_kernels,
            "min_partition": one.min_partition,
            "pooling_factors": one.pooling_factors,
            "feature_names": one.feature_names,
        }
        for name, one in parameter_constraints(plan).items()
    }
    atomic_write(output, format_json(document))


def _plain(value: object) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, bool | int | str) or value is None else str(value)


def _lines(result: dict[str, Any], found: tuple[ExportedDifference, ...]) -> list[str]:
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
