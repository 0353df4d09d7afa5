"""Measures of a training job while it goes on: of learning, of time, of bytes and of memory.

Shape suffixes: P processes.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter
from torchmetrics.classification import BinaryAUROC

from autoshard.core.errors import FormatError
from autoshard.core.step import StepCollective
from autoshard.runtime.releases import all_gather
from autoshard.runtime.results import SENT
from autoshard.runtime.timing import Part, Span, StepTimer, Timings
from autoshard.runtime.training.loop import TrainedStep

#: Thresholds that the area under the curve is computed with, so that its memory does not grow with the samples: evenly
#: in logits up to this on both sides, since predictions of rare labels are all close to 0; and what all and none reach.
_NUM_THRESHOLDS, _LARGEST_LOGIT = 1000, 16.0
_FILE = "metrics.jsonl"

#: Columns of what each process adds: sums, largest values, and the times of collectives as serialised and exposed ms.
_SUMS = ("cross_entropy", "positives", "samples", *SENT)
_LARGEST = ("step_ms", "data_ms", *Part, "memory_peak_bytes", "memory_planned_bytes")


class JobMetrics:
    """Measures of every so many steps, in TensorBoard's files and in `metrics.jsonl`, an object a line.

    `loss` is the mean cross-entropy of the samples since the line before, `normalised_entropy` that over the entropy of
    a model which always predicts their mean label (1 tells nothing more than that), `auc` the area under the curve of
    the job's predictions before each update, over the same samples. Times are means of a step at the slowest process,
    bytes those that all processes sent in a step, memory that of the process which needed most.

    Every process makes one and calls it after each step; the process of rank 0 writes.

    Args:
        folder: Where the files go.
        every: Steps from one line to the next.
        device: Where the metrics are computed.
        timer: The steps' timer.
        sent_bytes: Bytes that this process has sent so far, by `SENT`; empty where they are not counted.
        planned_bytes: Memory that this process needs by the plan.
        peak_bytes: The most that it has used.
        number: Steps that the job has made; what was written after them is removed.

    Raises:
        FormatError: If the folder cannot be written.

    Source:
        He et al., "Practical lessons from predicting clicks on ads at Facebook" (2014), Sec. 3, for the normalised
        entropy.
    """

    def __init__(
        self,
        folder: Path,
        every: int,
        device: torch.device,
        timer: StepTimer,
        sent_bytes: Callable[[], Mapping[str, float]],
        planned_bytes: int,
        peak_bytes: Callable[[], int],
        number: int,
    ) -> None:
        self._every, self._device, self._timer, self._sent_bytes = every, device, timer, sent_bytes
        self._planned_bytes, self._peak_bytes, self._file = planned_bytes, peak_bytes, folder / _FILE
        self._writer: SummaryWriter | None = None
        if dist.get_rank() == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                _keep_until(self._file, number)
                self._writer = SummaryWriter(str(folder), purge_step=number + 1)
            except OSError as error:
                raise FormatError(f"cannot be written: {error.strerror or error}", source=str(folder)) from error
        thresholds = torch.linspace(-_LARGEST_LOGIT, _LARGEST_LOGIT, _NUM_THRESHOLDS - 2).sigmoid()
        thresholds = torch.cat([thresholds.new_zeros(1), thresholds, thresholds.new_full((1,), math.inf)])
        self._auc = BinaryAUROC(thresholds=thresholds, validate_args=False).to(device)
        self._sent_before = dict(sent_bytes())
        self._steps: list[tuple[Span, float, Timings]] = []
        self._learned = torch.zeros(3, dtype=torch.float64, device=device)
        self._begun_s = time.perf_counter()

    def __call__(self, trained: TrainedStep) -> None:
        """Takes in a step."""
        samples, outcome = trained.samples, trained.outcome
        if size := len(samples.labels_B):
            self._auc.update(outcome.logits_B.sigmoid(), samples.labels_B.int())
            loss = outcome.loss.double()
            learned = torch.stack(
                [loss * (size / samples.weight), samples.labels_B.sum().double(), loss.new_full((), size)]
            )
            # A batch whose loss is no number, which training skips, has no part in the mean.
            self._learned += torch.where(loss.isfinite(), learned, 0.0)
        self._steps.append((trained.span, trained.data_ms, trained.timings))
        if trained.number % self._every == 0:
            self.write(trained.number)

    def write(self, number: int) -> None:
        """Writes the measures since the last time; all processes call it.

        Args:
            number: Steps that the job has made.
        """
        if not self._steps:
            return
        self._timer.wait()
        seconds = time.perf_counter() - self._begun_s
        auc = float(self._auc.compute())
        values = self._measured()
        everybody = values.new_empty(dist.get_world_size() * len(values))
        all_gather(everybody, values)
        self._steps, self._begun_s = [], time.perf_counter()
        self._learned.zero_()
        self._auc.reset()
        if self._writer is None:
            return
        of_P = everybody.view(dist.get_world_size(), -1).cpu()
        sums = dict(zip(_SUMS, of_P[:, : len(_SUMS)].sum(0).tolist(), strict=True))
        largest = of_P[:, len(_SUMS) :].max(0).values.tolist()
        document = {
            "step": number,
            **_learning(sums.pop("cross_entropy"), sums.pop("positives"), sums["samples"]),
            "auc": auc,
            "samples_per_s": sums["samples"] / seconds,
            "samples": round(sums.pop("samples")),
            **dict(zip(_LARGEST, largest, strict=False)),
            "collectives": {
                str(kind): {"serialised_ms": serialised_ms, "exposed_ms": exposed_ms}
                for kind, serialised_ms, exposed_ms in zip(
                    StepCollective, largest[len(_LARGEST) :: 2], largest[len(_LARGEST) + 1 :: 2], strict=True
                )
            },
            "sent_bytes": sums if self._sent_before else {},
        }
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(document) + "\n")
        for name, value in _flat(document):
            self._writer.add_scalar(name, value, number)
        self._writer.flush()

    def close(self) -> None:
        """Closes the files."""
        if self._writer is not None:
            self._writer.close()

    def _measured(self) -> torch.Tensor:
        """What this process adds."""
        count = len(self._steps)
        sent = dict(self._sent_bytes())
        bytes_sent = [(sent.get(name, 0.0) - self._sent_before.get(name, 0.0)) / count for name in SENT]
        self._sent_before = sent
        parts = [timings.parts for _, _, timings in self._steps]
        collectives = [timings.collectives for _, _, timings in self._steps]
        times = [
            sum(span.ms for span, _, _ in self._steps) / count,
            sum(data_ms for _, data_ms, _ in self._steps) / count,
            *(sum(one[part] for one in parts) / count for part in Part),
        ]
        waits = [
            sum(getattr(one[kind], name) for one in collectives) / count
            for kind in StepCollective
            for name in ("serialised_ms", "exposed_ms")
        ]
        values = [*bytes_sent, *times, float(self._peak_bytes()), float(self._planned_bytes), *waits]
        return torch.cat([self._learned, self._learned.new_tensor(values)])


def _learning(cross_entropy: float, positives: float, num_samples: float) -> dict[str, float | None]:
    """Loss and normalised entropy; null where all labels are alike, whose entropy is 0."""
    if not num_samples:
        return {"loss": None, "normalised_entropy": None}
    share = positives / num_samples
    loss = cross_entropy / num_samples
    if not 0 < share < 1:
        return {"loss": loss, "normalised_entropy": None}
    entropy = -share * math.log(share) - (1 - share) * math.log(1 - share)
    return {"loss": loss, "normalised_entropy": loss / entropy}


def _flat(document: Mapping[str, Any], within: str = "") -> list[tuple[str, float]]:
    """The numbers of a document, by their names with slashes between."""
    found: list[tuple[str, float]] = []
    for name, value in document.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{within}{name}/")
        elif value is not None and name != "step":
            found.append((f"{within}{name}", float(value)))
    return found


def _keep_until(file: Path, number: int) -> None:
    """Removes lines of steps after a number, which a job that goes on from there makes again."""
    if file.exists():
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= number]
        file.write_text("".join(kept), encoding="utf-8")
