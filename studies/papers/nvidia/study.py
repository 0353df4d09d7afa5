"""The study `nvidia`: `python -m studies nvidia`."""

from __future__ import annotations

from autoshard.console import progress
from studies.frame import OutputOptions
from studies.papers.nvidia.models import PUBLISHED_MS
from studies.papers.nvidia.program import predict_all
from studies.papers.nvidia.report import steps_result

#: Models whose points the check is made on; the two larger ones are shown beside them.
CHECKED = ("tiny", "small", "medium")


def main(output: OutputOptions) -> None:
    """Predicts NVIDIA's published step times of synthetic models on DGX-A100, and prints both.

    Example:
        python -m studies nvidia -o docs/figures
    """
    with progress("Predicting", sum(map(len, PUBLISHED_MS.values()))) as advance:
        predictions = predict_all(lambda: advance(1))
    output.write(steps_result(predictions, [one for one in predictions if one.model in CHECKED]))
