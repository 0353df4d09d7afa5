"""Points of a sweep, by the library and by the command."""

import json
from dataclasses import replace

import pytest

from autoshard.core import DenseLayers, Estimate, Link
from autoshard.core.errors import FormatError, InvalidOptionError, InvalidTopologyError
from autoshard.formats import load_machine, read_json, write_tables, write_topology
from autoshard.planning import make_costs, make_plan
from autoshard.results.sweep import PointMemory, PointStatus, PricedPoint, SweepPoint, UnpricedPoint, scaling_factors
from autoshard.results.sweep_record import SIMULATION, SweepRecord, read_record
from autoshard.whatif.sweep import Simulator, sweep_points
from tests import builders
from tests.builders import request, table

GROUP_SIZE_POINTS = {"machines": ["dgx-a100"], "batch_sizes": [256], "is_batch_per_rank": True}


def tables(num_tables=16, num_embeddings=100_000):
    fields = {"num_embeddings": num_embeddings, "embedding_dim": 64, "pooling_variance": 30.0, "alpha": 1.05}
    of = (table(f"t{index}", pooling_factor=5.0 + index, **fields) for index in range(num_tables))
    return builders.tables(*of, batch_size=4096)


def simulator(**changes):
    return Simulator(**{"tables": tables(), "planner": "cost-greedy", **changes})


def priced_point(point, step_ms):
    return PricedPoint(
        point=point,
        needed_bytes=1,
        available_bytes=1,
        step_ms=Estimate(value=step_ms, low=step_ms, high=step_ms),
        parts_ms={},
        imbalance=1.0,
        exchange_balance=1.0,
        memory=PointMemory(static_bytes=1, activation_bytes=0, limit_bytes=1),
        num_shards={},
        planned_groups=1,
        models={},
        planning_s=0.1,
    )


class TestPoints:
    def test_all_combinations_with_ranks_last(self):
        points = sweep_points(machines=["zionex", "dgx-h100"], ranks=[8, 16], batch_sizes=[64], groups=[1, 2])
        assert len(points) == 8
        assert [(one.machine, one.num_groups, one.num_ranks) for one in points][:4] == [
            ("zionex", 1, 8),
            ("zionex", 1, 16),
            ("zionex", 2, 8),
            ("zionex", 2, 16),
        ]

    def test_groups_of_one_size_are_one_series(self):
        points = sweep_points(ranks=[8, 16, 64], group_sizes=[16], **GROUP_SIZE_POINTS)
        assert [one.num_groups for one in points] == [1, 1, 4]
        assert len({one.series for one in points}) == 1
        assert points[2].global_batch_size == 256 * 64

    def test_nothing_below_one(self):
        with pytest.raises(InvalidOptionError, match="num_ranks: must be at least 1, got 0"):
            SweepPoint(machine="zionex", num_ranks=0, batch_size=1)

    def test_scaling_factors_are_throughput_per_rank_over_the_smallest(self):
        def priced(num_ranks, step_ms, machine="zionex"):
            point = SweepPoint(machine=machine, num_ranks=num_ranks, batch_size=100, is_batch_per_rank=True)
            return priced_point(point, step_ms)

        point = SweepPoint(machine="zionex", num_ranks=4, batch_size=100, is_batch_per_rank=True)
        failed = UnpricedPoint(
            point=point,
            needed_bytes=2,
            available_bytes=1,
            status=PointStatus.DOES_NOT_FIT,
            reason="1 byte more",
            planning_s=0.1,
        )
        points = [failed, priced(16, 2.5), priced(8, 2.0), priced(32, 4.0), priced(32, 7.0, machine="dgx-h100")]
        assert scaling_factors(points) == [None, 0.8, 1.0, 0.5, 1.0]


class TestSimulator:
    def test_a_point_is_a_plan_priced(self):
        (point,) = sweep_points(machines=["dgx-a100"], ranks=[8], batch_sizes=[4096])
        found = simulator().simulate(point)
        machine = load_machine("dgx-a100", 8)
        task = request(tables(), machine, costs=make_costs(tables(), machine))
        predicted = make_plan("cost-greedy", task).predicted
        assert found.step_ms == predicted.step_ms
        assert sum(found.parts_ms.values()) == pytest.approx(predicted.step_ms.value)
        assert found.samples_per_s == pytest.approx(4096 / predicted.step_ms.value * 1e3)
        assert found.memory.static_bytes == max(rank.hbm_bytes for rank in predicted.ranks)
        assert found.memory.used_bytes == max(rank.used_bytes for rank in predicted.ranks)
        assert found.memory.limit_bytes == machine.memory_bytes.hbm
        assert found.num_shards == {"table_wise": 16}
        assert found.models["kernel"] == "analytic:a100 (rows at 1,705 GB/s)"
        assert found.spread is None

    def test_parts_add_up_and_training_takes_memory(self):
        dense = DenseLayers(num_dense_features=13, bottom_mlp=(1024, 64), top_mlp=(1024, 1))
        (point,) = sweep_points(machines=["cpu-8"], ranks=[8], batch_sizes=[4096])
        found = simulator(tables=replace(tables(), dense=dense)).simulate(point)
        assert sum(found.parts_ms.values()) == pytest.approx(found.step_ms.value)
        assert found.parts_ms["overhead"] > 1
        assert found.memory.training_bytes > 4 * 1024 * 1024 > found.memory.activation_bytes / 100

    def test_groups_plan_for_a_group_and_synchronise(self):
        whole, halves = (
            simulator().simulate(one)
            for one in sweep_points(machines=["dgx-a100"], ranks=[16], batch_sizes=[4096], groups=[1, 2])
        )
        assert halves.parts_ms["group_sync"] > 0 == whole.parts_ms["group_sync"]
        assert halves.memory.static_bytes > whole.memory.static_bytes
        assert halves.available_bytes * 2 == whole.available_bytes
        assert (whole.planned_groups, halves.planned_groups) == (1, 2)

    def test_a_planner_may_choose_groups_itself(self):
        (point,) = sweep_points(machines=["zionex"], ranks=[16], batch_sizes=[65536])
        chosen = simulator(planner="replica-groups").simulate(point)
        assert isinstance(chosen, PricedPoint)
        assert chosen.point == point
        assert 16 % chosen.planned_groups == 0
        assert (chosen.parts_ms["group_sync"] > 0) == (chosen.planned_groups > 1)

    def test_what_does_not_fit_says_so_with_numbers(self):
        (point,) = sweep_points(machines=["dgx-a100"], ranks=[2], batch_sizes=[4096])
        found = simulator(tables=tables(num_embeddings=10**9)).simulate(point)
        assert found.status is PointStatus.DOES_NOT_FIT
        assert found.needed_bytes == 16 * 10**9 * (64 + 1) * 4
        assert found.available_bytes == 2 * 80 * 2**30
        assert "t0 needs 242 GiB on one rank" in found.reason

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"num_groups": 3}, "must divide the 8 ranks, got 3"),
            ({"batch_size": 2, "num_groups": 4}, "must be at least the 4 groups, got 2"),
        ],
    )
    def test_what_cannot_be_says_why(self, changes, reason):
        point = replace(SweepPoint(machine="dgx-a100", num_ranks=8, batch_size=4096), **changes)
        found = simulator().simulate(point)
        assert found.status is PointStatus.IMPOSSIBLE
        assert reason in found.reason

    def test_groups_of_another_size_are_not_simulated_in_place_of_those_asked_for(self):
        points = sweep_points(ranks=[8, 16, 24, 32, 40], group_sizes=[16], **GROUP_SIZE_POINTS)
        found = [simulator().simulate(one) for one in points]
        reasons = [one.reason if isinstance(one, UnpricedPoint) else None for one in found]
        refused = [f"group_size: must divide the {num_ranks} ranks, got 16" for num_ranks in (24, 40)]
        assert reasons == [None, None, refused[0], None, refused[1]]
        assert {one.status for one in found if isinstance(one, UnpricedPoint)} == {PointStatus.IMPOSSIBLE}
        assert [one.planned_groups for one in found if isinstance(one, PricedPoint)] == [1, 1, 2]

    def test_a_spread_of_one_batch_is_refused_before_any_point(self):
        with pytest.raises(InvalidOptionError, match="num_batches: must be 0, or at least 2, got 1"):
            simulator(num_batches=1)

    def test_a_machine_that_cannot_be_is_an_error(self):
        with pytest.raises(InvalidTopologyError, match="must be a multiple of the 8 ranks"):
            simulator().simulate(SweepPoint(machine="dgx-a100", num_ranks=12, batch_size=64))

    def test_batches_are_drawn_where_asked_for(self):
        (point,) = sweep_points(machines=["dgx-a100"], ranks=[8], batch_sizes=[4096])
        found = simulator(num_batches=20).simulate(point)
        assert found.spread.num_batches == 20
        assert found.spread.p50_ms == pytest.approx(found.step_ms.value, rel=0.2)


@pytest.fixture
def task(tmp_path):
    write_tables(tables(8), tmp_path / "tables.json")
    return str(tmp_path / "tables.json")


class TestCommand:
    SMALL = ("--planner", "cost-greedy", "--batches", 5)

    def test_prints_points_and_parts_or_one_json_object(self, run, task):
        options = (task, "--topology", "zionex,dgx-a100", "--ranks", "8,16", *self.SMALL)
        text, _ = run("simulate", *options)
        assert text.count("zionex, batch 4,096") == 4  # figures and parts of two points
        assert "samples/s" in text
        assert "Parts of the step" in text
        points = json.loads(run("simulate", *options, "--json")[0])["points"]
        assert [(one["machine"], one["num_ranks"]) for one in points] == [
            ("zionex", 8),
            ("zionex", 16),
            ("dgx-a100", 8),
            ("dgx-a100", 16),
        ]
        assert [one["scaling_factor"] for one in points][::2] == [1.0, 1.0]
        assert all(one["spread"]["p99_ms"] >= one["spread"]["p50_ms"] > 0 for one in points)

    def test_goes_on_where_it_was(self, run, task, tmp_path):
        file = tmp_path / "sweep.json"
        run("simulate", task, "--ranks", "8", *self.SMALL, "-o", file)
        # What is in the file is not computed again: a figure that no simulation gives stays.
        document = read_json(file)
        document["points"][0]["imbalance"] = 77.0
        file.write_text(json.dumps(document))
        points = json.loads(run("simulate", task, "--ranks", "8,16", *self.SMALL, "-o", file, "--json")[0])["points"]
        assert [one["imbalance"] == 77.0 for one in points] == [True, False]
        assert len(read_json(file)["points"]) == 2

    def test_another_cluster_of_the_same_name_is_simulated_anew(self, run, task, tmp_path):
        file, cluster = tmp_path / "sweep.json", tmp_path / "cluster.json"
        options = (task, "--topology", cluster, "--ranks", "8", *self.SMALL, "-o", file)
        machine = load_machine("zionex", 8)
        write_topology(machine, cluster)
        (first,) = json.loads(run("simulate", *options, "--json")[0])["points"]
        slower = [replace(one, all_to_all=Link(bytes_per_s=1e8)) for one in machine.levels]
        write_topology(replace(machine, levels=tuple(slower)), cluster)
        out, told = run("simulate", *options, "--json")
        (second,) = json.loads(out)["points"]
        assert second["step_ms"]["value"] > 2 * first["step_ms"]["value"]
        assert "the cluster or the models changed" in told
        assert len(read_json(file)["points"]) == 1

    def test_other_settings_need_another_file(self, run, task, tmp_path):
        file = tmp_path / "sweep.json"
        run("simulate", task, "--ranks", "8", *self.SMALL, "-o", file)
        _, error = run("simulate", task, "--ranks", "8", *self.SMALL, "--seed", 1, "-o", file, code=2)
        assert "settings.seed: must be 1 as in this run, got 0" in error

    def test_files_of_other_kinds_are_refused(self, tmp_path):
        for content, message in (
            ("{}", "schema"),
            ('{"schema": "autoshard.simulation/1", "settings": {}, "points": 3}', "points"),
        ):
            (tmp_path / "x.json").write_text(content)
            with pytest.raises(FormatError, match=message):
                read_record(tmp_path / "x.json", {})
        damaged = {"schema": "autoshard.simulation/1", "settings": {}, "points": [{"machine": "zionex"}]}
        (tmp_path / "x.json").write_text(json.dumps(damaged))
        with pytest.raises(FormatError, match=r"points\[0\]"):
            read_record(tmp_path / "x.json", {})

    def test_a_priced_point_has_its_figures(self, tmp_path):
        file = tmp_path / "x.json"
        (point,) = sweep_points(machines=["dgx-a100"], ranks=[8], batch_sizes=[4096])
        SIMULATION.write(SweepRecord(settings={}, points=(priced_point(point, 1.0),)), file)
        assert read_record(file, {}).points == (priced_point(point, 1.0),)
        document = read_json(file)
        document["points"][0]["memory"] = None
        file.write_text(json.dumps(document))
        with pytest.raises(FormatError, match=r"points\[0\]\.memory: must not be null where status is priced"):
            read_record(file, {})

    def test_points_without_a_plan_are_lines(self, run, tmp_path):
        write_tables(tables(8, num_embeddings=10**8), tmp_path / "large.json")
        options = (tmp_path / "large.json", "--planner", "cost-greedy", "--batches", 0)
        text, _ = run("simulate", *options, "--ranks", "1,8", "--groups", "1,3")
        assert "does not fit: tables need 194 GiB, the ranks of a group have 80.0 GiB" in text
        assert "impossible: replica_groups.num_groups: must divide the 8 ranks, got 3" in text
        out, err = run("simulate", *options, "--ranks", "1", code=3)
        assert "does not fit" in out
        assert "no point fits" in err

    def test_draws_a_page_that_needs_no_network(self, run, task, tmp_path):
        run("simulate", task, "--ranks", "8,16", *self.SMALL, "--html", tmp_path / "sweep.html")
        page = (tmp_path / "sweep.html").read_text(encoding="utf-8")
        assert "scaling factor" in page
        assert "dgx-a100, batch 4,096" in page
