"""The runtime on the oldest releases of torch and FBGEMM that it admits: a step without what newer ones have added."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import autoshard

ROOT = Path(autoshard.__file__).parents[1]


@pytest.mark.slow
def test_a_step_needs_none_of_the_names_that_newer_releases_have_added(tmp_path):
    command = [sys.executable, "-m", "tests.runtime.releases_worker", str(tmp_path / "rendezvous")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_only_one_module_uses_names_that_differ_between_releases():
    newer = re.compile(r"\b(all_gather_single|reduce_scatter_single|all_gather_into_tensor|reduce_scatter_tensor)\b")
    files = [
        path for folder in ("autoshard", "bench", "costmodel", "studies") for path in (ROOT / folder).rglob("*.py")
    ]
    assert [path.name for path in files if newer.search(path.read_text())] == ["releases.py"]


def test_the_releases_of_both_pairs_are_admitted():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = {
        one.name: one.specifier for one in map(Requirement, [*project["dependencies"], *extras["cuda"], *extras["cpu"]])
    }
    for name, versions in {
        "torch": ("2.11.0", "2.13.0"),
        "fbgemm-gpu": ("1.6.0", "1.8.0"),
        "fbgemm-gpu-cpu": ("1.6.0", "1.8.0"),
    }.items():
        assert all(version in named[name] for version in versions), name
