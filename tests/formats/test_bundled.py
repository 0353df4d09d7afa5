"""What comes with the package is what was published."""

import json
from dataclasses import replace

import pytest

from autoshard.core import AccessProfile, MemoryBytes, Optimizer
from autoshard.core.errors import FormatError, InvalidTopologyError, UnknownNameError
from autoshard.formats import (
    bundled_name,
    bundled_table_sets,
    bundled_topologies,
    load_tables,
    load_topology,
    tables_from_json,
    tables_to_json,
    topology_from_json,
    topology_to_json,
    write_tables,
    write_topology,
)
from autoshard.formats.topology_scaling import scaled_topology

NAMES = ["criteo-1tb", "criteo-kaggle", "metasyn", "mlperf-dlrm-v2", "nvidia-medium", "nvidia-small", "nvidia-tiny"]
NAMES += ["param-a", "param-b"]
#: Machines for any number of ranks, with that of the bare name.
MACHINES = {"cpu-host": 8, "dgx-a100": 8, "dgx-h100": 8, "hgx-h200": 8, "zionex": 128}


def test_all_names_have_a_line_about_them():
    assert sorted(bundled_table_sets()) == NAMES
    fixed = ["a100-32", "a100-8", "cpu-4", "cpu-8", "h100-8"]
    assert sorted(bundled_topologies()) == sorted([*fixed, *MACHINES])
    for line in (*bundled_table_sets().values(), *bundled_topologies().values()):
        assert 10 < len(line) < 130
        assert "\n" not in line


@pytest.mark.parametrize("name", NAMES)
def test_a_bundled_set_can_be_written_and_read(name):
    tables = load_tables(name)
    assert tables_from_json(tables_to_json(tables)) == tables


@pytest.mark.parametrize("name", ["a100-32", "a100-8", "cpu-4", "cpu-8", "h100-8"])
def test_a_bundled_topology_is_as_large_as_its_name_says(name):
    topology = load_topology(name)
    device, world_size = name.split("-")
    assert (topology.device, topology.world_size) == (device, int(world_size))
    assert topology.local_world_size == min(8, topology.world_size)
    assert topology_from_json(topology_to_json(topology)) == topology


@pytest.mark.parametrize("name", ["a100-32", "cpu-8", "dgx-a100", "dgx-a100-64", "zionex-16"])
def test_a_bundled_topology_is_known_by_its_name(name):
    topology = load_topology(name)
    assert bundled_name(topology_from_json(topology_to_json(topology))) == name
    assert bundled_name(replace(topology, device="other")) is None


def test_topologies_hold_what_their_sources_say():
    zion, hopper = load_topology("a100-32"), load_topology("h100-8")
    # Neo Table 2 (320 GB in a node of 8) and Fig. 17 (7 GB/s AlltoAll, 60 GB/s AllReduce at 256 MB).
    assert zion.memory_bytes.hbm == 40 * 2**30
    assert (zion.levels[1].all_to_all.bytes_per_s, zion.levels[1].all_reduce.bytes_per_s) == (7e9, 6e10)
    # Neo: 2.4 TB/s of a node; NVLink 4: 900 GB/s, both directions. 80% of one direction is taken as reached.
    assert zion.levels[0].all_to_all.bytes_per_s == pytest.approx(0.8 * 2.4e12 / 8)
    assert hopper.levels[0].all_to_all.bytes_per_s == pytest.approx(0.8 * 900e9 / 2)
    assert load_topology("cpu-8").memory_bytes.hbm == 2**30


class TestMachines:
    """Machines of any number of ranks."""

    @pytest.mark.parametrize("name", MACHINES)
    def test_a_machine_is_made_for_any_number_of_nodes(self, name):
        assert load_topology(name).world_size == MACHINES[name]
        for world_size in (1, 2, 4, 8, 16, 24, 4096):
            topology = load_topology(f"{name}-{world_size}")
            assert topology.world_size == world_size
            assert topology.local_world_size == min(8, world_size)
            assert len(topology.levels) == (1 if world_size <= 8 else 2)
            assert topology_from_json(topology_to_json(topology)) == topology
        whole, half = load_topology(f"{name}-4096"), load_topology(f"{name}-16")
        assert whole.levels[1].all_to_all == half.levels[1].all_to_all

    @pytest.mark.parametrize("name", MACHINES)
    def test_nodes_are_faster_than_the_network(self, name):
        node, network = load_topology(f"{name}-4096").levels
        assert node.all_to_all.bytes_per_s > network.all_to_all.bytes_per_s
        assert node.all_to_all.latency_s < network.all_to_all.latency_s

    def test_machines_hold_what_their_sources_say(self):
        ampere, hopper = load_topology("dgx-a100-16"), load_topology("dgx-h100-16")
        # NVIDIA/nccl-tests issues 149, 212, 290, NVIDIA/nccl issues 412, 812; bus bandwidth of all-reduces is 2 (n - 1)
        # / n times its own: 230 GB/s of 8 GPUs, 192 GB/s of many.
        assert [level.all_to_all.bytes_per_s for level in ampere.levels] == [230e9, 24e9]
        assert ampere.levels[0].all_reduce.bytes_per_s * 2 * 7 / 8 == pytest.approx(230e9)
        assert ampere.levels[1].all_reduce.bytes_per_s * 2 == 192e9
        assert [level.all_to_all.bytes_per_s for level in hopper.levels] == [370e9, 47e9]
        # Neo Table 2: 1.5 TB of DDR in a node of 8; Fig. 17.
        zionex = load_topology("zionex")
        assert zionex.memory_bytes.ddr * 8 == 1.5e12
        assert zionex.levels[1].all_to_all.bytes_per_s == 7e9

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("dgx-a100-12", "dgx-a100-12: ranks: must be a multiple of the 8 ranks of a node, or fewer, got 12"),
            ("dgx-a100-0", "dgx-a100-0: ranks: must be at least 1, got 0"),
            ("dgx-a100-1000000", "dgx-a100-1000000: ranks: must be at most 131072, got 1000000"),
        ],
    )
    def test_numbers_of_ranks_that_cannot_be(self, name, message):
        with pytest.raises(InvalidTopologyError) as caught:
            load_topology(name)
        assert str(caught.value) == message

    def test_topologies_of_files_and_fixed_ones_scale_too(self):
        assert scaled_topology(load_topology("a100-32"), 64).levels[1].size == 64
        assert scaled_topology(load_topology("a100-32"), 4).levels[0].size == 4
        with pytest.raises(InvalidTopologyError, match="at most 8, for the topology has no level outside of its node"):
            scaled_topology(load_topology("a100-8"), 16)
        uneven = replace(load_topology("a100-8"), overrides=((0, MemoryBytes(hbm=1)),))
        with pytest.raises(InvalidTopologyError, match="overrides: is of 8 single ranks"):
            scaled_topology(uneven, 4)


def test_mlperf_has_26_multi_hot_tables():
    tables = load_tables("mlperf-dlrm-v2")
    assert (len(tables.tables), tables.batch_size) == (26, 65536)
    assert {table.embedding_dim for table in tables.tables} == {128}
    assert max(table.num_embeddings for table in tables.tables) == 40_000_000
    assert sum(table.pooling_factor for table in tables.tables) == 214  # the multi-hot sizes add up to this
    assert tables.tables[20].pooling_factor == 100
    assert {table.optimizer for table in tables.tables} == {Optimizer.ADAGRAD}


def test_criteo_has_its_cardinalities():
    terabyte, kaggle = load_tables("criteo-1tb"), load_tables("criteo-kaggle")
    assert (len(terabyte.tables), len(kaggle.tables)) == (26, 26)
    assert sum(table.num_embeddings for table in terabyte.tables) == 177_944_275  # the well-known 178 million rows
    assert sum(table.num_embeddings for table in kaggle.tables) == 33_762_577  # the well-known 33.8 million


@pytest.mark.parametrize(
    ("name", "num_tables", "num_features", "gibibytes", "long_bag"),
    # Tables and sizes as the models' README tells them (weights alone, fp32), features from the configurations.
    [
        ("nvidia-tiny", 55, 58, 4.2, 10.0),
        ("nvidia-small", 107, 116, 26.3, 30.0),
        ("nvidia-medium", 311, 337, 206.2, 50.0),
    ],
)
def test_nvidias_models_share_tables_between_features(name, num_tables, num_features, gibibytes, long_bag):
    tables = load_tables(name)
    features = [feature for table in tables.tables for feature in table.features]
    assert (len(tables.tables), len(features)) == (num_tables, num_features)
    assert sum(table.weight_bytes for table in tables.tables) / 2**30 == pytest.approx(gibibytes, rel=0.01)
    shared = [table for table in tables.tables if len(table.features) > 1]
    assert {tuple(feature.pooling_factor for feature in table.features) for table in shared} == {(1.0, long_bag)}
    first = tables.tables[0]
    assert first.access == AccessProfile.zipf(first.num_embeddings, 1.05)


def test_param_has_long_bags():
    assert [table.num_embeddings for table in load_tables("param-a").tables] == [14_000_000, 26_000_000]
    assert [table.pooling_factor for table in load_tables("param-b").tables] == [34.0]


class TestNameOrPath:
    def test_a_file_is_read(self, tmp_path):
        tables, topology = load_tables("param-a"), load_topology("cpu-4")
        write_tables(tables, tmp_path / "tables")
        write_topology(topology, tmp_path / "topology")
        assert load_tables(tmp_path / "tables") == tables
        assert load_topology(str(tmp_path / "topology")) == topology

    @pytest.mark.parametrize(("load", "known"), [(load_tables, "metasyn, "), (load_topology, "a100-32, ")])
    def test_what_is_neither_is_told_what_there_is(self, load, known):
        with pytest.raises(UnknownNameError) as caught:
            load("metasin")
        assert str(caught.value).startswith("metasin: is neither a file nor ")
        assert known in str(caught.value)

    def test_a_file_of_another_kind_is_named(self, tmp_path):
        path = tmp_path / "x.json"
        path.write_text(json.dumps(topology_to_json(load_topology("cpu-4"))))
        with pytest.raises(FormatError, match="schema: must be"):
            load_tables(path)

    def test_the_same_name_gives_the_same_tables(self):
        assert load_tables("metasyn") is load_tables("metasyn")
