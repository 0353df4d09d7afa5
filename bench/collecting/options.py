"""What the command `collect` is asked to do."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from autoshard.core.errors import InvalidOptionError, SampleStoreError
from autoshard.core.quoting import shown

GIB = 2**30


class What(StrEnum):
    """Kinds of things that are measured, each with samples of its own."""

    KERNELS = "kernels"
    DENSE = "dense"
    COLLECTIVES = "collectives"


class IfBusy(StrEnum):
    """What to do when another collector is measuring on the device."""

    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectOptions:
    """Options of a run of the collector.

    Attributes:
        store: The store's folder.
        device: `auto`, `cpu` or `cuda`.
        what: What is measured, one after the other.
        seconds: Time to use, counted from `started`; None for no limit.
        num_samples: Samples to add of each kind; None for no limit.
        tables: A file with tables, or the name of bundled ones.
        scale: Divides rows and batch.
        max_tables: Largest number of tables in a set.
        rounds: Rounds in which each set is measured; None for the device's usual number.
        memory_bytes: What sets near the memory limit fill; None for a share of the device's.
        where: Shares of the strategies that choose sets; None for the usual mixture.
        registry: Folder of trained models that strategies ask; None to do without.
        seed: Of all choices.
        is_resumable: Whether a later run with this seed goes on where this one ends.
        nproc: Processes of collectives.
        node_size: Processes that count as one node.
        workers: Workers on a Ray cluster; None for one per GPU, or per core without GPUs.
        retrain: How often a cost model is trained while kernels are collected, which needs `seconds`.
        started: When the run began, by the monotonic clock.

    Raises:
        InvalidOptionError: If a number is out of range.
        SampleStoreError: If the store is there and is no folder.
    """

    store: Path
    device: str = "auto"
    what: tuple[What, ...] = (What.KERNELS,)
    seconds: float | None = None
    num_samples: int | None = None
    tables: str = "metasyn"
    scale: int = 64
    max_tables: int = 15
    rounds: int | None = None
    memory_bytes: int | None = None
    where: Mapping[str, float] | None = None
    registry: Path | None = None
    seed: int = 0
    is_resumable: bool = False
    nproc: int = 4
    node_size: int = 2
    workers: int | None = None
    retrain: int = 0
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        for name in ("seconds", "num_samples", "scale", "workers"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InvalidOptionError(f"must be above 0, got {value}", field=name)
        for name in ("max_tables", "nproc", "node_size"):
            if getattr(self, name) < 1:
                raise InvalidOptionError(f"must be at least 1, got {getattr(self, name)}", field=name)
        if self.seed < 0:
            raise InvalidOptionError(f"must be at least 0, got {self.seed}", field="seed")
        if self.retrain < 0:
            raise InvalidOptionError(f"must be at least 0, got {self.retrain}", field="retrain")
        if self.retrain and (self.seconds is None or What.KERNELS not in self.what):
            raise InvalidOptionError("needs --seconds, and kernels among what is collected", field="retrain")
        if self.store.exists() and not self.store.is_dir():
            raise SampleStoreError("is no folder", source=str(self.store))

    @property
    def deadline(self) -> float:
        """When the time is up, by the monotonic clock; infinite without a limit."""
        return math.inf if self.seconds is None else self.started + self.seconds

    def deadline_of_part(self, num_parts: int) -> float:
        """When the next of the parts that are yet to come should end, if they share alike what time is left."""
        now = time.monotonic()
        return now + max(0.0, self.deadline - now) / num_parts


def seconds_until(deadline: float) -> float | None:
    """Time left, never below a millisecond; None without a deadline."""
    return None if math.isinf(deadline) else max(1e-3, deadline - time.monotonic())


def parse_what(text: str) -> tuple[What, ...]:
    """Reads `kernels,dense`.

    Raises:
        InvalidOptionError: If a kind is unknown or named twice.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in list(What) or names.count(name) > 1:
            raise InvalidOptionError(f"must be some of {', '.join(What)}, each once; got {shown(text)}", field="what")
    return tuple(map(What, names))


def parse_where(text: str | None) -> Mapping[str, float] | None:
    """Reads `random,slices` or `random=3,slices=1`: strategies with their shares, 1 where none is given.

    Raises:
        InvalidOptionError: If a share is no number above 0, or a name is there twice.
    """
    if text is None:
        return None
    shares: dict[str, float] = {}
    for item in text.split(","):
        name, _, share = item.partition("=")
        try:
            value = float(share or 1)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0) or name.strip() in shares:
            raise InvalidOptionError(
                f"must be names of strategies, each once, with a share above 0 (random=3,slices=1), got {shown(text)}",
                field="where",
            )
        shares[name.strip()] = value
    return shares
