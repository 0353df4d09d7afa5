"""Files for deployment agree with the service: its options, ports, routes, users, folders and metrics."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import typer
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from typer.main import get_command

from autoshard.commands.options import as_typer_function
from costmodel.registry.versions import Registry
from server.first_keys import KEY_FILE_VARIABLE, KEY_VARIABLE
from server.planning.workers import WorkerPool
from server.settings import ServerSettings
from server.storage.location import DATABASE_VARIABLE
from server.tasks.reply import Reply
from server.tasks.work import WorkKind
from server.web.metrics import Metrics

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
DATA = "/var/lib/autoshard/.local/share/autoshard"
USER = 10001


def instructions(name):
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    *_, final = re.split(r"^FROM ", text, flags=re.MULTILINE)
    return [line.split(maxsplit=1)[1] for line in final.splitlines() if line.startswith(f"{name} ")]


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]


@pytest.fixture(scope="module")
def manifests():
    named = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"]
    assert {*named, "kustomization.yaml"} == {file.name for file in KUBERNETES.iterdir()}
    documents = [document for name in named for document in yaml.safe_load_all((KUBERNETES / name).read_text())]
    found = {document["kind"]: document for document in documents}
    assert len(found) == len(documents)
    return found


@pytest.fixture(scope="module")
def pods(manifests):
    return {kind: manifests[kind]["spec"]["template"] for kind in ("Deployment", "Job")}


def served(words):
    """The settings of a command line of `autoshard serve`."""
    assert words[:2] == ["autoshard", "serve"]
    made = []

    def serve(settings: ServerSettings) -> None:
        made.append(settings)

    app = typer.Typer()
    app.command()(as_typer_function(serve))
    get_command(app).main(words[2:], standalone_mode=False)
    return made[0]


def container(pod):
    (found,) = pod["spec"]["containers"]
    return found


def test_the_image_serves_as_its_user_from_a_read_only_root():
    settings = served(json.loads(*instructions("CMD")))
    assert (settings.host, settings.first_key) == ("0.0.0.0", True)
    assert instructions("EXPOSE") == [str(settings.port)]
    assert f"http://127.0.0.1:{settings.port}/readyz" in instructions("HEALTHCHECK")[0]
    assert instructions("USER") == [str(USER)]
    assert instructions("STOPSIGNAL") == ["SIGTERM"]
    assert json.loads(*instructions("VOLUME")) == [DATA, "/tmp"]
    assert any(f"--uid {USER}" in run and DATA in run for run in instructions("RUN"))


def test_the_image_holds_no_secret():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert not re.search(r"AUTOSHARD_KEY|PASSWORD|SECRET|TOKEN", text)


def test_compose_upgrades_the_database_before_it_serves(compose):
    assert compose["upgrade"]["command"] == ["autoshard", "db", "upgrade"]
    assert compose["upgrade"]["depends_on"] == {"database": {"condition": "service_healthy"}}
    assert compose["service"]["depends_on"] == {"upgrade": {"condition": "service_completed_successfully"}}
    for name in ("upgrade", "service"):
        part = compose[name]
        assert part["read_only"] is True
        assert part["cap_drop"] == ["ALL"]
        assert part["tmpfs"] == ["/tmp"]
        assert set(part["environment"]) <= {DATABASE_VARIABLE, KEY_VARIABLE}
        assert part["environment"][DATABASE_VARIABLE].startswith("postgresql://autoshard:${POSTGRES_PASSWORD:?")
    assert compose["service"]["environment"][KEY_VARIABLE] == "${AUTOSHARD_KEY:-}"
    port = served(json.loads(*instructions("CMD"))).port
    assert compose["service"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert compose["service"]["volumes"] == [f"data:{DATA}"]
    assert int(compose["service"]["stop_grace_period"].removesuffix("s")) > ServerSettings().grace_s


def test_pods_have_what_the_image_needs(pods):
    for pod in pods.values():
        spec, only = pod["spec"], container(pod)
        assert spec["securityContext"]["runAsUser"] == USER
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["automountServiceAccountToken"] is False
        assert only["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        mounts = {mount["mountPath"]: mount["name"] for mount in only["volumeMounts"]}
        assert set(mounts.values()) == {volume["name"] for volume in spec["volumes"]}
        assert "/tmp" in mounts
        variables = {variable["name"]: variable for variable in only["env"]}
        assert set(variables) <= {DATABASE_VARIABLE, KEY_FILE_VARIABLE}
        assert variables[DATABASE_VARIABLE]["valueFrom"]["secretKeyRef"] == {"name": "autoshard", "key": "database-url"}
    assert container(pods["Job"])["command"] == ["autoshard", "db", "upgrade"]
    service = container(pods["Deployment"])
    assert service["image"] == container(pods["Job"])["image"]
    mounts = [mount["mountPath"] for mount in service["volumeMounts"]]
    assert DATA in mounts
    file = next(variable["value"] for variable in service["env"] if variable["name"] == KEY_FILE_VARIABLE)
    assert str(Path(file).parent) in mounts


def test_the_deployment_s_probes_ports_and_times_agree_with_its_command(pods, manifests):
    service = container(pods["Deployment"])
    settings = served(service["command"] + service["args"])
    (port,) = service["ports"]
    assert port["containerPort"] == settings.port
    probes = {name: service[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert {probe["port"] for probe in probes.values()} == {port["name"]}
    assert probes["readinessProbe"]["path"] == probes["startupProbe"]["path"] == "/readyz"
    assert probes["livenessProbe"]["path"] == "/livez"
    (served_port,) = manifests["Service"]["spec"]["ports"]
    assert served_port["targetPort"] == port["name"]
    assert pods["Deployment"]["spec"]["terminationGracePeriodSeconds"] > settings.drain_s + settings.grace_s
    readiness = service["readinessProbe"]
    assert settings.drain_s > readiness["periodSeconds"] * readiness["failureThreshold"]


def test_what_is_selected_is_there(pods, manifests):
    labels = pods["Deployment"]["metadata"]["labels"]
    assert pods["Job"]["metadata"]["labels"] != labels
    spec = manifests["Deployment"]["spec"]
    assert spec["selector"]["matchLabels"] == labels == manifests["Service"]["spec"]["selector"]
    assert manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    scaler = manifests["HorizontalPodAutoscaler"]["spec"]
    assert scaler["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "autoshard"}
    assert manifests["Deployment"]["metadata"]["name"] == "autoshard"
    assert scaler["minReplicas"] > manifests["PodDisruptionBudget"]["spec"]["minAvailable"]
    assert "replicas" not in spec
    assert manifests["PersistentVolumeClaim"]["metadata"]["name"] == next(
        volume["persistentVolumeClaim"]["claimName"]
        for volume in pods["Deployment"]["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    )


def test_every_metric_of_the_dashboard_exists(tmp_path):
    Registry(tmp_path).publish("cost", "cpu", {"weights": np.zeros(1)}, {"device": "cpu"})
    pool = WorkerPool(ServerSettings(), on_ready=lambda: None, on_failure=lambda _: None)
    metrics = Metrics(pool, ServerSettings(registry=tmp_path))
    metrics.count_request("GET", "/v1/plans", 200, 0.1)
    metrics.count_work(WorkKind.PLAN, Reply(status=200, body=b"", planner="auto", floor_gap=0.1), 0.1)
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    labels = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [item["query"]["query"] for item in dashboard["templating"]["list"] if item["type"] == "query"]
    used = {name for query in queries for name in re.findall(r"autoshard_\w+", query)}
    assert len(used) >= 8
    assert used <= set(labels)
    for query in queries:
        (name, *_) = re.findall(r"autoshard_\w+", query)
        for group in re.findall(r" by \(([^)]*)\)", query):
            assert set(group.split(", ")) <= labels[name], query


def test_panels_do_not_overlap():
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert all(x < 24 for x, _ in cells)
