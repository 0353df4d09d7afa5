"""Arguments that several commands take, and how they are read."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoshard.commands.options import command_options
from autoshard.core.accepted import MAX_SEED
from autoshard.core.choices import Device, Overlap, Risk
from autoshard.core.errors import InputError, InvalidOptionError
from autoshard.core.quoting import shown
from autoshard.formats.files import check_writable
from autoshard.formats.stores.remote_folders import folder_of

if TYPE_CHECKING:
    from autoshard.client import Client
    from autoshard.core import CostModels, Payload, ShardingPlan, TableSet, Topology
    from autoshard.formats.row_orders import MovedOrders
    from autoshard.planners.planner import PlanRequest


def completed_tables(incomplete: str) -> list[tuple[str, str]]:
    """Names of bundled tables that begin so, with their descriptions, for shells to complete."""
    from autoshard.formats import bundled_table_sets

    return [item for item in bundled_table_sets().items() if item[0].startswith(incomplete)]


def completed_topologies(incomplete: str) -> list[tuple[str, str]]:
    """Names of bundled topologies likewise; of several with commas between them, the last."""
    from autoshard.formats import bundled_topologies

    return _last_completed(incomplete, bundled_topologies())


def completed_planners(incomplete: str) -> list[tuple[str, str]]:
    """Names of planners likewise."""
    from autoshard.planners.registry import describe_planners

    return _last_completed(incomplete, {planner.name: planner.summary for planner in describe_planners()})


def _last_completed(incomplete: str, known: Mapping[str, str]) -> list[tuple[str, str]]:
    before, comma, begun = incomplete.rpartition(",")
    return [(f"{before}{comma}{name}", about) for name, about in known.items() if name.startswith(begun)]


def seed_option(help: str, **settings: Any) -> Any:
    """The option `--seed`, of every command that draws."""
    return typer.Option(min=0, max=MAX_SEED, help=help, **settings)


def positive_option(help: str, **settings: Any) -> Any:
    """An option that takes finite numbers above 0."""
    return typer.Option(callback=_positive, metavar="<float above 0>", help=help, **settings)


def share_option(help: str, **settings: Any) -> Any:
    """An option that takes a share above 0 and up to 1."""
    return typer.Option(callback=_share, metavar="<float above 0 to 1>", help=help, **settings)


def _positive(value: float | None) -> float | None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise typer.BadParameter(f"must be a number above 0, got {value:g}")
    return value


def _share(value: float | None) -> float | None:
    if value is not None and not 0 < value <= 1:
        raise typer.BadParameter(f"must be a number above 0 and up to 1, got {value:g}")
    return value


def registry_folder(value: str | Path) -> Path:
    """Reads the folder or address of a registry that is to be written to.

    Raises:
        typer.BadParameter: If it is neither.
    """
    try:
        folder = value if isinstance(value, Path) else folder_of(value)
    except InputError as error:
        raise typer.BadParameter(str(error)) from error
    if folder.is_file():
        raise typer.BadParameter(f"Directory {str(value)!r} is a file.")
    return folder


def existing_registry(value: str | Path) -> Path:
    """Reads the folder or address of a registry that is read.

    Raises:
        typer.BadParameter: If it is neither, or the folder is not there.
    """
    folder = registry_folder(value)
    if not folder.exists():
        raise typer.BadParameter(f"Directory {str(value)!r} does not exist.")
    return folder


TablesArgument = Annotated[
    str,
    typer.Argument(
        help="A tables.json, a table list (CSV, TSV, JSON, YAML or Parquet with a row per table), or the name of "
        "bundled tables (`autoshard list tables`).",
        metavar="TABLES",
        autocompletion=completed_tables,
    ),
]
TopologyOption = Annotated[
    str,
    typer.Option(
        help="A topology.json, or the name of a bundled one (`autoshard list topologies`).",
        autocompletion=completed_topologies,
    ),
]
RegistryOption = Annotated[
    Path | None,
    typer.Option(
        parser=existing_registry,
        metavar="<path or address>",
        show_default="$AUTOSHARD_REGISTRY or ~/.local/share/autoshard/registry",
        help="Folder of trained models, here or on object storage (`s3://bucket/models`). "
        "Devices without a model there are priced by the one that comes with "
        "autoshard, or else analytically.",
    ),
]
SettingsOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of the planner; may be repeated.")
]
PayloadOption = Annotated[
    str,
    typer.Option(
        metavar="FORMAT[/FORMAT]",
        help="Number format in which embeddings and their gradients travel: fp32, fp16, bf16 or int8; or one for each, "
        "FORWARD/BACKWARD, such as fp16/bf16.",
    ),
]
OverlapOption = Annotated[
    Overlap | None,
    typer.Option(help="Which parts of a step run at the same time.", show_default="that of the step model, or none"),
]
DeviceOption = Annotated[
    Device, typer.Option(help="Where to measure: `auto` (a GPU if there is one), `cpu` or `cuda`.")
]
AcceleratorOption = Annotated[
    Device,
    typer.Option(
        help="Where to train: `auto` (a GPU for each process if there are enough, else the CPU), `cpu` or `cuda`. "
        "Plans are for --device, wherever training runs."
    ),
]


def _written(value: Path | None) -> Path | None:
    if value is not None:
        check_writable(value)
    return value


def written_file(*names: str, help: str, **settings: Any) -> Any:
    """An option of a file that is written at the end, which is refused before any work where none can be written."""
    return typer.Option(*names, callback=_written, help=help, **settings)


def _image(value: Path | None) -> Path | None:
    if value is None:
        return None
    check_writable(value)
    from autoshard.report.images import IMAGE_SUFFIXES

    if value.suffix not in IMAGE_SUFFIXES:
        raise typer.BadParameter(f"must end in {' or '.join(IMAGE_SUFFIXES)}, got {shown(value.name)}")
    return value


def image_option(help: str) -> Any:
    """The option `--image`, to be used in a parameter's annotation."""
    return typer.Option(callback=_image, metavar="FILE.svg|FILE.png", help=help)


ImageOption = Annotated[
    Path | None,
    image_option("Also draw the page's pictures; those after the first are put beside it, as FILE-NAME."),
]
OutputOption = Annotated[Path | None, written_file("--output", "-o", help="File to write the plan to.")]
PageOption = Annotated[
    Path | None, written_file("--output", "-o", "--html", help="Also write a page that opens without a network.")
]
HtmlOption = Annotated[Path | None, written_file(help="Also write a page that opens without a network.")]


@command_options()
class PricingOptions:
    """Options of the models that price plans."""

    registry: RegistryOption = None
    risk: Annotated[Risk, typer.Option(help="Plan for the mean or the 95th percentile of predicted times.")] = Risk.MEAN


@command_options()
class PlanPricingOptions:
    """Options of the models that price a plan for what it was made for."""

    registry: RegistryOption = None
    risk: Annotated[
        Risk | None,
        typer.Option(
            help="Price by the mean or the 95th percentile of predicted times.", show_default="as the plan was made"
        ),
    ] = None

    def risk_of(self, plan: ShardingPlan) -> Risk:
        """By what a plan is priced."""
        return self.risk or plan.risk

    def costs_of(self, plan: ShardingPlan) -> CostModels:
        """The models that price a plan.

        Raises:
            ModelError: If one is there but damaged.
        """
        from autoshard.planning import plan_costs

        return plan_costs(plan, self.registry, risk=self.risk_of(plan))


@command_options()
class SearchOptions:
    """Options of searches, and of the models that price plans."""

    time_limit: Annotated[float, positive_option("Seconds for planners that improve their plan until time is up.")] = (
        1.0
    )
    seed: Annotated[int, seed_option("Seed of random choices. Same seed, same plan, unless time runs out.")] = 0
    payload: PayloadOption = "fp32"
    assume_row_order: Annotated[
        bool,
        typer.Option(
            "--assume-row-order",
            help="Also cut tables by access rank that do not say which rows are accessed most. The plan names them.",
        ),
    ] = False
    pricing: PricingOptions

    def __post_init__(self) -> None:
        _ = self.parsed_payload

    @property
    def parsed_payload(self) -> Payload:
        """The number formats on the wire.

        Raises:
            InvalidOptionError: If the text names none.
        """
        from autoshard.core import Payload

        return Payload.parse(self.payload, "--payload")

    @property
    def local_options(self) -> Mapping[str, object]:
        """Options that a service does not take, by name."""
        return {"--registry": self.pricing.registry, "--assume-row-order": self.assume_row_order}

    def load_tables(self, tables: str) -> TableSet:
        """The tables of a file, or bundled ones.

        Raises:
            InputError: If they are not there, or make no sense.
        """
        from autoshard.formats import load_tables

        found = load_tables(tables)
        return found.assuming_orders() if self.assume_row_order else found

    def request(self, tables: str, topology: str, options: Mapping[str, object] | None = None) -> PlanRequest:
        """One planning task, whose time begins now.

        Args:
            tables: A file with tables, or the name of bundled ones.
            topology: Where to place them, alike.
            options: The planner's own options.

        Raises:
            InputError: If the tables or the topology are not there, or make no sense.
            ModelError: If a trained model is there but damaged.
        """
        from autoshard.formats import load_topology
        from autoshard.planners.planner import PlanRequest
        from autoshard.planning import make_costs

        started_s = time.perf_counter()
        payload = self.parsed_payload
        task, machine = self.load_tables(tables), load_topology(topology)
        return PlanRequest(
            tables=task,
            topology=machine,
            costs=make_costs(task, machine, self.pricing.registry, risk=self.pricing.risk),
            seed=self.seed,
            time_limit_s=self.time_limit,
            started_s=started_s,
            options=options or {},
            registry=self.pricing.registry,
            payload=payload,
        )


def check_planner(name: str, settings: Mapping[str, object], server: str | None) -> None:
    """Refuses a planner that is not there, and options that it does not take; a service has planners of its own.

    Raises:
        InputError: If there is none of the name, or an option is unknown or out of range.
    """
    from autoshard.planners.planner import parse_options
    from autoshard.planners.registry import get_planner

    if server is None:
        parse_options(get_planner(name).options_type, settings)


def parse_settings(settings: Sequence[str] | None) -> dict[str, object]:
    """Reads `KEY=VALUE` texts.

    Raises:
        InvalidOptionError: If one has no `=`, or a key is given twice.
    """
    parsed: dict[str, object] = {}
    for setting in settings or ():
        key, separator, value = setting.partition("=")
        if not separator or not key:
            raise InvalidOptionError(f"must be KEY=VALUE, got {shown(setting)}", field="--set")
        if key in parsed:
            raise InvalidOptionError(f"{shown(key)} is given twice", field="--set")
        parsed[key] = value
    return parsed


#: Holds the secret of a key of the service.
KEY_VARIABLE = "AUTOSHARD_API_KEY"


def _address(value: str | None) -> str | None:
    if value is not None:
        from autoshard.client.endpoints import check_address

        check_address(value)
    return value


def server_option(help: str) -> Any:
    """An option that takes the address of a service."""
    return typer.Option(callback=_address, metavar="URL", help=f"{help} ${KEY_VARIABLE} holds a key of it.")


ServerOption = Annotated[str | None, server_option("Let a service (`autoshard serve`) do the work, with its models.")]


def open_client(server: str) -> Client:
    """A client of the service at an address."""
    from autoshard.client import Client

    return Client(server, key=os.environ.get(KEY_VARIABLE))


def refuse_local(server: str | None, given: Mapping[str, object]) -> None:
    """Refuses options that only this machine can follow.

    Args:
        server: The service's address; None for this machine.
        given: Values by option; those that are not given are None or false.

    Raises:
        InvalidOptionError: If one is given beside a server.
    """
    for option, value in given.items():
        if server is not None and value not in (None, False):
            raise InvalidOptionError("cannot be given with --server", field=option)


def tables_to_send(tables: str, target: Path | None) -> tuple[TableSet | str, MovedOrders]:
    """Tables of a file, or the name of bundled ones, which the service has too; and their row orders.

    Args:
        tables: The file, or the name.
        target: The file that the plan is written to, which names copies of the row orders.

    Raises:
        InputError: If they are not there, or make no sense.
    """
    from autoshard.formats import bundled_table_sets, load_tables
    from autoshard.formats.row_orders import MovedOrders

    orders = MovedOrders(load_tables(tables), Path(tables).parent, target)
    return tables if tables in bundled_table_sets() else orders.named, orders


def topology_to_send(topology: str) -> Topology | str:
    """A topology of a file, or the name of a bundled one, alike.

    Raises:
        InputError: As `tables_to_send`.
    """
    from autoshard.formats import bundled_topology, load_topology

    found = load_topology(topology)
    return topology if bundled_topology(topology) == found else found
