"""What the project declares about itself holds."""

import subprocess
import tomllib
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path

import pytest
from setuptools import find_packages

import autoshard

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
    result = subprocess.run(["git", "check-ignore", "--no-index", f"{folder}/module.py"], cwd=ROOT, check=False)
    assert result.returncode == 1  # 0: ignored, 1: not ignored, 128: error


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
        separators = str.maketrans("<>=~", "    ")
        return {line.translate(separators).split()[0].lower().replace("_", "-") for line in lines}

    def pinned(part):
        lines = (ROOT / "requirements" / f"{part}.txt").read_text(encoding="utf-8").splitlines()
        lines = [line for line in lines if not line.startswith(("#", "-r"))]
        assert all(line.count("==") == 1 for line in lines)
        return names(lines)

    extras = PROJECT["optional-dependencies"]
    assert names(PROJECT["dependencies"]) <= pinned("runtime")
    assert names(extras["dev"]) <= pinned("dev")
    assert names(extras["cpu"]) == pinned("cpu")
    assert names(extras["cuda"]) == pinned("cuda") | pinned("no-deps")
