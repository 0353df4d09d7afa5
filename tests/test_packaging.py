"""What the project declares about itself holds, and what is installed works."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path

import pytest
from setuptools import find_packages

import autoshard
from autoshard.formats.stores.samples import read_samples
from costmodel import Registry
from costmodel.kernel.dataset import CostDataset
from costmodel.kernel.learned import LearnedCostModel
from costmodel.kernel.training import CostTrainingOptions, train_cost_model
from costmodel.registry.versions import REGISTRY_VARIABLE, SHIPPED_VARIABLE
from policies.network import first_weights
from policies.planning.trained import TrainedPolicy

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
FOLDERS = ["autoshard", "bench", "costmodel", "env", "policies", "server"]
DECLARED = [
    EntryPoint(name=name, value=value, group=group)
    for group, points in [("console_scripts", PROJECT["scripts"]), *PROJECT["entry-points"].items()]
    for name, value in points.items()
]


@pytest.mark.parametrize("point", DECLARED, ids=lambda point: f"{point.group}:{point.name}")
def test_an_entry_point_names_something_callable(point):
    assert callable(point.load())


def test_the_installed_entry_points_are_the_declared_ones():
    groups = {point.group for point in DECLARED}
    installed = {
        (point.group, point.name, point.value)
        for group in groups
        for point in entry_points(group=group)
        if point.dist is not None and point.dist.name == PROJECT["name"]
    }
    assert installed == {(point.group, point.name, point.value) for point in DECLARED}


def test_the_version_is_one():
    assert version("autoshard") == autoshard.__version__


def test_every_folder_with_python_files_is_a_package_that_gets_installed():
    find = PYPROJECT["tool"]["setuptools"]["packages"]["find"]
    found = set(find_packages(where=str(ROOT), include=find["include"]))
    with_code = {
        ".".join(file.parent.relative_to(ROOT).parts) for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")
    }
    assert found == with_code


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_ignore_rule_swallows_a_package(folder):
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    files = [f"{folder}/module.py", "costmodel/shipped/cost/cpu/0123456789abcdef/weights.safetensors"]
    result = subprocess.run(["git", "check-ignore", "--no-index", *files], cwd=ROOT, check=False)
    assert result.returncode == 1  # 0: one is ignored, 1: none is, 128: error


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_image_holds_every_package(folder):
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert folder not in {line.strip("/*") for line in ignored}
    copied = {
        Path(source).name
        for line in (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
        if line.startswith("COPY") and "--from" not in line
        for source in line.split()[1:-1]
    }
    assert folder in copied


def test_a_pin_exists_for_every_dependency():
    def names(lines):
        separators = str.maketrans("<>=~[", "     ")
        return {line.translate(separators).split()[0].lower().replace("_", "-") for line in lines}

    def pinned(part):
        lines = (ROOT / "requirements" / f"{part}.txt").read_text(encoding="utf-8").splitlines()
        lines = [line for line in lines if not line.startswith(("#", "-r"))]
        assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)  # and not where it came from
        return names(lines)

    extras = PROJECT["optional-dependencies"]
    assert names(PROJECT["dependencies"]) <= pinned("runtime")
    assert names(extras["otel"]) <= pinned("otel")
    assert names(extras["dev"]) <= pinned("dev")
    assert names(extras["docs"]) <= pinned("docs")
    assert names(extras["cpu"]) == pinned("cpu")
    assert names(extras["cuda"]) | names(extras["exact"]) == pinned("cuda") | pinned("no-deps")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of what a wheel is made of, to which models are added; setuptools writes into what it builds."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tree)
    return tree


@pytest.fixture(scope="module")
def shipped(tree):
    """A cost model trained shortly on measured samples, and an untrained policy beside it."""
    models = Registry(tree / "costmodel" / "shipped", author="autoshard")
    dataset = CostDataset.from_samples(read_samples(ROOT / "tests" / "data" / "samples", "cpu"))
    options = CostTrainingOptions(num_updates=60, batch_size=64)
    trained = train_cost_model(dataset, device="cpu", options=options)
    ids = {LearnedCostModel.kind: trained.model.publish(models)}
    policy = TrainedPolicy(weights=first_weights(0), training={})
    return {**ids, "policy": policy.publish(models)}


@pytest.fixture(scope="module")
def wheel(tree, shipped, tmp_path_factory):
    assert shipped, "the tree has its models before the wheel is built"
    folder = tmp_path_factory.mktemp("wheel")
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    command = [sys.executable, "-W", "ignore", "-c", build, folder]
    subprocess.run(command, cwd=tree, check=True, capture_output=True, timeout=120)
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def run(wheel, tmp_path_factory):
    """Runs the command of an install of the wheel, as a user without models of their own."""
    site, home = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("home")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    hidden = (REGISTRY_VARIABLE, SHIPPED_VARIABLE)
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"PYTHONPATH": str(site), "HOME": str(home)}

    def run(*arguments):
        code = "import sys; from autoshard.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", code, *arguments, "--json"]
        made = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, timeout=120)
        assert made.returncode == 0, made.stderr
        return json.loads(made.stdout)

    return run


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The programs of an environment of its own, into which the wheel is installed with `[cpu]`, as users do."""
    folder = tmp_path_factory.mktemp("environment")
    programs = folder / "venv" / "bin"
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=120)
    pip = [programs / "python", "-m", "pip", "--disable-pip-version-check"]
    asked = [*pip, "download", "--quiet", "--no-deps", "--dest", folder, "typing-extensions"]
    if subprocess.run(asked, capture_output=True, check=False, timeout=300).returncode:
        pytest.skip("no package registry can be reached")
    done = subprocess.run([*pip, "install", f"{wheel}[cpu]"], capture_output=True, text=True, check=False, timeout=1500)
    assert done.returncode == 0, done.stderr
    return programs


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_wheel_works_in_an_empty_environment(installed, tmp_path):
    """Without the repository: plans are made, priced by the shipped model, and run; what is missing is named."""

    def run(*arguments):
        command = [installed / "autoshard", *arguments]
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        made = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280
        )
        assert made.returncode == 0, made.stderr
        return made

    said = run("--version")
    assert said.stdout == f"autoshard {autoshard.__version__}\n"
    assert "missing: torchrec for TorchRec's models, planner and engine: pip install --no-deps" in said.stderr
    assert "missing: fbgemm" not in said.stderr
    run("import", "metasyn", "--num-tables", "4", "--scale", "4096", "-o", "tables.json")
    plan = json.loads(run("plan", "tables.json", "--topology", "cpu-4", "-o", "plan.json", "--json").stdout)
    assert plan["predicted"]["cost_model"].startswith("learned:cpu@")
    run("run", "plan.json", "--nproc", "2", "--steps", "2")
    run("show", "plan.json", "--html", "plan.html")


@pytest.mark.slow
def test_the_wheel_holds_models_and_data(wheel, tree, shipped):
    names = set(zipfile.ZipFile(wheel).namelist())
    for kind, identity in shipped.items():
        folder = f"costmodel/shipped/{kind}/{'any' if kind == 'policy' else 'cpu'}"
        assert {f"{folder}/{identity}/card.json", f"{folder}/{identity}/weights.safetensors"} <= names
        assert f"{folder}/production/00000001" in names
    code = {str(file.relative_to(tree)) for folder in FOLDERS for file in (tree / folder).rglob("*.py")}
    assert code <= names
    for pattern in ("autoshard/formats/schemas/*.json", "autoshard/report/templates/*.j2", "server/static/*"):
        data = {str(file.relative_to(tree)) for file in tree.glob(pattern)}
        assert data <= names


@pytest.mark.slow
def test_plans_are_made_with_what_is_shipped(run, shipped):
    plan = run("plan", "criteo-kaggle", "--topology", "cpu-4", "--planner", "policy")
    name = f"learned:cpu@{shipped[LearnedCostModel.kind]} (shipped)"
    assert plan["predicted"]["cost_model"] == plan["predicted"]["models"]["kernel"] == name
    assert plan["provenance"]["models"]["kernel"] == name
    assert plan["provenance"]["models"]["policy"] == f"policy:any@{shipped['policy']} (shipped)"


@pytest.mark.slow
def test_planners_are_compared_with_what_is_shipped(run, shipped):
    compared = run("compare", "criteo-kaggle", "--topology", "cpu-4", "--planners", "policy,cost-greedy")
    assert [row["failure"] for row in compared["planners"]] == [None, None]
    assert {row["cost_model"] for row in compared["planners"]} == {
        f"learned:cpu@{shipped[LearnedCostModel.kind]} (shipped)"
    }
