"""Topologies made for other numbers of ranks: more or fewer nodes of the same machine."""

from __future__ import annotations

from dataclasses import replace

from autoshard.core import Topology
from autoshard.core.accepted import AT_LEAST_1
from autoshard.core.errors import InvalidTopologyError


def scaled_topology(topology: Topology, world_size: int) -> Topology:
    """The same machine with another number of ranks.

    Levels that hold fewer ranks stay as they are; the first that holds as many or more holds exactly these, and the
    outermost level grows as far as it must. Links keep their bandwidths and latencies, so that what they measure of
    one size stands for others.

    Args:
        topology: Of any number of ranks, all alike.
        world_size: Ranks of the answer.

    Raises:
        InvalidTopologyError: If levels do not divide the ranks, if the topology ends at its only level and more
            ranks are asked for, or if its ranks are not alike.
    """
    if world_size == topology.world_size:
        return topology
    AT_LEAST_1.check(world_size, "world_size", InvalidTopologyError)
    if topology.overrides or topology.fetch_ms is not None:
        name = "overrides" if topology.overrides else "fetch_ms"
        raise InvalidTopologyError(
            f"is of {topology.world_size} single ranks, so the topology cannot be made for {world_size}", field=name
        )
    if len(topology.levels) == 1 and world_size > topology.world_size:
        raise InvalidTopologyError(
            f"must be at most {topology.world_size}, for the topology has no level outside of its "
            f"{topology.levels[0].name}, got {world_size}",
            field="world_size",
        )
    inner = [level for level in topology.levels[:-1] if level.size < world_size]
    for level in inner:
        if world_size % level.size:
            raise InvalidTopologyError(
                f"must be a multiple of the {level.size} ranks of a {level.name}, or fewer, got {world_size}",
                field="world_size",
            )
    last = replace(topology.levels[len(inner)], size=world_size)
    return replace(topology, world_size=world_size, levels=(*inner, last))
