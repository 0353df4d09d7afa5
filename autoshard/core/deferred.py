"""Public names of packages that are imported when they are first asked for.

numpy and the planners take a second to import, which `autoshard --help` and clients of a service do not need.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from importlib import import_module


def deferred(package: str, names: Collection[str], modules: Sequence[str]) -> Callable[[str], object]:
    """The function `__getattr__` of a package.

    Args:
        package: Its name.
        names: Its public names.
        modules: Its modules that hold them; imported in this order until one has the name.
    """

    def find(name: str) -> object:
        for module in modules if name in names else ():
            found = vars(import_module(f"{package}.{module}"))
            if name in found:
                setattr(sys.modules[package], name, found[name])
                return found[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
