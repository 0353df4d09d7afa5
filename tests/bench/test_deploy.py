import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from autoshard.commands.options import as_typer_function
from bench.collecting.options import CollectOptions, IfBusy

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = ("autoshard-collect.service", "autoshard-collect.timer")


def command_lines():
    """Every command line in the folder that runs `autoshard collect`, as words after `collect`."""
    found = []
    for file in sorted(file for file in DEPLOY.iterdir() if file.is_file()):
        if file.suffix == ".yaml" and "CronJob" in manifests(file):
            (container,) = manifests(file)["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
            lines = [shlex.join(container["command"])]
        else:
            lines = file.read_text().splitlines()
        for line in lines:
            matched = re.search(r"^[^#|`]*autoshard collect (.*?)(\s*>>.*)?$", line)
            if matched:
                found.append((file.name, shlex.split(matched[1])))
    return found


def manifests(file):
    yaml = pytest.importorskip("yaml")
    return {document.get("kind"): document for document in yaml.safe_load_all(file.read_text())}


def test_every_file_runs_the_collector():
    pytest.importorskip("yaml")
    assert {name for name, _ in command_lines()} == {"crontab", "cronjob.yaml", UNITS[0]}


def test_every_command_line_is_accepted():
    asked = []

    def collect(options: CollectOptions) -> None:
        asked.append(options)

    app = typer.Typer()
    app.command()(as_typer_function(collect))
    for _, words in command_lines():
        get_command(app).main(words, standalone_mode=False)
        assert asked[-1].seconds == 600
        assert asked[-1].if_busy is IfBusy.SKIP


def test_crontab_is_one():
    entries = [line for line in (DEPLOY / "crontab").read_text().splitlines() if line and line[0] not in "#M"]
    assert [line.split()[:5] for line in entries] == [["30", "2", "*", "*", "*"]]
    assert "%" not in entries[0]  # cron takes it for a line break


def test_cron_job_runs_one_at_a_time_within_its_time():
    found = manifests(DEPLOY / "cronjob.yaml")
    spec = found["CronJob"]["spec"]
    assert spec["concurrencyPolicy"] == "Forbid"
    pod = spec["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    seconds = int(container["command"][container["command"].index("--seconds") + 1])
    assert spec["jobTemplate"]["spec"]["activeDeadlineSeconds"] > seconds
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    (volume,) = pod["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == found["PersistentVolumeClaim"]["metadata"]["name"]
    store = container["command"][container["command"].index("--store") + 1]
    assert [(mount["name"], mount["mountPath"]) for mount in container["volumeMounts"]] == [(volume["name"], store)]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_units(tmp_path):
    for name in UNITS:
        # It wants the program to be there.
        text = (DEPLOY / name).read_text().replace("/opt/autoshard/.venv/bin/autoshard", shutil.which("true"))
        (tmp_path / name).write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / name) for name in UNITS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    complaints = [line for line in done.stderr.splitlines() if "autoshard-collect" in line]
    assert (done.returncode, complaints) == (0, []), done.stderr
