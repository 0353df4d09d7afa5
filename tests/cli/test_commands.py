"""What commands print and write when all is well."""

import json
import re
import sys
from collections import Counter
from dataclasses import replace
from importlib.metadata import EntryPoint

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from autoshard import cli
from autoshard.cli import main
from autoshard.formats import load_tables, read_plan, read_tables
from autoshard.report.replay_json import REPLAY, ReplayedRank, ReplayResult
from autoshard.validator import validate_plan

COMMANDS = (
    *("doctor", "init", "detect", "list", "import", "calibrate", "collect", "samples", "train", "models"),
    *("plan", "evaluate", "show", "diff", "explain", "export", "replay", "compare", "simulate", "run"),
    *("drift", "replan", "checkpoint"),
    *("serve", "jobs", "keys", "db"),
)
SUBCOMMANDS = (
    *("train cost", "train policy", "train step", "keys create", "keys list", "keys revoke", "db upgrade"),
    *(f"checkpoint {name}" for name in ("show", "verify", "reshard", "import", "export")),
)
WRITERS = (
    *("plan", "evaluate", "show", "compare", "import", "export", "simulate", "collect", "samples", "init", "detect"),
    *("train cost", "train policy", "train step", "calibrate", "replan", "checkpoint import", "checkpoint export"),
)


@pytest.fixture
def succeeds(run):
    """Runs a command that must succeed; returns what it printed on standard output."""
    return lambda *words: run(*words)[0]


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    task = ["plan", "criteo-kaggle", "--topology", "cpu-4", "--planner", "cost-greedy"]
    assert main([*task, "--time-limit", "60", "-o", str(file)]) == 0
    return file


def test_help_lists_every_command_in_the_order_of_their_use(succeeds):
    for arguments in ([], ["--help"]):
        lines = succeeds(*arguments).split("Commands:\n")[1].splitlines()
        assert [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "] == list(COMMANDS)
        assert not any("Unavailable" in line for line in lines)


@pytest.mark.parametrize("command", [*COMMANDS, *SUBCOMMANDS])
def test_every_command_has_help_with_an_example_and_says_all_on_one_json_object(succeeds, command):
    text = succeeds(*command.split(), "--help")
    if command not in cli.GROUPS:
        assert f"\n      autoshard {command}" in text
        assert command == "serve" or "--json" in text
        assert "Args:" not in text
        assert "Raises:" not in text
        # What is written goes where the same option says.
        assert (re.search(r"^  -o, .*--output\b|^ +--output, -o\b", text, re.MULTILINE) is not None) == (
            command in WRITERS
        )


@pytest.mark.parametrize("what", ["tables", "topologies", "planners"])
def test_lists_name_what_can_be_used(succeeds, what):
    listed = json.loads(succeeds("list", what, "--json"))[what]
    assert len(listed) >= 5
    text = succeeds("list", what)
    for item in listed:
        assert item["name"] in text
        assert item.get("description") or item["summary"]


def test_import_draws_and_scales_and_says_so(succeeds, tmp_path):
    file = tmp_path / "tables.json"
    options = ("--num-tables", 5, "--seed", 3, "--scale", 64, "-o", file)
    assert "856 tables with seed 3" in (text := succeeds("import", "metasyn", *options))
    assert "by 64" in text
    assert read_tables(file) == load_tables("metasyn").sample(5, 3).scaled(64)
    result = json.loads(succeeds("import", "metasyn", *options, "--json"))
    assert result["num_tables"] == 5
    assert result["batch_size"] == 1024
    assert result["scale"] == 64
    assert result["bytes"] == sum(table.storage_bytes for table in read_tables(file).tables)


def test_parts_of_a_pool_share_no_table(succeeds, tmp_path):
    parts = [tmp_path / f"part{number}.json" for number in (1, 2, 3)]
    for number, file in enumerate(parts, start=1):
        assert f"part {number}/3 of 856" in succeeds("import", "metasyn", "--part", f"{number}/3", "-o", file)
    names = [table.name for file in parts for table in read_tables(file).tables]
    assert sorted(names) == sorted(table.name for table in load_tables("metasyn").tables)
    drawn = succeeds("import", "metasyn", "--part", "1/3", "--num-tables", 5, "-o", tmp_path / "drawn.json")
    assert "5 of 286 tables" in drawn
    kept = set(read_tables(tmp_path / "drawn.json").tables)
    assert kept < set(read_tables(parts[0]).tables)


def test_import_reads_other_projects_files(succeeds, tmp_path):
    file = tmp_path / "tables.json"
    config = {"T": 2, "E": 100, "D": 8, "mixed_dim": False, "weighted": False, "batch_params": {"B": 64}}
    config["pooling_params"] = {"L": 3, "sigma_L": None}
    config["indices_params"] = {"heavy_hitters": [0.25], "zipf_q": 2.0, "zipf_s": 1.1}
    (tmp_path / "configs").mkdir()
    for name in ("a", "b"):
        (tmp_path / "configs" / f"{name}.json").write_text(json.dumps(config), encoding="utf-8")
    assert "4 tables" in succeeds("import", tmp_path / "configs", "-o", file)
    assert [table.name for table in read_tables(file).tables] == ["a.t0", "a.t1", "b.t0", "b.t1"]

    pq.write_table(pa.table({"item": [[1, 2], [2], None]}), tmp_path / "ids.parquet")
    options = ("--format", "id-batches", "--set", "embedding_dim=16", "--set", "num_embeddings=50", "-o", file)
    result = json.loads(succeeds("import", tmp_path / "ids.parquet", *options, "--json"))
    assert (result["num_tables"], result["batch_size"]) == (1, 3)
    assert read_tables(file)["item"].num_embeddings == 50


def test_a_plan_is_written_valid_and_the_same_for_the_same_seed(succeeds, tmp_path):
    documents = []
    for name in ("one.json", "two.json"):
        file = tmp_path / name
        printed = succeeds(
            *("plan", "criteo-kaggle", "--topology", "cpu-8", "--planner", "random", "--seed", 5, "-o", file, "--json")
        )
        documents.append(file.read_bytes())
        assert json.loads(printed) == json.loads(documents[-1])
        read_plan(file)
    assert documents[0] == documents[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.json", "two.json"]


def test_tables_are_read_and_a_plan_is_validated_once(succeeds, tmp_path):
    calls = Counter()

    def count(frame, event, _):
        if event == "call":
            calls[frame.f_code] += 1

    tables, plan = tmp_path / "tables.json", tmp_path / "plan.json"
    succeeds("import", "criteo-kaggle", "-o", tables)
    for command in (
        ("plan", tables, "--topology", "cpu-4", "--planner", "cost-greedy", "-o", plan),
        ("evaluate", plan, "-o", tmp_path / "priced.json"),
    ):
        calls.clear()
        sys.setprofile(count)
        try:
            succeeds(*command)
        finally:
            sys.setprofile(None)
        assert calls[validate_plan.__code__] == 1, command
        assert calls[load_tables.__code__] == (command[0] == "plan")


def test_evaluate_prices_a_plan_that_has_no_prices(succeeds, plan_file, tmp_path):
    document = json.loads(plan_file.read_text(encoding="utf-8"))
    predicted = document.pop("predicted")
    bare, priced = tmp_path / "bare.json", tmp_path / "priced.json"
    bare.write_text(json.dumps(document), encoding="utf-8")
    text = succeeds("evaluate", bare, "-o", priced)
    assert json.loads(priced.read_text(encoding="utf-8"))["predicted"] == predicted
    assert "Predicted step" in text
    assert "evaluate" in succeeds("show", bare)


def test_plans_say_how_far_they_are_above_a_lower_bound(succeeds, tmp_path):
    plan, file = ("plan", "criteo-kaggle", "--topology", "a100-8", "--planner", "cost-greedy"), tmp_path / "plan.json"
    text = succeeds(*plan, "--time-limit", "60", "-o", file)
    predicted = read_plan(file).predicted
    above = predicted.step_ms.value / predicted.bounds["step"].estimated_ms - 1
    assert f"Step {100 * above:.1f}% above an estimated lower bound of " in text
    assert "Slowest kernel of whole tables " in text
    assert "lower bound" in succeeds("show", file)
    assert "lower bound" not in succeeds("evaluate", file, "--no-bound")
    assert "bounds" not in json.loads(succeeds(*plan, "--no-bound", "--json"))["predicted"]


def test_bounds_take_their_time_from_the_limit(succeeds):
    plan = (
        "plan",
        "criteo-kaggle",
        "--topology",
        "a100-8",
        "--planner",
        "cost-greedy",
        "--time-limit",
        "0.1",
        "--json",
    )
    assert "bounds" not in json.loads(succeeds(*plan))["predicted"]
    assert json.loads(succeeds(*plan, "--bound"))["predicted"]["bounds"]["step"]["estimated_ms"] > 0


def test_show_prints_and_writes_a_page(succeeds, plan_file, tmp_path):
    page = tmp_path / "plan.html"
    text = succeeds("show", plan_file, "--html", page)
    assert "26 tables" in text
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert json.loads(succeeds("show", plan_file, "--json")) == json.loads(plan_file.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_show_takes_what_replay_printed(run, succeeds, tmp_path):
    tables, plan, replayed = (tmp_path / name for name in ("tables.json", "plan.json", "replay.json"))
    succeeds("import", "metasyn", "--num-tables", 4, "--scale", 2048, "-o", tables)
    succeeds("plan", tables, "--topology", "cpu-4", "--planner", "random", "-o", plan)
    replayed.write_text(succeeds("replay", plan, "--device", "cpu", "--json"), encoding="utf-8")
    text = succeeds("show", plan, "--replayed", replayed, "--html", tmp_path / "plan.html")
    assert "Measured slowest kernel" in text
    assert "Measured balance" in (tmp_path / "plan.html").read_text(encoding="utf-8")
    document = json.loads(replayed.read_text(encoding="utf-8"))
    for damaged in ({}, {"ranks": document["ranks"][1:]}, {"ranks": [{"forward_ms": 1.0}] * 4}):
        replayed.write_text(json.dumps(damaged), encoding="utf-8")
        assert str(replayed) in run("show", plan, "--replayed", replayed, code=2)[1]


def test_show_takes_no_other_plans_replay_and_says_where_it_was_measured(run, plan_file, tmp_path):
    plan, file = read_plan(plan_file), tmp_path / "replay.json"
    ranks = [
        ReplayedRank(rank=rank, num_shards=len(shards), forward_ms=0.5, backward_ms=1.0, predicted_ms=None)
        for rank, shards in enumerate(plan.local_shards())
    ]
    usual = {"num_rounds": 3, "num_groups": 1, "ceiling_balance": 0.9}
    found = ReplayResult(
        device="h200",
        device_name="NVIDIA H200",
        predicted_max_kernel_ms=None,
        cost_model=None,
        ranks=tuple(ranks),
        **usual,
    )
    REPLAY.write(found, file)
    shown, page = ("show", plan_file, "--replayed", file), tmp_path / "plan.html"
    said = f"Measured on h200, but the plan is for {plan.topology.device}."
    assert f"warning: {said}" in run(*shown, "--html", page)[1]
    assert said in page.read_text(encoding="utf-8")
    count = ranks[1].num_shards
    REPLAY.write(replace(found, ranks=(ranks[0], replace(ranks[1], num_shards=count + 1), *ranks[2:])), file)
    said = f"replay.json: ranks[1].num_shards: must be {count}, as in the plan, got {count + 1}"
    assert said in run(*shown, code=2)[1]


def test_compare_plans_replays_and_writes(succeeds, tmp_path):
    tables, page, folder = tmp_path / "tables.json", tmp_path / "page.html", tmp_path / "plans"
    succeeds("import", "metasyn", "--num-tables", 6, "--seed", 1, "--scale", 2048, "-o", tables)
    task = ("compare", tables, "--topology", "cpu-4", "--planners", "random,cost-greedy")
    document = json.loads(
        succeeds(*task, "--replay", "--device", "cpu", "--html", page, "--output-dir", folder, "--json")
    )
    assert [row["planner"] for row in document["planners"]] == ["random", "cost-greedy"]
    for row in document["planners"]:
        plan = read_plan(folder / f"{row['planner']}.json")
        assert plan.predicted.max_kernel_ms == row["predicted_max_kernel_ms"]
        assert len(row["measured_kernel_ms"]) == 4
        assert max(row["measured_kernel_ms"]) == row["measured_max_kernel_ms"] > 0
        assert row["prediction_error"] == pytest.approx(
            row["predicted_max_kernel_ms"] / row["measured_max_kernel_ms"] - 1
        )
    first = document["planners"][0]
    assert first["speedup_over_random"] == 1.0
    assert 0 < document["ceiling_balance"] <= 1
    assert set(document["within_noise"]) <= {"random", "cost-greedy"}
    assert document["floor_kernel_ms"] > 0
    assert "Ceiling" in page.read_text(encoding="utf-8")


def test_compare_says_that_it_measured_on_another_device_than_plans_are_for(run, tmp_path):
    run("import", "metasyn", "--num-tables", 2, "--scale", 16384, "-o", tmp_path / "tables.json")
    task = ("compare", tmp_path / "tables.json", "--topology", "a100-8", "--planners", "random")
    page, note = tmp_path / "page.html", "Measured on cpu, but the plan is for a100."
    said = run(*task, "--replay", "--device", "cpu", "--html", page)[1]
    assert said.count(f"warning: {note}\n") == 1
    assert note in page.read_text(encoding="utf-8")


def test_compare_goes_on_when_one_planner_cannot_do_the_task(succeeds, tmp_path):
    # An empty registry has no policy.
    task = ("compare", "criteo-kaggle", "--topology", "cpu-4", "--registry", tmp_path)
    text = succeeds(*task, "--planners", "random,policy")
    assert "random" in text
    assert "policy: " in text
    assert "no plan" in text


def test_commands_of_other_packages_are_listed_by_their_package_and_imported_when_they_run(
    succeeds, monkeypatch, tmp_path
):
    """A package as pip leaves it: a module, and the metadata beside it."""
    about = tmp_path / "my_commands-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-commands\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("[autoshard.commands]\nhello = my_commands:hello\n")
    (tmp_path / "my_commands.py").write_text('def hello() -> None:\n    """Greets."""\n    print("Hello.")\n')
    monkeypatch.syspath_prepend(tmp_path)
    assert "  hello       Comes from my-commands 0.1.\n" in succeeds("--help")
    assert "my_commands" not in sys.modules
    assert succeeds("hello") == "Hello.\n"


def test_a_damaged_plugin_leaves_the_others_alone(run, succeeds, monkeypatch):
    real = cli.installed

    def with_a_damaged_one(group):
        damaged = EntryPoint(name="broken", value="nowhere.commands:run", group=group)
        return [*real(group), damaged]

    monkeypatch.setattr(cli, "installed", with_a_damaged_one)
    assert "broken" in succeeds("--help")
    succeeds("plan", "--help")
    _, err = run("broken", "--anything", "x", code=1)
    assert err == "error: broken: nowhere.commands:run cannot be loaded: No module named 'nowhere'\n"


def test_a_plugin_that_fails_while_it_is_loaded_is_told_as_itself(run, monkeypatch, tmp_path):
    (tmp_path / "fails_when_loaded.py").write_text("{}['no such key']\n")
    monkeypatch.syspath_prepend(tmp_path)
    damaged = EntryPoint(name="broken", value="fails_when_loaded:run", group="autoshard.commands")
    monkeypatch.setattr(cli, "installed", lambda _: [damaged])
    _, err = run("broken", code=1)
    assert err == "error: broken: fails_when_loaded:run cannot be loaded: KeyError: 'no such key'\n"
