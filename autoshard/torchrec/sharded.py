"""Models of TorchRec whose tables run on autoshard's engine, by any plan.

Shape suffixes: F features, B samples of the local batch, N rows, D embedding dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor

from autoshard.core import Constraints, Optimizer, ShardingPlan
from autoshard.core.errors import InputError, InvalidPlanError
from autoshard.core.quoting import shown
from autoshard.formats.torchrec.modules import Collection, read_model, weight_of
from autoshard.runtime.batch import BatchOfIds, Embedded, KeyedEmbeddings, as_batch, as_keyed
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.state import TableState

#: FBGEMM's own, which TorchRec leaves as it is.
_EPS = 1e-8


class ShardedCollection(torch.nn.Module):
    """One of TorchRec's modules of tables on autoshard's engine: takes what it takes and returns what it returns.

    Args:
        collection: The module.
        plan: A plan of its tables, and of no others.
        settings: Learning rate, epsilon and seed.
        options: Of `ShardedEmbeddings`.

    Raises:
        InputError: If its lookups are weighted, it returns ids with the embeddings, or several paths share it and an
            optimizer has moments.
    """

    def __init__(self, collection: Collection, plan: ShardingPlan, settings: FusedSettings, **options: Any) -> None:
        super().__init__()
        field = collection.path or "model"
        adaptive = [table for table in plan.tables.tables if table.optimizer is not Optimizer.SGD]
        if adaptive and len(collection.paths) > 1:
            raise InputError(
                f"stands at {', '.join(collection.paths[1:])}, too, and each of its lookups would be an update of its "
                f"own: {adaptive[0].optimizer} would not train table {shown(adaptive[0].name)} on their sum; look up "
                "the features of all paths in one call, or train it with sgd",
                field=field,
            )
        if collection.is_weighted:
            raise InputError("weighted lookups are not executed", field=field)
        if getattr(collection.module, "need_indices", bool)():
            raise InputError("embeddings are returned without ids; set need_indices=False", field=field)
        self.embeddings = ShardedEmbeddings(plan, settings, **options)
        self._wanted = [name for config in collection.configs for name in config.feature_names]
        given = [name for names in collection.embedding_names for name in names]
        self._names = dict(zip(self.embeddings.feature_names, given, strict=True))
        for table, config in zip(collection.tables, collection.configs, strict=True):
            weights_ND = weight_of(collection.module, config.name)
            if weights_ND is not None and not weights_ND.is_meta:
                self.embeddings.load_weights(table, weights_ND)

    def forward(self, features: KeyedJaggedTensor) -> KeyedEmbeddings:
        """Embeddings of the local batch, as the module returns them; weights of lookups are left aside, as there.

        Raises:
            InputError: As `ShardedEmbeddings.forward`: on all processes.
        """
        batch = as_batch(features, self._wanted, leaves_weights=True)
        embedded = self.embeddings(batch)
        assert isinstance(batch, BatchOfIds)
        assert isinstance(embedded, Embedded)
        return as_keyed(embedded, batch, self.embeddings.owners.tables, self._names)


class ShardedModel(torch.nn.Module):
    """A model whose tables are sharded; made by `shard`.

    Attributes:
        module: The model; in `DistributedDataParallel` where it has parameters of its own and there are several
            processes.
        collections: Its modules of tables by path; those at several paths by the first.
        optimizer: Holds the learning rate of all tables, for `torch.optim.lr_scheduler`; the same on all processes.
    """

    def __init__(self, module: torch.nn.Module, collections: Mapping[str, ShardedCollection]) -> None:
        super().__init__()
        self.module = module
        self.collections = dict(collections)
        self.optimizer = next(iter(collections.values())).embeddings.optimizer
        for one in collections.values():
            one.embeddings.optimizer = self.optimizer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        return self.module(*args, **kwargs)

    def end_step(self) -> None:
        """Ends a training step: plans with several replica groups average them. All processes call it."""
        for one in self.collections.values():
            one.embeddings.end_step()

    def table_state(self, name: str, rows: range | None = None) -> TableState:
        """Weights and moments of a table, by its name in the plan; as `ShardedEmbeddings.table_state`."""
        return self._holder(name).table_state(name, rows)

    def load_table_state(self, name: str, state: TableState, rows: range | None = None) -> None:
        """Sets weights and moments of a table; as `ShardedEmbeddings.load_table_state`."""
        self._holder(name).load_table_state(name, state, rows)

    def _holder(self, name: str) -> ShardedEmbeddings:
        names = []
        for one in self.collections.values():
            names += [table.name for table in one.embeddings.owners.tables.tables]
            if name in names:
                return one.embeddings
        raise InputError(f"no table is named {shown(name)}; there are {', '.join(names)}", field="name")

    def close(self) -> None:
        """Lets go of the tables and of process groups, before these are destroyed."""
        for one in self.collections.values():
            one.embeddings.close()
        if isinstance(self.module, torch.nn.parallel.DistributedDataParallel):
            self.module = self.module.module


def shard(
    model: torch.nn.Module,
    plan: ShardingPlan,
    *,
    learning_rate: float | None = None,
    eps: float | None = None,
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    row_orders: Mapping[str, torch.Tensor] | None = None,
) -> ShardedModel:
    """Puts the tables of a model on autoshard's engine by any plan, in place of `DistributedModelParallel`.

    The tables' modules are replaced in the model; what they return has the types that they returned. The optimizer runs
    in the backward pass, by the plan's optimizer of each table. A module at several paths of the model is sharded once,
    and put at all of them; each of its lookups is an update of its own, so that its tables are trained with SGD alone.
    If `shard` fails, the model is as it was. Weights that are there are kept; those on the meta device are drawn with
    the seed. All processes of the group call it with the same arguments.

    Args:
        model: The model, its other parameters on the device.
        plan: A plan of its tables, by their names in `tables_of(model)`.
        learning_rate: Of the tables; None for that of `apply_optimizer_in_backward`.
        eps: Added to the root of the moments; None for that of `apply_optimizer_in_backward`, or 1e-8.
        seed: Of weights on the meta device.
        group: The processes; None for all.
        device: Where tables and batches are; None for the CPU.
        row_orders: As `ShardedEmbeddings` takes them.

    Raises:
        InvalidPlanError: If the plan lacks a table or holds one in a way that is not executed.
        InvalidTableError: If the model has what plans cannot hold, or a module of tables cannot be replaced everywhere.
        InputError: If tables have no learning rate or several, or a module is weighted.
    """
    found = read_model(model, batch_size=plan.tables.batch_size)
    settings = FusedSettings(
        learning_rate=_agreed(found.collections, "lr", learning_rate, None),
        eps=_agreed(found.collections, "eps", eps, _EPS),
        seed=seed,
    )
    sharded: dict[str, ShardedCollection] = {}
    replaced: list[tuple[str, torch.nn.Module]] = []
    try:
        for one in found.collections:
            own = {name: ids for name, ids in (row_orders or {}).items() if name in one.tables}
            options = {"group": group, "device": device, "row_orders": own}
            sharded[one.path] = ShardedCollection(one, _part_of(plan, one), settings, **options)
        for one in found.collections:
            for path in filter(None, one.paths):
                replaced.append((path, one.module))
                _replace(model, path, sharded[one.path])
        whole = sharded.get("", model)
        if dist.get_world_size(group) > 1 and any(parameter.requires_grad for parameter in whole.parameters()):
            whole = torch.nn.parallel.DistributedDataParallel(whole, process_group=group)
    except BaseException:  # the model is as it was
        for path, module in replaced:
            if model.get_submodule(path) is not module:
                model.set_submodule(path, module)
        for collection in sharded.values():
            collection.embeddings.close()
        raise
    return ShardedModel(whole, sharded)


def _replace(model: torch.nn.Module, path: str, module: torch.nn.Module) -> None:
    """Puts a module at a path of the model.

    Raises:
        InputError: If the model does not take it.
    """
    try:
        model.set_submodule(path, module)
        is_there = model.get_submodule(path) is module
    except Exception as error:
        raise InputError(f"cannot be replaced in the model: {error}", field=path) from error
    if not is_there:
        raise InputError("cannot be replaced in the model, which kept its own", field=path)


def _part_of(plan: ShardingPlan, collection: Collection) -> ShardingPlan:
    """The plan of one module's tables, in the module's order."""
    known = {table.name: table for table in plan.tables.tables}
    missing = [name for name in collection.tables if name not in known]
    if missing:
        raise InvalidPlanError(f"has no table {shown(missing[0])}, which the model has", field="tables")
    # Who shares a rank with tables of other modules does not matter any more.
    tables = {name: replace(known[name], constraints=Constraints()) for name in collection.tables}
    shards = tuple(
        replace(placed, shard=replace(placed.shard, table=tables[placed.shard.table.name]))
        for placed in plan.shards
        if placed.shard.table.name in tables
    )
    return replace(
        plan,
        tables=replace(plan.tables, tables=tuple(tables.values()), dense=None),
        shards=shards,
        row_orders={name: order for name, order in plan.row_orders.items() if name in tables},
        predicted=None,
        provenance=None,
    )


def _agreed(collections: tuple[Collection, ...], key: str, given: float | None, usual: float | None) -> float:
    """A setting of all tables' optimizers.

    Raises:
        InputError: If they have several, or none and there is no usual one.
    """
    if given is not None:
        return given
    values = {
        settings[0].get(key, usual)
        for one in collections
        for config in one.configs
        if (settings := getattr(weight_of(one.module, config.name), "_optimizer_kwargs", None))
    } or {usual}
    value = values.pop()
    if values or value is None:
        field = "learning_rate" if key == "lr" else key
        raise InputError("must be given where tables have none of their own, or several", field=field)
    return float(value)
