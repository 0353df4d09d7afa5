"""Pictures of docs/how-to/page.md, of a service of its own: `python -m tests.server.page.pictures` takes them anew."""

import asyncio
import tempfile
from pathlib import Path

from tests.server.conftest import start_service
from tests.server.page.browser import browse

FOLDER = Path(__file__).parents[3] / "docs" / "images"
WIDTH = 1100


async def take(page, name, height, top="main"):
    """Writes a picture of the window, from an element on."""
    await page.resize(width=WIDTH, height=height)
    await page.value(f"document.getElementById({top!r}).scrollIntoView()")
    await page.picture(FOLDER / f"page-{name}.png", width=WIDTH, height=height)


async def play(page, url):
    """Plans twice, and shows what docs tell of."""
    await page.open(url)
    await page.until("document.getElementById('planner').options.length > 3")
    for tables, planner, limit_s in (("mlperf-dlrm-v2", "cost-greedy", "5"), ("mlperf-dlrm-v2", "auto", "20")):
        await page.go("plan")
        for field, value in (("tables", tables), ("topology", "a100-8"), ("planner", planner), ("limit", limit_s)):
            await page.fill(f"#{field}", value)
        await page.click("#make")
        if planner == "auto":
            await page.until("document.getElementById('shape').children.length > 0")
            await asyncio.sleep(8)
            await take(page, "plan", 960)
        await page.until("location.hash.startsWith('#one/')")
    await page.until("document.getElementById('other').options.length === 2")
    await asyncio.sleep(5)  # the report draws its charts
    await take(page, "one", 900)
    await page.click("#explain")
    await page.shown("explained")
    await page.click("#improve")
    await page.shown("improved")
    await take(page, "explained", 1000, "explained")
    await page.fill("#other", await page.value("document.getElementById('other').options[1].value"))
    await page.shown("difference")
    await take(page, "diff", 760)
    assert page.problems == []


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        service = start_service(Path(folder), "--workers", "1")
        try:
            browse(lambda page: play(page, service.url))
        finally:
            service.stop()
