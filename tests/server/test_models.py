"""Models over REST: listed, promoted, rolled back, tried in the shadow; damaged ones are refused."""

import contextlib
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient

import costmodel
from autoshard.api import AuditSearch
from autoshard.cli import main
from autoshard.client import Client
from autoshard.core.choices import Alias
from autoshard.formats import load_tables, tables_to_json
from autoshard.formats.stores.remote_folders import CACHE_VARIABLE, folder_of
from costmodel.registry.objects import BASELINES
from costmodel.registry.versions import SHIPPED_VARIABLE, Registry
from server.access import Principal
from server.models.catalogue import ModelCatalogue
from server.models.shadow import LEAST_PLANS
from server.planning.workers import WorkerPool
from server.problems import ModelChangedError, StorageError
from server.settings import ServerSettings
from server.storage.database import Database
from server.storage.location import parsed_url
from server.storage.shadow import ShadowRow
from server.storage.storage import Storage
from server.storage.upgrading import upgrade
from server.tasks.reply import Reply
from server.web.app import create_app

ADDRESS = "/v1/models/cost/cpu"
BAD = [
    ("/v1/models/cost/nothing/promotions", {"version": "0" * 16}),
    (f"{ADDRESS}/promotions", {"version": "../../etc"}),
    (f"{ADDRESS}/promotions", {"version": "0" * 16, "alias": "favourite"}),
    ("/v1/models/cost/..%2Fpolicy/rollbacks", {}),
    ("/v1/models/cost/a100/rollbacks", {}),
]


@pytest.fixture
def versions(registry):
    """Ids: the production version's, and the other one's."""
    production = registry.production_id("cost", "cpu")
    (other,) = {one.id for one in registry.list()} - {production}
    return production, other


@pytest.fixture
def task():
    tables = load_tables("metasyn").sample(12, 1).scaled(64)
    return {"tables": tables_to_json(tables), "topology": "cpu-4", "planner": "cost-greedy"}


@pytest.fixture
def client(own_service, registry):
    service = own_service("--registry", registry.root, "--workers", "1", "--shadow", "1")
    with service.client() as opened:
        yield opened


def model_of(client, task):
    return client.post("/v1/plans", json=task).json()["plan"]["predicted"]["cost_model"]


def test_a_version_is_promoted_and_rolled_back(client, versions, task):
    production, other = versions
    listed = {one["id"]: one for one in client.get("/v1/models?kind=cost&name=cpu").json()["models"]}
    assert (listed[production]["used"], listed[other]["used"]) == (True, False)
    assert 0 < listed[other]["relative_error"] < 0.5
    assert model_of(client, task) == f"learned:cpu@{production}"
    before = client.get(ADDRESS)
    answer = client.post(f"{ADDRESS}/promotions", json={"version": other, "force": True})
    assert (answer.status_code, answer.json()["production"]) == (200, other)
    assert answer.headers["etag"] == client.get(ADDRESS).headers["etag"] != before.headers["etag"]
    assert model_of(client, task) == f"learned:cpu@{other}"
    # Who decided by the state before is told.
    late = client.post(
        f"{ADDRESS}/promotions",
        json={"version": production, "force": True},
        headers={"If-Match": before.headers["etag"]},
    )
    assert (late.status_code, late.json()["type"]) == (412, "urn:autoshard:problem:model-changed")
    assert client.post(f"{ADDRESS}/rollbacks", json={}).json()["production"] == production
    assert model_of(client, task) == f"learned:cpu@{production}"
    with Client(str(client.base_url)) as typed:
        assert [one.id for one in typed.list_models("cost", "cpu") if one.used] == [production]
        assert typed.promote_model("cost", "cpu", other, force=True).production == other
        assert typed.roll_back_model("cost", "cpu").production == production
    assert [one["by"] for one in client.get(ADDRESS).json()["history"]["production"]][1:] == ["anybody"] * 4


@pytest.fixture
def shipped(monkeypatch):
    """Has the models that come with this package be found, which tests else do not see."""
    monkeypatch.setenv(SHIPPED_VARIABLE, str(Path(costmodel.__file__).parent / "shipped"))


def cells(printed):
    """The words of tables, whose columns are as wide as the longest of their words."""
    return [line.split() for line in printed.splitlines() if not set(line) & set("┌├└┏┡")]


def said(capsys, *arguments):
    """The result of `autoshard models`, or its last line if it fails."""
    code = main(["models", *arguments, "--json"])
    out, err = capsys.readouterr()
    return json.loads(out) if code == 0 else (code, err.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.usefixtures("shipped")
def test_the_command_says_and_does_the_same_at_a_service(client, registry, versions, capsys, monkeypatch):
    production, other = versions
    monkeypatch.setenv("COLUMNS", "200")
    here, there = ("--registry", str(registry.root)), ("--server", str(client.base_url))

    def both(*arguments):
        found = [said(capsys, *arguments, *place) for place in (here, there)]
        for one in found:
            one.pop("registry", None)  # the folder, and the address
        return found

    choices = (("--kind", "cost", "--device", "cpu"), ("--kind", "policy"))
    questions = [
        (),
        *(("list", *one) for one in choices),
        ("show", other),
        *(("show", "production", *one) for one in choices),
    ]
    for question in questions:
        local, served = both(*question)
        assert served == local
        printed = []
        for place in (here, there):
            assert main(["models", *question, *place]) == 0
            printed.append(cells(capsys.readouterr().out.replace(str(client.base_url), str(registry.root))))
        assert printed[0] == printed[1]
    refused = said(capsys, "promote", other, *there)
    assert refused[0] == 1
    assert "compared with the production model's on 0 different plans" in refused[1]
    moved = said(capsys, "promote", other, "--force", *there)
    assert (moved["id"], registry.production_id("cost", "cpu")) == (other, other)
    assert moved["history"] == [{**entry} for entry in said(capsys, "show", other, *here)["history"]["production"]]
    assert said(capsys, "promote", production, "--alias", "candidate", *there)["alias"] == "candidate"
    back = said(capsys, "roll-back", "--kind", "cost", "--device", "cpu", *there)
    assert (back["id"], back["history"][-1]["action"]) == (production, "roll-back")
    assert said(capsys, "promote", "shipped", "--kind", "policy", *there)["kind"] == "policy"
    assert said(capsys, "roll-back", "--kind", "cost", "--alias", "candidate", *there)[0] == 1
    assert said(capsys, "show", "ffff", *there) == said(capsys, "show", "ffff", *here)
    assert said(capsys, *here, *there) == (2, "error: --registry: cannot be given with --server")


def published_without_numbers(registry):
    """Id of a version whose weights are no numbers, though they are stored as they should be."""
    stored = registry.load("cost", "cpu")
    card = {key: value for key, value in stored.card.items() if key != "weights_sha256"}
    broken = {name: np.full_like(value, np.nan) for name, value in stored.tensors.items()}
    return registry.publish("cost", "cpu", broken, card, alias=None)


def test_a_damaged_version_is_refused_and_the_old_one_stays(client, registry, versions, task):
    production, other = versions
    weights = registry.root / "cost" / "cpu" / other / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    unread = published_without_numbers(registry)
    for version in (other, unread):
        answer = client.post(f"{ADDRESS}/promotions", json={"version": version, "force": True})
        assert (answer.status_code, answer.json()["type"]) == (422, "urn:autoshard:problem:model")
    answer = client.post(f"{ADDRESS}/promotions", json={"version": other, "force": True})
    assert "damaged" in answer.json()["detail"]
    shutil.rmtree(registry.root / "cost" / "cpu" / other)
    assert client.post(f"{ADDRESS}/promotions", json={"version": other, "force": True}).status_code == 404
    for address, body in BAD:
        answer = client.post(address, json=body)
        assert answer.status_code in (400, 404), address
        assert answer.headers["content-type"] == "application/problem+json"
    assert client.get(ADDRESS).json()["production"] == production
    assert model_of(client, task) == f"learned:cpu@{production}"


@pytest.mark.slow
def test_a_candidate_prices_plans_in_the_shadow_before_it_is_used(client, versions, task):
    production, candidate = versions
    refused = client.post(f"{ADDRESS}/promotions", json={"version": candidate})
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:autoshard:problem:not-compared")
    assert client.post(f"{ADDRESS}/promotions", json={"version": candidate, "alias": "candidate"}).status_code == 200
    deadline = time.monotonic() + 120
    for seed in range(LEAST_PLANS):
        while (shadow := client.get(f"{ADDRESS}/versions/{candidate}").json()["shadow"])["num_plans"] <= seed:
            assert time.monotonic() < deadline
            assert model_of(client, {**task, "seed": seed}) == f"learned:cpu@{production}"
        assert shadow["num_plans"] == seed + 1
    assert shadow["least_ratio"] <= shadow["median_ratio"] <= shadow["largest_ratio"]
    assert 1.02 < shadow["median_ratio"] <= 1.1  # kernels are 10% dearer, exchanges as they were
    assert client.post(f"{ADDRESS}/promotions", json={"version": candidate}).json()["production"] == candidate


@pytest.mark.slow
def test_plans_that_jobs_make_and_plans_made_anew_are_priced_in_the_shadow_too(client, versions, task):
    _, candidate = versions
    assert client.post(f"{ADDRESS}/promotions", json={"version": candidate, "alias": "candidate"}).status_code == 200

    def priced(count):
        deadline = time.monotonic() + 60
        while client.get(f"{ADDRESS}/versions/{candidate}").json()["shadow"]["num_plans"] < count:
            assert time.monotonic() < deadline
            time.sleep(0.1)

    job = client.post("/v1/plans", json=task, headers={"Prefer": "respond-async"}).json()["id"]
    priced(1)
    plan_id = client.get(f"/v1/jobs/{job}").json()["plan_id"]
    assert client.post(f"/v1/plans/{plan_id}/replans", json={"batch_size": 512}).status_code == 200
    priced(2)


@pytest.fixture
def unheard(database_address, registry, monkeypatch):
    """A service in this process, and its storage: it does not hear that its first answer with a key was kept."""

    async def answer(*_):
        return Reply(status=200, body=b"{}")

    monkeypatch.setattr(WorkerPool, "answer", answer)
    settings = ServerSettings(registry=registry.root)
    pool = WorkerPool(settings, on_ready=lambda: None, on_failure=lambda _: None)
    with contextlib.closing(Database(parsed_url(database_address))) as database:
        upgrade(database)
        storage = Storage(database)
        failures = [StorageError("the database does not answer")]
        keep = storage.keep

        def failing_once(*kept):
            if failures:
                raise failures.pop()
            keep(*kept)

        monkeypatch.setattr(storage, "keep", failing_once)
        yield TestClient(create_app(settings, pool, storage), base_url="http://localhost"), storage


def twice(client, change, body):
    """Answers to a change that is sent again as it was, decided by the state before it."""
    headers = {"Idempotency-Key": "once", "If-Match": client.get(ADDRESS).headers["etag"]}
    yield client.post(f"{ADDRESS}/{change}", json=body, headers=headers).status_code
    yield client.post(f"{ADDRESS}/{change}", json=body, headers=headers)


def price_in_shadow(storage, production, candidate, numbers):
    """Adds prices of plans by a candidate and by the version that was in use."""
    for number in numbers:
        prices = {"production_ms": 1.0, "candidate_ms": 1.0 + number / 100}
        storage.shadow.add(
            ShadowRow(
                name="cpu",
                candidate=candidate,
                production=f"learned:cpu@{production}",
                plan_id=f"sha256:{number % LEAST_PLANS:064x}",
                **prices,
            )
        )


def test_a_candidate_is_compared_on_different_plans_with_the_version_in_use(unheard, registry, versions):
    client, storage = unheard
    production, candidate = versions

    def refused():
        answer = client.post(f"{ADDRESS}/promotions", json={"version": candidate})
        assert (answer.status_code, answer.json()["type"]) == (409, "urn:autoshard:problem:not-compared")
        return client.get(f"{ADDRESS}/versions/{candidate}").json()["shadow"]

    price_in_shadow(storage, production, candidate, [0] * 40)
    assert refused()["num_plans"] == 1
    price_in_shadow(storage, "0" * 16, candidate, range(LEAST_PLANS))
    price_in_shadow(storage, production, candidate, range(1, LEAST_PLANS - 1))
    assert refused()["num_plans"] == LEAST_PLANS - 1
    price_in_shadow(storage, production, candidate, range(LEAST_PLANS, 2 * LEAST_PLANS))
    shadow = client.get(f"{ADDRESS}/versions/{candidate}").json()["shadow"]
    assert shadow["num_plans"] == LEAST_PLANS
    assert (shadow["least_ratio"], shadow["largest_ratio"]) == pytest.approx((1.20, 1.39))  # the latest of each plan
    # Sent again after it was made, it is not compared with itself.
    assert [getattr(one, "status_code", one) for one in twice(client, "promotions", {"version": candidate})] == [
        503,
        200,
    ]
    assert registry.production_id("cost", "cpu") == candidate


def test_where_no_model_is_in_use_candidates_are_compared_with_the_analytic_one(unheard):
    _, storage = unheard
    row = ShadowRow(
        name="a100", candidate="c" * 16, production="analytic:a100", plan_id="p", production_ms=2.0, candidate_ms=3.0
    )
    storage.shadow.add(row)
    storage.shadow.add(replace(row, production=f"learned:a100@{'0' * 16} and analytic:a100", candidate_ms=4.0))
    found = {used: storage.shadow.ratios("a100", "c" * 16, used) for used in (None, "0" * 16, "1" * 16)}
    assert found == {None: [1.5], "0" * 16: [2.0], "1" * 16: []}


def test_a_roll_back_that_is_sent_again_goes_one_step_back(unheard, registry, versions):
    client, storage = unheard
    first, second = versions
    for version in (second, first):
        registry.promote("cost", "cpu", version)
    refused, again = twice(client, "rollbacks", {})
    assert (refused, again.status_code, again.json()["production"]) == (503, 200, second)
    assert [(entry.action, entry.id) for entry in registry.history("cost", "cpu")][-2:] == [
        ("promote", first),
        ("roll-back", second),
    ]
    (entry,) = storage.audit.list(AuditSearch(), None).entries
    assert (entry.action, entry.target) == ("model.roll-back", f"cost/cpu production={first}")
    later = client.post(f"{ADDRESS}/rollbacks", json={}, headers={"Idempotency-Key": "another"})
    assert later.json()["production"] == first


def test_a_promotion_that_is_sent_again_leaves_later_changes_alone(unheard, registry, versions):
    client, storage = unheard
    first, second = versions
    sent = twice(client, "promotions", {"version": second, "force": True})
    assert next(sent) == 503
    assert registry.production_id("cost", "cpu") == second
    registry.promote("cost", "cpu", first)
    assert next(sent).json()["production"] == first
    assert [entry.id for entry in registry.history("cost", "cpu")] == [first, second, first]
    assert [entry.action for entry in storage.audit.list(AuditSearch(), None).entries] == ["model.promote"]


def test_no_change_is_made_that_the_audit_log_lacks(unheard, registry, versions, monkeypatch):
    client, storage = unheard
    first, second = versions
    body = {"version": second, "force": True}

    def unwritable(*_):
        raise StorageError("the disk of the database is full")

    with monkeypatch.context() as patched:
        patched.setattr(storage.audit, "add", unwritable)
        assert client.post(f"{ADDRESS}/promotions", json=body).status_code == 503
        assert client.post(f"{ADDRESS}/rollbacks", json={}).status_code == 503
    assert [entry.id for entry in registry.history("cost", "cpu")] == [first]
    late = {"If-Match": '"of-another-state"'}
    assert client.post(f"{ADDRESS}/promotions", json=body, headers=late).status_code == 412
    monkeypatch.setattr(storage, "keep", unwritable)  # of a request without a key, no answer is kept
    assert client.post(f"{ADDRESS}/promotions", json=body).json()["production"] == second
    entries = storage.audit.list(AuditSearch(action="model.promote"), None).entries
    assert [entry.action for entry in entries] == ["model.promote", "model.promote.failed", "model.promote"]
    assert {entry.target for entry in entries} == {f"cost/cpu production={second}"}


def test_a_version_that_was_worse_when_it_was_trained_is_promoted_by_force_only(unheard, registry, versions):
    client, storage = unheard
    first, second = versions
    reason = "mean relative error 5.00 points above that of version x on 20 samples (tolerance 0.10 points)"
    registry.note_worse("cost", "cpu", second, first, reason)
    price_in_shadow(storage, first, second, range(LEAST_PLANS))
    body = {"version": second}
    assert client.post(f"{ADDRESS}/promotions", json={**body, "alias": "candidate"}).status_code == 200
    refused = client.post(f"{ADDRESS}/promotions", json=body)
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:autoshard:problem:worse-model")
    assert refused.json()["detail"] == f"version: was worse when it was trained: {reason}; send force to use it"
    assert client.get(ADDRESS).json()["production"] == first
    assert client.post(f"{ADDRESS}/promotions", json={**body, "force": True}).json()["production"] == second
    # It is not worse than itself, nor is the other one; what needs no training counts beside whatever is in use.
    price_in_shadow(storage, second, first, range(LEAST_PLANS))
    assert client.post(f"{ADDRESS}/promotions", json={"version": first}).json()["production"] == first
    registry.note_worse("cost", "cpu", first, BASELINES, "worse than cost-greedy")
    registry.promote("cost", "cpu", second)
    refused = client.post(f"{ADDRESS}/promotions", json={"version": first})
    assert (refused.status_code, "worse than cost-greedy" in refused.json()["detail"]) == (409, True)


def test_of_two_roll_backs_decided_by_one_state_one_is_made(tmp_path, monkeypatch):
    catalogues = []
    for machine in ("a", "b"):
        monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / machine))
        catalogues.append(ModelCatalogue(folder_of("memory://roll-backs/models")))
    models = Registry(folder_of("memory://roll-backs/models"))
    ids = [models.publish("cost", "cpu", {"w": np.full(1, number)}, {}) for number in range(3)]
    asked = ("cost", "cpu", Alias.PRODUCTION, Principal())
    etags = [catalogue.state("cost", "cpu").etag for catalogue in catalogues]
    assert etags[0] == etags[1]
    assert catalogues[0].roll_back(*asked, etags[0]).production == ids[1]
    with pytest.raises(ModelChangedError):  # by its copy, nothing has changed
        catalogues[1].roll_back(*asked, etags[1])
    assert catalogues[1].state("cost", "cpu").production == ids[1]
