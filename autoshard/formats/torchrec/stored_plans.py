"""TorchRec's plans in files of `torch.save`: written, and read without loading the pickle in them.

What a file describes is walked (`pickle_walk`): nothing of it is imported or called. TorchRec need not be installed to
read one.
"""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from autoshard.core.errors import FormatError
from autoshard.core.quoting import shortened, shown
from autoshard.formats.archives.pickle_walk import OBJECT_OPCODES, Global, Record, walk
from autoshard.formats.archives.torch_archive import read_program
from autoshard.formats.documents.fields import from_source
from autoshard.formats.files import atomic_write, open_file
from autoshard.formats.torchrec.objects import KERNEL_SETTINGS

#: Bytes of a plan's pickle: 5,000 tables on 128 ranks, all row-wise, take 60 MB.
_MAX_BYTES = 1 << 27
_PACKAGES = ("torchrec", "torch", "fbgemm_gpu")
#: Classes that plans are made of, wherever the packages keep them.
_CLASSES = frozenset(
    {
        *("ShardingPlan", "EmbeddingModuleShardingPlan", "ParameterSharding", "EnumerableShardingSpec"),
        *("ShardMetadata", "_remote_device", "device", "CacheParams", "CacheAlgorithm", "DataType"),
        *("BoundsCheckMode", "CacheStatistics", "MultiPassPrefetchConfig", "KeyValueParams"),
    }
)


def write_stored_plan(torchrec_plan: Any, path: str | Path) -> None:
    """Writes TorchRec's plan as `torch.save` does.

    Raises:
        FormatError: If no file can be written there.
    """
    import torch

    buffer = io.BytesIO()
    torch.save(torchrec_plan, buffer)
    atomic_write(path, buffer.getvalue())


def read_stored_plan(path: str | Path) -> Any:
    """The TorchRec plan of a file, as plain data with the attributes that `from_torchrec` reads.

    Raises:
        FormatError: If the file is none that `torch.save` wrote of a TorchRec plan.
    """
    return from_source(str(path), lambda: _read(path))


def _read(path: str | Path) -> Any:
    with open_file(path) as file:
        program = read_program(file, _MAX_BYTES)
    plan = walk(
        program, accepted=OBJECT_OPCODES, reduce=_record, wanted="a TorchRec ShardingPlan", described="its plan"
    )
    modules = _attributes(plan, "ShardingPlan").get("plan")
    if not isinstance(modules, dict):
        raise FormatError("must hold a TorchRec ShardingPlan with modules by path")
    return SimpleNamespace(plan={_text(path): _module(module) for path, module in modules.items()})


#: How Python 3.11.0 to 3.11.3 pickles members of enumerations: by name, from their class.
_GETTERS = frozenset({"builtins getattr", "__builtin__ getattr"})
#: Values of members whose names say another one.
_VALUES: dict[str, dict[object, object]] = {"CacheAlgorithm": {"LRU": 0, "LFU": 1}}


def _record(function: object, arguments: object) -> Record:
    name = function.name if isinstance(function, Global) else shown(function)
    if name in _GETTERS and isinstance(arguments, tuple) and len(arguments) == 2:
        member = arguments[1]
        kind = _record(arguments[0], ()).name
        return Record(name=kind, arguments=(_VALUES.get(kind, {}).get(member, member),))
    package, _, kind = name.partition(" ")
    if package.partition(".")[0] not in _PACKAGES or kind not in _CLASSES or not isinstance(arguments, tuple):
        raise FormatError(
            f"must hold a TorchRec ShardingPlan and nothing else, its description calls {shortened(name)}"
        )
    return Record(name=kind, arguments=arguments)


def _module(value: object) -> dict[str, Any]:
    if not isinstance(value, Record) or value.name != "EmbeddingModuleShardingPlan":
        raise FormatError("must hold an EmbeddingModuleShardingPlan for each module")
    return {_text(name): _entry(entry) for name, entry in value.items.items()}


def _entry(value: object) -> SimpleNamespace:
    given = _attributes(value, "ParameterSharding")
    spec, cache, ranks = given.get("sharding_spec"), given.get("cache_params"), given.get("ranks")
    if ranks is not None and not isinstance(ranks, list):
        raise FormatError(f"must have lists of ranks, got {shown(ranks)}")
    shards = None if spec is None else _attributes(spec, "EnumerableShardingSpec").get("shards")
    if shards is not None and not isinstance(shards, list):
        raise FormatError(f"must have lists of shards, got {shown(shards)}")
    settings = {name: given.get(name) for name in KERNEL_SETTINGS}
    settings["output_dtype"] = _enumerated(settings["output_dtype"])
    return SimpleNamespace(
        sharding_type=given.get("sharding_type"),
        compute_kernel=given.get("compute_kernel"),
        ranks=ranks,
        sharding_spec=SimpleNamespace(shards=[_shard(one) for one in shards]) if shards is not None else None,
        cache_params=None if cache is None else _cache(_attributes(cache, "CacheParams")),
        **settings,
    )


def _shard(value: object) -> SimpleNamespace:
    given = _attributes(value, "ShardMetadata")
    offsets, sizes = given.get("shard_offsets"), given.get("shard_sizes")
    if not isinstance(offsets, list) or not isinstance(sizes, list):
        raise FormatError("must have shards with offsets and sizes")
    return SimpleNamespace(shard_offsets=offsets, shard_sizes=sizes)


def _cache(given: dict[str, object]) -> SimpleNamespace:
    load_factor = given.get("load_factor")
    if load_factor is not None and type(load_factor) not in (int, float):
        raise FormatError(f"must have load factors that are numbers, got {shown(load_factor)}")
    return SimpleNamespace(
        load_factor=load_factor,
        algorithm=_enumerated(given.get("algorithm")),
        precision=_enumerated(given.get("precision")),
    )


def _enumerated(value: object) -> SimpleNamespace | None:
    """A member of an enumeration, which is pickled as a call with its value."""
    if value is None:
        return None
    if not isinstance(value, Record) or len(value.arguments) != 1:
        raise FormatError(f"must have members of enumerations, got {shown(value)}")
    return SimpleNamespace(value=value.arguments[0])


def _attributes(value: object, kind: str) -> dict[str, object]:
    if not isinstance(value, Record) or value.name != kind:
        raise FormatError(f"must hold a {kind}, got {shown(getattr(value, 'name', value))}")
    return value.attributes


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise FormatError(f"must have names of modules and tables, got {shown(value)}")
    return value
