"""topology.json: what is read back is what was written, and faults are named by field."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import Level, Link, MemoryBandwidth, MemoryBytes, Topology
from autoshard.core.errors import InputError
from autoshard.formats import read_topology, topology_from_json, topology_to_json, write_topology

SCHEMA = "autoshard.topology/1"

links = st.builds(Link, bytes_per_s=st.floats(1.0, 1e18), latency_s=st.floats(0, 3600))
memory = st.builds(MemoryBytes, hbm=st.integers(0, 2**60), ddr=st.integers(0, 2**60), ssd=st.integers(0, 2**60))
rates = st.none() | st.floats(1.0, 1e18)
bandwidths = st.builds(MemoryBandwidth, hbm=rates, ddr=rates, ssd=rates)


@st.composite
def topologies(draw):
    sizes = [draw(st.integers(1, 4))]
    for factor in draw(st.lists(st.integers(1, 3), max_size=2)):
        sizes.append(sizes[-1] * factor)
    overrides = draw(st.dictionaries(st.integers(0, sizes[-1] - 1), memory))
    costs = st.lists(st.floats(0, 1e6), min_size=sizes[-1], max_size=sizes[-1]).map(tuple)
    return Topology(
        world_size=sizes[-1],
        device=draw(st.sampled_from(["cpu", "h100"])),
        memory_bytes=draw(memory),
        levels=tuple(
            Level(
                name=f"level {index}",
                size=size,
                all_to_all=draw(links),
                all_reduce=draw(links),
                shared_links=index > 0 and draw(st.booleans()),
            )
            for index, size in enumerate(sizes)
        ),
        overrides=tuple(overrides.items()),
        fetch_ms=draw(st.none() | st.lists(costs, min_size=sizes[-1], max_size=sizes[-1]).map(tuple)),
        memory_bandwidth=draw(bandwidths),
    )


@given(topology=topologies())
def test_what_is_written_is_read_back_equal(topology, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "topology.json"
    write_topology(topology, path)
    assert read_topology(path) == topology


def test_an_override_keeps_the_levels_that_it_does_not_name(documents):
    read = topology_from_json(documents[SCHEMA])
    usual = read.memory_of(3)
    assert usual == MemoryBytes(hbm=2**30, ddr=2**32)
    assert read.memory_of(0) == read.memory_of(2) == MemoryBytes(hbm=2**29, ddr=usual.ddr)
    assert read.memory_of(1) == MemoryBytes(hbm=usual.hbm, ddr=usual.ddr, ssd=5)


def test_bandwidths_of_memory_may_be_left_out(documents):
    document = copy.deepcopy(documents[SCHEMA])
    assert topology_from_json(document).memory_bandwidth == MemoryBandwidth(ddr=2.4e10, ssd=3e9)
    del document["memory_bandwidth_bytes_per_s"]
    read = topology_from_json(document)
    assert read.memory_bandwidth == MemoryBandwidth()
    assert "memory_bandwidth_bytes_per_s" not in topology_to_json(read)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda it: it.update(world_size=0), "world_size: must be a whole number in [1, 131072], got 0"),
        (
            lambda it: (it.pop("fetch_ms"), it.update(world_size=8)),
            "levels: the last level must hold all 8 ranks, it holds 4",
        ),
        (
            lambda it: it["levels"][1].update(size=3),
            "levels[1].size: must be a whole multiple of the level inside it (2)",
        ),
        (lambda it: it["levels"][1].update(name="node"), 'levels[1].name: "node" is used twice'),
        (lambda it: it["levels"][0].pop("all_reduce"), "levels[0].all_reduce: is missing"),
        (
            lambda it: it["levels"][0]["all_to_all"].update(bytes_per_s=0),
            "levels[0].all_to_all.bytes_per_s: must be a finite number in [1, 1e+18], got 0.0",
        ),
        (
            lambda it: it["levels"][0]["all_to_all"].update(latency_s=float("nan")),
            "levels[0].all_to_all.latency_s: must be a finite number in [0, 3600], got NaN",
        ),
        (
            lambda it: it["memory_bytes"].update(hbm=-1),
            "memory_bytes.hbm: must be a whole number in [0, 1152921504606846976]",
        ),
        (lambda it: it["memory_bytes"].pop("hbm"), "memory_bytes.hbm: is missing"),
        (lambda it: it["memory_bytes"].update(nvme=1), "memory_bytes.nvme: is not known; accepted: hbm, ddr, ssd"),
        (
            lambda it: it["memory_bandwidth_bytes_per_s"].update(ddr=0),
            "memory_bandwidth_bytes_per_s.ddr: must be a finite number in [1, 1e+18], got 0.0",
        ),
        (
            lambda it: it["memory_bandwidth_bytes_per_s"].update(nvme=1),
            "memory_bandwidth_bytes_per_s.nvme: is not known; accepted: hbm, ddr, ssd",
        ),
        (
            lambda it: it["overrides"][0].update(ranks=[4]),
            "overrides[0].ranks[0]: must be a whole number in [0, 3], got 4",
        ),
        (lambda it: it["overrides"][1].update(ranks=[2]), "overrides[1].ranks: rank 2 is overridden twice"),
        (lambda it: it["fetch_ms"].pop(), "fetch_ms: must hold 4 values, got 3"),
        (lambda it: it["fetch_ms"][3].pop(), "fetch_ms[3]: must hold 4 values, got 3"),
        (
            lambda it: it["fetch_ms"][1].__setitem__(2, -1),
            "fetch_ms[1][2]: must be a finite number in [0, 1e+09], got -1",
        ),
    ],
)
def test_a_fault_is_one_line_with_its_field(change, line, documents):
    changed = copy.deepcopy(documents[SCHEMA])
    change(changed)
    with pytest.raises(InputError) as caught:
        topology_from_json(changed)
    assert str(caught.value).startswith(line)
