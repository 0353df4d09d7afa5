"""Topologies: levels that nest, memory per rank, and replica groups laid over them."""

import math
from dataclasses import replace

import pytest

from autoshard.core import GroupLayout, Link, MemoryBandwidth, MemoryBytes, MemoryLevel, ReplicaGroups
from autoshard.core.errors import InvalidPlanError, InvalidTopologyError
from tests.builders import topology


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: MemoryBytes(hbm=-1), "memory_bytes.hbm"),
        (lambda: MemoryBytes(hbm=1, ssd=1.5), "memory_bytes.ssd"),
        (lambda: MemoryBandwidth(ddr=0.0), "memory_bandwidth_bytes_per_s.ddr"),
        (lambda: MemoryBandwidth(ssd=math.inf), "memory_bandwidth_bytes_per_s.ssd"),
        (lambda: Link(bytes_per_s=0.0), "bytes_per_s"),
        (lambda: Link(bytes_per_s=1e-300), "bytes_per_s"),
        (lambda: Link(bytes_per_s=1e19), "bytes_per_s"),
        (lambda: Link(bytes_per_s=1e9, latency_s=3601.0), "latency_s"),
        (lambda: MemoryBandwidth(hbm=0.5), "memory_bandwidth_bytes_per_s.hbm"),
        (lambda: Link(bytes_per_s=math.nan), "bytes_per_s"),
        (lambda: Link(bytes_per_s=1.0, latency_s=-1.0), "latency_s"),
        (lambda: topology(world_size=0), "world_size"),
        (lambda: topology(device=""), "device"),
        (lambda: topology(device="a/b"), "device"),
        (lambda: topology(device=".."), "device"),
        (lambda: topology(device="a" * 101), "device"),
        (lambda: topology(levels=()), "levels"),
        (lambda: topology(levels=(replace(topology().levels[0], shared_links=True),)), "levels[0].shared_links"),
        (lambda: topology(4, 6), "levels[1].size"),
        (lambda: topology(world_size=9), "levels"),
        (lambda: topology(overrides=((4, MemoryBytes(hbm=1)),)), "overrides.ranks"),
        (lambda: topology(fetch_ms=((0.0,),)), "fetch_ms"),
        (lambda: topology(1, fetch_ms=((math.inf,),)), "fetch_ms"),
    ],
)
def test_impossible_values_are_refused_by_field(make, field):
    with pytest.raises(InvalidTopologyError) as caught:
        make()
    assert caught.value.field == field


def test_ranks_lie_on_nodes():
    two_nodes = topology(4, 8)
    assert (two_nodes.local_world_size, two_nodes.num_nodes) == (4, 2)
    assert [two_nodes.node_of(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_memory_is_that_of_all_ranks_unless_overridden():
    uneven = topology(hbm=100, ddr=10, overrides=((2, MemoryBytes(hbm=7)),))
    assert [uneven.memory_of(rank)[MemoryLevel.HBM] for rank in (1, 2, 3)] == [100, 7, 100]
    assert uneven.memory_of(2)[MemoryLevel.DDR] == 0


@pytest.mark.parametrize("layout", list(GroupLayout))
@pytest.mark.parametrize("num_groups", [1, 2, 4, 8])
def test_groups_share_the_world_and_each_node_out(layout, num_groups):
    machine, groups = topology(4, 8), ReplicaGroups(num_groups=num_groups, layout=layout)
    size, per_node = groups.group_size(machine), groups.ranks_per_node(machine)
    assert size * num_groups == 8
    world = [list(groups.world_ranks(rank, machine)) for rank in range(size)]
    assert sorted(rank for ranks in world for rank in ranks) == list(range(8))
    for group in range(num_groups):
        nodes = [machine.node_of(world[rank][group]) for rank in range(size)]
        assert nodes == sorted(nodes)
        assert {nodes.count(node) for node in nodes} == {per_node}


def test_copies_sit_in_one_node_or_groups_do():
    machine = topology(4, 8)
    across = ReplicaGroups(num_groups=2, layout=GroupLayout.ACROSS_NODES)
    within = ReplicaGroups(num_groups=2, layout=GroupLayout.WITHIN_NODES)
    assert [list(across.world_ranks(rank, machine)) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [list(within.world_ranks(rank, machine)) for rank in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_groups_that_do_not_divide_are_refused():
    with pytest.raises(InvalidPlanError, match="must divide the 8 ranks"):
        ReplicaGroups(num_groups=3).group_size(topology(4, 8))
    with pytest.raises(InvalidPlanError, match="no equal share"):
        ReplicaGroups(num_groups=3).ranks_per_node(topology(4, 12))
