"""The study `active`: sets chosen where the cost model is least certain, beside sets chosen at random."""

from __future__ import annotations

from autoshard import console
from studies.cost_models.active import ActiveOptions, run_active_loop
from studies.cost_models.active_report import active_result
from studies.frame import OutputOptions


def main(options: ActiveOptions, output: OutputOptions) -> None:
    """Compares sets chosen where the cost model is least certain with sets chosen at random.

    Each way of choosing has a store of its own, and is measured and trained on in turn until time is up. The rounds
    are kept beside the samples, and a later run goes on.

    Example:
        python -m studies active --store samples --seconds 3600 -o active
    """
    with console.working("Collecting and training"):
        progress, _ = run_active_loop(options, console.log)
    output.write(active_result(progress))
