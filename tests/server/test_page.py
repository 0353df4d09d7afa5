"""The page at `/` in a real browser: plans made and watched, listed, compared, explained; keys; names that are HTML."""

import asyncio
import json

import pytest

from autoshard.cli import main
from autoshard.formats import load_tables, tables_to_json
from autoshard.report.images import ImageError, find_browser

try:
    find_browser()
    NO_BROWSER = ""
except ImageError as error:
    NO_BROWSER = str(error)

needs_browser = pytest.mark.skipif(bool(NO_BROWSER), reason=NO_BROWSER)
EVIL = "<img src=x onerror=document.title='evil'>"


def test_its_files_are_open_and_run_nothing_but_their_own(client):
    for path, kind in (("/", "text/html"), ("/page/app.js", "text/javascript"), ("/page/app.css", "text/css")):
        answer = client.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'" in policy
        assert "unsafe" not in policy
        assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in answer.text
    assert "innerHTML" not in client.get("/page/app.js").text
    found = client.get("/v1/catalogue").json()
    assert "criteo-kaggle" in found["tables"]
    assert {"name": "auto"} in found["planners"]


def test_a_session_needs_a_key_and_changes_need_the_header(own_service, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AUTOSHARD_DATABASE_URL", f"sqlite:///{tmp_path}/service.sqlite")
    assert main(["keys", "create", "page", "--scope", "plan"]) == 0
    secret = capsys.readouterr().out.strip().splitlines()[-1].split()[-1]
    service = own_service("--workers", "1")
    with service.client() as client:
        assert client.get("/v1/plans").status_code == 401
        assert client.post("/page/session", json={"key": "nothing"}).status_code == 401
        answer = client.post("/page/session", json={"key": secret})
        assert answer.status_code == 204
        assert "httponly" in answer.headers["set-cookie"].lower()
        assert "samesite=strict" in answer.headers["set-cookie"].lower()
        assert client.get("/v1/plans").status_code == 200
        refused = client.delete("/v1/plans/sha256:" + "0" * 64)
        assert (refused.status_code, refused.json()["field"]) == (403, "x-autoshard-page")
        told = {"X-Autoshard-Page": "1"}
        assert client.delete("/v1/plans/sha256:" + "0" * 64, headers=told).status_code == 404
        assert client.delete("/page/session", headers=told).status_code == 204
        assert client.get("/v1/plans").status_code == 401


@pytest.mark.slow
@needs_browser
def test_who_has_a_key_signs_in_and_out_also_after_a_reload(own_service, tmp_path, monkeypatch, capsys):
    from tests.server.browser import browse

    monkeypatch.setenv("AUTOSHARD_DATABASE_URL", f"sqlite:///{tmp_path}/service.sqlite")
    assert main(["keys", "create", "page", "--scope", "plan"]) == 0
    secret = capsys.readouterr().out.strip().splitlines()[-1].split()[-1]
    service = own_service("--workers", "1")

    async def play(page):
        await page.open(service.url)
        await page.until("location.hash === '#sign-in'")
        await page.fill("#key", secret)
        await page.click("#sign-in button")
        await page.until("document.getElementById('planner').options.length > 3")
        assert await page.value("document.cookie") == ""
        await page.value("location.reload()")
        await page.until("document.readyState === 'complete' && !document.getElementById('leave').hidden")
        # More memory than there is: the job fails, and says what would help.
        await page.fill("#tables", "nvidia-medium")
        await page.fill("#topology", "a100-8")
        await page.fill("#limit", "1")
        await page.click("#make")
        await page.value("location.hash = '#jobs'")
        await page.until("/feasible|fits|room/.test(document.getElementById('message').textContent)")
        await page.click("#leave")
        await page.until("location.hash === '#sign-in'")
        assert page.problems == []

    browse(play)


@pytest.mark.slow
@needs_browser
def test_plans_are_made_watched_listed_compared_and_explained(own_service, tmp_path):
    from tests.server.browser import browse

    service = own_service("--workers", "2")
    tables = tables_to_json(load_tables("criteo-kaggle"))
    tables["tables"][0]["name"] = EVIL

    async def play(page):
        await page.open(service.url)
        await page.until("document.getElementById('planner').options.length > 3")
        await page.fill("#tables-text", json.dumps(tables))
        await page.fill("#limit", "3")
        await page.click("#make")
        await page.until("/^[0-9.]+ ms$/.test(document.getElementById('best').textContent)")
        await page.until("location.hash.startsWith('#one/')")
        await page.click("#explain")
        await page.until("!document.getElementById('explained').hidden")
        assert EVIL in await page.value("document.getElementById('alternatives').textContent")
        await page.value("location.hash = '#plan'")
        await page.click("#compare")
        await page.until("document.querySelectorAll('#compared tbody tr').length === 4")
        await page.value(
            "document.getElementById('limit').value = '0.2'; document.getElementById('tables-text').value = ''"
        )
        await page.click("#make")
        await page.until("location.hash.startsWith('#one/')")
        await page.value("location.hash = '#plans'")
        await page.until("document.querySelectorAll('#listed input').length >= 2")
        await page.value("[...document.querySelectorAll('#listed input')].slice(0, 2).forEach((one) => one.click())")
        await page.click("#diff")
        await page.until("!document.getElementById('difference').hidden")
        await page.fill("#text", "no such name")
        await page.click("#find button")
        await page.until("document.querySelectorAll('#listed tbody tr').length === 0")
        for name, rows in (("jobs", "#worked tbody tr"), ("models", "#trained tr")):
            await page.value(f"location.hash = '#{name}'")
            await page.until(f"document.querySelectorAll('{rows}').length >= 1")
        await page.fill("#tables-text", "{")
        await page.value("location.hash = '#plan'")
        await page.click("#make")
        assert "is not JSON" in await page.until("document.getElementById('message').textContent")
        await asyncio.sleep(0.5)
        assert await page.value("document.title") == "autoshard"
        assert page.problems == []
        assert page.hosts == {service.url}
        wide = "document.documentElement.scrollWidth > innerWidth"
        await page.picture(tmp_path / "narrow.png", width=420)
        assert not await page.value(wide)

    browse(play)
