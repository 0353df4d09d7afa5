"""Micro-benchmarks of embedding kernels, and the store of their samples.

Names are imported when they are first asked for: `autoshard --help` looks at the commands of this package and must
not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.collecting.collection import Collection
    from bench.collecting.kernels import KernelKind
    from bench.kernels.harness import Harness, Measurement, Settings, measure
    from bench.kernels.replay import Replay, replay_plans
    from bench.measuring.devices import BenchDevice, find_device
    from bench.measuring.timing import RoundSettings
    from bench.sampling.strategies import SetSource
    from bench.sampling.stream import ChosenSet, choose_sets, stream_sets, table_wise_pool

__all__ = [
    "BenchDevice",
    "ChosenSet",
    "Collection",
    "Harness",
    "KernelKind",
    "Measurement",
    "Replay",
    "RoundSettings",
    "SetSource",
    "Settings",
    "choose_sets",
    "find_device",
    "measure",
    "replay_plans",
    "stream_sets",
    "table_wise_pool",
]

_MODULES = (
    "collecting.collection",
    "collecting.kernels",
    "measuring.devices",
    "kernels.harness",
    "kernels.replay",
    "sampling.strategies",
    "sampling.stream",
    "measuring.timing",
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            found = import_module(f"bench.{module}")
            if getattr(getattr(found, name, None), "__module__", None) == found.__name__:
                return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
