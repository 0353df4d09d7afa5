"""The study `nvidia`: `python -m studies nvidia`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoshard.console import JsonOption, emit, log, progress
from autoshard.report.images import write_report
from studies.papers.nvidia.models import PUBLISHED_MS
from studies.papers.nvidia.program import predict_all
from studies.papers.nvidia.report import rank_correlation, steps_document, steps_report, steps_table

#: Models whose points the check is made on; the two larger ones are told beside them.
CHECKED = ("tiny", "small", "medium")


def main(
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", "-o", help="Folder for nvidia-steps.json, .html and .png.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predicts NVIDIA's published step times of synthetic models on DGX-A100, and prints both.

    Example:
        python -m studies nvidia -o docs/figures
    """
    with progress("Predicting", sum(map(len, PUBLISHED_MS.values()))) as advance:
        predictions = predict_all(lambda: advance(1))
    checked = [one for one in predictions if one.model in CHECKED]
    if output_dir is not None:
        write_report(steps_report(predictions, checked), output_dir, "nvidia-steps")
    worst = max(checked, key=lambda one: abs(one.error))
    text = (
        f"{steps_table(predictions).to_markdown()}\n\nKendall's tau {rank_correlation(checked):.3f} over the "
        f"{len(checked)} points of {', '.join(CHECKED)}, {rank_correlation(predictions):.3f} over all; largest error "
        f"{worst.error:+.1%} ({worst.model} on {worst.num_ranks})"
    )
    emit(steps_document(predictions, checked), text, as_json=as_json)
    if output_dir is not None:
        log(f"Wrote {output_dir / 'nvidia-steps'}.json, .html and .png")
