"""Stage `fig4`: AutoShard's Fig. 4 on this device, and what adding up single tables' costs gets wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from autoshard.report.images import Section
from autoshard.report.wording import write_percent
from bench.kernels.harness import Harness, Settings
from bench.measuring.devices import BenchDevice
from bench.measuring.timing import RoundSettings
from studies.frame import Numbers, to_document
from studies.frame.documents import read_as
from studies.gpu.stages import Stage, Visit
from studies.kernels.fig4 import FIG4_SCHEMA, Fig4, TableGrid, fig4_result, measure_fig4

#: With less time, a smaller grid.
_SECONDS_OF_ALL: Final = 40.0
_ROUNDS: Final = RoundSettings(num_warmup=2, num_measured=5, num_dropped=1)


def _run(visit: Visit) -> Numbers:
    usual = Settings.for_collecting(visit.device)
    rounds = replace(_ROUNDS, flush_every_run=usual.rounds.flush_every_run)
    harness = Harness(visit.device, replace(usual, rounds=rounds, max_attempts=1))
    return to_document(measure_fig4(harness, _grid(visit.device, visit.seconds_left)), FIG4_SCHEMA)


def _grid(device: BenchDevice, seconds: float) -> TableGrid:
    usual = TableGrid.for_device(device)
    if seconds >= _SECONDS_OF_ALL and device.is_cuda:
        return replace(usual, num_combinations=20)
    small = replace(
        usual,
        embedding_dims=(16, 64, 256),
        pooling_factors=(1, 8, 32),
        accessed_ratios=(0.001, 0.1, 1.0),
        num_combinations=5 if device.is_cuda else 3,
    )
    return small.up_to(1_000_000 if device.is_cuda else 100_000)


def read_fig4(numbers: Numbers) -> Fig4:
    """The numbers as they were measured."""
    body: dict[str, Any] = {name: value for name, value in numbers.items() if name != "schema"}
    return read_as(Fig4, body, "fig4")


def _show(numbers: Numbers) -> Sequence[Section]:
    page = fig4_result(read_fig4(numbers)).page
    assert page is not None
    return page.sections


def _headline(numbers: Numbers) -> str:
    found = read_fig4(numbers).combinations
    return (
        f"a fused kernel takes {found.fitted_ratio:.2f} times its tables' sum; scaled by that, the sum is off by "
        f"{write_percent(found.mean_error)}"
    )


STAGE: Final = Stage(name="fig4", share=0.13, run=_run, show=_show, headline=_headline)
