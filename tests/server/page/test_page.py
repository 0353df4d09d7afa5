"""The page at `/` in a real browser: plans made and watched, listed, compared, explained; keys; names that are HTML."""

import asyncio
import contextlib
import json

import pytest
from sqlalchemy import update

from autoshard.api import JobKind, JobState
from autoshard.cli import main
from autoshard.formats import load_tables, load_topology, tables_to_json, topology_to_json
from server.access import Principal
from server.storage.jobs import JobEnd, NewJob
from server.storage.location import DATABASE_VARIABLE
from server.storage.schema import JOBS, now_us
from server.storage.storage import open_storage
from server.web.routes.page import PAGE_FILES
from tests.server.page.browser import browse, needs_browser

EVIL = "<img src=x onerror=document.title='evil'>"
#: Turns the direction of what follows; pages show it as an escape.
BACKWARDS = "\u202e"


def test_its_files_are_open_and_run_nothing_but_their_own(client):
    assert {"/", "/page/app.js", "/page/app.css"} <= PAGE_FILES.keys()
    for path, (_, kind) in PAGE_FILES.items():
        answer = client.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == kind
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'" in policy
        assert "unsafe" not in policy
        assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in answer.text
        assert "innerHTML" not in answer.text
    found = client.get("/v1/catalogue").json()
    assert "criteo-kaggle" in found["tables"]
    assert "auto" in [one["name"] for one in found["planners"]]


@pytest.mark.slow
@needs_browser
def test_who_has_a_key_signs_in_and_out_also_after_a_reload(own_service, tmp_path, monkeypatch, capsys):
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
        await page.until("document.getElementById('planner').options.length > 3")
        # More memory than there is: the job fails, and says what would help.
        await page.fill("#tables", "nvidia-medium")
        await page.fill("#topology", "a100-8")
        await page.fill("#limit", "1")
        await page.click("#make")
        await page.go("jobs")
        await page.until("/feasible|fits|room/.test(document.getElementById('message').textContent)")
        await page.click("#leave")
        await page.until("location.hash === '#sign-in'")
        assert page.problems == []

    browse(play)


@pytest.mark.slow
@needs_browser
def test_an_admin_makes_and_ends_keys_and_reads_what_was_done(own_service):
    service = own_service("--workers", "1", "--first-key")
    secret = next(line["secret"] for line in service.log() if line["event"] == "first key")

    async def play(page):
        await page.open(service.url)
        await page.until("location.hash === '#sign-in'")
        await page.fill("#key", secret)
        await page.click("#sign-in button")
        await page.until("document.getElementById('planner').options.length > 3")
        await page.go("keys")
        await page.until("document.querySelectorAll('#keys tbody tr').length === 1")
        await page.fill("#key-name", EVIL)
        await page.fill("#key-team", "red")
        await page.click("#new-key button")
        await page.shown("made-key")
        made = await page.text("secret")
        await page.until("document.querySelectorAll('#keys tbody tr').length === 2")
        assert EVIL in await page.text("keys")
        assert "red" in await page.text("keys")
        with service.client() as client:
            client.headers["Authorization"] = f"Bearer {made}"
            assert client.get("/v1/plans").status_code == 200
            await page.value("window.confirm = () => true")
            await page.click("#keys tr:last-child button")
            await page.until("document.querySelectorAll('#keys button').length === 1")
            assert client.get("/v1/plans").status_code == 401
        await page.go("audit")
        await page.until("document.querySelectorAll('#audited tbody tr').length === 4")
        assert "key.revoke" in await page.text("audited")
        await page.fill("#audit-action", "session")
        await page.click("#find-audit button")
        await page.until("document.querySelectorAll('#audited tbody tr').length === 1")
        assert await page.value("document.title") == "autoshard"
        assert page.problems == []

    browse(play)


@pytest.mark.slow
@needs_browser
def test_a_search_is_stopped_and_its_best_plan_kept(own_service):
    service = own_service("--workers", "1")

    async def play(page):
        await page.open(service.url)
        await page.until("document.getElementById('planner').options.length > 3")
        await page.fill("#tables", "criteo-kaggle")
        await page.fill("#limit", "600")
        await page.click("#make")
        await page.until("/^[0-9.]+ ms$/.test(document.getElementById('best').textContent)")
        shape = await page.value("[...document.querySelectorAll('#shape dt')].map((one) => one.textContent)")
        assert shape == ["slowest rank", "balance", "fullest rank"]
        await page.click("#stop")
        await page.until("location.hash.startsWith('#one/')")
        with service.client() as client:
            (listed,) = client.get("/v1/jobs").json()["jobs"]
            job = client.get(f"/v1/jobs/{listed['id']}").json()
            assert job["state"] == "succeeded"
            assert job["is_stopped"]
            assert await page.value("location.hash") == f"#one/{job['plan_id']}"
            await page.go("plan")
            await page.click("#make")
            await page.shown("search")
            await page.until("/^[0-9.]+ ms$/.test(document.getElementById('best').textContent)")
            await page.go("jobs")
            buttons = "[...document.querySelectorAll('#worked button')]"
            await page.until(f"{buttons}.map((one) => one.textContent).join() === 'Stop and keep,Cancel'")
            await page.click("#worked button")
            await page.until("document.getElementById('search').hidden")
            assert [one["state"] for one in client.get("/v1/jobs").json()["jobs"]] == ["succeeded", "succeeded"]
        assert page.problems == []

    browse(play)


@pytest.mark.slow
@needs_browser
def test_plans_are_made_watched_listed_compared_and_explained(own_service, tmp_path):
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
        await page.shown("explained")
        assert EVIL in await page.text("alternatives")
        # Tables without which the step is shorter: how many these are is the plan's.
        assert 1 <= await page.value("document.querySelectorAll('#binding tbody tr').length") <= 10
        assert "fullest rank" in await page.text("bounds")
        await page.click("#improve")
        await page.shown("trying")
        await page.shown("improved")
        await page.until("document.getElementById('trying').offsetHeight === 0")
        assert "twice the " in await page.text("hardware")  # how many changes are planned depends on the time
        assert "another plan" in await page.text("settings")
        assert (await page.text("advice")).startswith(("Most would be gained by ", "None of the changes"))
        await page.go("plan")
        await page.click("#compare")
        await page.until("document.querySelectorAll('#compared tbody tr').length === 4")
        await page.value(
            "document.getElementById('limit').value = '0.2'; document.getElementById('tables-text').value = ''"
        )
        await page.click("#make")
        await page.until("location.hash.startsWith('#one/')")
        await page.go("plans")
        await page.until("document.querySelectorAll('#listed input').length >= 2")
        await page.value("[...document.querySelectorAll('#listed input')].slice(0, 2).forEach((one) => one.click())")
        await page.click("#diff")
        await page.shown("difference")
        await page.go("plans")
        await page.fill("#text", "no such name")
        await page.click("#find button")
        await page.until("document.querySelectorAll('#listed tbody tr').length === 0")
        assert "No plan is stored that fits" in await page.text("listed")
        for name, rows in (("jobs", "#worked tbody tr"), ("models", "#trained tr")):
            await page.go(name)
            await page.until(f"document.querySelectorAll('{rows}').length >= 1")
        await page.fill("#tables-text", "{")
        await page.go("plan")
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


@pytest.mark.slow
@needs_browser
def test_files_are_uploaded_and_planned(own_service, tmp_path):
    service = own_service("--workers", "1")
    tables = tables_to_json(load_tables("metasyn").sample(12, 1).scaled(64))
    topology = topology_to_json(load_topology("cpu-4"))
    files = [tmp_path / "tables.json", tmp_path / "topology.json"]
    for file, document in zip(files, (tables, topology), strict=True):
        file.write_text(json.dumps(document))

    async def play(page):
        await page.open(service.url)
        await page.until("document.getElementById('planner').options.length > 3")
        await page.upload("#tables-file", files[0])
        await page.upload("#topology-file", files[1])
        await page.fill("#planner", "size-greedy")
        await page.click("#make")
        await page.until("location.hash.startsWith('#one/')")
        files[0].write_text("no JSON")
        await page.go("plan")
        await page.upload("#tables-file", files[0])
        await page.click("#make")
        assert "column" in await page.until("document.getElementById('message').textContent"), "read as a table list"
        assert page.problems == []

    browse(play)
    with service.client() as client:
        (summary,) = client.get("/v1/plans").json()["plans"]
        plan = client.get(f"/v1/plans/{summary['id']}").json()["plan"]
    assert (plan["tables"], plan["topology"]) == (tables, topology)


def evil_task():
    """Tables and a topology all of whose names are HTML; those of tables end with a mark of direction."""
    tables = tables_to_json(load_tables("metasyn").sample(12, 1).scaled(64))
    for number, table in enumerate(tables["tables"]):
        table["name"] = f"{EVIL}{number}{BACKWARDS}"
        for feature in table["features"]:
            feature["name"] = f"{EVIL}{feature['name']}"
    topology = topology_to_json(load_topology("a100-32"))
    for level in topology["levels"]:
        level["name"] = f"{EVIL}{level['name']}"
    return tables, topology


@pytest.mark.slow
@needs_browser
def test_names_that_are_html_are_texts_everywhere(own_service):
    service = own_service("--workers", "2")
    tables, topology = evil_task()
    twice = {**tables, "tables": [tables["tables"][0], *tables["tables"]]}
    too_small = {**topology, "memory_bytes": {**topology["memory_bytes"], "hbm": 1 << 20}}
    shown = {}

    async def note(page, element):
        shown[element] = await page.text(element)
        assert await page.value("document.querySelectorAll('#main img').length") == 0

    async def play(page):
        await page.open(service.url)
        await page.until("document.getElementById('planner').options.length > 3")
        await page.fill("#tables-text", json.dumps(tables))
        await page.fill("#topology-text", json.dumps(topology))
        for planner in ("size-greedy", "neo"):
            await page.go("plan")
            await page.fill("#planner", planner)
            await page.click("#make")
            await page.until("location.hash.startsWith('#one/')")
        await page.click("#explain")
        await page.shown("explained")
        await page.click("#improve")
        await page.shown("improved")
        for element in ("binding", "alternatives", "hardware", "settings"):
            await note(page, element)
        await page.go("plans")
        await page.until("document.querySelectorAll('#listed input').length === 2")
        await page.value("document.querySelectorAll('#listed input').forEach((one) => one.click())")
        await page.click("#diff")
        await page.shown("difference")
        await note(page, "moved")
        await page.go("plan")
        await page.fill("#tables-text", json.dumps(twice))
        await page.click("#make")
        await page.shown("message")
        await note(page, "message")
        await page.fill("#tables-text", json.dumps(tables))
        await page.fill("#topology-text", json.dumps(too_small))
        await page.click("#compare")
        await page.until("/onerror/.test(document.getElementById('compared').textContent)")
        await note(page, "compared")
        await page.go("jobs")
        await page.until("document.querySelectorAll('#worked a').length >= 3")
        rows = "[...document.querySelectorAll('#worked tbody tr')]"
        await page.value(
            f"location.hash = {rows}.find((one) => /used twice/.test(one.textContent)).querySelector('a').hash"
        )
        await page.shown("log")
        await page.until("/used twice/.test(document.getElementById('log').textContent)")
        await note(page, "log")
        assert await page.value("document.title") == "autoshard"
        assert page.problems == []
        assert page.hosts == {service.url}

    browse(play)
    assert {element: text[:300] for element, text in shown.items() if EVIL not in text} == {}
    assert [element for element, text in shown.items() if BACKWARDS in text] == []
    assert {"binding", "alternatives", "moved"} <= {element for element, text in shown.items() if "\\u{202e}" in text}


@pytest.mark.slow
@needs_browser
def test_json_lines_are_a_list_and_options_and_the_start_go_to_the_planners_that_take_them(own_service, tmp_path):
    service = own_service("--workers", "1")
    lines = "".join(json.dumps({"name": name, "rows": 120_000, "dim": 64}) + "\n" for name in ("user", "item"))
    file = tmp_path / "list.jsonl"
    file.write_text(lines)
    remarks = {}
    with service.client() as client:
        task = {"tables": {"text": lines}, "topology": "cpu-4", "planner": "size-greedy"}
        start = client.post("/v1/plans", json=task).json()["id"]

    async def play(page):
        await page.open(service.url)
        await page.until("document.getElementById('planner').options.length > 3")
        notes = "document.getElementById('tables-notes').textContent"
        await page.fill("#tables-text", lines)
        await page.until(f"/^2 tables/.test({notes})")
        await page.fill("#tables-text", "")
        await page.until(f"/^26 tables/.test({notes})")
        await page.upload("#tables-file", file)
        await page.until(f"/^2 tables/.test({notes})")
        await page.fill("#topology", "cpu-4")
        await page.fill("#limit", "0.2")
        await page.fill("#options", "sharding_types=table_wise")
        await page.fill("#start", start)
        await page.click("#compare")
        await page.until("document.getElementById('all-compared').textContent")
        rows = "[...document.querySelectorAll('#compared tbody tr')]"
        cells = f"{rows}.map((row) => [row.cells[0].textContent, row.cells[2].textContent])"
        remarks.update(await page.value(f"Object.fromEntries({cells})"))
        assert page.problems == []

    browse(play)
    with service.client() as client:
        known = {one["name"]: one["options"] for one in client.get("/v1/catalogue").json()["planners"]}
        plans = [client.get(f"/v1/plans/{one['id']}").json()["plan"] for one in client.get("/v1/plans").json()["plans"]]
    given = {one["provenance"]["planner"]: one["provenance"]["options"].get("sharding_types") for one in plans}
    for planner, remark in remarks.items():
        assert ("has no option sharding_types" in remark) == ("sharding_types" not in known[planner])
        assert ("takes no start" in remark) == (planner != "auto")
    assert given.keys() == remarks.keys() | {"size-greedy"}
    assert {planner for planner, types in given.items() if types == "table_wise"} == {"auto", "neo"}


@pytest.mark.slow
@needs_browser
def test_jobs_that_run_stand_before_those_that_ended_and_more_follow(own_service, tmp_path, monkeypatch):
    monkeypatch.setenv(DATABASE_VARIABLE, f"sqlite:///{tmp_path}/service.sqlite")
    with contextlib.closing(open_storage()) as storage:
        for number in range(61):
            job = NewJob(kind=JobKind.PLAN, request=b"{}", task="{}", client="anybody", team="")
            storage.add_job(job, None, Principal())
            if number < 60:  # the last one waits: its client has a job, and the service one place
                claimed = storage.jobs.claim()
            if 0 < number < 60:
                storage.finish_job(claimed, JobEnd(state=JobState.SUCCEEDED), None)
        with storage.database.writing() as connection:  # no service takes the first for lost
            connection.execute(update(JOBS).where(JOBS.c.state == "running").values(seen_us=2 * now_us()))
    service = own_service("--workers", "1", "--jobs", "1")

    async def play(page):
        await page.open(f"{service.url}/#jobs")
        rows = "document.querySelectorAll('#worked tbody tr')"
        await page.until(f"{rows}.length === 51")
        assert "running" in await page.value(f"{rows}[0].textContent")
        assert "queued" in await page.value(f"{rows}[1].textContent")
        with service.client() as client:
            (waiting,) = client.get("/v1/jobs?state=queued").json()["jobs"]
            client.post(f"/v1/jobs/{waiting['id']}/cancel")
        await page.click("#more-jobs")
        await page.until(f"{rows}.length === 61")
        assert await page.value("document.getElementById('more-jobs').hidden")
        assert await page.value(f"[...{rows}].filter((one) => /running/.test(one.textContent)).length") == 1
        assert not await page.value(f"[...{rows}].some((one) => /queued/.test(one.textContent))")
        assert page.problems == []

    browse(play)


@pytest.mark.slow
@needs_browser
def test_a_table_list_is_shown_mapped_and_planned(own_service, tmp_path):
    service = own_service("--workers", "1")
    file = tmp_path / "list.csv"
    file.write_text('Table Name,#Rows,Dim,Avg Pooling,size\nuser,"1,234,567",64.0,2.5,9\nitem,120K,32,1,9\n')

    async def play(page):
        await page.open(service.url)
        await page.until("document.getElementById('planner').options.length > 3")
        await page.upload("#tables-file", file)
        await page.until("/may mean rows or bytes/.test(document.getElementById('message').textContent)")
        assert await page.value("document.getElementById('tables-file').getAttribute('aria-invalid')") == "true"
        await page.fill("#columns select", "-")
        await page.until("/^2 tables/.test(document.getElementById('tables-notes').textContent)")
        read = await page.value("[...document.querySelectorAll('#columns select')].map((one) => one.value)")
        assert read == ["name", "num_embeddings", "embedding_dim", "pooling_factor", "-"]
        assert "the list says no batch size: 65,536" in await page.text("tables-notes")
        await page.fill("#batch", "4096")
        await page.until("!/batch size/.test(document.getElementById('tables-notes').textContent)")
        await page.picture(tmp_path / "list.png", height=1200)
        await page.fill("#topology", "cpu-8")
        await page.fill("#limit", "0.2")
        await page.click("#make")
        await page.until("location.hash.startsWith('#one/')")
        plan_id = (await page.value("location.hash")).partition("/")[2]
        assert page.problems == []
        return plan_id

    plan_id = browse(play)
    with service.client() as client:
        tables = client.get(f"/v1/plans/{plan_id}").json()["plan"]["tables"]
    assert (tables["batch_size"], tables["tables"][0]["num_embeddings"]) == (4096, 1_234_567)


@pytest.mark.slow
@needs_browser
def test_a_jobs_plan_is_found_compared_and_exported_in_five_clicks(own_service):
    service = own_service("--workers", "1")
    task = {"tables": "criteo-kaggle", "topology": "cpu-8"}
    with service.client() as client:
        yesterday = client.post("/v1/plans", json={**task, "planner": "size-greedy"}).json()["id"]
        made = client.post("/v1/plans", json={**task, "planner": "lookup-greedy"}, headers={"Prefer": "respond-async"})
    job_id = made.json()["id"]

    async def play(page):
        num_clicks = 0

        async def click(selector):
            nonlocal num_clicks
            num_clicks += 1
            await page.click(selector)

        await page.open(service.url)
        await page.until("document.getElementById('planner').options.length > 3")
        await click("nav a[href='#jobs']")
        await page.until("document.querySelectorAll('#worked a').length === 1")
        await click("#worked a")
        await page.until("document.querySelector('#job a[href^=\\'#one/\\']') !== null")
        assert job_id in await page.value("location.hash")
        await click("#job a[href^='#one/']")
        await page.until("document.getElementById('other').options.length === 2")
        assert job_id in await page.value("document.querySelector('#made-by a').hash")
        num_clicks += 1
        await page.fill("#other", yesterday)
        await page.shown("difference")
        assert await page.value("document.querySelectorAll('#side-by-side tbody tr.best').length") == 1
        assert " ms → " in await page.text("changes")
        address = await page.value("location.href")
        await click("#side-by-side tr.best a[download]")
        assert num_clicks == 5
        await page.open("about:blank")
        await page.open(address)
        await page.shown("difference")
        assert page.problems == []

    browse(play)


@pytest.mark.slow
@needs_browser
def test_what_was_typed_stays_and_a_service_that_is_gone_is_said_and_found_again(own_service, tmp_path):
    service = own_service("--workers", "1")
    port = service.url.rpartition(":")[2]
    file = tmp_path / "tables.json"
    file.write_text(json.dumps(tables_to_json(load_tables("criteo-kaggle"))))

    async def play(page):
        await page.open(service.url)
        await page.until("document.getElementById('planner').options.length > 3")
        await page.fill("#tables-text", "[1, 2]")
        await page.until(
            "document.getElementById('message').closest('fieldset')?.contains(document.getElementById('tables'))"
        )
        assert await page.value("document.getElementById('tables-text').getAttribute('aria-invalid')") == "true"
        await page.upload("#tables-file", file)
        await page.until("/^26 tables/.test(document.getElementById('tables-notes').textContent)")
        await page.click("#tables-remove")
        await page.until("document.getElementById('tables-file').files.length === 0")
        await page.fill("#tables-text", "name,rows")
        await page.fill("#seed", "7")
        await page.value("location.reload()")
        await page.until("document.readyState === 'complete' && document.getElementById('seed').value === '7'")
        assert await page.value("document.getElementById('tables-text').value") == "name,rows"
        service.stop()
        await page.until("document.getElementById('gone').offsetHeight > 0", 3)
        again = own_service("--workers", "1", "--port", port)
        assert again.url == service.url
        await page.until("document.getElementById('gone').offsetHeight === 0", 10)
        assert page.problems == []

    browse(play)


@pytest.mark.slow
@needs_browser
def test_lists_are_sorted_and_filtered_and_schedules_are_made(own_service):
    service = own_service("--workers", "1")
    with service.client() as client:
        for planner in ("lookup-greedy", "size-greedy", "random"):
            client.post("/v1/plans", json={"tables": "criteo-kaggle", "topology": "cpu-8", "planner": planner})

    async def play(page):
        await page.open(f"{service.url}/#plans")
        await page.until("document.querySelectorAll('#listed tbody tr').length === 3")
        column = "[...document.querySelectorAll('#listed tbody tr')].map((one) => one.cells[4].textContent)"
        await page.click("#listed button[value=planner]")
        assert await page.value(column) == ["lookup-greedy", "random", "size-greedy"]
        await page.click("#listed button[value=planner]")
        assert await page.value(column) == ["size-greedy", "random", "lookup-greedy"]
        await page.fill("#by-planner", "random")
        await page.fill("#by-topology", "cpu-4")
        await page.click("#find > button")
        await page.until("document.querySelectorAll('#listed tbody tr').length === 0")
        await page.fill("#by-topology", "cpu-8")
        await page.click("#find > button")
        await page.until("document.querySelectorAll('#listed tbody tr').length === 1")
        await page.click("#listed a")
        await page.until("document.getElementById('other').options.length === 3")
        await page.fill("#plan-name", "ranker of the week")
        await page.click("#labels button")
        await page.until("document.getElementById('labelled').textContent === 'Kept.'")
        await page.value("window.confirm = () => true")
        await page.click("#delete")
        await page.until("/No plan is stored/.test(document.getElementById('listed').textContent)")
        await page.click("#deleted")
        await page.click("#find > button")
        await page.until("document.querySelectorAll('#listed td button').length === 1")
        await page.click("#listed td button")
        await page.until("/No plan is stored/.test(document.getElementById('listed').textContent)")
        await page.click("#deleted")
        await page.fill("#by-planner", "")
        await page.fill("#text", "of the week")
        await page.click("#find > button")
        await page.until("document.querySelectorAll('#listed tbody tr').length === 1")
        await page.go("schedules")
        await page.until("/make the first/.test(document.getElementById('schedules').textContent)")
        await page.fill("#schedule-name", "nightly")
        await page.click("#new-schedule button")
        await page.until("document.querySelectorAll('#schedules tbody tr').length === 1")
        await page.click("#schedules button")
        await page.until("/paused/.test(document.getElementById('schedules').textContent)")
        assert page.problems == []

    browse(play)


@pytest.mark.slow
@needs_browser
def test_constraints_and_a_start_are_checked_as_typed_and_kept_to(own_service):
    service = own_service("--workers", "1")
    task = {"tables": "criteo-kaggle", "topology": "cpu-8", "planner": "size-greedy"}
    with service.client() as client:
        start = client.post("/v1/plans", json={**task, "constraints": {"t3": {"pinned_ranks": [5]}}}).json()["id"]
    told = "document.getElementById('message').textContent"

    async def play(page):
        await page.open(service.url)
        await page.until("document.getElementById('planner').options.length > 3")
        await page.fill("#topology", "cpu-8")
        await page.fill("#limit", "1")
        for given, fault in (
            ("{", "JSON"),
            ('{"t3": {"pinned_ranks": [8]}}', "constraints.t3.pinned_ranks: must be in"),
        ):
            await page.fill("#constraints", given)
            assert fault in await page.until(told)
            assert await page.value("document.getElementById('constraints').getAttribute('aria-invalid')") == "true"
            assert await page.value("document.querySelector('#task details').open")
        await page.fill("#constraints", '{"t3": {"pinned_ranks": [5]}}')
        await page.fill("#start", "sha256:" + "0" * 64)
        assert "no plan" in await page.until(told)
        await page.fill("#start", start)
        await page.until("document.getElementById('message').hidden")
        await page.click("#make")
        await page.until("location.hash.startsWith('#one/')")
        assert page.problems == []
        return (await page.value("location.hash")).partition("/")[2]

    plan_id = browse(play)
    with service.client() as client:
        plan, before = (client.get(f"/v1/plans/{one}").json()["plan"] for one in (plan_id, start))
    assert [one["replicas"] for one in plan["shards"] if one["table"] == "t3"] == [[[5]]]
    assert plan["predicted"]["step_ms"]["value"] <= before["predicted"]["step_ms"]["value"]


#: Has answers to requests whose address holds a text come a second and a half later.
SLOW = """
((real) => {
  window.fetch = async (path, options) => {
    const answer = await real(path, options);
    if (String(path).includes(%s)) await new Promise((done) => setTimeout(done, 1500));
    return answer;
  };
})(window.fetch);
"""


@pytest.mark.slow
@needs_browser
def test_an_old_plan_keeps_the_labels_that_are_not_changed(own_service):
    service = own_service("--workers", "1")
    task = {"tables": "criteo-kaggle", "topology": "cpu-8", "planner": "size-greedy"}
    with service.client() as client:
        ids = [client.post("/v1/plans", json={**task, "seed": seed}).json()["id"] for seed in range(52)]
        labels = {"name": "ranker", "tags": "nightly ads"}
        assert client.patch(f"/v1/plans/{ids[0]}", json=labels).status_code == 204

        def kept():
            (plan,) = client.get("/v1/plans", params={"id": ids[0]}).json()["plans"]
            return {name: plan[name] for name in labels}

        async def play(page):
            values = "[document.getElementById('plan-name').value, document.getElementById('plan-tags').value]"
            await page.open(f"{service.url}/#one/{ids[0]}")
            await page.until("document.getElementById('plan-name').value === 'ranker'")
            assert await page.value(values) == ["ranker", "nightly ads"]
            for name in ("ranker, second week", "ranker"):  # what was kept is what the next change is told from
                await page.fill("#plan-name", name)
                await page.click("#labels button")
                await page.until("document.getElementById('labelled').textContent === 'Kept.'")
                assert kept() == {**labels, "name": name}
                await page.value("document.getElementById('labelled').textContent = ''")
            # Until one plan's labels are known, nothing is kept, and least of all another one's.
            await page.value(SLOW % json.dumps("/v1/plans?id="))
            await page.go(f"one/{ids[1]}")
            await page.until(f"document.getElementById('one-title').textContent === 'Plan {ids[1][7:19]}'")
            assert await page.value("document.querySelector('#labels button').disabled")
            assert await page.value(values) == ["", ""]
            await page.until("!document.querySelector('#labels button').disabled")
            assert await page.value(values) == ["", ""]
            assert page.problems == []

        browse(play)


@pytest.mark.slow
@needs_browser
def test_answers_that_come_late_leave_what_is_shown_by_then(own_service):
    service = own_service("--workers", "1")
    task = {"tables": "criteo-kaggle", "topology": "cpu-8"}
    with service.client() as client:
        planners = ("size-greedy", "lookup-greedy", "random")
        first, second, third = [
            client.post("/v1/plans", json={**task, "planner": one}).json()["id"] for one in planners
        ]
        step_ms = client.get(f"/v1/plans/{first}").json()["plan"]["predicted"]["step_ms"]["value"]
        for plan_id, name in ((first, "the first"), (second, "the second")):
            client.patch(f"/v1/plans/{plan_id}", json={"name": name})
        client.post(f"/v1/plans/{first}/runs", json={"steps_ms": [step_ms]})

    async def play(page):
        name = "document.getElementById('plan-name').value"
        await page.open(f"{service.url}/#plans")
        await page.until("document.querySelectorAll('#listed tbody tr').length === 3")
        await page.value(SLOW % json.dumps(first))
        await page.go(f"one/{first}")
        await page.go(f"one/{second}")
        await page.until(f"{name} === 'the second'")
        await asyncio.sleep(2)
        assert await page.value(name) == "the second"
        assert "No run is reported yet" in await page.text("runs")
        assert second[7:19] in await page.text("one-title")
        await page.go(f"compare/{first}/{second}")
        await page.go(f"compare/{second}/{third}")
        await page.shown("difference")
        await asyncio.sleep(2)
        assert first[7:19] not in await page.text("side-by-side")
        missing = f"sha256:{first[7:15]}{'0' * 56}"
        await page.value(SLOW % json.dumps(missing))
        await page.go(f"one/{missing}")  # whose refusal comes when another plan is shown
        await page.go(f"one/{second}")
        await page.until(f"{name} === 'the second'")
        await asyncio.sleep(2)
        assert await page.text("message") == ""
        assert page.problems == []

    browse(play)
