"""Table sets and topologies that come with the package, by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from importlib import resources
from itertools import count
from pathlib import Path
from typing import Any

from autoshard.core import EmbeddingTable, Feature, ImpliedOrder, Optimizer, TableSet, Topology
from autoshard.core.accepted import MAX_WORLD_SIZE
from autoshard.core.errors import InvalidTopologyError, UnknownNameError
from autoshard.formats.documents.access_json import AccessContext, access_from_json
from autoshard.formats.documents.topology_json import read_topology, topology_from_json
from autoshard.formats.metasyn import metasyn
from autoshard.formats.topology_scaling import scaled_topology

_DATA = resources.files("autoshard.formats") / "bundled"
_METASYN = "metasyn"
_METASYN_DESCRIPTION = "AutoShard's MetaSyn: a pool of 856 tables generated to its published statistics"


def load_topology(name_or_path: str | Path) -> Topology:
    """A topology by the name of a bundled one, or from a `topology.json`.

    Machines whose description says so can be made for any number of ranks, named after it: `dgx-a100-128`.

    Raises:
        InvalidTopologyError: If a machine cannot be made for so many ranks.
        UnknownNameError: If it is neither the name of a bundled topology nor a file.
        InputError: If the file holds no topology; the text names file and field.
    """
    known = bundled_topologies()
    if str(name_or_path) in known or not _is_there(name_or_path):
        found = bundled_topology(str(name_or_path))
        if found is not None:
            return found
    check_file(name_or_path, known, "topology")
    return read_topology(name_or_path)


def bundled_topology(name: str) -> Topology | None:
    """A bundled topology by name, such as `a100-8`, or `dgx-a100-128` for a machine of that many ranks; else None.

    Raises:
        InvalidTopologyError: If a machine cannot be made for so many ranks.
    """
    known = bundled_topologies()
    if name in known:
        return _bundled_topology(name)
    family, _, num_ranks = name.rpartition("-")
    return _scaled_topology(family, int(num_ranks)) if num_ranks.isdecimal() and _is_family(family, known) else None


def bundled_name(topology: Topology) -> str | None:
    """The name by which `bundled_topology` gives a topology; None for another one."""
    for known in bundled_topologies():
        for name in (known, f"{known}-{topology.world_size}"):
            with suppress(InvalidTopologyError):
                if bundled_topology(name) == topology:
                    return name
    return None


def load_machine(name_or_path: str | Path, num_ranks: int) -> Topology:
    """A topology by name or file, made for a number of ranks.

    Raises:
        UnknownNameError: As `load_topology`.
        InvalidTopologyError: If the machine cannot be made for so many ranks; the text says for how many it can.
        InputError: As `load_topology`.
    """
    if _is_family(str(name_or_path), bundled_topologies()):
        return _scaled_topology(str(name_or_path), num_ranks)
    topology = load_topology(name_or_path)
    try:
        return scaled_topology(topology, num_ranks)
    except InvalidTopologyError as error:
        raise error.in_source(str(name_or_path)) from error


def bundled_table_sets() -> Mapping[str, str]:
    """Names of the bundled table sets, with one line about each."""
    return {_METASYN: _METASYN_DESCRIPTION, **_descriptions("tables")}


def bundled_topologies() -> Mapping[str, str]:
    """Names of the bundled topologies, with one line about each."""
    return _descriptions("topologies")


@lru_cache(maxsize=4)
def bundled_tables(name: str) -> TableSet:
    """A bundled table set by one of the names of `bundled_table_sets`."""
    if name == _METASYN:
        return metasyn()
    published = _published("tables", name)
    table_numbers, feature_numbers = count(), count()
    tables = []
    for group in published["groups"]:
        num_embeddings, pooling_factors = group["num_embeddings"], group["pooling_factors"]
        context = AccessContext(num_embeddings=num_embeddings, pooling_factor=sum(pooling_factors))
        access = access_from_json(published["access"], "access", context)
        for _ in range(group["num_tables"]):
            features = tuple(
                Feature(name=f"f{next(feature_numbers)}", pooling_factor=float(factor)) for factor in pooling_factors
            )
            tables.append(
                EmbeddingTable(
                    name=f"t{next(table_numbers)}",
                    num_embeddings=num_embeddings,
                    embedding_dim=group["embedding_dim"],
                    features=features,
                    access=access,
                    optimizer=Optimizer(published["optimizer"]),
                    row_order=ImpliedOrder.BY_ID,
                )
            )
    return TableSet(batch_size=published["batch_size"], tables=tuple(tables))


@lru_cache(maxsize=16)
def _bundled_topology(name: str) -> Topology:
    published = _published("topologies", name)
    topology = topology_from_json(published["topology"])
    return scaled_topology(topology, published.get("default_ranks", topology.world_size))


@lru_cache(maxsize=64)
def _scaled_topology(family: str, num_ranks: int) -> Topology:
    source = f"{family}-{num_ranks}"
    if num_ranks > MAX_WORLD_SIZE:
        raise InvalidTopologyError(f"must be at most {MAX_WORLD_SIZE}, got {num_ranks}", field="ranks", source=source)
    published = topology_from_json(_published("topologies", family)["topology"])
    try:
        return scaled_topology(published, num_ranks)
    except InvalidTopologyError as error:
        raise InvalidTopologyError(error.message, field="ranks", source=source) from error


def _is_family(name: str, known: Mapping[str, str]) -> bool:
    return name in known and name != _METASYN and "default_ranks" in _published("topologies", name)


@lru_cache(maxsize=2)
def _descriptions(folder: str) -> Mapping[str, str]:
    names = sorted(file.name.removesuffix(".json") for file in (_DATA / folder).iterdir())
    return {name: _description(name, _published(folder, name)) for name in names}


def _description(name: str, published: Mapping[str, Any]) -> str:
    text: str = published["description"]
    ranks = published.get("default_ranks")
    return text if ranks is None else f"{text} ({ranks} ranks, {name}-N for N)"


def _published(folder: str, name: str) -> dict[str, Any]:
    content = json.loads((_DATA / folder / f"{name}.json").read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def check_file(name_or_path: str | Path, known: Mapping[str, str], kind: str) -> None:
    """Refuses what is neither a file nor one of the bundled names.

    Raises:
        UnknownNameError: Then; the text lists the names.
    """
    if not _is_there(name_or_path):
        raise UnknownNameError(
            f"is neither a file nor bundled {kind}; bundled are {', '.join(known)}", source=str(name_or_path)
        )


def _is_there(path: str | Path) -> bool:
    """Whether there is such a file; a name that no file can have is none."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # too long; a null character
        return False
