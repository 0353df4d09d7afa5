"""Every kind of page is small, asks no host for anything, keeps to its cards, and takes names as they are."""

import asyncio
import base64
import gzip
import hashlib
import itertools
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import choreographer
import pytest
from plotly.offline import get_plotlyjs_version

from autoshard.core import Estimate
from autoshard.core.errors import InfeasiblePlanError
from autoshard.formats import load_topology
from autoshard.planning import make_plan
from autoshard.report import ComparedPlan, MeasuredPlan, comparison_page, plan_page
from autoshard.report.coverage_page import MOST_POINTS, PairAxis, RegionMap, coverage_page
from autoshard.report.images import figure_page
from autoshard.report.rendering import PLOTLY_JS, short_markup
from autoshard.report.simulation import curves_figure, point_tables, simulation_report
from autoshard.results.sweep import PointMemory, PointStatus, PricedPoint, SweepPoint, UnpricedPoint
from autoshard.results.sweep_record import SweepRecord
from autoshard.table import Table
from tests import builders as make

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
AXE = Path(__file__).parents[2] / "build" / "axe-core" / "axe.min.js"
MOST_BYTES = 1_500_000
EVIL = "<img src=x onerror=\"document.title='taken'\"></script><script>document.title='taken'</script>"
BACKWARDS = "\u202eten\u202d"
LONG = "n" * 512  # as long as names of tables may be
KINDS = ("plan", "comparison", "simulation", "coverage")


def a_plan():
    names = (LONG, EVIL, BACKWARDS, *(f"t{index}" for index in range(13)))
    tables = (make.table(name, 10_000, 64, 40.0 if name == LONG else 2.0, alpha=1.05) for name in names)
    return make_plan("cost-greedy", make.request(make.tables(*tables, batch_size=4096), load_topology("cpu-8")))


def a_comparison(plan):
    measured = MeasuredPlan(forward_ms_R=(1.0,) * 8, backward_ms_R=(3.0,) * 8)
    rows = [
        ComparedPlan(planner=f"planner-{index}", planning_s=1.0, plan=plan, measured=measured) for index in range(8)
    ]
    return [*rows, ComparedPlan(planner="broken", planning_s=0.1, failure=InfeasiblePlanError(f"{EVIL} {LONG}"))]


def a_sweep():
    points = tuple(
        PricedPoint(
            point=SweepPoint(machine=machine, num_ranks=ranks, batch_size=4096, num_groups=groups),
            needed_bytes=1 << 30,
            available_bytes=1 << 34,
            step_ms=Estimate(value=1.0, low=0.9, high=1.2),
            parts_ms={"forward_kernel": 0.4, "forward_exchange": 0.6},
            imbalance=1.1,
            exchange_balance=0.9,
            num_shards={},
            models={},
            planning_s=0.1,
            memory=PointMemory(static_bytes=1 << 30, activation_bytes=1 << 20, limit_bytes=1 << 34),
            planned_groups=groups,
        )
        for machine in ("zionex", "dgx-a100")
        for groups in (1, 2)
        for ranks in (8, 16, 32, 64)
    )
    lost = UnpricedPoint(
        point=points[0].point,
        needed_bytes=1 << 30,
        available_bytes=1 << 34,
        status=PointStatus.IMPOSSIBLE,
        reason=f"{BACKWARDS}{LONG}",
        planning_s=0.1,
    )
    return SweepRecord(settings={"tables": LONG, "planner": EVIL}, points=(*points, lost))


def a_coverage_page():
    axes = [PairAxis(name=name, is_log=name != "share") for name in ("dim", "rows", "lookups", "share", "kernel ms")]
    rows = [[1.0 + (index * prime) % 997 for prime in (3, 7, 11, 13, 17)] for index in range(MOST_POINTS + 100)]
    labels = tuple(f"{index}00k - {index + 1}00k" for index in range(7))
    region = RegionMap(
        title="Shards: rows and dim",
        x_name="rows",
        y_name="dim",
        x_labels=labels,
        y_labels=labels,
        samples={(1, 2): 30, (2, 2): 4},
        wanted={(1, 2): 1, (0, 0): 2},
    )
    listing = Table(title="Kinds", caption="All.", columns=("kind", "samples"), rows=((EVIL, "3"), (LONG, "4")))
    return coverage_page(
        title="What the samples cover",
        subtitle="2 samples",
        facts=[("Samples", "2", "of 3 different shards")] * 5,
        axes=axes,
        points={EVIL: rows[:800], "random": rows[800:]},
        maps=[region] * 3,
        missing=[],
        listings=[listing],
    )


@pytest.fixture(scope="module")
def pages():
    plan = a_plan()
    measured = MeasuredPlan(forward_ms_R=(1.0,) * 8, backward_ms_R=(3.0,) * 8)
    learned = replace(plan, predicted=replace(plan.predicted, cost_model="learned:cpu@ccc8c1fb1ad61723 (shipped)"))
    return {
        "plan": plan_page(learned, measured),
        "comparison": comparison_page(a_comparison(plan), [f"Predicted by {LONG}."]),
        "simulation": figure_page(simulation_report(a_sweep(), f"Simulated steps of {LONG}")),
        "coverage": a_coverage_page(),
    }


class Attributes(HTMLParser):
    """Tags and names of all attributes of a page."""

    def __init__(self, page):
        super().__init__()
        self.found = set()
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found |= {(tag, name) for name, _ in attrs}


def content_hash(script):
    return f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}'"


def test_the_bundle_is_the_version_that_the_python_package_carries_and_has_its_licence():
    header = gzip.decompress(PLOTLY_JS.read_bytes())[:200].decode()
    assert f"plotly.js (cartesian - minified) v{get_plotlyjs_version()}\n" in header, "run scripts/vendor-plotly"
    assert "MIT License" in PLOTLY_JS.with_name("plotly-LICENSE").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_small_and_lets_only_its_own_scripts_run_and_no_host_be_asked(pages, kind):
    page = pages[kind]
    assert len(page.encode()) < MOST_BYTES
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    plotly = gzip.decompress(base64.b64decode(re.search(r'id="plotly">([^<]*)<', page)[1]))
    hashes = f"{content_hash(script.encode())} {content_hash(plotly)}"
    assert policy == f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
    assert not {"src", "href"} & {name for _, name in Attributes(page).found}
    assert page.count('<script type="application/json">') == page.count('class="chart"') > 0


def a_large_plan():
    """1,000 tables on 128 ranks."""
    rows = [1_000 * (1 + index * 37 % 1_000) for index in range(1_000)]
    tables = [make.table(f"table_{index}", size, 64, 1.0 + index % 30, alpha=1.05) for index, size in enumerate(rows)]
    return make_plan("neo", make.request(make.tables(*tables, batch_size=65_536), load_topology("zionex")))


@pytest.mark.slow
def test_the_page_of_a_thousand_tables_on_128_ranks_is_small():
    plan = a_large_plan()
    page = plan_page(plan)
    assert len(page.encode()) < MOST_BYTES
    assert page.count('class="chart"') == 4
    (cells,) = re.findall(r'"shape":"1000, 128"', page)
    assert cells


def test_pages_are_dark_on_dark_screens_and_light_in_print(pages):
    for page in pages.values():
        assert "@media screen and (prefers-color-scheme: dark)" in page
        assert "beforeprint" in page


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_escaped_short_and_whole_in_titles(pages, kind):
    page = pages[kind]
    assert EVIL not in page
    assert "\u202e" not in page
    searched = r'"meta":\[[^]]*\]'  # names of the map's tables, in which its search looks
    assert LONG not in re.sub(rf' title="[^"]*"|{searched}', "", page)
    assert LONG[:40] in page


def test_long_names_are_cut_and_letters_that_turn_the_text_are_written_out():
    assert short_markup("t" * 60) == "t" * 60
    assert short_markup("<b>" + "t" * 100, 10) == f'<span title="&lt;b&gt;{"t" * 100}">&lt;b&gt;tttttt…</span>'
    assert short_markup(f"a{BACKWARDS}b") == "a\\u202eten\\u202db"


def test_curves_are_over_ranks_or_over_batches_if_only_these_vary():
    ranks = a_sweep().points[:4]
    assert curves_figure(ranks).data[0].x == (8, 16, 32, 64)
    batches = [
        replace(one, point=replace(one.point, num_ranks=8, batch_size=batch))
        for one, batch in zip(ranks, (4096, 1024, 2048, 512), strict=True)
    ]
    figure = curves_figure(batches)
    assert [trace.x for trace in figure.data] == [(512, 1024, 2048, 4096)] * 4
    assert figure.data[0].name == "zionex, 8 ranks"
    assert figure.layout.xaxis3.title.text == "global batch"


def test_throughput_starts_at_zero_unless_it_spans_a_decade():
    points = a_sweep().points
    narrow, wide = (
        curves_figure(shown).to_dict()["layout"]
        for shown in (points[:2], [points[0], replace(points[1], step_ms=Estimate(value=0.1, low=0.09, high=0.12))])
    )
    for axis in ("yaxis", "yaxis2", "yaxis3", "yaxis4"):
        assert narrow[axis]["rangemode"] == "tozero"
        assert "type" not in narrow[axis]
    assert wide["yaxis2"]["type"] == "log"


def test_notebooks_show_sweeps_without_scripts():
    shown = a_sweep()._repr_html_()
    assert "<script" not in shown
    assert "zionex, batch 4,096, 8 ranks" in shown
    assert "\u202e" not in shown


def test_points_without_figures_have_their_status_and_the_reason_below():
    points = a_sweep().points
    figures, left_out = point_tables(points)
    assert figures.lines[0][:4] == ("zionex, batch 4,096", "8", "1.00", "0.900 to 1.20")
    assert figures.lines[-1] == ("zionex, batch 4,096", "8", "impossible", *("" for _ in figures.columns[3:]))
    assert left_out.lines == ((f"zionex, batch 4,096, 8 ranks: impossible: {points[-1].reason}",),)
    assert len(point_tables(points[:-1])) == 1


#: What leaves its card or the page, and what a card or a chart shows; what scrolls is there by scrolling.
MEASURED = """(() => {
  const width = document.documentElement.clientWidth, outside = [];
  if (document.documentElement.scrollWidth > width) outside.push("the page");
  for (const element of document.querySelectorAll("main *, header *")) {
    const box = element.getBoundingClientRect();
    const scrolls = element.parentElement.closest(".scroll, figure > div");
    const card = element.closest("section, dl.facts div, main, header").getBoundingClientRect();
    const leaves = box.width && (box.right > card.right + 1 || box.left < card.left - 1);
    if (leaves && !scrolls) outside.push(element.outerHTML.slice(0, 200));
  }
  const lines = (element) => element.getClientRects().length;
  return {
    outside,
    cut: [...document.querySelectorAll(".scroll")].filter((one) => one.scrollWidth > one.clientWidth + 1).length,
    values: [...document.querySelectorAll("dl.facts dd")].map((one) => {
      const range = document.createRange();
      range.selectNode(one.firstChild);
      return lines(range);
    }),
    drawn: document.querySelectorAll(".chart .main-svg").length / 3,
    ticks: [...document.querySelectorAll(".subplot")].map((one) => one.querySelectorAll(".ytick").length),
    hosts: performance.getEntriesByType("resource").map((one) => one.name),
    title: document.title,
  };
})()"""
WAITED = """(async () => {
  const pause = (ms) => new Promise((done) => setTimeout(done, ms));
  for (let turn = 0; turn < 600 && [...document.querySelectorAll(".chart")].some((one) => !one.layout); turn++)
    await pause(50);
  await pause(300);
  return MEASURED;
})()""".replace("MEASURED", MEASURED)


async def measured_in_a_browser(files, widths, script=WAITED, schemes=("light",)):
    """What a script finds, by file, width in pixels and colour scheme."""
    found = {}
    async with choreographer.Browser(path=CHROMIUM, headless=True, enable_sandbox=False) as browser:
        for file in files:
            tab = await browser.create_tab()
            await tab.send_command("Page.enable")
            loaded = tab.subscribe_once("Page.loadEventFired")
            await tab.send_command("Page.navigate", params={"url": file.as_uri()})
            await loaded
            for width, scheme in itertools.product(widths, schemes):
                size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
                await tab.send_command("Emulation.setDeviceMetricsOverride", params=size)
                media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
                await tab.send_command("Emulation.setEmulatedMedia", params=media)
                wanted = {"expression": script, "awaitPromise": True, "returnByValue": True}
                answer = await tab.send_command("Runtime.evaluate", params=wanted)
                found[file.stem, width, scheme] = answer["result"]["result"]["value"]
            await browser.close_tab(tab)
    return found


def written(pages, folder):
    for kind, page in pages.items():
        (folder / f"{kind}.html").write_text(page, encoding="utf-8")
    return [folder / f"{kind}.html" for kind in pages]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: the pages' markup is checked, nothing is drawn")
def test_a_browser_draws_all_charts_within_their_cards(pages, tmp_path):
    found_by_size = asyncio.run(measured_in_a_browser(written(pages, tmp_path), (1280, 420)))
    for (kind, width, _), found in found_by_size.items():
        assert found["title"] != "taken"
        assert found["hosts"] == []
        assert found["drawn"] == pages[kind].count('class="chart"')
        # Axes that subplots share have their ticks at one of them.
        assert min(number for number in found["ticks"] if number) >= 3, (kind, width)
        assert found["outside"] == [], (kind, width)
        assert set(found["values"]) <= {1}, (kind, width)
        assert found["cut"] == 0 or width == 420, (kind, width)


#: What axe-core finds on a drawn page: name of the rule and the first element.
BARRIERS = """(async () => {
  await WAITED;
  const { violations } = await axe.run();
  return violations.map((one) => `${one.id}: ${one.nodes[0].html.slice(0, 200)}`);
})()""".replace("WAITED", WAITED)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: nothing is drawn")
@pytest.mark.skipif(not AXE.exists(), reason="no axe-core: scripts/axe-core fetches it")
def test_axe_finds_no_barrier_on_any_page(pages, tmp_path):
    script = f"{AXE.read_text(encoding='utf-8')};{BARRIERS}"
    files = written(pages, tmp_path)
    found = asyncio.run(measured_in_a_browser(files, (1280, 420), script, ("light", "dark")))
    assert len(found) == 4 * len(KINDS)
    assert found == {key: [] for key in found}
