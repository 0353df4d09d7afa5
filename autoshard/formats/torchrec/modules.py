"""The embedding tables of a TorchRec model: of every `EmbeddingBagCollection` and `EmbeddingCollection` in it.

Weights are never read, so models on the meta device do.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection, ITEPEmbeddingCollection
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection

from autoshard.core import AccessProfile, Constraints, EmbeddingTable, Feature, Optimizer, Pooling, TableSet, Tier
from autoshard.core.accepted import FINITE_AT_LEAST_0, WHOLE_AT_LEAST_1
from autoshard.core.errors import InvalidTableError
from autoshard.core.quoting import shown
from autoshard.formats.documents.tables_json import DEFAULT_BATCH_SIZE
from autoshard.formats.torchrec.config_fields import REFUSED_CONFIG
from autoshard.formats.torchrec.configs import DATA_TYPES, OPTIMIZER_CLASSES, POOLING_TYPES
from autoshard.formats.torchrec.objects import KERNEL_SETTINGS
from autoshard.formats.torchrec.places import Place, Places
from autoshard.formats.torchrec.sharding import TIERS, TorchRecType, also_allowed

try:
    from torchrec.modules.pec_embedding_modules import PECEmbeddingCollection
except ModuleNotFoundError:  # TorchRec 1.6 has none
    PECEmbeddingCollection = None

#: Optimizer of tables whose parameters and sharders name none.
DEFAULT_OPTIMIZER = Optimizer.ROWWISE_ADAGRAD

_DTYPES = {data_type: dtype for dtype, data_type in DATA_TYPES.items()}
_POOLINGS = {pooling_type: pooling for pooling, pooling_type in POOLING_TYPES.items()}
_OPTIMIZERS: Mapping[type, Optimizer] = {
    **{kind: optimizer for optimizer, kind in OPTIMIZER_CLASSES.items()},
    torch.optim.SGD: Optimizer.SGD,
    torch.optim.Adagrad: Optimizer.ADAGRAD,
    torch.optim.Adam: Optimizer.ADAM,
}
#: Optimizers that sharders name in `fused_params`.
_SHARDER_OPTIMIZERS: Mapping[EmbOptimType, Optimizer] = {
    EmbOptimType.SGD: Optimizer.SGD,
    EmbOptimType.EXACT_SGD: Optimizer.SGD,
    EmbOptimType.ROWWISE_ADAGRAD: Optimizer.ROWWISE_ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: Optimizer.ROWWISE_ADAGRAD,
    EmbOptimType.EXACT_ADAGRAD: Optimizer.ADAGRAD,
    EmbOptimType.ADAM: Optimizer.ADAM,
    EmbOptimType.PARTIAL_ROWWISE_ADAM: Optimizer.PARTIAL_ROWWISE_ADAM,
    EmbOptimType.LAMB: Optimizer.LAMB,
    EmbOptimType.PARTIAL_ROWWISE_LAMB: Optimizer.PARTIAL_ROWWISE_LAMB,
}
#: Modules of tables.
_COLLECTIONS = (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    FeatureProcessedEmbeddingBagCollection,
)
#: Modules whose tables change in ways that a plan does not hold.
_REFUSED: Mapping[type, str] = {
    BaseManagedCollisionEmbeddingCollection: "manages collisions of ids",
    ITEPEmbeddingBagCollection: "prunes rows while it trains",
    ITEPEmbeddingCollection: "prunes rows while it trains",
    **({} if PECEmbeddingCollection is None else {PECEmbeddingCollection: "shares rows between tables"}),
    EmbeddingTower: "is sharded with its interaction as one",
    EmbeddingTowerCollection: "is sharded with its interaction as one",
}
#: Fields of TorchRec's constraints that become the tables' own, and those that repeat what the model says.
READ_CONSTRAINTS = ("sharding_types", "pooling_factors", "feature_names", "is_weighted")
#: Fields that tables do not hold, and what does the same.
UNKEPT_CONSTRAINTS: Mapping[str, str] = {
    "min_partition": "plan with --set min_partition=N",
    "compute_kernels": "plan with --planner neo --set memory=hbm or ddr",
    "cache_params": "plan with --planner neo --set memory=ddr",
    "device_group": "take a topology of that device",
    **dict.fromkeys(KERNEL_SETTINGS, "set it in the exported ParameterSharding"),
    "output_dtype": "plan with --payload",
}
#: Fields that change what a table is, unless they repeat what is so anyway, and the nearest that plans hold.
REFUSED_CONSTRAINTS: Mapping[str, str] = {
    "num_poolings": "multiply pooling_factors by it",
    "batch_sizes": "give the largest as batch size, and scale pooling_factors",
    "key_value_params": "leave it out, and plan with --planner neo --set memory=ssd",
    "use_virtual_table": "leave it out, and give num_embeddings the rows that are in use",
}
#: The nearest of the number formats that plans have.
_NEAREST_FORMATS = {"FP64": DataType.FP32, "INT64": DataType.FP32, "INT32": DataType.FP32, "UINT32": DataType.FP32}
#: Optimizers whose state takes as much memory as that of others; Adam takes the most.
_NEAREST_OPTIMIZERS = {"LarsSGD": "Adagrad", "LARS_SGD": "EXACT_ADAGRAD"}


@dataclass(frozen=True, slots=True, eq=False)
class Collection:
    """One module of tables.

    Attributes:
        paths: Its paths in the model: several where parts of the model share it.
        module: The module itself.
        configs: TorchRec's configs of its tables.
        tables: Names of the tables in the `TableSet`, one for each config.
        is_weighted: Whether its lookups are weighted.
    """

    paths: tuple[str, ...]
    module: torch.nn.Module
    configs: tuple[Any, ...]
    tables: tuple[str, ...]
    is_weighted: bool

    @property
    def path(self) -> str:
        """The first of its paths, which names it."""
        return self.paths[0]

    @property
    def embedding_names(self) -> list[list[str]]:
        """Names of the embeddings that it returns, by table: features, with their table where tables share them."""
        names: list[list[str]] = get_embedding_names_by_table(list(self.configs))
        return names


@dataclass(frozen=True, slots=True, eq=False)
class ModelTables:
    """The tables of a model.

    Attributes:
        tables: The tables, module by module.
        collections: The modules.
        model_notes: What of the model the tables do not say, one sentence each.
        constraint_notes: What of the constraints they do not say, likewise.
    """

    tables: TableSet
    collections: tuple[Collection, ...]
    model_notes: tuple[str, ...]
    constraint_notes: tuple[str, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """What the tables do not say, one sentence each."""
        return self.model_notes + self.constraint_notes

    @property
    def places(self) -> Places:
        """Where each table is."""
        return {
            name: Place(collection.path, config.name)
            for collection in self.collections
            for name, config in zip(collection.tables, collection.configs, strict=True)
        }


def read_model(
    model: torch.nn.Module,
    *,
    batch_size: int = DEFAULT_BATCH_SIZE,
    world_size: int | None = None,
    pooling_factor: float = 1.0,
    constraints: Mapping[str, Any] | None = None,
    sharders: Sequence[Any] = (),
) -> ModelTables:
    """The tables of a model, and where they are.

    - Rows, dimension, number format, pooling and features are those of the configs. Tables of one name in several
      modules are told apart by the modules' paths, features that several tables look up by the tables' names.
    - A module that parts of the model share is read once, under the first of its paths.
    - The optimizer is the one that `apply_optimizer_in_backward` or a fused module names, else the one in
      `fused_params` of the module's sharder, else row-wise AdaGrad.
    - `pooling_factors` of constraints are the mean ids per sample, but for TorchRec's default, `[1.0]`;
      `sharding_types` forbid the other tiers; where their tiers stand for more, that is noted.
    - Rows are taken to be looked up alike until traffic is recorded (`autoshard.torchrec.record`).

    Args:
        model: A module, a model with such modules, or one of a single collection; its weights may be on meta.
        batch_size: Samples per step over all ranks.
        world_size: Ranks that share the batch, by which `batch_sizes` of constraints are compared with it; None where
            they are not known.
        pooling_factor: Mean ids per sample of features whose constraints do not say it.
        constraints: TorchRec's `ParameterConstraints` by table.
        sharders: TorchRec's sharders of the modules; none where they are not known.

    Raises:
        InvalidTableError: If there are no tables, or a module, a config, a constraint or an optimizer asks for what
            plans cannot hold; the field names it.
    """
    WHOLE_AT_LEAST_1.check(batch_size, "batch_size", InvalidTableError)
    FINITE_AT_LEAST_0.check(pooling_factor, "pooling_factor", InvalidTableError)
    found = _named(list(_collections(model)))
    known = dict(constraints or {})
    for name in known.keys() - {config.name for one in found for config in one.configs}:
        raise InvalidTableError("is no table of the model", field=f"constraints.{name}")
    feature_names = Counter(name for one in found for config in one.configs for name in config.feature_names)
    # What constraints may repeat.
    usual = {"num_poolings": 1, "batch_sizes": batch_size / world_size if world_size else None}
    tables = []
    for one in found:
        of_sharder = _sharder_optimizer(sharder_of(one.module, sharders))
        for name, config in zip(one.tables, one.configs, strict=True):
            constraint = known.get(config.name)
            factors = _pooling_factors(config, constraint, pooling_factor)
            features = tuple(
                Feature(name=feature if feature_names[feature] == 1 else f"{feature}@{name}", pooling_factor=factor)
                for feature, factor in zip(config.feature_names, factors, strict=True)
            )
            kept = _constraints(constraint, config.name, usual)
            tables.append(_table(one, config, name, features, kept, of_sharder))
    return ModelTables(
        tables=TableSet(batch_size=batch_size, tables=tuple(tables)),
        collections=tuple(found),
        model_notes=_model_notes(found, sharders),
        constraint_notes=_constraint_notes(known),
    )


def sharder_of(module: torch.nn.Module, sharders: Sequence[Any]) -> Any:
    """The sharder that TorchRec takes for a module: the last one of its very type; None if there is none."""
    return {sharder.module_type: sharder for sharder in sharders}.get(type(module))


def fused_optimizer(parameter: Any) -> type | None:
    """The one optimizer class that `apply_optimizer_in_backward` gave a parameter; None if it gave none."""
    classes = getattr(parameter, "_optimizer_classes", [None])
    kind: type | None = classes[0]
    return kind


def named_optimizer(module: Any, table: str) -> type | None:
    """The optimizer class that `apply_optimizer_in_backward`, or a fused module, gave a table; None if neither did."""
    kind: type | None = module.optimizer_type() if hasattr(module, "optimizer_type") else None
    return kind or fused_optimizer(weight_of(module, table))


def optimizer_arguments(module: Any, table: str) -> Mapping[str, Any]:
    """What `apply_optimizer_in_backward`, or a fused module, gave the optimizer of a table; nothing if neither did."""
    if hasattr(module, "optimizer_kwargs"):
        return dict(module.optimizer_kwargs())
    given = getattr(weight_of(module, table), "_optimizer_kwargs", None)
    return dict(given[0]) if given else {}


def weight_of(module: Any, table: str) -> Any:
    """The weights of a table in a module; None where a fused module keeps them elsewhere."""
    return getattr(holder_of(module, table), "weight", None)


def holder_of(module: Any, table: str) -> Any:
    """The module of torch that a module keeps a table in; None where a fused module keeps it elsewhere."""
    inner = getattr(module, "_embedding_bag_collection", module)
    tables = getattr(inner, "embedding_bags", None)
    holders = tables if tables is not None else getattr(inner, "embeddings", {})
    return dict(holders.items()).get(table)


def _collections(model: torch.nn.Module) -> Iterator[Collection]:
    """Modules of tables, by rising path, each once.

    Raises:
        InvalidTableError: If a module is of a kind that plans do not hold, or could not be put in another's place
            everywhere: a part of it or its weights stand elsewhere, too, or it is held by what is no module.
    """
    walked = list(_walk(model, "", ()))
    paths: dict[torch.nn.Module, list[str]] = {}
    for path, module in walked:
        for kind, reason in _REFUSED.items():
            if isinstance(module, kind):
                raise InvalidTableError(
                    f"{type(module).__name__} {reason}, which plans do not hold", field=path or "model"
                )
        if isinstance(module, _COLLECTIONS):
            paths.setdefault(module, []).append(path)
    found = [_collection(module, tuple(of)) for module, of in paths.items()]
    _check_parts(found, walked)
    _check_holders(walked)
    yield from found


def _walk(
    module: torch.nn.Module, path: str, above: tuple[torch.nn.Module, ...]
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Every path of every module, but for the parts of modules of tables; `named_modules` has paths of its own."""
    yield path, module
    if isinstance(module, _COLLECTIONS):
        return
    for name, part in module._modules.items():
        if part is not None and part is not module and part not in above:
            yield from _walk(part, f"{path}.{name}" if path else name, (*above, module))


def _collection(module: Any, paths: tuple[str, ...]) -> Collection:
    source = getattr(module, "_embedding_bag_collection", module)
    is_bags = isinstance(source, EmbeddingBagCollectionInterface)
    configs = source.embedding_bag_configs() if is_bags else source.embedding_configs()
    is_weighted = is_bags and bool(source.is_weighted())
    return Collection(paths=paths, module=module, configs=tuple(configs), tables=(), is_weighted=is_weighted)


def _check_parts(found: Sequence[Collection], walked: Sequence[tuple[str, torch.nn.Module]]) -> None:
    """Refuses modules of tables a part of which, or whose weights, stand elsewhere in the model, too."""
    part_of = {part: one.path for one in found for part in one.module.modules() if part is not one.module}
    for path, module in walked:
        if module in part_of:
            raise InvalidTableError(
                f"is a part of {part_of[module]}, too, which could not be replaced without it: use one of them",
                field=path,
            )
    weights: dict[object, str] = {}
    for one in found:
        for config in one.configs:
            name = f"{one.path}.{config.name}" if one.path else config.name
            key = _memory_of(weight_of(one.module, config.name))
            if key is not None and weights.setdefault(key, name) != name:
                raise InvalidTableError(f"shares its weights with {weights[key]}, which plans do not hold", field=name)
    for path, module in walked:
        for name, parameter in () if isinstance(module, _COLLECTIONS) else module._parameters.items():
            if (owner := weights.get(_memory_of(parameter))) is not None:
                raise InvalidTableError(
                    f"shares its weights with table {owner}, which plans do not hold",
                    field=f"{path}.{name}" if path else name,
                )


def _memory_of(weights: torch.Tensor | None) -> object:
    """What is equal for tensors that are the same weights; None for no weights."""
    if weights is None or not weights.numel():
        return None
    return id(weights) if weights.is_meta else weights.data_ptr()


def _check_holders(walked: Sequence[tuple[str, torch.nn.Module]]) -> None:
    """Refuses modules of tables that a model also holds in what is no module, where nobody could replace them."""
    tree = {module for _, module in walked}
    seen: set[int] = set()
    left: list[tuple[str, Any]] = [
        (f"{path}.{name}" if path else name, value)
        for path, module in walked
        if not isinstance(module, _COLLECTIONS)
        for name, value in vars(module).items()
        if name not in ("_modules", "_parameters", "_buffers")
    ]
    while left:
        path, value = left.pop()
        if isinstance(value, str | bytes | int | float | torch.Tensor | type | ModuleType) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _COLLECTIONS):
            raise InvalidTableError(
                f"is {type(value).__name__} in an attribute that is no submodule, where it cannot be replaced: make it "
                "one (torch.nn.ModuleList, ModuleDict, or the module itself as an attribute), or remove it",
                field=path,
            )
        if isinstance(value, torch.nn.Module) and value in tree:
            continue
        left += [(f"{path}{step}", part) for step, part in _held_by(value)]


def _held_by(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value holds, with the way to it."""
    if isinstance(value, Mapping):
        yield from ((f"[{shown(str(key))}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from ((f"[{place}]", part) for place, part in enumerate(value))
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # not set yet
                yield f".{name}", cell.cell_contents
    else:
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())


def _named(found: Sequence[Collection]) -> list[Collection]:
    """The modules with names of their tables that differ over all of them.

    Raises:
        InvalidTableError: If there are no modules.
    """
    if not found:
        raise InvalidTableError("holds no EmbeddingBagCollection and no EmbeddingCollection", field="model")
    names = Counter(config.name for one in found for config in one.configs)
    return [
        replace(
            one,
            tables=tuple(
                config.name if names[config.name] == 1 else f"{one.path}.{config.name}" for config in one.configs
            ),
        )
        for one in found
    ]


def _table(
    one: Collection,
    config: BaseEmbeddingConfig,
    name: str,
    features: tuple[Feature, ...],
    constraints: Constraints,
    of_sharder: EmbOptimType | None,
) -> EmbeddingTable:
    field = f"{one.path}.{config.name}" if one.path else config.name
    for setting, meaning in REFUSED_CONFIG.items():
        if getattr(config, setting, None):
            raise InvalidTableError(f"is set: plans do not hold {meaning}", field=f"{field}.{setting}")
    if config.data_type not in _DTYPES:
        accepted = ", ".join(str(kind.value) for kind in _DTYPES)
        got = config.data_type.value if isinstance(config.data_type, DataType) else config.data_type
        nearest = _NEAREST_FORMATS.get(str(got), DataType.INT8).value
        raise InvalidTableError(
            f"must be one of {accepted}, got {shown(got)}; the nearest is {nearest}", field=f"{field}.data_type"
        )
    return EmbeddingTable(
        name=name,
        num_embeddings=config.num_embeddings,
        embedding_dim=config.embedding_dim,
        features=features,
        access=AccessProfile.uniform(config.num_embeddings),
        dtype=_DTYPES[config.data_type],
        pooling=_pooling(config, field),
        weighted=one.is_weighted,
        optimizer=_optimizer(one.module, config, f"{field}.optimizer", of_sharder),
        constraints=constraints,
    )


def _pooling(config: BaseEmbeddingConfig, field: str) -> Pooling:
    if not isinstance(config, EmbeddingBagConfig):
        return Pooling.SEQUENCE
    if config.pooling not in _POOLINGS:
        got = config.pooling.value if isinstance(config.pooling, PoolingType) else config.pooling
        raise InvalidTableError(f"must be SUM or MEAN, got {shown(got)}", field=f"{field}.pooling")
    return _POOLINGS[config.pooling]


def _optimizer(module: Any, config: BaseEmbeddingConfig, field: str, of_sharder: EmbOptimType | None) -> Optimizer:
    if _is_quantised(module):
        return Optimizer.NONE
    weights = weight_of(module, config.name)
    for attribute in ("_optimizer_classes", "_optimizer_kwargs"):
        num_given = len(getattr(weights, attribute, [None]))
        if num_given != 1:
            raise InvalidTableError(f"must be one, as TorchRec trains a table by one, got {num_given}", field=field)
    kind: type | EmbOptimType | None = named_optimizer(module, config.name) or of_sharder
    if kind is None:
        return DEFAULT_OPTIMIZER
    known: Mapping[Any, Optimizer] = _OPTIMIZERS if isinstance(kind, type) else _SHARDER_OPTIMIZERS
    if kind not in known:
        accepted = ", ".join(dict.fromkeys(_optimizer_name(one) for one in known))
        got = _optimizer_name(kind)
        nearest = _NEAREST_OPTIMIZERS.get(got, "Adam" if isinstance(kind, type) else "ADAM")
        raise InvalidTableError(f"must be one of {accepted}, got {got}; {nearest} has the nearest state", field=field)
    return known[kind]


def _optimizer_name(kind: type | EmbOptimType) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind.name)


def _sharder_optimizer(sharder: Any) -> EmbOptimType | None:
    """What the `fused_params` of a sharder name; None if they name none."""
    kind: EmbOptimType | None = (getattr(sharder, "fused_params", None) or {}).get("optimizer")
    return kind


def _pooling_factors(config: BaseEmbeddingConfig, constraint: Any, usual: float) -> Sequence[float]:
    given = getattr(constraint, "pooling_factors", None)
    num_features = len(config.feature_names)
    if given is None or list(given) == [1.0]:  # TorchRec's own default
        return [usual] * num_features
    if len(given) != num_features:
        raise InvalidTableError(
            f"must be one for each of {num_features} features, got {len(given)}",
            field=f"constraints.{config.name}.pooling_factors",
        )
    return [float(factor) for factor in given]


def _constraints(constraint: Any, name: str, usual: Mapping[str, float | None]) -> Constraints:
    """What tables hold of a constraint; `usual` are the values, by field, that only repeat what is so anyway."""
    for field, nearest in REFUSED_CONSTRAINTS.items():
        given = getattr(constraint, field, None)
        if given and not (field in usual and all(one == usual[field] for one in given)):
            raise InvalidTableError(f"is set, and plans do not hold it: {nearest}", field=f"constraints.{name}.{field}")
    types = getattr(constraint, "sharding_types", None)
    if not types:
        return Constraints()
    unknown = [kind for kind in types if kind not in list(TorchRecType)]
    if unknown:
        raise InvalidTableError(
            f"must be of {', '.join(TorchRecType)}, got {shown(unknown[0])}",
            field=f"constraints.{name}.sharding_types",
        )
    allowed = {TIERS[TorchRecType(kind)] for kind in types}
    return Constraints(forbidden_tiers=tuple(tier for tier in Tier if tier not in allowed))


def _model_notes(collections: Sequence[Collection], sharders: Sequence[Any]) -> tuple[str, ...]:
    notes = ["rows are taken to be looked up alike: record traffic with autoshard.torchrec.record"]
    notes += [
        f"{one.path} stands at {', '.join(one.paths[1:])}, too: TorchRec shards each path for itself, "
        "autoshard.torchrec.shard shards it once"
        for one in collections
        if len(one.paths) > 1
    ]
    unnamed = sum(
        named_optimizer(one.module, config.name) is None
        for one in collections
        if not _is_quantised(one.module) and _sharder_optimizer(sharder_of(one.module, sharders)) is None
        for config in one.configs
    )
    if unnamed:
        notes.append(f"{unnamed} tables have no optimizer in their backward pass: taken as {DEFAULT_OPTIMIZER}")
    quantised = [one.path or "model" for one in collections if _is_quantised(one.module)]
    if quantised:
        notes.append(
            "quantised tables have no optimizer; steps are priced as if they were trained without state: "
            f"{', '.join(quantised[:8])}"
        )
    return tuple(notes)


def _constraint_notes(constraints: Mapping[str, Any]) -> tuple[str, ...]:
    notes = []
    for field, nearest in UNKEPT_CONSTRAINTS.items():
        names = [name for name, one in constraints.items() if getattr(one, field, None) is not None]
        if names:
            notes.append(f"constraints.{names[0]}.{field} is not kept: {nearest}")
    wider = {name: _also_allowed(one) for name, one in constraints.items() if _also_allowed(one)}
    if wider:
        notes.append(
            f"sharding_types of {', '.join([*wider][:8])} are kept as tiers, which allow "
            f"{', '.join(sorted(frozenset().union(*wider.values())))}, too: autoshard.torchrec.Planner keeps to each "
            "table's types, --set sharding_types=... to one choice for all tables"
        )
    return tuple(notes)


def _also_allowed(constraint: Any) -> frozenset[TorchRecType]:
    return also_allowed([TorchRecType(kind) for kind in getattr(constraint, "sharding_types", None) or ()])


def _is_quantised(module: torch.nn.Module) -> bool:
    return isinstance(module, QuantEmbeddingBagCollection | QuantEmbeddingCollection)
