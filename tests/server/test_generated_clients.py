"""Clients that common generators make of the service's OpenAPI document."""

import os
import shutil
import subprocess
import sys

import pytest

PYTHON_GENERATOR = "openapi-python-client==0.29.1"
TYPESCRIPT_GENERATOR = ("openapi-typescript@7.13.0", "typescript@5.9.3")
#: The document's media types that the generator does not know; and no changes to what it has written.
SETTINGS = "content_type_overrides: {application/vnd.apache.parquet: application/octet-stream}\npost_hooks: []\n"
PLANNING = """
import sys
from client import Client
from client.api.plans import list_plans, make_plan, read_plan
from client.models import PlanAnswer, PlanJobBody, Problem

with Client(base_url=sys.argv[1]) as client:
    made = make_plan.sync(client=client, body=PlanJobBody(tables="criteo-kaggle", topology="cpu-8"))
    assert isinstance(made, PlanAnswer), made
    kept = read_plan.sync(made.id, client=client)
    assert kept.to_dict() == made.to_dict()
    assert kept.plan.topology.world_size == 8 and kept.plan.predicted.step_ms.value > 0, kept
    assert made.id in [one.id for one in list_plans.sync(client=client, num_ranks=8).plans]
    refused = make_plan.sync(client=client, body=PlanJobBody(tables="nothing", topology="cpu-8"))
    assert isinstance(refused, Problem) and refused.field == "tables", refused
    print(made.id)
"""
TYPED = """
import type { components, paths } from "./api";

type Body = components["schemas"]["PlanJobBody"];
type Made = paths["/v1/plans"]["post"]["responses"][200]["content"]["application/json"];

export const named: Body = { tables: "criteo-kaggle", topology: "cpu-8" };
export const rows: Body = { ...named, tables: [{ name: "user", rows: 1000, dim: 64 }] };
export const steps = (made: Made): number | undefined => made.plan.predicted?.step_ms.value;
export const held = (made: Made): string[] => made.plan.shards.map((shard) => `${shard.table} ${shard.tier}`);
// @ts-expect-error: the seed is a number
export const refused: Body = { ...named, seed: "1" };
// @ts-expect-error: plans have no price
export const missing = (made: Made): unknown => made.plan.price;
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def document(service, tmp_path_factory):
    path = tmp_path_factory.mktemp("document") / "openapi.json"
    with service.client() as client:
        path.write_bytes(client.get("/openapi.json").content)
    return path


def run(*command, folder, **environment):
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_generated_python_client_makes_and_reads_a_plan(service, document, tmp_path):
    (tmp_path / "settings.yaml").write_text(SETTINGS)
    run(sys.executable, "-m", "pip", "install", "-q", "--target", "generator", PYTHON_GENERATOR, folder=tmp_path)
    generate = [
        "-m",
        "openapi_python_client",
        "generate",
        "--path",
        document,
        "--output-path",
        "client",
        "--meta",
        "none",
    ]
    said = run(
        sys.executable,
        *generate,
        "--config",
        "settings.yaml",
        "--fail-on-warning",
        folder=tmp_path,
        PYTHONPATH="generator",
    )
    assert "WARNING" not in said
    made = run(sys.executable, "-c", PLANNING, service.url, folder=tmp_path, PYTHONPATH="generator:.")
    assert made.startswith("sha256:")


@pytest.mark.skipif(shutil.which("npm") is None, reason="this machine has no npm")
def test_generated_typescript_types_fit_tasks_and_plans(document, tmp_path):
    run("npm", "install", "--no-audit", "--no-fund", *TYPESCRIPT_GENERATOR, folder=tmp_path)
    run("npx", "openapi-typescript", document, "--default-non-nullable=false", "-o", "api.d.ts", folder=tmp_path)
    (tmp_path / "program.ts").write_text(TYPED)
    run("npx", "tsc", "--noEmit", "--strict", "api.d.ts", "program.ts", folder=tmp_path)
