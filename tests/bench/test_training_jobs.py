"""The jobs that train on GPUs: their command lines are accepted, and what they share is named alike."""

import shlex
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from autoshard.commands.options import as_typer_function
from costmodel.kernel.command import TrainCostOptions
from costmodel.registry.publish_options import PublishOptions
from policies.training.run_options import PolicyRunOptions

JOBS = Path(__file__).parents[2] / "deploy" / "jobs"


def manifests():
    yaml = pytest.importorskip("yaml")
    return {document["kind"]: document for document in yaml.safe_load_all((JOBS / "train.yaml").read_text())}


def containers():
    pod = manifests()["Job"]["spec"]["template"]["spec"]
    return [*pod["initContainers"], *pod["containers"]]


def script_words(name):
    """Words of a script's command after `autoshard train`."""
    text = (JOBS / name).read_text().replace("\\\n", " ")
    (line,) = (line for line in text.splitlines() if "autoshard train" in line and not line.startswith("#"))
    return shlex.split(line.split("autoshard train ", 1)[1])


def accepted(words):
    """The options of a command line, as the command gets them."""
    asked = []

    def cost(options: TrainCostOptions, publishing: PublishOptions) -> None:
        asked.append((options, publishing))

    def policy(options: PolicyRunOptions, publishing: PublishOptions) -> None:
        asked.append((options, publishing))

    app = typer.Typer()
    for command in (cost, policy):
        app.command(command.__name__)(as_typer_function(command))
    get_command(app).main(words, standalone_mode=False)
    return asked[0]


def test_the_job_trains_the_cost_model_first_and_both_into_one_registry():
    (cost, of_cost), (policy, of_policy) = (accepted(container["command"][2:]) for container in containers())
    assert isinstance(cost, TrainCostOptions)
    assert isinstance(policy, PolicyRunOptions)
    assert of_cost.registry == of_policy.registry
    assert cost.accelerator == policy.learning.accelerator == "cuda"


def test_the_job_asks_for_a_gpu_and_for_the_volumes_that_its_paths_are_on():
    found = manifests()
    pod = found["Job"]["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"]}
    assert volumes["models"] == found["PersistentVolumeClaim"]["metadata"]["name"]
    for container in containers():
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
        for path in (word for word in container["command"] if word.startswith("/")):
            assert any(path.startswith(mount) for mount in mounts), path
    seconds = int(containers()[-1]["command"][containers()[-1]["command"].index("--seconds") + 1])
    assert found["Job"]["spec"]["activeDeadlineSeconds"] > seconds


def test_the_slurm_script_trains_on_a_gpu_and_goes_on_from_its_checkpoint():
    options, _ = accepted(script_words("train.sbatch"))
    assert options.learning.accelerator == "cuda"
    assert options.checkpoint is not None
    assert options.learning.actors > 0
