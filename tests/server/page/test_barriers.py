"""The page for everybody: no barrier that axe-core finds, on light and dark screens, and all of it by keyboard."""

import itertools
import json

import pytest

from tests.report.test_pages import AXE
from tests.server.page.browser import browse, needs_browser

TASK = {"tables": "criteo-kaggle", "topology": "cpu-8", "planner": "size-greedy"}
#: What axe-core finds: name of the rule and the first element. The report in its frame is tested by itself.
BARRIERS = """axe.run(document, { iframes: false }).then(({ passes, violations }) =>
  passes.length < 10 ? ["few rules apply: is the view shown?"]
    : violations.map((one) => `${one.id}: ${one.nodes[0].html.slice(0, 200)}`))"""


def made(service, **changes):
    with service.client() as client:
        answer = client.post("/v1/plans", json={**TASK, **changes})
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]


async def show_search(page):
    await page.go("plan")
    await page.until("document.getElementById('planner').options.length > 3")
    await page.value("document.querySelector('#task details').open = true")
    await page.fill("#limit", "1")
    await page.click("#compare")
    await page.until("document.querySelector('#all-compared a') !== null")
    await page.fill("#limit", "60")
    await page.click("#make")
    await page.until("/ms$/.test(document.getElementById('best').textContent)")


async def show_fault(page):
    await page.go("plan")
    await page.fill("#tables-text", "{")
    await page.click("#make")
    await page.shown("message")


async def show_plan(page):
    await page.go("plans")
    await page.until("document.querySelectorAll('#listed a').length >= 2")
    await page.click("#listed a")
    await page.until("/[0-9a-f]{64}[/]report$/.test(document.getElementById('report').href)")
    await page.click("#explain")
    await page.shown("explained")
    await page.click("#improve")
    await page.shown("improved")


async def show_plans(page):
    await page.go("plans")
    await page.until("document.querySelectorAll('#listed input').length >= 2")
    await page.value("document.querySelector('#find details').open = true")


async def show_difference(page):
    await show_plans(page)
    await page.value("[...document.querySelectorAll('#listed input')].slice(0, 2).forEach((one) => one.click())")
    await page.click("#diff")
    await page.shown("difference")


async def show_jobs(page):
    await page.go("jobs")
    await page.until("document.querySelectorAll('#worked a').length >= 1")
    await page.value("location.hash = document.querySelector('#worked a').getAttribute('href')")
    await page.shown("log")


async def show_schedules(page):
    await page.go("schedules")
    await page.shown("new-schedule")


async def show_models(page):
    await page.go("models")
    await page.until("document.querySelectorAll('#trained button').length === 2")


async def show_keys(page):
    await page.go("keys")
    await page.shown("new-key")


async def show_audit(page):
    await page.go("audit")
    await page.until("document.querySelectorAll('#audited tbody tr').length >= 1")


async def show_sign_in(page):
    await page.go("sign-in")
    await page.shown("key")


VIEWS = {
    "search": show_search,
    "plans": show_plans,
    "difference": show_difference,
    "plan": show_plan,
    "jobs": show_jobs,
    "models": show_models,
    "schedules": show_schedules,
    "keys": show_keys,
    "audit": show_audit,
    "sign-in": show_sign_in,
    "fault": show_fault,
}


@pytest.mark.slow
@needs_browser
@pytest.mark.skipif(not AXE.exists(), reason="no axe-core: scripts/axe-core fetches it")
@pytest.mark.parametrize(("width", "dark"), [*itertools.product((1440, 390), (False, True))])
def test_axe_finds_no_barrier_in_any_view(own_service, registry, width, dark):
    service = own_service("--workers", "2", "--registry", registry.root)
    made(service)
    made(service, planner="lookup-greedy")

    async def play(page):
        await page.resize(width=width, dark=dark)
        await page.open(service.url)
        found = {}
        for name, show in VIEWS.items():
            await show(page)
            await page.value(AXE.read_text(encoding="utf-8") + ";0")
            found[name] = await page.value(BARRIERS)
            assert await page.value("document.documentElement.scrollWidth <= innerWidth"), name
        assert page.problems == []
        return found

    assert browse(play) == {name: [] for name in VIEWS}


#: Names of the controls that can be seen and used, in the order of the page, those of the report in its frame aside.
CONTROLS = """(() => {
  const all = "a[href], button, input, select, textarea, iframe, summary, [tabindex='0']";
  const seen = [...document.querySelectorAll(all)].filter((one) => !one.disabled && one.checkVisibility());
  window.controls = seen;
  return seen.map((one) => one.id || one.getAttribute("aria-label") || one.textContent.trim());
})()"""
#: Number of the control that has the focus; -1 for what is none.
FOCUSED = "window.controls.indexOf(document.activeElement)"


async def reached(page, most):
    """Names of the controls of a view, and of those that Tab reaches, from the first on."""
    names = await page.value(CONTROLS)
    await page.value("document.getElementById('skip').focus()")
    found = ["skip"]
    for _ in range(most):
        await page.press("Tab")
        number = await page.value(FOCUSED)
        if number >= 0 and names[number] not in found[-1:]:  # the frame keeps the focus for its own controls
            found.append(names[number])
        if len(found) == len(names):
            break
    return names, found


async def tab_to(page, element, most=200):
    """Presses Tab until an element with an id, or the first link with a text, has the focus."""
    for _ in range(most):
        await page.press("Tab")
        if await page.value(
            f"document.activeElement.id === {json.dumps(element)} ||"
            f" document.activeElement.textContent.trim() === {json.dumps(element)}"
        ):
            return
    raise AssertionError(f"Tab does not reach {element}")


@pytest.mark.slow
@needs_browser
def test_tab_reaches_every_control_of_every_view(own_service, registry):
    service = own_service("--workers", "2", "--registry", registry.root)
    made(service)
    made(service, planner="lookup-greedy")

    async def play(page):
        await page.open(service.url)
        for name, show in VIEWS.items():
            await show(page)
            names, found = await reached(page, most=200)
            assert found == names, name
        assert page.problems == []

    browse(play)


@pytest.mark.slow
@needs_browser
def test_a_plan_is_made_explained_compared_and_deleted_by_keyboard_alone(own_service):
    service = own_service("--workers", "2")
    made(service)

    async def play(page):
        await page.open(f"{service.url}/#plans")
        await page.until("document.querySelectorAll('#listed a').length === 1")
        await page.press("Tab")
        assert await page.value("document.activeElement.id") == "skip"
        await page.press("Enter")
        assert await page.value("[document.activeElement.id, location.hash].join()") == "main,#plans"
        await page.open(f"{service.url}/#plan")
        await page.until("document.getElementById('planner').options.length > 3")
        await tab_to(page, "tables-text")
        await tab_to(page, "planner")
        await page.type("lookup")
        assert await page.value("document.getElementById('planner').value") == "lookup-greedy"
        await tab_to(page, "make")
        await page.press("Enter")
        await page.until("location.hash.startsWith('#one/')")
        await tab_to(page, "explain")
        await page.press("Enter")
        await page.until("document.activeElement.id === 'explained'")
        await tab_to(page, "improve")
        await page.press(" ")
        await page.until("document.activeElement.id === 'improved'")
        await tab_to(page, "Plans")
        await page.press("Enter")
        await page.until("document.querySelectorAll('#listed input').length === 2")
        await tab_to(page, "text")
        while await page.value("document.activeElement.type") != "checkbox":
            await page.press("Tab")
        await page.press(" ")
        await page.press("Tab", times=2)  # past the plan's link
        await page.press(" ")
        assert await page.value("document.querySelectorAll('#listed input:checked').length") == 2
        await tab_to(page, "diff")
        await page.press("Enter")
        await page.shown("difference")
        await tab_to(page, await page.value("document.querySelector('#side-by-side a').textContent"))
        await page.press("Enter")
        await page.until("location.hash.startsWith('#one/')")
        await page.value("window.confirm = () => true")
        await tab_to(page, "delete")
        await page.press("Enter")
        await page.until("location.hash === '#plans' && document.querySelectorAll('#listed a').length === 1")
        assert page.problems == []

    browse(play)
