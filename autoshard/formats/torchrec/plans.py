"""Plans as TorchRec's `ShardingPlan`, and back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from autoshard.core import EmbeddingTable, Payload, PlacedShard, ShardingPlan, TableSet, Topology
from autoshard.core.errors import InvalidPlanError
from autoshard.core.machine import device_family
from autoshard.core.quoting import shown
from autoshard.formats.torchrec.objects import (
    CACHE_LOAD_FACTOR,
    KERNEL_SETTINGS,
    PAYLOADS,
    cache_params,
    output_dtype,
    parameter_sharding,
    payload_of,
    table_sharding,
    unsized_cache,
)
from autoshard.formats.torchrec.places import Place, Places, usual_places
from autoshard.formats.torchrec.sharding import (
    NotInTorchRecError,
    TableSharding,
    TorchRecType,
    fault_of,
    fault_of_means,
    refused,
    renamed,
    sharding_of,
    shards_of,
)

_log = logging.getLogger(__name__)

#: Kinds of devices whose shards TorchRec places on the host.
_HOST_DEVICES = ("cpu",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedDifference:
    """A field of a shard that TorchRec has another value for. None of them changes what is computed.

    Attributes:
        field: Field of the plan, such as `shards[3].split`.
        table: The shard's table.
        planned: Its value in the plan.
        executed: What TorchRec does.
    """

    field: str
    table: str
    planned: object
    executed: object


def shardings_of(
    plan: ShardingPlan,
    *,
    device_type: str | None = None,
    sharding_types: Mapping[str, Collection[TorchRecType]] | None = None,
) -> dict[str, TableSharding]:
    """What TorchRec's plan says of each table, by name.

    Args:
        plan: The plan.
        device_type: `cuda` or `cpu`; None for that of the plan's topology.
        sharding_types: Sharding types by table that its entry may have; None for any.

    Raises:
        NotInTorchRecError: At the first part of the plan that TorchRec cannot say, or would not compute rightly.
    """
    check_whole(plan)
    kinds = sharding_types or {}
    return {name: _sharding(plan, held, device_type, kinds.get(name)) for name, held in _held(plan).items()}


def check_whole(plan: ShardingPlan) -> None:
    """Refuses what concerns all tables of a plan: replica groups, and number formats on the wire other than `PAYLOADS`.

    Raises:
        NotInTorchRecError: If TorchRec's plans do not have it.
    """
    if plan.replica_groups.num_groups > 1 or plan.replica_groups.moment_scale != 1:
        raise refused("has one replica group and moments as they are", "replica_groups")
    if plan.payload not in PAYLOADS:
        sent = ", ".join(map(str, PAYLOADS))
        raise refused(f"sends embeddings and gradients alike, in {sent}; not in {plan.payload}", "payload")


def refusals(plan: ShardingPlan, places: Places | None = None) -> tuple[NotInTorchRecError, ...]:
    """Everything of a plan that TorchRec cannot say, or would not compute rightly, table by table; empty if nothing.

    Args:
        plan: The plan.
        places: Where its tables are in the model; None for `usual_places`.

    Raises:
        InvalidPlanError: If a table has no place in the model.
    """
    found = []
    checks: list[Callable[[], object]] = [partial(check_whole, plan)]
    checks += [partial(_sharding, plan, held) for held in _held(plan).values()]
    for check in checks:
        try:
            check()
        except NotInTorchRecError as error:
            found.append(error)
    if not found:
        try:
            _check_modules(plan, shardings_of(plan), _places_of(plan.tables, places))
        except NotInTorchRecError as error:
            found.append(error)
    return tuple(found)


def to_torchrec(
    plan: ShardingPlan,
    places: Places | None = None,
    *,
    device_type: str | None = None,
    sharding_types: Mapping[str, Collection[TorchRecType]] | None = None,
) -> Any:
    """TorchRec's `ShardingPlan` of a plan, for `DistributedModelParallel`.

    TorchRec carries out some things otherwise than the plan has them, see `changes`. All tables have the number format
    on the wire as `output_dtype`.

    Args:
        plan: The plan.
        places: Where its tables are in the model; None for `usual_places`.
        device_type: `cuda` or `cpu`; None for that of the plan's topology.
        sharding_types: Sharding types by table that its entry may have; None for any.

    Raises:
        NotInTorchRecError: At the first part of the plan that TorchRec cannot say, or would not compute rightly.
        InvalidPlanError: If a table has no place in the model.
    """
    from torchrec.distributed.types import EmbeddingModuleShardingPlan
    from torchrec.distributed.types import ShardingPlan as TorchRecPlan

    found = _places_of(plan.tables, places)
    shardings = shardings_of(plan, device_type=device_type, sharding_types=sharding_types)
    _check_modules(plan, shardings, found)
    modules: dict[str, Any] = {}
    for table in plan.tables.tables:
        place = found[table.name]
        modules.setdefault(place.path, EmbeddingModuleShardingPlan())[place.name] = parameter_sharding(
            shardings[table.name],
            device_type=device_type or device_type_of(plan.topology),
            node_size=plan.topology.local_world_size,
            payload=plan.payload,
        )
    return TorchRecPlan(plan=modules)


def from_torchrec(
    torchrec_plan: Any, tables: TableSet, topology: Topology, places: Places | None = None
) -> ShardingPlan:
    """A plan that says what TorchRec's `ShardingPlan` says; without prediction or provenance.

    Embeddings that are all given out in one number format travel in it. Settings of kernels that plans do not hold, and
    caches whose size is TorchRec's default, go to the log, a warning each.

    Args:
        torchrec_plan: TorchRec's plan: of its planner, of `to_torchrec`, or of a file (`read_stored_plan`).
        tables: The tables that it is for.
        topology: The ranks that it is for.
        places: Where the tables are in the model; None to find them by their names, which have the path of the module
            before them or are used once.

    Raises:
        NotInTorchRecError: If it holds a table as plans cannot say, or in a way that TorchRec trains wrongly.
        InvalidPlanError: If it lacks a table, has one more, or contradicts itself.
    """
    entries = {
        Place(path, name): entry for path, module in torchrec_plan.plan.items() for name, entry in module.items()
    }
    found = _found_places(entries, tables) if places is None else places
    left = dict(entries)
    shards: list[PlacedShard] = []
    for table in tables.tables:
        place = found[table.name]
        entry = left.pop(place, None)
        if entry is None:
            raise InvalidPlanError(f"has no table {shown(table.name)}", field=_field(place))
        sharding = table_sharding(
            entry, table.num_embeddings, table.embedding_dim, world_size=topology.world_size, field=_field(place)
        )
        shards += shards_of(table, sharding, world_size=topology.world_size, field=_field(place))
    if left:
        raise InvalidPlanError("is none of the tables", field=_field(min(left)))
    payload = payload_of(one for one in entries.values() if one.sharding_type != TorchRecType.DATA_PARALLEL)
    for note in _notes(entries, payload):
        _log.warning("%s", note)
    return ShardingPlan(tables=tables, topology=topology, shards=tuple(shards), payload=payload or Payload())


def as_executed(
    plan: ShardingPlan, *, sharding_types: Mapping[str, Collection[TorchRecType]] | None = None
) -> ShardingPlan:
    """The plan as TorchRec carries it out: rows in blocks, sums of rows that all ranks hold by reduce-scatter.

    Args:
        plan: The plan.
        sharding_types: Sharding types by table that its entry may have; None for any.

    Raises:
        NotInTorchRecError: At the first part of the plan that TorchRec cannot say, or would not compute rightly.
    """
    shardings = shardings_of(plan, sharding_types=sharding_types)
    shards: list[PlacedShard] = []
    for table in plan.tables.tables:
        shards += shards_of(
            table, shardings[table.name], world_size=plan.topology.world_size, field=f"tables.{table.name}"
        )
    return replace(plan, shards=tuple(shards), row_orders={}, predicted=None)


def changes(plan: ShardingPlan) -> tuple[ExportedDifference, ...]:
    """What TorchRec carries out otherwise than a plan has it, shard by shard.

    Raises:
        NotInTorchRecError: At the first part of the plan that TorchRec cannot say.
    """
    executed = {(one.shard.table.name, one.shard.columns): one for one in as_executed(plan).shards}
    found = []
    for index, placed in enumerate(plan.shards):
        other = executed[placed.shard.table.name, placed.shard.columns]
        for field in fields(PlacedShard):
            before, after = getattr(placed, field.name), getattr(other, field.name)
            if field.name == "shard":
                before, after = placed.shard.rows.by, other.shard.rows.by
            if before != after:
                found.append(
                    ExportedDifference(
                        field=f"shards[{index}].{'rows.by' if field.name == 'shard' else field.name}",
                        table=placed.shard.table.name,
                        planned=before,
                        executed=after,
                    )
                )
    return tuple(found)


def parameter_constraints(plan: ShardingPlan, places: Places | None = None) -> dict[str, Any]:
    """`ParameterConstraints` by which TorchRec's planner holds every table as a plan does, ranks left to it.

    They are by the tables' names in their modules, as TorchRec's planner looks them up.

    Args:
        plan: The plan.
        places: Where its tables are in the model; None for `usual_places`.

    Raises:
        NotInTorchRecError: At the first part of the plan that TorchRec cannot say, or would not compute rightly; or if
            tables of one name are held differently.
        InvalidPlanError: If a table has no place in the model.
    """
    from torchrec.distributed.planner.types import ParameterConstraints

    shardings = shardings_of(plan)
    found = _places_of(plan.tables, places)
    _check_modules(plan, shardings, found)
    made: dict[str, Any] = {}
    for table in plan.tables.tables:
        sharding = shardings[table.name]
        first, last = sharding.blocks[0].columns
        is_cut = sharding.sharding_type in (TorchRecType.COLUMN_WISE, TorchRecType.GRID_SHARD)
        one = ParameterConstraints(
            sharding_types=[sharding.sharding_type.value],
            compute_kernels=[sharding.kernel.value],
            min_partition=last - first if is_cut else None,
            pooling_factors=[feature.pooling_factor for feature in table.features],
            cache_params=cache_params(sharding),
            feature_names=[table.name_in_batches(feature.name) for feature in table.features],
            output_dtype=output_dtype(plan.payload),
        )
        # Names in TorchRec have no dots: without places, a dot is behind the path that `read_model` puts before a name.
        name = found[table.name].name.rpartition(".")[2]
        other = made.setdefault(name, one)
        if other.feature_names != one.feature_names:  # which TorchRec's planner does not read
            other.feature_names = one.feature_names = None
        if other != one:
            raise refused(
                f"has the same constraints for all tables of a name; those of {shown(name)} would differ",
                f"tables.{table.name}",
            )
    return made


def device_type_of(topology: Topology) -> str:
    """TorchRec's `cpu` or `cuda` for the ranks of a topology."""
    return "cpu" if device_family(topology.device) in _HOST_DEVICES else "cuda"


def _held(plan: ShardingPlan) -> dict[str, list[int]]:
    """Places in the plan of each table's shards."""
    held: dict[str, list[int]] = {table.name: [] for table in plan.tables.tables}
    for index, placed in enumerate(plan.shards):
        held[placed.shard.table.name].append(index)
    return held


def _sharding(
    plan: ShardingPlan,
    held: Sequence[int],
    device_type: str | None = None,
    kinds: Collection[TorchRecType] | None = None,
) -> TableSharding:
    topology, field = plan.topology, f"shards[{held[0]}]"
    shards, table = [plan.shards[index] for index in held], plan.shards[held[0]].shard.table
    world_size, node_size = topology.world_size, topology.local_world_size
    sharding = sharding_of(shards, world_size=world_size, node_size=node_size, field=field)
    if kinds is not None:
        named = renamed(sharding, kinds, world_size=world_size, node_size=node_size)
        if named is None:
            accepted = ", ".join(sorted(kinds))
            raise refused(f"may hold {shown(table.name)} as {accepted}; it is {sharding.sharding_type}", field)
        sharding = named
    fault = fault_of(
        table,
        sharding.sharding_type,
        device_type=device_type or device_type_of(topology),
        world_size=world_size,
        node_size=node_size,
    )
    if fault is not None:
        raise refused(fault, field)
    return sharding


def _check_modules(plan: ShardingPlan, shardings: Mapping[str, TableSharding], places: Places) -> None:
    """Refuses what TorchRec would not compute rightly in a module, whose tables each are right alone."""
    modules: dict[str, dict[EmbeddingTable, TorchRecType]] = {}
    for table in plan.tables.tables:
        modules.setdefault(places[table.name].path, {})[table] = shardings[table.name].sharding_type
    for kinds in modules.values():
        fault = fault_of_means(kinds)
        if fault is not None:
            table, reason = fault
            raise refused(reason, f"shards[{_held(plan)[table.name][0]}]")


def _places_of(tables: TableSet, places: Places | None) -> Places:
    """The places, each table's among them; `usual_places` for None."""
    found = usual_places(tables) if places is None else places
    for table in tables.tables:
        if table.name not in found:
            raise InvalidPlanError("is no table of the model", field=f"tables.{table.name}")
    return found


def _found_places(entries: Mapping[Place, Any], tables: TableSet) -> Places:
    """Where tables are by their names: with the path of the module before it, as `read_model` has it, or alone."""
    by_path = {_field(place): place for place in entries}
    by_name: dict[str, list[Place]] = {}
    for place in entries:
        by_name.setdefault(place.name, []).append(place)
    found = {}
    for table in tables.tables:
        named = [by_path[table.name]] if table.name in by_path else by_name.get(table.name, [Place("", table.name)])
        if len(named) > 1:
            raise InvalidPlanError(
                f"has two tables {shown(table.name)}, in {shown(named[0].path)} and {shown(named[1].path)}; give them "
                f"the names {_field(named[0])} and {_field(named[1])}, as an import of the model does"
            )
        [found[table.name]] = named
    return found


def _notes(entries: Mapping[Place, Any], payload: Payload | None) -> Iterator[str]:
    """What of TorchRec's plan a plan does not hold, or takes as TorchRec's default."""
    unsized = [_field(place) for place, entry in entries.items() if unsized_cache(entry)]
    if unsized:
        yield (
            f"caches of {', '.join(unsized[:8])} have no load factor: they are taken to hold TorchRec's default, "
            f"{CACHE_LOAD_FACTOR:.0%} of the rows"
        )
    for setting in KERNEL_SETTINGS:
        if setting == "output_dtype" and payload is not None:
            continue
        names = [_field(place) for place, entry in entries.items() if getattr(entry, setting, None) is not None]
        if names:
            yield f"{setting} of {', '.join(names[:8])} is left out, which plans do not hold"


def _field(place: Place) -> str:
    return f"{place.path}.{place.name}" if place.path else place.name
