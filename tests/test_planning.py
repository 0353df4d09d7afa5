"""Planning from end to end: which model prices, what a plan carries, planners side by side."""

import logging
import re
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from autoshard import __version__
from autoshard.cli import main
from autoshard.core import (
    DType,
    GradSync,
    MemoryBandwidth,
    Optimizer,
    PlacedShard,
    Pooling,
    Shard,
    Tier,
    local_shard,
    local_shards,
)
from autoshard.core.costs import Risk
from autoshard.core.errors import AutoshardError, InfeasiblePlanError, InvalidOptionError, UnknownNameError
from autoshard.core.machine import MeasuredMachine
from autoshard.evaluation import evaluate
from autoshard.evaluation.analytic import AnalyticCostModel
from autoshard.formats import load_topology, read_plan, write_plan
from autoshard.formats.bundled import load_machine
from autoshard.formats.documents.json_document import read_json
from autoshard.formats.metasyn import metasyn
from autoshard.hardware import this_processor
from autoshard.planners.heuristics.greedy import RandomPlanner
from autoshard.planning import (
    compare,
    kernel_model,
    machine_note,
    make_costs,
    make_plan,
    plan_costs,
    repriced,
    searched_types,
)
from autoshard.report import speedups_over
from autoshard.validator import validate_plan
from costmodel import Registry
from costmodel.kernel.learned import LearnedCostModel
from tests import builders as make
from tests.costmodel.conftest import dataset, samples, short_options, store, trained  # noqa: F401

SCALE = 64


@pytest.fixture(scope="module")
def registry(tmp_path_factory, trained):  # noqa: F811
    """With a cost model of this project's own, trained shortly on real samples."""
    root = tmp_path_factory.mktemp("registry")
    trained.model.publish(Registry(root))
    return root


def whole_shards(tables):
    placed = [PlacedShard.table_wise(Shard.whole(table), 0) for table in tables.tables]
    return local_shards(placed, group_batch_size=tables.batch_size, bags_share_N=[1.0] * len(placed))


@pytest.fixture(scope="module")
def tables():
    pool = metasyn().scaled(SCALE)
    chosen = np.random.default_rng(5).choice(len(pool.tables), 30, replace=False)
    return replace(pool, tables=tuple(pool.tables[index] for index in chosen))


@pytest.fixture(scope="module")
def topology():
    return load_topology("cpu-4")


@pytest.fixture
def request_of(tables, topology, registry):
    costs = make_costs(tables, topology, registry)
    return partial(make.request, tables=tables, topology=topology, costs=costs, registry=registry)


class TestModels:
    def test_learned_where_the_registry_has_one(self, topology, registry):
        version = Registry(registry).production_id(LearnedCostModel.kind, "cpu")
        assert kernel_model(topology, registry).name == f"learned:cpu@{version}"

    def test_analytic_else(self, topology, registry, tmp_path):
        assert kernel_model(topology, tmp_path).name == "analytic:cpu"
        assert kernel_model(replace(topology, device="a100"), registry).name == "analytic:a100"

    def test_neither(self, topology, registry):
        name = kernel_model(replace(topology, device="abacus"), registry).name
        assert name == "analytic:abacus (unknown device, priced as t4)"

    def test_topologies_state_how_fast_their_memory_is(self, tables, tmp_path):
        card = load_machine("dgx-a100", 8)
        usual = replace(card, memory_bandwidth=MemoryBandwidth())
        models = [kernel_model(one, tmp_path) for one in (card, usual)]
        assert [model.name for model in models] == ["analytic:a100 (rows at 1,705 GB/s)", "analytic:a100"]
        shards = [
            local_shard(PlacedShard.table_wise(Shard.whole(table), 0), group_batch_size=1024) for table in tables.tables
        ]
        fast, slow = (model.predict_ms(model.encode(shards)) for model in models)
        assert (fast < slow).all()

    def test_prices_of_another_machine_are_said_to_be(self, tables, topology, registry, caplog, tmp_path):
        model = kernel_model(topology, registry)
        (here, elsewhere) = (
            LearnedCostModel(model.tensors(), replace(model.card, measured_on=machine))
            for machine in (this_processor(), MeasuredMachine(device_name="Abacus"))
        )
        assert machine_note(here, "cpu") == ""
        note = machine_note(elsewhere, "cpu")
        assert note.startswith(f"{elsewhere.name}: prices are of Abacus, this machine is ")
        assert note.endswith("; `autoshard calibrate` fits them in a minute")
        assert machine_note(elsewhere, "cpu:abacus") == ""
        assert "the topology's devices are cpu:amd-epyc; `autoshard calibrate` there" in machine_note(
            elsewhere, "cpu:amd-epyc"
        )
        assert machine_note(elsewhere, "a100") == machine_note(AnalyticCostModel.for_device("cpu"), "cpu") == ""
        own = shutil.copytree(registry, tmp_path / "registry")
        elsewhere.publish(Registry(own))
        with caplog.at_level(logging.WARNING):
            costs = make_costs(tables, topology, own)
        assert "prices are of Abacus" in caplog.text
        made = make_plan("cost-greedy", make.request(tables, topology, costs=costs))
        assert made.provenance.models["kernel_machine"] == "Abacus"
        assert "prices are of Abacus" in made.provenance.models["machine_notes"]
        # Prices of other models come with what is said of these, in place of what was said of the former.
        notes = {**made.provenance.models, "search": "stays"}
        noted = replace(made, provenance=replace(made.provenance, models=notes))
        analytic = repriced(noted, plan_costs(noted, tmp_path / "none", risk=Risk.HIGH))
        models = analytic.provenance.models
        assert (models["kernel"], models["search"]) == ("analytic:cpu (upper end)", "stays")
        assert models.keys().isdisjoint({"kernel_machine", "machine_notes", "kernel_notes"})
        assert analytic.risk is Risk.HIGH
        assert repriced(analytic, plan_costs(analytic, own)) == noted

    def test_a_model_of_a_device_falls_back_on_its_family(self, topology, registry, tmp_path):
        named = replace(topology, device="cpu:abacus")
        assert kernel_model(named, registry).name == kernel_model(topology, registry).name
        assert kernel_model(named, tmp_path).name == "analytic:cpu:abacus"

    def test_tables_of_a_kind_that_was_not_learned(self, tables, topology, registry, caplog):
        """Are priced by the analytic model, the others as if they were alone."""
        mean = replace(tables, tables=(replace(tables.tables[0], pooling=Pooling.MEAN), *tables.tables[1:]))
        with caplog.at_level(logging.WARNING):
            costs = make_costs(mean, topology, registry)
        learned = kernel_model(topology, registry)
        assert costs.kernel.name == f"{learned.name} and analytic:cpu"
        assert "has not measured kernels of 1 table (fused/hbm/fp32/rowwise_adagrad/mean): analytic:cpu" in caplog.text
        shards = whole_shards(mean)
        ms_N = costs.kernel.predict_ms(costs.kernel.encode(shards))
        analytic = kernel_model(replace(topology, device="cpu"), registry.parent / "none")
        np.testing.assert_array_equal(ms_N[:1], analytic.predict_ms(analytic.encode(shards[:1])))
        np.testing.assert_allclose(ms_N[1:], learned.predict_ms(learned.encode(shards[1:])), rtol=1e-6)
        both = costs.kernel.predict_parts(costs.kernel.encode(shards).sum(axis=0, keepdims=True))
        rest = learned.predict_ms(learned.encode(shards[1:]).sum(axis=0, keepdims=True))
        assert float(both.kernel_ms_S[0]) == pytest.approx(float(ms_N[0] + rest[0]), rel=1e-5)
        assert both.low_ms_S < both.kernel_ms_S < both.high_ms_S
        assert costs.kernel.predict_ms(np.zeros((1, sum(costs.kernel.widths)), dtype=np.float32)) == 0

    @pytest.mark.parametrize(
        ("changes", "planners"),
        [
            ({"dtype": DType.BF16}, ("auto", "neo", "oper", "flexshard", "neuroshard", "cost-greedy")),
            ({"optimizer": Optimizer.ADAM}, ("cost-greedy",)),
            ({"pooling": Pooling.SEQUENCE}, ("cost-greedy",)),
        ],
    )
    def test_where_no_kernel_was_learned_the_analytic_model_prices_all(
        self, tables, topology, registry, changes, planners
    ):
        changed = replace(tables, tables=tuple(replace(table, **changes) for table in tables.tables))
        request = make.request(changed, topology, costs=make_costs(changed, topology, registry), time_limit_s=0.3)
        for name in planners:
            plan = make_plan(name, request)
            assert plan.predicted.cost_model == "analytic:cpu"
            assert plan.predicted.step_ms == evaluate(plan, plan_costs(plan, registry)).step_ms

    def test_plans_with_shards_of_a_kind_that_was_not_learned(self, tables, topology, registry, caplog):
        every = make.each(topology.world_size)
        first, *rest = tables.tables
        replicated = PlacedShard(
            shard=Shard.whole(first), tier=Tier.DATA_PARALLEL, replicas=every, grad_sync=GradSync.DENSE
        )
        whole = tuple(PlacedShard.table_wise(Shard.whole(table), 0) for table in rest)
        mixed = make.plan(replicated, *whole, tables=tables, topology=topology)
        names = f"{kernel_model(topology, registry).name} and analytic:cpu"
        assert evaluate(mixed, plan_costs(mixed, registry)).cost_model == names
        costs = make_costs(tables, topology, registry)
        assert evaluate(mixed, costs).cost_model == names
        unmixed = replace(mixed, shards=tuple(PlacedShard.table_wise(Shard.whole(t), 0) for t in tables.tables))
        assert evaluate(unmixed, costs).cost_model == kernel_model(topology, registry).name
        assert "has not measured" in caplog.text  # the plan's kernels, none of the tables'
        caplog.clear()
        few = replace(tables, tables=tables.tables[:2])
        for name in ("auto", "neo"):
            asked = make.request(
                few,
                topology,
                costs=make_costs(few, topology, registry),
                options={"sharding_types": "data_parallel"},
                time_limit_s=0.2,
            )
            plan = make_plan(name, asked)
            assert {placed.tier for placed in plan.shards} == {Tier.DATA_PARALLEL}
            assert plan.predicted.cost_model == "analytic:cpu"
            assert "has not measured kernels of 2 tables (all_reduced/hbm/fp32/none/sum): analytic:cpu" in caplog.text
            caplog.clear()


class TestMakePlan:
    def test_plans_carry_prediction_and_provenance(self, request_of):
        plan = make_plan("auto", request_of(seed=3, options={"steps": "100", "objective": "kernel"}))
        assert plan.predicted == evaluate(plan, request_of().costs)
        version = Registry(request_of().registry).production_id(LearnedCostModel.kind, "cpu")
        assert plan.predicted.cost_model == f"learned:cpu@{version}"
        assert plan.predicted.step_ms.low <= plan.predicted.step_ms.value <= plan.predicted.step_ms.high
        made = plan.provenance
        assert (made.planner, made.version, made.seed) == ("auto", __version__, 3)
        assert made.options == {
            "objective": "kernel",
            "sharding_types": "all",
            "reserved_bytes": 0,
            "count_activations": True,
            "steps": 100,
            "prefer_whole": True,
            "policy": True,
            "min_partition": 0,
        }
        assert made.models["kernel"] == f"learned:cpu@{version}"
        assert made.models["search"].startswith(("stopped by ", "as "))

    @pytest.mark.parametrize(("guests", "steps"), [((), 100), pytest.param(("torchrec",), 500, marks=pytest.mark.slow)])
    def test_auto_is_slower_than_no_other_on_a_learned_model(self, request_of, guests, steps):
        request = request_of(time_limit_s=20.0)
        rows = compare(
            ["random", "size-greedy", "dim-greedy", "lookup-greedy", "cost-greedy", *guests, "auto"],
            request,
            options={"auto": {"steps": steps, "objective": "kernel"}},
        )
        times = {row.planner: row.predicted_max_ms for row in rows}
        assert all(times["auto"] <= time for time in times.values())
        assert speedups_over("random", rows)["auto"] > 1.2

    @pytest.mark.parametrize(
        ("name", "options", "error"),
        [("magic", {}, UnknownNameError), ("random", {"beam": 1}, InvalidOptionError)],
    )
    def test_refuses_what_is_not_there(self, request_of, name, options, error):
        with pytest.raises(error):
            make_plan(name, request_of(options=options))

    @pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
    def test_refuses_time_limits_that_are_none(self, request_of, seconds):
        with pytest.raises(InvalidOptionError, match="time_limit_s: must be a number above 0"):
            request_of(time_limit_s=seconds)

    @pytest.mark.parametrize("seed", [-1, 2**32, 10**25])
    def test_refuses_seeds_that_not_everything_takes(self, request_of, seed):
        with pytest.raises(InvalidOptionError, match=rf"seed: must be in \[0, 4294967295\], got {seed}"):
            request_of(seed=seed)

    def test_checks_what_planners_make(self, request_of, monkeypatch):
        # A planner with a fault: it drops the last table.
        plan = RandomPlanner.plan
        monkeypatch.setattr(
            RandomPlanner, "plan", lambda self, request: replace(p := plan(self, request), shards=p.shards[:-1])
        )
        with pytest.raises(AutoshardError, match="planner random: made an invalid plan") as caught:
            make_plan("random", request_of())
        assert caught.value.exit_code == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [2026, 2029])
def test_a_second_of_search_comes_within_a_percent_of_a_minute(registry, seed):
    """Counted in steps: a free core makes some 200 in a second."""
    pool = metasyn().scaled(SCALE)
    chosen = np.random.default_rng(seed).choice(len(pool.tables), 80, replace=False)
    tables = replace(pool, tables=tuple(pool.tables[index] for index in chosen))
    topology = load_topology("cpu-8")
    costs = make_costs(tables, topology, registry)
    assert costs.kernel.name.startswith("learned:cpu@")

    def found_ms(num_steps, seed):
        options = {"objective": "kernel", "sharding_types": "table_wise", "policy": False, "steps": num_steps}
        request = make.request(tables, topology, costs=costs, seed=seed, time_limit_s=3600.0, options=options)
        plan = make_plan("auto", request)
        assert plan.predicted is not None
        return plan.predicted.max_kernel_ms

    minute_ms = found_ms(12_000, seed=77)
    assert max(found_ms(200, seed=seed) for seed in range(4)) <= 1.01 * minute_ms


class TestCompare:
    def test_goes_on_where_a_planner_fails(self, request_of):
        empty = request_of(registry=Path("no-such-folder"))
        seen = []
        rows = compare(["policy", "random"], empty, on_planned=seen.append)
        assert [(row.planner, row.plan is None) for row in rows] == [("policy", True), ("random", False)]
        assert "no policy model" in str(rows[0].failure)
        assert tuple(seen) == rows
        assert all(row.planning_s > 0 for row in rows)

    def test_reports_what_does_not_fit(self, request_of, topology):
        tight = replace(topology, memory_bytes=replace(topology.memory_bytes, hbm=1000))
        (row,) = compare(["cost-greedy"], request_of(topology=tight))
        assert re.search(make.AMOUNT, str(row.failure))
        with pytest.raises(InfeasiblePlanError):
            make_plan("cost-greedy", request_of(topology=tight))

    def test_names_are_checked_first(self, request_of):
        with pytest.raises(UnknownNameError, match='"magic"'):
            compare(["random", "magic"], request_of(), on_planned=lambda _: pytest.fail("it had started"))


class TestNotes:
    def test_a_plan_of_many_tables_unlike_what_was_measured_can_be_read_back(
        self, tables, topology, registry, request_of, tmp_path
    ):
        """A text of plan.json has 512 characters, and there are 30 tables, all of them odd."""
        changed = replace(tables, batch_size=tables.batch_size * 2)
        costs = make_costs(changed, topology, registry)
        for renamed in (changed, _with_long_names(changed)):
            plan = make_plan("cost-greedy", request_of(tables=renamed, costs=costs))
            assert "lie outside the range this model was trained on" in plan.provenance.models["kernel_notes"]
            write_plan(plan, tmp_path / "plan.json")
            assert read_plan(tmp_path / "plan.json") == plan
        assert plan.provenance.models["kernel_notes"].endswith(": expect wider errors")


def _with_long_names(tables):
    """The same tables, with names as long as names may be."""
    return replace(tables, tables=tuple(replace(table, name=f"{table.name:x<512}") for table in tables.tables))


class TestRisk:
    def test_plans_at_the_upper_end_cost_more(self, tables, topology, registry):
        mean, high = (make_costs(tables, topology, registry, risk=risk).kernel for risk in Risk)
        shards = [
            local_shard(PlacedShard.table_wise(Shard.whole(table), 0), group_batch_size=tables.batch_size)
            for table in tables.tables
        ]
        codes_NH = mean.encode(shards)
        assert (high.predict_ms(codes_NH) > mean.predict_ms(codes_NH)).all()
        assert high.predict_ms(codes_NH) == pytest.approx(mean.predict_parts(codes_NH).high_ms_S)

    def test_tables_unlike_all_that_were_measured_are_named(self, tables, topology, registry, request_of, caplog):
        odd = replace(tables.tables[0], features=(replace(tables.tables[0].features[0], pooling_factor=3000.0),))
        changed = replace(tables, tables=(odd, *tables.tables[1:]))
        with caplog.at_level(logging.WARNING):
            costs = make_costs(changed, topology, registry)
        (warning,) = (message for message in caplog.messages if "this model was trained on" in message)
        assert ": 1 shard lies outside the range this model was trained on (pooling_factor 3,000, trained on" in warning
        assert warning.endswith("): expect wider errors")
        plan = make_plan("cost-greedy", replace(request_of(), tables=changed, costs=costs))
        assert "pooling_factor 3,000, trained on" in plan.provenance.models["kernel_notes"]
        assert plan.provenance.models["kernel_notes"].endswith(f"; tables: {odd.name}")
        assert len(plan.provenance.models["kernel_notes"]) <= 512
        usual = make_plan("cost-greedy", request_of()).provenance.models
        assert "kernel_notes" not in usual


def counted(monkeypatch, function):
    """Counts the calls of a function, by whatever module they are made."""
    calls = []

    def counting(*arguments, **named):
        calls.append(arguments)
        return function(*arguments, **named)

    for module in list(sys.modules.values()):
        if getattr(module, function.__name__, None) is function:
            monkeypatch.setattr(module, function.__name__, counting)
    return calls


def test_a_plan_is_read_validated_and_priced_once(tmp_path, monkeypatch):
    tables, output = tmp_path / "tables.json", tmp_path / "plan.json"
    shutil.copy(Path(__file__).parent.parent / "examples" / "tables.json", tables)
    arguments = ["plan", str(tables), "--topology", "cpu-8", "--planner", "cost-greedy", "--bound", "-o", str(output)]
    assert main(arguments) == 0  # imports all that is to be counted
    read, validated = counted(monkeypatch, read_json), counted(monkeypatch, validate_plan)
    priced, searched = counted(monkeypatch, evaluate), counted(monkeypatch, searched_types)
    assert main(arguments) == 0
    assert [path for (path,) in read if Path(path) == tables] == [str(tables)]
    assert len(validated) == len(priced) == 1
    assert searched == [("cost-greedy", {})]
