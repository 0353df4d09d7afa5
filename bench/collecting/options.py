"""What the command `collect` is asked to do."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from autoshard.commands.arguments import DeviceOption, existing_registry, positive_option, seed_option
from autoshard.commands.options import Needs, command_options
from autoshard.core.accepted import listed
from autoshard.core.choices import Device
from autoshard.core.errors import InvalidOptionError, SampleStoreError
from autoshard.core.quoting import shown

GIB = 2**30
_DEFAULT_SECONDS = 60.0


class SampleKind(StrEnum):
    """Kinds of things that are measured, each with samples of its own."""

    KERNELS = "kernels"
    DENSE = "dense"
    COLLECTIVES = "collectives"


class IfBusy(StrEnum):
    """What to do when another collector is measuring on the device."""

    FAIL = "fail"
    SKIP = "skip"


def _measures(kind: SampleKind) -> Needs:
    return Needs(f"--kinds {kind}", lambda options: kind in options.sample_kinds)


_KERNELS, _COLLECTIVES = _measures(SampleKind.KERNELS), _measures(SampleKind.COLLECTIVES)
_ON_RAY = Needs("--ray", lambda options: options.ray)
_LENGTH, _SETS, _GROUP, _CLUSTER = "How long", "Sets of tables", "Collectives", "Ray cluster"


@command_options()
class CollectOptions:
    """Options of a run of the collector.

    Raises:
        InvalidOptionError: If one is out of range, or does not go with others.
        SampleStoreError: If the store is there and is no folder.
    """

    store: Annotated[
        Path, typer.Option("--store", "--output", "-o", help="Folder that samples are appended to; made when missing.")
    ]
    device: DeviceOption = Device.AUTO
    kinds: Annotated[str, typer.Option(help="Any of kernels, dense, collectives, separated by commas.")] = "kernels"
    if_busy: Annotated[
        IfBusy, typer.Option(help="When another collector is measuring on the device: `fail` (code 1) or `skip` (0).")
    ] = IfBusy.FAIL
    seed: Annotated[
        int | None, seed_option("Seed of the choice of sets. Left out: a new one, so other sets, every time.")
    ] = None
    seconds: Annotated[
        float | None, positive_option("Stop after this time, start-up included.", rich_help_panel=_LENGTH)
    ] = None
    num_samples: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many samples of each kind.", rich_help_panel=_LENGTH)
    ] = None
    strategies: Annotated[
        str | None,
        typer.Option(
            help="Strategies that choose the sets of tables, with shares: `random=3,slices=1`. Left out: a mixture.",
            rich_help_panel=_SETS,
        ),
        _KERNELS,
    ] = None
    tables: Annotated[
        str,
        typer.Option(help="Tables to measure: a file, or the name of bundled ones.", rich_help_panel=_SETS),
        _KERNELS,
    ] = "metasyn"
    scale: Annotated[
        int,
        typer.Option(
            min=1, help="Divide rows and batch by this, so that a machine can hold them.", rich_help_panel=_SETS
        ),
        _KERNELS,
    ] = 64
    max_tables: Annotated[
        int, typer.Option(min=1, help="Largest number of tables in a set.", rich_help_panel=_SETS), _KERNELS
    ] = 15
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most runs of each set that count; fewer leave time for more sets. Left out: 9 on a CPU.",
            rich_help_panel=_SETS,
        ),
        _KERNELS,
    ] = None
    memory_gib: Annotated[
        float | None,
        positive_option(
            "Memory of the largest sets. Left out: a quarter of a GPU's, at most 1 GiB on a CPU.",
            rich_help_panel=_SETS,
        ),
        _KERNELS,
    ] = None
    registry: Annotated[
        Path | None,
        typer.Option(
            parser=existing_registry,
            metavar="<path or address>",
            help="Folder of trained models, here or on object storage (`s3://bucket/models`): measures sets that they "
            "place or are least certain about.",
            rich_help_panel=_SETS,
        ),
        _KERNELS,
    ] = None
    retrain: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Train a cost model N times in between, and measure where it is least certain.",
            rich_help_panel=_SETS,
        ),
    ] = 0
    nproc: Annotated[
        int, typer.Option(min=1, help="Processes that run collectives.", rich_help_panel=_GROUP), _COLLECTIVES
    ] = 4
    node_size: Annotated[
        int,
        typer.Option(min=1, help="Processes of collectives that count as one node.", rich_help_panel=_GROUP),
        _COLLECTIVES,
    ] = 2
    ray: Annotated[
        bool, typer.Option("--ray", help="Measure on all GPUs of a Ray cluster.", rich_help_panel=_CLUSTER)
    ] = False
    ray_address: Annotated[
        str,
        typer.Option(
            help="Address of the cluster: `auto`, HOST:PORT, or `local` to start one here.", rich_help_panel=_CLUSTER
        ),
        _ON_RAY,
    ] = "auto"
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Workers on the cluster. Left out: one per GPU, or per core with --device cpu.",
            rich_help_panel=_CLUSTER,
        ),
        _ON_RAY,
    ] = None
    is_calibrating: bool = False
    """Whether sets are chosen and measured as a calibration needs them."""
    started: float = field(default_factory=time.monotonic)
    """When the run began, by the monotonic clock."""
    new_seed: int = field(default_factory=lambda: secrets.randbits(32))
    """The seed where none is given."""

    def __post_init__(self) -> None:
        kinds, _ = self.sample_kinds, self.shares
        if self.retrain and (self.limit_s is None or SampleKind.KERNELS not in kinds):
            raise InvalidOptionError("needs --seconds, and kernels among what is collected", field="retrain")
        if self.ray and self.retrain:
            raise InvalidOptionError("cannot be used with --ray", field="retrain")
        if self.registry is not None and self.retrain:
            raise InvalidOptionError(
                "cannot be used with --registry: the models that it trains say where to measure", field="retrain"
            )
        if self.ray and kinds != (SampleKind.KERNELS,):
            raise InvalidOptionError(f"must be kernels with --ray, got {shown(self.kinds)}", field="kinds")
        check_folder(self.store)

    @property
    def sample_kinds(self) -> tuple[SampleKind, ...]:
        """What is measured, one after the other."""
        return _parse_kinds(self.kinds)

    @property
    def shares(self) -> Mapping[str, float] | None:
        """Shares of the strategies that choose sets; None for the usual mixture."""
        return None if self.strategies is None else _parse_strategies(self.strategies)

    @property
    def set_seed(self) -> int:
        """Seed of all choices."""
        return self.new_seed if self.seed is None else self.seed

    @property
    def is_resumable(self) -> bool:
        """Whether a later run with this seed goes on where this one ends."""
        return self.seed is not None

    @property
    def memory_bytes(self) -> int | None:
        """What sets near the memory limit fill; None for a share of the device's."""
        return None if self.memory_gib is None else int(self.memory_gib * GIB)

    @property
    def limit_s(self) -> float | None:
        """Time to use, counted from `started`; None for no limit."""
        return _DEFAULT_SECONDS if self.seconds is None and self.num_samples is None else self.seconds

    @property
    def deadline(self) -> float:
        """When the time is up, by the monotonic clock; infinite without a limit."""
        return math.inf if self.limit_s is None else self.started + self.limit_s

    def deadline_of_part(self, num_parts: int) -> float:
        """When the next of the parts that are yet to come should end, if they share alike what time is left."""
        now = time.monotonic()
        return now + max(0.0, self.deadline - now) / num_parts


def check_folder(store: Path) -> None:
    """Refuses a store that is there and is no folder.

    Raises:
        SampleStoreError: If it is one.
    """
    if store.exists() and not store.is_dir():
        raise SampleStoreError("is no folder", source=str(store))


def seconds_until(deadline: float) -> float | None:
    """Time left, never below a millisecond; None without a deadline."""
    return None if math.isinf(deadline) else max(1e-3, deadline - time.monotonic())


def _parse_kinds(text: str) -> tuple[SampleKind, ...]:
    """Reads `kernels,dense`."""
    names = listed(text)
    if not set(names) <= set(SampleKind) or len(set(names)) < len(names):
        raise InvalidOptionError(
            f"must be some of {', '.join(SampleKind)}, each once; got {shown(text)}", field="kinds"
        )
    return tuple(map(SampleKind, names))


def _parse_strategies(text: str) -> Mapping[str, float]:
    """Reads `random,slices` or `random=3,slices=1`: strategies with their shares, 1 where none is given."""
    shares: dict[str, float] = {}
    for item in listed(text):
        name, _, share = item.partition("=")
        try:
            value = float(share or 1)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0) or name.strip() in shares:
            raise InvalidOptionError(
                f"must be names of strategies, each once, with a share above 0 (random=3,slices=1), got {shown(text)}",
                field="strategies",
            )
        shares[name.strip()] = value
    return shares
