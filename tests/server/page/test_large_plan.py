"""The page with a plan of 1,000 tables on 128 ranks."""

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
