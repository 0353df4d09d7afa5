"""Ray, which is an extra, for those who scale out on it."""

from __future__ import annotations

import logging
import os
from types import ModuleType
from typing import Any

from autoshard.core.errors import ExecutionError, InvalidOptionError


def import_ray() -> ModuleType:
    """The package `ray`, with its usage reports off unless the user asked for them.

    Raises:
        InvalidOptionError: If it is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise InvalidOptionError(
            "needs Ray, which is not installed: pip install 'autoshard[ray]'", field="ray"
        ) from error
    return ray


def connect(ray: ModuleType, address: str, num_cpus: int | None) -> None:
    """Connects to a Ray cluster, quietly.

    Args:
        ray: The package.
        address: Of the cluster: `auto`, `HOST:PORT`, or `local` to start one here.
        num_cpus: Cores of one that is started here; None for all.

    Raises:
        ExecutionError: If there is no cluster at the address, or none starts.
    """
    kinds: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}
    if address == "local":
        kinds |= {"num_cpus": num_cpus, "include_dashboard": False}
    try:
        ray.init(address=address, **kinds)
    except Exception as error:  # a plain one where a node does not start in time
        ray.shutdown()
        reason = str(error).strip().splitlines()[0]
        raise ExecutionError(f"no Ray cluster can be reached: {reason}", source=address) from error
