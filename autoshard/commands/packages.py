"""Packages beside autoshard's own dependencies: which are installed, and what the others would be for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

#: Packages by their names in registries, of which one is enough; what needs them, and how they are installed.
_PACKAGES: Mapping[tuple[str, ...], tuple[str, str]] = {
    ("torch",): ("all commands that measure, train or execute", "pip install 'torch>=2.11,<2.14'"),
    ("fbgemm-gpu", "fbgemm-gpu-cpu"): ("embedding kernels", "pip install 'autoshard[cpu]', or 'autoshard[cuda]'"),
    ("torchrec",): (
        "TorchRec's models, planner and engine",
        "pip install --no-deps 'torchrec>=1.6,<1.9', or 'autoshard[cuda]'",
    ),
    ("ortools",): ("planner cp-sat", "pip install 'autoshard[exact]'"),
    ("nvidia-ml-py",): ("GPUs' links in `autoshard detect`", "pip install 'autoshard[nvml]'"),
    ("ray",): ("collecting and training on several machines", "pip install 'autoshard[ray]'"),
    ("scikit-learn",): ("train cost --report", "pip install 'autoshard[report]'"),
}


def found_packages() -> list[dict[str, Any]]:
    """Each package's `name`, its `version` or None, what it is `needed_by`, and the command to `install` it."""
    return [_package(names, *about) for names, about in _PACKAGES.items()]


def missing_packages() -> list[str]:
    """A line for each package that is not installed: what needs it, and how to install it."""
    missing = [one for one in found_packages() if one["version"] is None]
    return [f"{one['name']} for {one['needed_by']}: {one['install']}" for one in missing]


def _package(names: tuple[str, ...], needed_by: str, install: str) -> dict[str, Any]:
    for name in names:
        try:
            return {"name": name, "version": version(name), "needed_by": needed_by, "install": install}
        except PackageNotFoundError:
            continue
    return {"name": " or ".join(names), "version": None, "needed_by": needed_by, "install": install}
