"""Ray, which is an extra, for those who scale out on it."""

from __future__ import annotations

import os
from types import ModuleType

from autoshard.core.errors import InvalidOptionError


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
