"""The page with a plan of 1,000 tables on 128 ranks."""

import asyncio
import json

import pytest

from autoshard.formats import plan_to_json
from tests.report.test_pages import a_large_plan
from tests.server.page.browser import browse, needs_browser

#: Milliseconds since the navigation began at which every chart is drawn.
DRAWN = """(async () => {
  const charts = [...document.querySelectorAll(".chart")];
  while (!charts.every((one) => one.layout && one.querySelector(".main-svg")))
    await new Promise((done) => setTimeout(done, 10));
  return performance.now();
})()"""
#: Milliseconds from the choice of a plan to the end of its report's loading in the page.
CHOSEN = """(async (view) => {
  const started = performance.now();
  const loaded = new Promise((done) => document.getElementById("drawn").addEventListener("load", done, { once: true }));
  location.hash = view;
  await loaded;
  return performance.now() - started;
})"""


#: Rows of the map's lower and upper end, and the names on its axis.
SEEN = """(() => {
  const { yaxis, shapes } = document.getElementById("chart-map").layout;
  return [yaxis.range[0] - yaxis.range[1], yaxis.ticktext, shapes.length];
})()"""


async def look_for_tables(page):
    """Tables whose names are looked for are marked and named; a single one is shown with its neighbours."""

    async def seen(name):
        await page.value(f"document.getElementById('find-table').value = {json.dumps(name)}")
        await page.value("document.getElementById('find-table').dispatchEvent(new Event('input'))")
        await asyncio.sleep(1)
        await page.until(f"document.getElementById('found-tables').textContent.length {'> 0' if name else '=== 0'}")
        return await page.value(SEEN)

    rows, names, num_marked = await seen("_77")
    assert await page.text("found-tables") == "11 of 1,000 tables"
    assert (len(names), num_marked) == (11, 11)
    assert rows > 500
    rows, names, num_marked = await seen("TABLE_123")
    assert num_marked == 1
    assert rows < 100
    assert len(names) > 20, "neighbours are named too"
    assert "table_123" in names
    assert await seen("") == [1000, ["table_wise<br>1,000 tables"], 0]


@pytest.mark.slow
@needs_browser
def test_a_thousand_tables_on_128_ranks_are_shown_and_explained(own_service):
    service = own_service("--workers", "1")
    with service.client() as client:
        answer = client.post("/v1/evaluations", json={"plan": plan_to_json(a_large_plan())})
        assert answer.status_code == 200, answer.text
    plan_id = answer.json()["id"]

    async def play(page):
        await page.open(f"{service.url}/v1/plans/{plan_id}/report")
        await page.until("document.readyState === 'complete' && document.querySelector('.chart') !== null")
        drawn_ms = await page.value(DRAWN)
        assert await page.value("document.querySelectorAll('.chart .main-svg').length") >= 4
        await look_for_tables(page)
        await page.open(service.url)
        await page.until("document.getElementById('planner').options.length > 3")
        chosen_ms = await page.value(f"{CHOSEN}({json.dumps(f'#one/{plan_id}')})")
        await page.click("#explain")
        await page.shown("explained")
        assert await page.value("document.querySelectorAll('#alternatives tbody tr').length") == 1000
        # The list scrolls in its own box, and what would help is near.
        assert await page.value("document.documentElement.scrollHeight") < 10_000
        await page.click("#improve")
        await page.shown("improved")
        assert "256 ranks" in await page.text("hardware")
        await page.resize(width=420)
        assert await page.value("document.documentElement.scrollWidth <= innerWidth")
        assert page.problems == []
        assert page.hosts == {service.url}
        return drawn_ms, chosen_ms

    drawn_ms, chosen_ms = browse(play)
    print(f"report drawn after {drawn_ms:.0f} ms; in the page, loaded after {chosen_ms:.0f} ms")
