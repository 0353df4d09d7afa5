"""What samples of all kinds say: when, on which machine, with which software; and those of timed passes, how long."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Annotated, Any, Self

import numpy as np

from autoshard.core.accepted import AT_LEAST_0
from autoshard.core.machine import MeasuredMachine
from autoshard.formats.stores.sample_columns import Amount, Count, Milliseconds

#: What a sample says of its machine beside names and versions; the first versions of the columns lack it.
MACHINE_COLUMNS = tuple(
    item.name for item in fields(MeasuredMachine) if item.name not in ("device_name", "torch_version", "fbgemm_version")
)


def machine_columns(machine: MeasuredMachine) -> dict[str, Any]:
    """The columns that describe a machine, by name."""
    return {name: getattr(machine, name) for name in MACHINE_COLUMNS}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSample(ABC):
    """A sample of any kind: a dataclass whose fields are the columns, see `sample_columns`.

    Attributes:
        sample_id: Hash of all else; given by `identified`.
        collected_at: When the measurement ended, in UTC.
        device: Key of the kind of device, such as `cpu` or `h200`; models are made per key.
        device_name: Full name of the processor.
        core: Design of a core: vendor, family and model by number, widest vectors; empty on a GPU.
        core_threads: Hardware threads of a core; 0 where the machine does not tell, as for all up to `driver_version`.
        core_cache_bytes: Second-level cache of a core.
        cache_bytes: Cache before the memory.
        cache_threads: Hardware threads that share the cache before the memory.
        memory_bytes: Memory of the host; of a GPU, its own.
        memory_bytes_per_s: Bandwidth of a copy from memory to memory by one thread, measured when a run begins.
        clock_mhz: Clock that the system states when a run begins; of a GPU, the highest.
        driver_version: Of a GPU; empty on a CPU.
    """

    sample_id: str = ""
    collected_at: datetime
    device: str
    device_name: str
    core: str = ""
    core_threads: Annotated[int, AT_LEAST_0] = 0
    core_cache_bytes: Annotated[int, AT_LEAST_0] = 0
    cache_bytes: Annotated[int, AT_LEAST_0] = 0
    cache_threads: Annotated[int, AT_LEAST_0] = 0
    memory_bytes: Annotated[int, AT_LEAST_0] = 0
    memory_bytes_per_s: Amount = 0.0
    clock_mhz: Amount = 0.0
    driver_version: str = ""
    torch_version: str
    autoshard_version: str
    git_commit: str

    @abstractmethod
    def identified(self) -> Self:
        """The same sample with the id of its content."""

    @property
    def machine(self) -> MeasuredMachine:
        """Where it was measured, as far as it says."""
        names = (item.name for item in fields(MeasuredMachine))
        return MeasuredMachine(**{name: getattr(self, name) for name in names if hasattr(self, name)})


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSample(MeasuredSample):
    """A sample of a forward and a backward pass.

    Attributes:
        num_threads: Intra-op threads; 1 on devices that do not care.
        source: How it was chosen what to measure.
        forward_ms: Forward pass.
        backward_ms: Backward pass.
        forward_spread: Standard deviation of single rounds over the mean, drift divided out.
        backward_spread: As `forward_spread`.
        reference_forward_ms: The device's reference in the same rounds.
        reference_backward_ms: As `reference_forward_ms`.
        num_rounds: Rounds measured, warm-ups left out.
        num_attempts: Measurements that this is the mean of: more than one if their spread asked for it.
        is_noisy: Whether the spread stayed above the harness's bound.
        sm_clock_mhz: Median clock of the GPU while it was measured; 0 where it is not read.
        throttle_reasons: Why the device held its clock back, separated by commas; empty for no reason.
    """

    num_threads: Count
    fbgemm_version: str
    source: str
    forward_ms: Amount
    backward_ms: Amount
    forward_spread: Amount
    backward_spread: Amount
    reference_forward_ms: Milliseconds
    reference_backward_ms: Milliseconds
    num_rounds: Count
    num_attempts: Count = 1
    is_noisy: bool = False
    sm_clock_mhz: Amount = 0.0
    throttle_reasons: str = ""


def machine_of(samples: Sequence[MeasuredSample]) -> MeasuredMachine:
    """The machine of most samples, of at least one, with the median of their bandwidths of its memory."""
    machines = [sample.machine for sample in samples]
    usual = Counter(machines).most_common(1)[0][0]
    found = [one.memory_bytes_per_s for one in machines if one.memory_bytes_per_s and one == usual]
    return replace(usual, memory_bytes_per_s=float(np.median(found)) if found else 0.0)
