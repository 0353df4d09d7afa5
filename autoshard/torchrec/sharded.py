"""Models of TorchRec whose tables run on autoshard's engine, by any plan.

Shape suffixes: F features, B samples of the local batch, C columns of all pooled features, N rows, D embedding dim.
"""

from __future__ import annotations

import gc
import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.fused import EmptyFusedOptimizer
from torchrec.sparse.tensor_dict import maybe_td_to_kjt
from typing_extensions import override

from autoshard.core import Constraints, Optimizer, ShardingPlan
from autoshard.core.errors import InputError, InvalidPlanError
from autoshard.core.quoting import shown
from autoshard.formats.torchrec.modules import (
    Collection,
    ModelTables,
    holder_of,
    named_optimizer,
    optimizer_arguments,
    read_model,
    weight_of,
)
from autoshard.runtime.batch import KeyedEmbeddings, as_batch, unreadable
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.groups import group_beside
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.state import TableState

#: FBGEMM's own, which TorchRec leaves as it is.
_EPS, _BETAS = 1e-8, (0.9, 0.999)
#: Arguments of optimizers that are read, or do not change what is computed.
_ARGUMENTS = ("lr", "eps", "betas", "foreach", "fused", "capturable")
#: Attributes of torch's tables that change lookups or gradients.
_SETTINGS = ("padding_idx", "max_norm", "scale_grad_by_freq")


class ShardedCollection(torch.nn.Module):
    """One of TorchRec's modules of tables on autoshard's engine: takes what it takes and returns what it returns.

    Args:
        collection: The module.
        plan: A plan of its tables, and of no others.
        settings: Learning rate, epsilon and seed.
        options: Of `ShardedEmbeddings`.

    Attributes:
        paths: Its paths in the model.

    Raises:
        InputError: If it has feature processors, its lookups are weighted and a table is averaged, it returns ids with
            the embeddings, several paths share it and an optimizer has moments, or a table or its optimizer has what is
            not executed.
    """

    def __init__(self, collection: Collection, plan: ShardingPlan, settings: FusedSettings, **options: Any) -> None:
        super().__init__()
        self.paths = collection.paths
        field = collection.path or "model"
        adaptive = [table for table in plan.tables.tables if table.optimizer is not Optimizer.SGD]
        if adaptive and len(collection.paths) > 1:
            raise InputError(
                f"stands at {', '.join(collection.paths[1:])}, too, and each of its lookups would be an update of its "
                f"own: {adaptive[0].optimizer} would not train table {shown(adaptive[0].name)} on their sum; look up "
                "the features of all paths in one call, or train it with sgd",
                field=field,
            )
        if isinstance(collection.module, FeatureProcessedEmbeddingBagCollection):
            raise InputError("its feature processors are not executed, which weights give gradients to", field=field)
        if getattr(collection.module, "need_indices", bool)():
            raise InputError("embeddings are returned without ids; set need_indices=False", field=field)
        for config in collection.configs:
            _check_executed(collection.module, config.name, f"{field}.{config.name}")
        self._is_weighted = collection.is_weighted
        weights = {
            table: weight_of(collection.module, config.name)
            for table, config in zip(collection.tables, collection.configs, strict=True)
        }
        frozen = [table for table, of in weights.items() if of is not None and not of.requires_grad]
        self.embeddings = ShardedEmbeddings(plan, settings, frozen=frozen, **options)
        self._wanted = [name for config in collection.configs for name in config.feature_names]
        #: Of the same features in the result.
        self._names = [name for names in collection.embedding_names for name in names]
        for (table, weights_ND), config in zip(weights.items(), collection.configs, strict=True):
            if weights_ND is None or weights_ND.is_meta:
                weights_ND = _drawn(config, table, settings.seed)
            if weights_ND is not None:
                self.embeddings.load_weights(table, weights_ND)
        self.embeddings.align_copies()

    @override
    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """As `ShardedEmbeddings.requires_grad_`."""
        self.embeddings.requires_grad_(requires_grad)
        return self

    def forward(self, features: KeyedJaggedTensor) -> KeyedEmbeddings:
        """Embeddings of the local batch, as the module returns them; where it is not weighted, weights are left aside.

        Args:
            features: The batch; as the module, it takes a `TensorDict` of jagged tensors, too.

        Raises:
            InputError: As `ShardedEmbeddings.forward`: on all processes.
        """
        try:
            keyed: object = maybe_td_to_kjt(features, None)
        except Exception as error:  # noqa: BLE001 - raised again by all processes, which wait for this one else
            keyed = unreadable(error)
        batch = as_batch(keyed, self._wanted, names=self._names, leaves_weights=not self._is_weighted)
        embedded: KeyedEmbeddings = self.embeddings(batch)
        return embedded


class ShardedModel(torch.nn.Module):
    """A model whose tables are sharded; made by `shard`.

    Args:
        module: The model.
        collections: Its modules of tables by path.
        parallel: The model in `DistributedDataParallel`; None where it is called as it is.

    Attributes:
        module: The model, whose names of parameters and states are the same on any number of processes. Where it is
            called, its other layers get each process's own gradients: call the `ShardedModel`, or `parallel`.
        parallel: What is called of it: `DistributedDataParallel` where it has parameters of its own to train and there
            are several processes, else the model itself. It is no submodule.
        collections: Its modules of tables by path; those at several paths by the first.
        optimizer: Holds the learning rate of all tables, for `torch.optim.lr_scheduler`; the same on all processes.
        fused_optimizer: The same learning rate for TorchRec's `CombinedOptimizer` and `WarmupOptimizer`.
    """

    parallel: torch.nn.Module

    def __init__(
        self,
        module: torch.nn.Module,
        collections: Mapping[str, ShardedCollection],
        parallel: torch.nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self._call(module if parallel is None else parallel)
        self.collections = dict(collections)
        self.optimizer = next(iter(collections.values())).embeddings.optimizer
        for one in collections.values():
            one.embeddings.optimizer = self.optimizer
        self.fused_optimizer = EmptyFusedOptimizer()
        self.fused_optimizer.param_groups = self.optimizer.param_groups

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        return self.parallel(*args, **kwargs)

    @override
    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """As a module's, for training alone.

        Raises:
            InputError: If it is to freeze the tables.
        """
        for one in self.collections.values():
            one.requires_grad_(requires_grad)
        return super().requires_grad_(requires_grad)

    def _call(self, parallel: torch.nn.Module) -> None:
        # As a submodule it would be in the names of all states.
        object.__setattr__(self, "parallel", parallel)

    def end_step(self) -> None:
        """Ends a training step: replica groups are averaged, Adam and LAMB count it. All processes call it."""
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
        if isinstance(self.parallel, torch.nn.parallel.DistributedDataParallel):
            group = self.parallel.process_group
            self._call(self.module)
            gc.collect()  # The first one that a process makes lies in a cycle of torch's.
            dist.destroy_process_group(group)


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
    find_unused_parameters: bool = False,
) -> ShardedModel:
    """Puts the tables of a model on autoshard's engine by any plan, in place of `DistributedModelParallel`.

    The tables' modules are replaced in the model; what they return has the types that they returned. The optimizer runs
    in the backward pass, by the plan's optimizer of each table. A module at several paths of the model is sharded once,
    and put at all of them; each of its lookups is an update of its own, so that its tables are trained with SGD alone.
    If `shard` fails, the model is as it was. Weights that are there are kept: where processes have drawn other ones,
    each row is that of the process that holds it, and copies of it are as the first. Those on the meta device are drawn
    with the seed, by the `init_fn` of their config. Tables with `requires_grad=False` stay as they are, weights and
    moments. All processes of the group call it with the same arguments.

    Each module looks up and exchanges in its own forward pass: nothing of the next batch is prefetched, and no plan
    follows the first one. A trainer that wants `pipelined` or `adopt` takes `ShardedEmbeddings`; a checkpoint of the
    model loads under any other plan.

    Args:
        model: The model, its other parameters on the device.
        plan: A plan of its tables, by their names in `tables_of(model)`.
        learning_rate: Of the tables; None for that of `apply_optimizer_in_backward`.
        eps: Added to the root of the moments; None for that of `apply_optimizer_in_backward`, or 1e-8.
        seed: Of weights on the meta device.
        group: The processes; None for all.
        device: Where tables and batches are; None for the CPU.
        row_orders: As `ShardedEmbeddings` takes them.
        find_unused_parameters: Of `DistributedDataParallel`, for models with parameters that not every step uses.

    Raises:
        InvalidPlanError: If the plan lacks a table, is of a table that differs from the model's, or holds one in a way
            that is not executed.
        InvalidTableError: If the model has what plans cannot hold, or a module of tables cannot be replaced everywhere.
        InputError: If there is no process group, tables have no learning rate or several, a module has feature
            processors, or a table or its optimizer has what is not executed (weight decay, momentum, hooks,
            `padding_idx`; means where lookups are weighted).
    """
    found = read_model(model, batch_size=plan.tables.batch_size)
    beta1, beta2 = _agreed(found, "betas", None, _BETAS)
    settings = FusedSettings(
        learning_rate=float(_agreed(found, "lr", learning_rate, None)),
        eps=float(_agreed(found, "eps", eps, _EPS)),
        beta1=beta1,
        beta2=beta2,
        seed=seed,
    )
    sharded: dict[str, ShardedCollection] = {}
    replaced: list[tuple[str, torch.nn.Module]] = []
    dense: dist.ProcessGroup | None = None
    parallel: torch.nn.Module | None = None
    try:
        for one in found.collections:
            own = {name: ids for name, ids in (row_orders or {}).items() if name in one.tables}
            options = {"group": group, "device": device, "row_orders": own}
            sharded[one.path] = ShardedCollection(one, _part_of(plan, one, found), settings, **options)
        for one in found.collections:
            for path in filter(None, one.paths):
                replaced.append((path, one.module))
                _replace(model, path, sharded[one.path])
        whole = sharded.get("", model)
        if dist.get_world_size(group) > 1 and any(parameter.requires_grad for parameter in whole.parameters()):
            # Its all-reduces come in another order among those of tables where processes use other layers.
            dense = group_beside(group)
            parallel = torch.nn.parallel.DistributedDataParallel(
                whole, process_group=dense, find_unused_parameters=find_unused_parameters
            )
    except BaseException:  # the model is as it was
        for path, module in replaced:
            if model.get_submodule(path) is not module:
                model.set_submodule(path, module)
        for collection in sharded.values():
            collection.embeddings.close()
        if dense is not None:
            dist.destroy_process_group(dense)
        raise
    return ShardedModel(whole, sharded, parallel)


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


def _check_executed(module: Any, table: str, field: str) -> None:
    """Refuses what a module asks of a table, or of its optimizer, beyond what is executed.

    Raises:
        InputError: If it asks for anything else; the field names it.
    """
    for name, value in _arguments(module, table).items():
        if value and name not in _ARGUMENTS:
            raise InputError(
                f"is not executed: must be left out, got {shown(value)}", field=f"{field}.optimizer.{name}"
            )
    holder = holder_of(module, table)
    for name in _SETTINGS:
        value = getattr(holder, name, None)
        if value is not None and value is not False:
            raise InputError(f"is not executed: must be left out, got {shown(value)}", field=f"{field}.{name}")
    if getattr(weight_of(module, table), "_backward_hooks", None):
        raise InputError("has hooks on its gradient, which no step computes as a whole: remove them", field=field)


def _drawn(config: Any, table: str, seed: int) -> torch.Tensor | None:
    """All weights of a table, by its config's `init_fn`; None where the engine draws the same kind without all of them.

    Args:
        config: TorchRec's.
        table: Its name in the plan.
        seed: Same seed and name, same weights.
    """
    draw, bound = config.init_fn, math.sqrt(1 / config.num_embeddings)
    if draw is None or (
        isinstance(draw, partial)
        and draw.func is torch.nn.init.uniform_
        and draw.keywords == {"a": -bound, "b": bound}  # of configs that name none
    ):
        return None
    weights_ND = torch.empty(config.num_embeddings, config.embedding_dim, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}/{table}".encode()).digest()[:8], "little"))
        draw(weights_ND)
    return weights_ND


def _check_alike(plan: ShardingPlan, collection: Collection, found: ModelTables) -> None:
    """Refuses a plan of tables that differ from the model's.

    Raises:
        InvalidPlanError: If it lacks one, or one differs; the field names what.
    """
    known = {table.name: table for table in plan.tables.tables}
    for name, config in zip(collection.tables, collection.configs, strict=True):
        if name not in known:
            raise InvalidPlanError(f"has no table {shown(name)}, which the model has", field="tables")
        model, planned = found.tables[name], known[name]
        names = ["num_embeddings", "embedding_dim", "dtype", "pooling"]
        if named_optimizer(collection.module, config.name) is not None:
            names.append("optimizer")
        pairs = {one: (getattr(model, one), getattr(planned, one)) for one in names}
        pairs["features"] = len(model.features), len(planned.features)
        for one, (wanted, got) in pairs.items():
            if wanted != got:
                raise InvalidPlanError(
                    f"must be {wanted} as in the model, got {got}: plan its tables anew", field=f"tables.{name}.{one}"
                )


def _part_of(plan: ShardingPlan, collection: Collection, found: ModelTables) -> ShardingPlan:
    """The plan of one module's tables, in the module's order."""
    _check_alike(plan, collection, found)
    known = {table.name: table for table in plan.tables.tables}
    # Who shares a rank with tables of other modules does not matter any more.
    weighted = collection.is_weighted
    tables = {name: replace(known[name], weighted=weighted, constraints=Constraints()) for name in collection.tables}
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


def _arguments(module: Any, table: str) -> dict[str, Any]:
    """What a table's optimizer was given, by torch's names; TorchRec takes those of FBGEMM as well."""
    given = dict(optimizer_arguments(module, table))
    if "learning_rate" in given:
        given.setdefault("lr", given.pop("learning_rate"))
    beta1, beta2 = given.get("betas", _BETAS)
    given["betas"] = given.pop("beta1", beta1), given.pop("beta2", beta2)
    return given


def _agreed(found: ModelTables, key: str, given: Any, usual: Any) -> Any:
    """A setting of the optimizers of all tables that have it; of frozen tables only where no other has it.

    Args:
        found: The model's tables.
        key: `lr`, `eps` or `betas`.
        given: What `shard` was given; None for what the optimizers were.
        usual: Of an optimizer that was given none; None if it has to be given.

    Raises:
        InputError: If they have several, or none and there is no usual one.
    """
    if given is not None:
        return given
    trained: set[Any] = set()
    frozen: set[Any] = set()
    for one in found.collections:
        for name, config in zip(one.tables, one.configs, strict=True):
            optimizer = found.tables[name].optimizer
            has = {"lr": True, "eps": bool(optimizer.moments), "betas": optimizer.has_decaying_moments}[key]
            if has and named_optimizer(one.module, config.name) is not None:
                weights = weight_of(one.module, config.name)
                is_trained = weights is None or weights.requires_grad
                (trained if is_trained else frozen).add(_arguments(one.module, config.name).get(key, usual))
    values = trained or frozen or {usual}
    if len(values) == 1 and None not in values:
        return values.pop()
    if key == "betas":
        raise InputError(f"must be the same for all tables, got {' and '.join(map(str, sorted(values)))}", field=key)
    field = "learning_rate" if key == "lr" else key
    raise InputError("must be given where tables have none of their own, or several", field=field)
