"""Reports say what the plan says, in the terminal and in the page's markup."""

import io
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console

from autoshard.core import (
    Estimate,
    GroupLayout,
    MemoryBytes,
    PlacedShard,
    Provenance,
    ReplicaGroups,
    RowRange,
    Shard,
    SyncRows,
    Tier,
)
from autoshard.core.errors import InfeasiblePlanError
from autoshard.core.quoting import write_bytes
from autoshard.evaluation import evaluate
from autoshard.report import (
    ComparedPlan,
    MeasuredPlan,
    comparison_page,
    comparison_table,
    plan_page,
    plan_summary,
    run_page,
    speedups_over,
    within_noise,
)
from autoshard.report.comparison import planners_table
from autoshard.report.figures import RANK_PARTS, executed_figure, memory_figure, rank_time_figure
from autoshard.report.wording import write_columns, write_ms, write_percent, write_ranks, write_rows
from autoshard.results.comparison import Comparison
from autoshard.runtime.results import RankTiming
from tests import builders as make

EVIL = "<img src=x onerror=\"document.title='taken'\"></script><script>document.title='taken'</script>[bold]"
VOID = {"meta", "img", "br", "hr", "input", "link"}


def table(index, name=None, num_embeddings=10_000):
    return make.table(
        name or f"t{index}", num_embeddings, 32 * (1 + index % 3), pooling_factor=float(1 + 5 * index), alpha=1.05
    )


def make_plan(num_ranks=4, ranks=(0, 1, 1, 2, 3, 3), seed=7):
    names = [EVIL, *(None for _ in ranks[1:])]
    tables = make.tables(*(table(index, name) for index, name in enumerate(names)), batch_size=1024)
    source = Provenance(planner="by hand", version="0.1.0", seed=seed, options={"why": EVIL})
    topology = make.topology(num_ranks, hbm=1 << 30, latency_s=1e-5)
    plan = make.plan(*make.table_wise(tables.tables, ranks), tables=tables, topology=topology, provenance=source)
    return plan.with_predicted(evaluate(plan, make.costs()))


@pytest.fixture(scope="module")
def plan():
    return make_plan()


@pytest.fixture(scope="module")
def measured():
    return MeasuredPlan(forward_ms_R=(1.0, 2.0, 3.0, 4.0), backward_ms_R=(1.0, 1.0, 1.0, 4.0))


class Page(HTMLParser):
    """The elements of a page, with their text; every element must be closed in order."""

    def __init__(self, text):
        super().__init__()
        self.elements = []  # (tag, attributes, texts)
        self._open = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), []))
        if tag not in VOID:
            self._open.append(self.elements[-1])

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag

    def handle_data(self, data):
        for element in self._open:
            element[2].append(data)

    def texts(self, tag):
        return ["".join(texts).strip() for name, _, texts in self.elements if name == tag]

    def attributes(self, name):
        return [attributes[name] for _, attributes, _ in self.elements if name in attributes]


def rendered(renderable):
    out = io.StringIO()
    Console(file=out, width=160, markup=False, highlight=False).print(renderable)
    return out.getvalue()


def test_a_plan_page_is_whole_accessible_and_escapes_names(plan, measured):
    page = Page(plan_page(plan, measured))
    assert page.texts("title") == ["Sharding plan"] == page.texts("h1")
    assert page.attributes("lang") == ["en"]
    assert page.texts("h2") == [
        *("Time per rank", "Predicted against measured", "Memory per rank", "Tables by ranks", "Parts of the step"),
        *("Access curves", "Ranks", "Tables", "Where it came from"),
    ]
    assert len(page.texts("caption")) == len(page.texts("table")) == 4
    assert all(page.texts("caption"))
    assert not page.attributes("src")
    assert not page.attributes("href")
    assert "img" not in [tag for tag, _, _ in page.elements]
    assert EVIL in page.attributes("title")
    assert f"{EVIL[:59]}…" in page.texts("th")
    charts = [attributes for _, attributes, _ in page.elements if attributes.get("role") == "img"]
    assert len(charts) == 5
    assert all(chart["aria-label"] for chart in charts)
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    assert set(page.attributes("aria-labelledby")) <= set(ids)


def test_a_plan_page_holds_the_numbers(plan, measured):
    page = Page(plan_page(plan, measured))
    cells = page.texts("td")
    for cost in plan.predicted.ranks:
        assert write_ms(cost.kernel_ms) in cells
    assert "8.00" in cells  # rank 3's measured kernel
    facts = dict(zip(page.texts("dt"), page.texts("dd"), strict=True))
    assert facts["Measured balance"].startswith("25.0%")
    assert facts["Predicted balance"].startswith(write_percent(plan.predicted.balance))
    assert facts["Floor"].startswith(write_ms(plan.predicted.floor_kernel_ms))


def test_reports_show_the_parts_of_the_step_with_intervals_and_what_overlaps(plan):
    predicted = plan.predicted
    shown, page = rendered(plan_summary(plan)), Page(plan_page(plan))
    for part, estimate in predicted.parts.items():
        ends = (write_ms(estimate.low), write_ms(estimate.high))
        line = next(line for line in shown.splitlines() if line.startswith(part.value.replace("_", " ")))
        assert line.split()[-4:] == [write_ms(estimate.value), ends[0], "to", ends[1]]
        assert " to ".join(ends) in page.texts("td")
    assert "Overlap: none, parts of a step run one after the other" in shown
    assert any("Overlap: none" in text for text in page.texts("caption"))
    assert "communication alpha-beta" in shown
    assert dict(zip(page.texts("dt"), page.texts("dd"), strict=True))["Communication times from"] == "alpha-beta"


def test_predictions_of_before_there_were_parts_are_shown_without(plan):
    old = replace(plan.predicted, overlap=None, models={}, dense_ms=None, sync_ms=None, parts={})
    shown = rendered(plan_summary(replace(plan, predicted=old)))
    assert "Predicted step" in shown
    assert "Overlap" not in shown
    assert "Parts of the step" not in Page(plan_page(replace(plan, predicted=old))).texts("h2")


def test_a_plan_over_replica_groups_says_how_they_lie_and_what_they_cost():
    plan = make_plan()
    groups = ReplicaGroups(num_groups=2, sync_every=3)
    small = replace(plan.topology, overrides=((1, MemoryBytes(hbm=1 << 20)),))
    num_ranks = plan.group_size // 2
    shards = tuple(PlacedShard.table_wise(placed.shard, placed.replicas[0][0] % num_ranks) for placed in plan.shards)
    grouped = replace(plan, topology=small, shards=shards, replica_groups=groups, predicted=None)
    grouped = grouped.with_predicted(evaluate(grouped, make.costs()))
    predicted, shown, page = grouped.predicted, rendered(plan_summary(grouped)), Page(plan_page(grouped))
    line = f"in 2 groups of {num_ranks} ranks across nodes that meet every 3 steps (shown per rank of one group)"
    assert "rank of one group  shards" in shown
    assert line in " ".join(shown.split())
    assert line in plan_page(grouped)
    touched = replace(grouped, replica_groups=replace(groups, sync_rows=SyncRows.TOUCHED))
    assert "meet every 3 steps in the rows that they touched (shown" in plan_page(touched)
    assert f"of which groups {write_ms(predicted.group_sync_ms)}" in " ".join(shown.split())
    # Ranks 0 and 1 of the world are rank 0 of a group: the smaller one sets its limit.
    share = predicted.ranks[0].used_bytes / (1 << 20)
    assert write_percent(share) in page.texts("td")


def test_a_plan_without_prediction_or_provenance_shows_its_placement(plan):
    bare = replace(plan, predicted=None, provenance=None)
    page = Page(plan_page(bare))
    assert page.texts("h2") == ["Tables by ranks", "Access curves", "Tables"]
    assert len(page.texts("tr")) == 1 + len(plan.shards)
    assert "autoshard evaluate" in rendered(plan_summary(bare))


def test_the_charts_stack_to_the_prediction(plan, measured):
    figure = rank_time_figure(plan.predicted, measured).to_dict()
    kernel_bars = [trace for trace in figure["data"] if trace["name"].endswith(" kernel") and trace["type"] == "bar"]
    assert [trace["name"] for trace in kernel_bars] == ["forward kernel", "backward kernel"]
    for rank, cost in enumerate(plan.predicted.ranks):
        assert sum(trace["y"][rank] for trace in kernel_bars) == pytest.approx(cost.kernel_ms)
    marks = next(trace for trace in figure["data"] if trace["type"] == "scatter")
    assert tuple(marks["y"]) == measured.kernel_ms_per_rank
    memory = memory_figure(plan, plan.predicted).to_dict()["data"]
    assert list(memory[0]["y"]) == [cost.hbm_bytes / 2**30 for cost in plan.predicted.ranks]
    assert list(memory[2]["y"]) == [1.0] * 4


def test_the_terminal_shows_every_rank_and_takes_names_as_they_are(plan, measured):
    text = rendered(plan_summary(plan, measured))
    lines = [line.split() for line in text.splitlines()]
    assert [line[0] for line in lines[-4:]] == ["0", "1", "2", "3"]
    assert "balance 25.0%" in text
    slowest = next(cost for cost in plan.predicted.ranks if cost.rank == plan.predicted.binding_rank)
    assert write_ms(slowest.kernel_ms) in lines[-4 + slowest.rank]
    renamed = replace(plan, predicted=replace(plan.predicted, binding_shard="[red]t[/red]"))
    assert "[red]t[/red]" in rendered(plan_summary(renamed))


def test_the_terminal_says_on_which_machine_kernels_were_measured(plan):
    provenance = Provenance(planner="auto", version="1", models={"kernel_machine": "AMD EPYC (32 MiB last cache)"})
    shown = rendered(plan_summary(replace(plan, provenance=provenance)))
    assert "Kernels as measured on AMD EPYC (32 MiB last cache)" in shown
    assert "Kernels as measured" not in rendered(plan_summary(replace(plan, provenance=None)))


def compared(plan, measured=None):
    other = make_plan(ranks=(0, 1, 2, 3, 3, 1))
    faster = MeasuredPlan(forward_ms_R=(1.0,) * 4, backward_ms_R=(3.0,) * 4)
    return (
        ComparedPlan(planner="random", planning_s=0.5, plan=plan, measured=measured),
        ComparedPlan(planner="auto", planning_s=1.25, plan=other, measured=faster if measured else None),
        ComparedPlan(planner="broken", planning_s=0.1, failure=InfeasiblePlanError(f"{EVIL} needs 5 bytes more")),
    )


def by_heading(table):
    """The lines of a table by its headings."""
    return [dict(zip(table.headings, line, strict=True)) for line in table.lines]


def test_a_comparison_ranks_by_measured_time(plan, measured):
    rows = compared(plan, measured)
    assert speedups_over("random", rows) == {"random": 1.0, "auto": 2.0}
    assert rows[0].prediction_error == pytest.approx(plan.predicted.max_kernel_ms / 8.0 - 1)
    table = planners_table(rows)
    auto, random, broken = by_heading(table)  # the fastest first
    assert [line["planner"] for line in (auto, random, broken)] == ["auto", "random", "broken"]
    assert auto["measured max kernel ms"] == "4.00"
    assert auto["measured balance"] == "100.0%"
    assert auto["speed-up over random"] == "2.000×"
    assert auto["planning, s"] == "1.25"
    assert random["predicted against measured"] == write_percent(rows[0].prediction_error, signed=True)
    assert table.marked == [0]
    assert list(broken.values()) == ["broken", "no plan", "", "", "", "", "", "", "0.10"]


def test_a_comparison_without_replay_ranks_by_prediction(plan):
    rows = compared(plan)
    factor = rows[0].predicted_max_ms / rows[1].predicted_max_ms
    assert speedups_over("random", rows)["auto"] == pytest.approx(factor)
    assert not any("measured" in heading for heading in planners_table(rows).headings)
    assert speedups_over("policy", rows) == {}
    assert speedups_over("broken", rows) == {}


def test_within_noise_nobody_is_best(plan, measured):
    random, auto, broken = compared(plan, measured)  # the slowest ranks take 8 and 4 ms
    assert within_noise((random, auto, broken)) == ("auto",)
    for noise, level in ((0.49, ("auto",)), (0.5, ("random", "auto")), (1.0, ("random", "auto"))):
        rows = (replace(random, measured_noise=noise), replace(auto, measured_noise=noise), broken)
        assert within_noise(rows) == level
        assert planners_table(rows).marked == ([0] if len(level) == 1 else [])
    assert within_noise((broken,)) == ()
    bare = replace(random, plan=replace(random.plan, predicted=None), measured=None)
    assert within_noise((bare, broken)) == ()


def test_predictions_rank_by_the_step_and_are_as_good_as_the_best_one_within_its_interval(plan):
    def row(name, step_ms, high, kernel_ms):
        step = Estimate(value=step_ms, low=1.0, high=high)
        predicted = replace(plan.predicted, step_ms=step, max_kernel_ms=kernel_ms)
        return ComparedPlan(planner=name, planning_s=0.1, plan=replace(plan, predicted=predicted))

    rows = (row("c", 11.1, 90.0, 1.0), row("b", 10.9, 90.0, 2.0), row("a", 10.0, 11.0, 3.0))
    assert set(within_noise(rows)) == {"a", "b"}
    table = planners_table(rows)
    assert [line[:3] for line in table.lines] == [("a", "10.0", "3.00"), ("b", "10.9", "2.00"), ("c", "11.1", "1.00")]
    assert table.marked == []
    sure = (*rows[:2], row("a", 10.0, 10.0, 3.0))
    assert within_noise(sure) == ("a",)
    assert planners_table(sure).marked == [0]


def test_a_plan_that_takes_no_time_has_no_speed_up(plan):
    idle = replace(plan, predicted=replace(plan.predicted, max_kernel_ms=0.0))
    rows = (compared(plan)[0], ComparedPlan(planner="idle", planning_s=0.1, plan=idle))
    assert {line["planner"]: line["speed-up over random"] for line in by_heading(planners_table(rows))} == {
        "random": "1.000×",
        "idle": "",
    }


def test_a_comparison_page_and_table_show_every_planner(plan, measured):
    rows = compared(plan, measured)
    page = Page(comparison_page(rows, ["a note <b>"]))
    assert page.texts("h3") == ["auto", "random"], "as the table is"
    assert "a note <b>" in page.texts("p")
    assert f"broken: {EVIL} needs 5 bytes more" in page.texts("p")
    text = rendered(comparison_table(rows, ["a note [x]"]))
    assert "a note [x]" in text
    assert f"broken: {EVIL} needs 5 bytes more" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01234, "0.0123"), (0.5, "0.500"), (1.234, "1.23"), (12.34, "12.3"), (1234.4, "1,234")],
)
def test_milliseconds_keep_three_digits(value, text):
    assert write_ms(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (50 * 2**20, "50.0 MiB"), (2**31, "2.00 GiB")],
)
def test_bytes_have_binary_units(value, text):
    assert write_bytes(value) == text


def test_placements_are_written_short():
    whole = table(1)
    assert (write_rows(Shard.whole(whole)), write_columns(Shard.whole(whole))) == ("all", "all")
    part = Shard(table=whole, rows=RowRange(start=0, stop=1000), columns=(32, 64))
    assert (write_rows(part), write_columns(part)) == ("0-999", "32-63")
    split = PlacedShard(shard=part, tier=Tier.FLEX, replicas=((0, 1, 2, 3), (4, 6)))
    assert write_ranks(split) == "0-3 | 4, 6"
    copies = PlacedShard(shard=part, tier=Tier.REPLICATED, replicas=((0,), (1,), (4,)), fetch=(0, 1, 0, 0, 2, 2))
    assert write_ranks(copies) == "each of 0-1, 4"


def test_the_terminal_lists_the_slowest_of_very_many_ranks():
    text = rendered(plan_summary(make_plan(num_ranks=300, ranks=(0, 1, 1, 299, 298, 297))))
    rows = [line.split() for line in text.splitlines()]
    listed = [words[0] for words in rows if len(words) > 1 and words[0].isdecimal() and words[1].isdecimal()]
    assert len(listed) == 256
    assert listed == sorted(listed, key=int)
    assert {"0", "1", "297", "298", "299"} <= set(listed)
    assert "44 ranks with shorter kernels are left out; --json lists all" in text


def test_notebooks_show_plans_and_comparisons_without_scripts(plan):
    noted = replace(plan, provenance=replace(plan.provenance, models={"kernel_notes": f"{EVIL} lies outside"}))
    shown = noted._repr_html_()
    assert EVIL not in shown
    assert "<script" not in shown
    assert f"{EVIL} lies outside." in Page(shown).texts("p")
    assert len(Page(shown).texts("rect")) == 3 * len(plan.predicted.ranks)
    assert write_ms(plan.predicted.step_ms.value) in shown
    assert "autoshard evaluate" in replace(plan, predicted=None)._repr_html_()
    shown = Page(Comparison(compared(plan))._repr_html_())
    assert {"random", "auto", "broken"} <= set(shown.texts("th"))
    assert f"broken: {EVIL} needs 5 bytes more" in shown.texts("p")


def test_notebooks_say_how_many_ranks_have_bars(plan, monkeypatch):
    assert "ms of each rank</p>" in plan._repr_html_()
    monkeypatch.setattr("autoshard.report.notebooks._MOST_RANKS", 3)
    assert "ms of each of the first 3 of 4 ranks</p>" in plan._repr_html_()


def timings(plan_ranks):
    """What processes took that run these ranks of a plan: the forward kernel of process 0 takes 1 ms, of 1 2 ms."""
    others = {attribute: 0.0 for _, attribute, _ in RANK_PARTS} | {"num_tables": 1}
    return [
        RankTiming(process=process, plan_ranks=ranks, **{**others, "forward_kernel_ms": process + 1.0})
        for process, ranks in enumerate(plan_ranks)
    ]


def test_the_page_of_a_run_has_each_rank_predicted_and_executed(plan):
    ranks, executed = plan.predicted.ranks, timings([(0,), (1,), (2,), (3,)])
    figure = executed_figure(ranks, executed)
    kernel = next(bar for bar in figure.data if bar.name == "forward kernel")
    places, kinds = kernel.x
    assert list(zip(places, kinds, strict=True)) == [
        (str(rank), kind) for rank in range(len(ranks)) for kind in ("plan", "run")
    ]
    assert list(kernel.y[:2]) == [ranks[0].forward_kernel_ms, executed[0].forward_kernel_ms]
    page = run_page(plan, executed, ["20 steps of 64 samples.", EVIL], title="Run of plan.json")
    assert EVIL not in page
    assert page.count(">executed<") == page.count(">predicted<") == len(ranks)


def test_the_page_of_a_run_without_prices_has_what_was_executed(plan):
    page = run_page(replace(plan, predicted=None), timings([(0,), (1,), (2,), (3,)]), ["20 steps."])
    assert ">predicted<" not in page
    assert page.count(">executed<") == len(plan.predicted.ranks)


def predicted_kernels(page):
    """Of the page of a run: the predicted forward kernels by process, as texts."""
    cells = ["".join(texts) for tag, _, texts in Page(page).elements if tag in ("th", "td")]
    return {cells[at - 1]: cells[at + 1] for at, cell in enumerate(cells) if cell == "predicted"}


@pytest.mark.parametrize(
    ("layout", "places"),
    [(GroupLayout.ACROSS_NODES, (0, 0, 1, 1)), (GroupLayout.WITHIN_NODES, (0, 1, 0, 1))],
)
def test_the_page_of_a_run_in_groups_has_the_prediction_of_each_processs_place(layout, places):
    tables = make.tables(table(0), table(1), batch_size=1024)
    topology = make.topology(4, hbm=1 << 30, latency_s=1e-5)
    groups = ReplicaGroups(num_groups=2, layout=layout)
    plan = make.plan(*make.table_wise(tables.tables, (0, 1)), tables=tables, topology=topology, replica_groups=groups)
    plan = plan.with_predicted(evaluate(plan, make.costs()))
    kernels = [write_ms(rank.forward_kernel_ms) for rank in plan.predicted.ranks]
    assert kernels[0] != kernels[1]
    page = run_page(plan, timings([(0,), (1,), (2,), (3,)]), ["20 steps."])
    assert predicted_kernels(page) == {str(process): kernels[place] for process, place in enumerate(places)}


def test_the_page_of_a_folded_run_predicts_nothing_for_several_ranks(plan):
    page = run_page(plan, timings([(0, 3), (1,), (2,)]), ["20 steps."])
    assert predicted_kernels(page).keys() == {"1", "2"}
    assert "Processes that run several ranks of the plan have no prediction." in page
