"""What a sample says about the machine and the software that measured it."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import autoshard
from bench.measuring.devices import BenchDevice


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Versions of what decides how fast kernels are."""

    torch_version: str
    fbgemm_version: str
    autoshard_version: str
    git_commit: str
    """Commit of this checkout; empty where it is installed without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where something is measured."""

    device: BenchDevice
    num_threads: int
    """Intra-op threads of a kernel; 1 on a GPU."""
    software: Software


def installed_software() -> Software:
    """The versions that are running."""
    return Software(
        torch_version=torch.__version__,
        fbgemm_version=_fbgemm_version(),
        autoshard_version=autoshard.__version__,
        git_commit=_git_commit(Path(__file__).parent),
    )


def _fbgemm_version() -> str:
    for name in ("fbgemm-gpu-cpu", "fbgemm-gpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def _git_commit(folder: Path) -> str:
    try:
        result = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
